# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-omni-health project
"""A stage's process ends by a signal when its server has ordered it to, and else passes it on."""

import os
import select
import signal
import time
from functools import partial
from multiprocessing.connection import Connection

import pytest
from vllm_omni.health.processes import stop_signals
from vllm_omni.health.processes.last_words import LastWordsReader, LastWordsWriter
from vllm_omni.health.processes.process import STOP_SIGNALS
from vllm_omni.health.processes.stop_signals import StopSignals

WAIT_S = 20


def run_stage(words, order, ready, kind):
    """What the process does; never returns."""
    order = Connection(order, writable=False)
    writer = LastWordsWriter(words, shared=True)
    for signum in STOP_SIGNALS:
        signal.signal(signum, signal.SIG_DFL)
    stop_signals.listen(partial(stop_signals.given, order), writer.told_to_stop)
    if kind == "handler":
        for signum in stop_signals.SIGNALS:
            signal.signal(signum, lambda *_: os._exit(3))
        stop_signals.take_again()
    os.write(ready, b"!")
    while True:
        time.sleep(60)


class Stage:
    """A process with the handler, and the server's ends of its pipes."""

    def __init__(self, kind):
        words_reader, words_writer = os.pipe()
        order_reader, self.order = os.pipe()
        self.ready, ready_writer = os.pipe()
        self.pid = os.fork()
        if self.pid == 0:
            try:
                os.close(self.order)
                run_stage(words_writer, order_reader, ready_writer, kind)
            finally:
                os._exit(99)
        for fd in (words_writer, order_reader, ready_writer):
            os.close(fd)
        self.words = LastWordsReader(words_reader)
        self.status = None
        assert os.read(self.ready, 1) == b"!"

    def send(self, signum):
        os.kill(self.pid, signum)

    def alive(self):
        return os.waitid(os.P_PID, self.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is None

    def ended(self):
        """The exit status, as subprocess gives it."""
        pidfd = os.pidfd_open(self.pid)
        try:
            assert select.select([pidfd], [], [], WAIT_S)[0]
        finally:
            os.close(pidfd)
        self.status = os.waitstatus_to_exitcode(os.waitpid(self.pid, 0)[1])
        return self.status

    def hear(self):
        assert select.select([self.words.fd], [], [], WAIT_S)[0]
        return [(words.told.pid, words.told.signum) for words in self.words.read()]

    def close(self):
        if self.status is None:
            self.send(signal.SIGKILL)
            self.ended()
        self.words.close()
        os.close(self.ready)
        if self.order >= 0:
            os.close(self.order)


@pytest.fixture(params=["default", "handler"])
def stage(request):
    stage = Stage(request.param)
    stage.ended_by = -signal.SIGTERM if request.param == "default" else 3
    yield stage
    stage.close()


@pytest.mark.parametrize("signum", [signal.SIGTERM, signal.SIGINT])
def test_without_an_order_it_goes_on_and_says_so(stage, signum):
    stage.send(signum)
    assert stage.hear() == [(stage.pid, signum)]
    stage.send(signum)
    assert stage.hear() == [(stage.pid, signum)]
    assert stage.alive()


def test_with_an_order_it_ends_as_it_would_have(stage):
    os.write(stage.order, b"end")
    stage.send(signal.SIGTERM)
    assert stage.ended() == stage.ended_by


def test_nobody_there_to_give_orders_is_an_order(stage):
    os.close(stage.order)
    stage.order = -1
    stage.send(signal.SIGTERM)
    assert stage.ended() == stage.ended_by


def test_the_order_stays_given_for_signals_that_came_before_it(stage):
    stage.send(signal.SIGTERM)
    stage.hear()
    os.write(stage.order, b"end")
    stage.send(signal.SIGTERM)
    assert stage.ended() == stage.ended_by


def test_a_closed_terminal_is_nothing_to_a_stage(stage):
    stage.send(signal.SIGHUP)
    stage.send(signal.SIGTERM)
    assert stage.hear() == [(stage.pid, signal.SIGTERM)]
    assert stage.alive()


def test_taken_twice_it_does_not_call_itself():
    before = {signum: signal.getsignal(signum) for signum in STOP_SIGNALS}
    ended = []
    try:
        signal.signal(signal.SIGTERM, lambda *_: ended.append(True))
        signals = StopSignals(lambda: True, lambda _signum: None)
        signals.take()
        signals.take()
        signal.raise_signal(signal.SIGTERM)
    finally:
        for signum, handler in before.items():
            signal.signal(signum, handler)
    assert ended == [True]
