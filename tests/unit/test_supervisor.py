# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-omni-health project
"""The supervisor on real processes: who ended, how, and who is left alone."""

import json
import os
import signal
import subprocess
import sys
import threading
import time

import msgspec
import pytest
from vllm_omni.health.faults.fault import Fault, FaultKind
from vllm_omni.health.processes.last_words import LastWordsReader
from vllm_omni.health.processes.process import ExitStatus
from vllm_omni.health.processes.supervisor import Supervisor
from vllm_omni.health.state.machine import HealthMachine, State

WAIT_S = 20

STAGE = '''
import os, subprocess, sys, threading, time
os.setpgid(0, 0)
words = int(sys.argv[1])
SLEEPER = """
import threading, time
threading.Thread(target=time.sleep, args=(60,), daemon=True).start()
print("ready", flush=True)
time.sleep(60)
"""
worker = subprocess.Popen([sys.executable, "-c", SLEEPER], stdout=subprocess.PIPE)
worker.stdout.readline()
os.write(words, b'{"workers":[{"rank":0,"pid":%d}]}\\n' % worker.pid)
for _ in range(3):
    threading.Thread(target=time.sleep, args=(60,), daemon=True).start()
print(worker.pid, flush=True)
command = sys.stdin.readline().strip()
if command.startswith("{"):
    os.write(words, command.encode() + b"\\n")
    os._exit(1)
if command == "told":
    os.write(words, b'{"told":{"pid":%d,"signum":15}}\\n' % os.getpid())
    sys.stdin.readline()
if command == "thread":
    threading.Thread(target=print, args=("done",), kwargs={"flush": True}).start()
    sys.stdin.readline()
os._exit(int(command or 0))
'''


