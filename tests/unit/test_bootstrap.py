# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-omni-health project
"""Spawned processes end with the process that spawned them, however that ends."""

import os
import select
import signal
import subprocess
import sys

import pytest
from vllm_omni.health.processes.pidfd import open_pidfd
from vllm_omni.health.processes.process import ProcessIdentity

from vllm_omni_health.bootstrap import ArmedName, arm

WAIT_S = 20

FAMILY = """
import multiprocessing, os, sys, time
from multiprocessing import spawn
from vllm_omni_health import bootstrap

spawn.get_preparation_data = bootstrap.get_preparation_data

def child(pipe):
    inner, outer = context.Pipe(duplex=False)
    context.Process(target=grandchild, args=(outer,), name="grandchild").start()
    pipe.send([os.getpid(), inner.recv()])
    time.sleep(600)

def grandchild(pipe):
    pipe.send(os.getpid())
    time.sleep(600)

context = multiprocessing.get_context("spawn")

if __name__ == "__main__":
    inner, outer = context.Pipe(duplex=False)
    process = context.Process(target=child, args=(outer,), name="child")
    process.start()
    assert process.name == "child"
    print(*inner.recv(), flush=True)
    time.sleep(600)
"""


def wait_for_end(pid):
    identity = ProcessIdentity.of(pid)
    fd = None if identity is None else open_pidfd(identity)
    if fd is None:
        return True
    try:
        return bool(select.select([fd], [], [], WAIT_S)[0])
    finally:
        os.close(fd)


@pytest.fixture
def family(tmp_path):
    script = tmp_path / "family.py"
    script.write_text(FAMILY)
    parent = subprocess.Popen([sys.executable, script], stdout=subprocess.PIPE, text=True)
    pids = [int(pid) for pid in parent.stdout.readline().split()]
    yield parent, *pids
    for pid in (*pids, parent.pid):
        try:
            os.kill(pid, signal.SIGKILL)
        except ProcessLookupError:
            continue
    parent.wait()
    parent.stdout.close()


def test_a_killed_parent_takes_children_and_grandchildren_with_it(family):
    parent, child, grandchild = family
    parent.kill()
    parent.wait()
    assert wait_for_end(child)
    assert wait_for_end(grandchild)


def test_a_killed_child_takes_its_own_with_it_and_nobody_else(family):
    parent, child, grandchild = family
    os.kill(child, signal.SIGKILL)
    assert wait_for_end(grandchild)
    assert parent.poll() is None


def test_a_child_whose_parent_is_gone_already_ends_at_once():
    pid = os.fork()
    if pid == 0:
        arm("orphan", parent_pid=1 << 30)
        os._exit(0)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 128 + signal.SIGKILL


def test_the_name_stays_a_name():
    assert ArmedName("x") == "x"
    assert ArmedName("x").__reduce__() == (arm, ("x", os.getpid()))
