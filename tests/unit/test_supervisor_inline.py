# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-omni-health project
"""A replica in the server's own process: its workers are watched and ended, the server never is."""

import os
import signal
import subprocess
import sys
import threading

import pytest
from vllm_omni.health.faults.fault import Fault, FaultKind
from vllm_omni.health.processes.last_words import LastWordsReader, LastWordsWriter
from vllm_omni.health.processes.process import ExitStatus
from vllm_omni.health.processes.supervisor import Supervisor
from vllm_omni.health.state.machine import HealthMachine, State

WAIT_S = 20


class Server:
    """This process, with one inline replica and one worker of it."""

    def __init__(self):
        self.machine = HealthMachine()
        self.supervisor = Supervisor(self.machine)
        self.moved = threading.Condition()
        self.machine.observe(self._on_move)
        self.supervisor.start()
        self.machine.expect_stage(0, 1)
        self.supervisor.watch_inline(0, 0)
        self.worker = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
        read_fd, self.words_fd = os.pipe()
        self.words = LastWordsWriter(self.words_fd, shared=True)
        self.supervisor.watch_worker(
            0,
            0,
            1,
            self.worker.pid,
            words=LastWordsReader(read_fd),
            exit_status=lambda: ExitStatus.from_exit_code(self.worker.poll()),
        )
        self.supervisor.replica_ready(0, 0)
        self.machine.started()

    def _on_move(self, _move):
        with self.moved:
            self.moved.notify_all()

    def fault(self):
        with self.moved:
            assert self.moved.wait_for(lambda: self.machine.snapshot.state is State.DEAD, WAIT_S), (
                self.machine.snapshot
            )
        return self.machine.reason


@pytest.fixture
def server():
    server = Server()
    yield server
    server.supervisor.stop()
    server.worker.kill()
    server.worker.wait(WAIT_S)
    os.close(server.words_fd)


def test_its_pid_is_the_servers(server):
    (replica,) = server.machine.snapshot.stages[0].replicas
    assert replica.pid == os.getpid()


def test_a_killed_worker_loses_the_replica(server):
    os.kill(server.worker.pid, signal.SIGKILL)
    fault = server.fault()
    assert (fault.kind, fault.role, fault.rank) == (FaultKind.PROCESS_LOST, "worker", 1)
    assert (fault.pid, fault.signal) == (server.worker.pid, "SIGKILL")


def test_what_a_worker_said_is_the_reason(server):
    server.words.fault(Fault(kind=FaultKind.OOM, rank=1, pid=server.worker.pid))
    fault = server.fault()
    assert (fault.kind, fault.stage_id, fault.replica_id, fault.rank) == (FaultKind.OOM, 0, 0, 1)


def test_the_same_fault_whole_and_cut_is_one(server):
    whole = Fault(kind=FaultKind.OOM, pid=server.worker.pid, traceback="x" * 30000)
    server.words.fault(whole)
    server.fault()
    entries = len(server.machine.history())
    server.supervisor.report(whole.with_context(stage_id=0, replica_id=0))
    assert len(server.machine.history()) == entries


@pytest.mark.parametrize("end", ["kill_replica", "kill_all"])
def test_ending_it_ends_the_worker_alone(server, end):
    assert server.supervisor.replica(0, 0).alive() == [server.worker.pid]
    if end == "kill_all":
        assert server.supervisor.kill_all() == [server.worker.pid]
    else:
        server.supervisor.replica_closing(0, 0)
        server.supervisor.kill_replica(0, 0)
        assert server.worker.wait(WAIT_S) == -signal.SIGKILL
    assert server.supervisor.replica(0, 0).alive() == []
    assert server.machine.snapshot.state is State.HEALTHY
