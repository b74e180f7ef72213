# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-omni-health project
"""Where the threads of a process that hangs are, in real processes that do."""

import contextlib
import logging
import os
import re
import select
import signal
import threading
import time

import pytest
from vllm_omni.health.liveness import stacks
from vllm_omni.health.processes.process import Activity, ProcessIdentity

WAIT_S = 20


def waits_for_ever(ready, secret):
    lock = threading.Lock()
    lock.acquire()
    os.write(ready, b"!")
    lock.acquire()
    return secret


def deep(depth, ready):
    if depth:
        deep(depth - 1, ready)
    waits_for_ever(ready, None)


@contextlib.contextmanager
def hanging(work, *, offers=True):
    """A child that runs ``work`` with the writing end of a pipe, and hangs in it."""
    reader, writer = os.pipe()
    pid = os.fork()
    if pid == 0:
        try:
            if offers:
                stacks.offer()
            work(writer)
        finally:
            os._exit(99)
    os.close(writer)
    try:
        assert select.select([reader], [], [], WAIT_S)[0]
        assert os.read(reader, 1) == b"!"
        yield ProcessIdentity.of(pid)
    finally:
        os.close(reader)
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)


def in_two_s():
    return time.monotonic() + stacks.TAKE_S


def open_files():
    return len(os.listdir("/proc/self/fd"))


def test_every_thread_shows_with_its_functions_and_without_values():
    def work(ready):
        threading.Thread(target=time.sleep, args=(600,), name="other").start()
        waits_for_ever(ready, "a secret prompt")

    before = open_files()
    with hanging(work) as process:
        first = stacks.take(process, in_two_s())
        second = stacks.take(process, in_two_s())
        assert process.running()
    for text in (first, second):
        assert "in waits_for_ever" in text
        assert text.count("most recent call first") == 2
        assert "secret" not in text
    assert open_files() == before


def test_a_forked_child_offers_its_own():
    def work(ready):
        pid = os.fork()
        if pid == 0:
            stacks.offer()
            waits_for_ever(ready, None)
        os.waitpid(pid, 0)

    with hanging(work) as process:
        children = f"/proc/{process.pid}/task/{process.pid}/children"
        with open(children) as file:
            child = ProcessIdentity.of(int(file.read()))
        try:
            assert "in waits_for_ever" in stacks.take(child, in_two_s())
        finally:
            os.kill(child.pid, signal.SIGKILL)


def test_what_is_long_is_cut():
    def work(ready):
        for _ in range(40):
            threading.Thread(target=deep, args=(95, os.dup(2))).start()
        time.sleep(0.5)
        waits_for_ever(ready, None)

    with hanging(work) as process:
        text = stacks.take(process, in_two_s())
    assert 1000 < len(text) <= stacks._LONGEST
    # The main thread is the one that matters most.
    assert "in test_what_is_long_is_cut" in text


def test_a_stopped_process_is_described_by_the_kernel():
    with hanging(lambda ready: waits_for_ever(ready, None)) as process:
        os.kill(process.pid, signal.SIGSTOP)
        while not Activity.of(process).stopped:
            time.sleep(0.005)
        text = stacks.take(process, in_two_s())
    assert "state T, waits in " in text


def test_a_process_that_offers_nothing_is_left_alone():
    with hanging(lambda ready: waits_for_ever(ready, None), offers=False) as process:
        text = stacks.take(process, in_two_s())
        assert process.running()
    assert re.search(r": state [RS], waits in ", text)


def test_a_process_that_does_not_answer_is_not_waited_for():
    def work(ready):
        signal.pthread_sigmask(signal.SIG_BLOCK, [stacks.SIGNAL])
        waits_for_ever(ready, None)

    with hanging(work) as process:
        began = time.monotonic()
        text = stacks.take(process, began + 0.3)
        assert time.monotonic() - began < WAIT_S / 4
    assert re.search(r": state [RS], waits in ", text)


@pytest.mark.parametrize("status", [0, 3])
def test_a_process_that_is_gone_is_gone(status):
    pid = os.fork()
    if pid == 0:
        os._exit(status)
    identity = ProcessIdentity.of(pid)
    os.waitpid(pid, 0)
    assert stacks.take(identity, in_two_s()) == "is gone"


def test_the_servers_own(caplog):
    before = open_files()
    with caplog.at_level(logging.ERROR):
        stacks.log_own()
    assert "in test_the_servers_own" in caplog.text
    assert open_files() == before