class Stage:
    """A stand-in for an engine core: a process group of its own, with one worker."""

    def __init__(self):
        read_fd, write_fd = os.pipe()
        self.process = subprocess.Popen(
            [sys.executable, "-c", STAGE, str(write_fd)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            pass_fds=[write_fd],
            text=True,
        )
        os.close(write_fd)
        self.words = LastWordsReader(read_fd)
        self.worker = int(self.process.stdout.readline())

    def tell(self, line):
        self.process.stdin.write(line + "\n")
        self.process.stdin.flush()

    def end(self):
        self.process.kill()
        self.process.wait(WAIT_S)
        self.process.stdin.close()
        self.process.stdout.close()


class Server:
    """A machine and a supervisor that watch one stage with ``replicas`` replicas."""

    def __init__(self, replicas):
        self.machine = HealthMachine()
        self.supervisor = Supervisor(self.machine)
        self.moved = threading.Condition()
        self.machine.observe(self._on_move)
        self.supervisor.start()
        self.stages = [Stage() for _ in range(replicas)]
        self.machine.expect_stage(0, replicas)
        for replica_id, stage in enumerate(self.stages):
            self.supervisor.watch_engine_core(
                0,
                replica_id,
                stage.process.pid,
                words=stage.words,
                exit_status=lambda p=stage.process: ExitStatus.from_exit_code(p.poll()),
            )
            self.supervisor.replica_ready(0, replica_id)
        self.machine.started()

    def _on_move(self, _move):
        with self.moved:
            self.moved.notify_all()

    def wait_for(self, condition):
        with self.moved:
            assert self.moved.wait_for(condition, WAIT_S), self.machine.snapshot
        return self.machine.snapshot

    def wait_for_state(self, state):
        return self.wait_for(lambda: self.machine.snapshot.state is state)


@pytest.fixture
def server_with():
    servers = []

    def build(replicas=1):
        servers.append(Server(replicas))
        return servers[-1]

    yield build
    for server in servers:
        server.supervisor.kill_all()
        server.supervisor.stop()
        for stage in server.stages:
            stage.end()


def test_a_killed_engine_core_is_lost_with_its_signal(server_with):
    server = server_with()
    os.kill(server.stages[0].process.pid, signal.SIGKILL)
    fault = server.wait_for_state(State.DEAD).fault
    assert (fault.kind, fault.role, fault.signal) == (
        FaultKind.PROCESS_LOST,
        "engine core",
        "SIGKILL",
    )
    assert fault.pid == server.stages[0].process.pid


def test_a_killed_worker_loses_its_replica(server_with):
    server = server_with()
    os.kill(server.stages[0].worker, signal.SIGKILL)
    fault = server.wait_for_state(State.DEAD).fault
    assert (fault.kind, fault.role, fault.rank) == (FaultKind.PROCESS_LOST, "worker", 0)
    assert (fault.pid, fault.signal) == (server.stages[0].worker, "SIGKILL")


def test_a_worker_that_went_with_its_engine_core_is_not_the_cause(server_with):
    """The kernel kills it when its parent ends, and may be done with it first."""
    server = server_with()
    stage = server.stages[0]
    both_ended = threading.Event()
    server.supervisor._do(lambda: both_ended.wait(WAIT_S))
    for pid in (stage.worker, stage.process.pid):
        os.kill(pid, signal.SIGKILL)
        until_ended(pid)
    both_ended.set()
    fault = server.wait_for_state(State.DEAD).fault
    assert (fault.role, fault.pid) == ("engine core", stage.process.pid)


def until_ended(pid):
    """Wait until a process is a zombie, or gone."""
    deadline = time.monotonic() + WAIT_S
    while time.monotonic() < deadline:
        try:
            with open(f"/proc/{pid}/stat") as file:
                if file.read().rpartition(")")[2].split()[0] in "ZX":
                    return
        except FileNotFoundError:
            return
        time.sleep(0.005)
    raise AssertionError(f"{pid} does not end")


def test_what_the_process_said_before_it_ended_is_the_reason(server_with):
    server = server_with()
    said = Fault(kind=FaultKind.OOM, message="no room", rank=0)
    server.stages[0].tell(json.dumps({"fault": msgspec.to_builtins(said)}))
    fault = server.wait_for_state(State.DEAD).fault
    assert fault == said.with_context(stage_id=0, replica_id=0)


def test_an_exit_without_a_word_tells_its_status(server_with):
    server = server_with()
    server.stages[0].tell("3")
    fault = server.wait_for_state(State.DEAD).fault
    assert (fault.kind, fault.exit_code, fault.signal) == (FaultKind.PROCESS_LOST, 3, None)


def test_a_process_that_is_told_to_stop_alone_is_lost_and_ended(server_with):
    server = server_with()
    server.stages[0].tell("told")
    fault = server.wait_for_state(State.DEAD).fault
    assert (fault.kind, fault.role, fault.signal) == (
        FaultKind.PROCESS_LOST,
        "engine core",
        "SIGTERM",
    )
    assert fault.pid == server.stages[0].process.pid
    assert server.stages[0].process.wait(WAIT_S) == -signal.SIGKILL


@pytest.mark.parametrize("first", ["server", "stage"])
def test_a_process_that_is_told_to_stop_with_its_server_is_needed_for_the_drain(
    server_with, monkeypatch, first
):
    monkeypatch.setattr("vllm_omni.health.processes.judge._TOLD_S", 0.2)
    server = server_with(replicas=2)
    if first == "server":
        server.machine.drain()
    server.stages[0].tell("told")
    time.sleep(0.1)
    server.machine.drain()
    time.sleep(0.4)
    # The other one's loss shows that the first has been judged.
    os.kill(server.stages[1].process.pid, signal.SIGKILL)
    snapshot = server.wait_for_state(State.DEGRADED)
    assert [replica.state.value for replica in snapshot.stages[0].replicas] == ["live", "lost"]
    assert server.stages[0].process.poll() is None


def test_a_process_that_ends_by_the_signal_its_server_gets_as_well_is_no_fault(
    server_with, monkeypatch
):
    """As one does that is still being imported."""
    monkeypatch.setattr("vllm_omni.health.processes.judge._TOLD_S", 0.2)
    server = server_with(replicas=2)
    os.kill(server.stages[0].process.pid, signal.SIGTERM)
    server.stages[0].process.wait(WAIT_S)
    server.supervisor.all_closing()
    time.sleep(0.4)
    assert server.machine.snapshot.state is State.HEALTHY


def test_a_thread_that_ends_is_no_fault(server_with):
    server = server_with()
    server.stages[0].tell("thread")
    assert server.stages[0].process.stdout.readline() == "done\n"
    assert server.machine.snapshot.state is State.HEALTHY
    server.stages[0].tell("")
    server.stages[0].tell("")
    server.wait_for_state(State.DEAD)


def test_one_of_two_replicas_lost_is_degraded_and_its_processes_can_be_killed_alone(server_with):
    server = server_with(replicas=2)
    os.kill(server.stages[0].process.pid, signal.SIGKILL)
    snapshot = server.wait_for_state(State.DEGRADED)
    assert snapshot.accepting
    server.supervisor.kill_replica(0, 0)
    assert server.stages[1].process.poll() is None
    server.supervisor.kill_all()
    assert server.supervisor.replica(0, 0).alive() == []
    assert server.machine.snapshot.state is State.DEGRADED


def test_an_end_that_is_wanted_is_no_fault(server_with):
    server = server_with(replicas=2)
    server.supervisor.replica_closing(0, 0)
    os.kill(server.stages[0].process.pid, signal.SIGKILL)
    server.stages[0].process.wait(WAIT_S)
    # The other one is not closing: its loss shows that the first has been seen and passed over.
    os.kill(server.stages[1].process.pid, signal.SIGKILL)
    snapshot = server.wait_for_state(State.DEGRADED)
    states = [replica.state.value for replica in snapshot.stages[0].replicas]
    assert states == ["live", "lost"]


def test_a_fault_that_is_stated_twice_is_one_fault(server_with):
    server = server_with()
    fault = Fault(kind=FaultKind.ENGINE, stage_id=0, replica_id=0, message="boom")
    server.supervisor.report(fault)
    entries = len(server.machine.history())
    server.supervisor.report(fault)
    assert len(server.machine.history()) == entries


def test_a_process_that_is_gone_before_it_is_watched_is_lost(server_with):
    server = server_with()
    gone = subprocess.Popen([sys.executable, "-c", "import os; os._exit(7)"])
    gone.wait(WAIT_S)
    server.supervisor.watch_engine_core(
        0, 1, gone.pid, exit_status=lambda: ExitStatus.from_exit_code(gone.returncode)
    )
    fault = server.wait_for_state(State.DEGRADED).fault
    assert (fault.replica_id, fault.exit_code) == (1, 7)


def test_a_stopped_supervisor_leaves_no_descriptor_open(server_with):
    before = len(os.listdir("/proc/self/fd"))
    server = server_with()
    server.supervisor.kill_all()
    server.supervisor.stop()
    for stage in server.stages:
        stage.end()
    assert len(os.listdir("/proc/self/fd")) == before
