# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-omni-health project
"""Suspect, then hung, then nothing: the monitor on a clock of the test's own."""

import asyncio
import os
import signal
import subprocess
import sys

import pytest
from vllm_omni.health.faults.fault import FaultKind
from vllm_omni.health.liveness.pings import SECOND_PING_S, LivenessMonitor, Pulse
from vllm_omni.health.processes.process import ProcessIdentity
from vllm_omni.health.processes.watched import Replica, open_watch
from vllm_omni.health.state.machine import HealthMachine, ReplicaState, State


class Bench:
    """A monitor over one replica that answers pings only while ``answering``."""

    def __init__(self, timeout_s=10.0, replica=None, on_answer=None):
        self.now = 0.0
        self.answering = True
        self.answer = None
        self.pings = 0
        self.waiting = asyncio.Event()
        self.hangs = []
        self.machine = HealthMachine()
        self.machine.expect_stage(0, 1)
        self.machine.replica_ready(0, 0)
        self.machine.started()
        self.monitor = LivenessMonitor(
            self.machine,
            timeout_s,
            self.hangs.append,
            clock=lambda: self.now,
            replicas=lambda _stage_id, _replica_id: replica,
        )
        self.monitor.watch(0, 0, self.ping, on_answer)

    async def ping(self):
        self.pings += 1
        if not self.answering:
            await self.waiting.wait()
        return self.answer

    async def pass_time(self, seconds, step=0.1):
        for _ in range(round(seconds / step)):
            self.now += step
            self.monitor.tick()
            await asyncio.sleep(0)
            await asyncio.sleep(0)

    @property
    def replica(self):
        return self.machine.replica_state(0, 0)


def run(scenario):
    asyncio.run(scenario())


def test_a_replica_that_answers_is_left_alone_and_rarely_asked():
    async def scenario():
        bench = Bench()
        await bench.pass_time(1000, step=0.5)
        assert bench.replica is ReplicaState.LIVE
        assert bench.hangs == []
        assert 100 <= bench.pings <= 500

    run(scenario)


def test_silence_makes_it_suspect_and_then_hung():
    async def scenario():
        bench = Bench()
        bench.answering = False
        await bench.pass_time(9.9)
        assert bench.machine.snapshot.state is State.HEALTHY
        await bench.pass_time(0.2)
        assert bench.replica is ReplicaState.SUSPECT
        assert bench.machine.snapshot.state is State.DEGRADED
        assert bench.hangs == []
        await bench.pass_time(SECOND_PING_S + 0.2)
        (fault,) = bench.hangs
        assert (fault.kind, fault.stage_id, fault.replica_id) == (FaultKind.HANG, 0, 0)
        await bench.pass_time(20)
        assert len(bench.hangs) == 1

    run(scenario)


def test_an_answer_during_suspicion_clears_it():
    async def scenario():
        bench = Bench()
        bench.answering = False
        await bench.pass_time(10.1)
        assert bench.replica is ReplicaState.SUSPECT
        bench.waiting.set()
        await bench.pass_time(0.1)
        assert bench.replica is ReplicaState.LIVE
        assert bench.machine.snapshot.state is State.HEALTHY
        bench.answering = True
        await bench.pass_time(30)
        assert bench.hangs == []

    run(scenario)


def test_a_long_step_below_the_timeout_is_no_alarm():
    async def scenario():
        bench = Bench()
        for _ in range(5):
            bench.answering = False
            bench.waiting.clear()
            await bench.pass_time(7)
            bench.waiting.set()
            bench.answering = True
            await bench.pass_time(3)
        assert bench.hangs == []
        assert len([m for m in bench.machine.history() if m.cause == "replica suspect"]) == 0

    run(scenario)


@pytest.mark.parametrize("stop", ["forget", "close"])
def test_a_replica_that_is_closing_is_not_judged_and_no_ping_is_left(stop):
    async def scenario():
        bench = Bench()
        bench.answering = False
        await bench.pass_time(5)
        bench.monitor.forget(0, 0) if stop == "forget" else bench.monitor.close()
        await bench.pass_time(50)
        assert bench.hangs == []
        assert bench.machine.snapshot.state is State.HEALTHY
        assert asyncio.all_tasks() == {asyncio.current_task()}

    run(scenario)


def test_a_replica_that_answers_and_gets_nowhere_hangs():
    async def scenario():
        bench = Bench()
        worked_since = bench.now
        for _ in range(12):
            bench.answer = Pulse(bench.now - worked_since)
            await bench.pass_time(1)
        (fault,) = bench.hangs
        assert fault.kind is FaultKind.HANG

    run(scenario)


def test_a_replica_that_answers_and_gets_on_does_not():
    async def scenario():
        bench = Bench()
        bench.answer = Pulse(7.0)
        await bench.pass_time(300)
        assert (bench.hangs, bench.machine.snapshot.state) == ([], State.HEALTHY)

    run(scenario)


def test_steps_that_are_told_of_are_life_while_no_answer_comes():
    async def scenario():
        replica = Replica(core=ProcessIdentity.of(os.getpid()))
        bench = Bench(replica=replica)
        bench.answering = False
        for _ in range(50):
            replica.progressed_at = bench.now
            await bench.pass_time(5)
        assert (bench.hangs, bench.machine.snapshot.state) == ([], State.HEALTHY)
        await bench.pass_time(12)
        assert len(bench.hangs) == 1

    run(scenario)


def test_what_a_replica_says_is_handed_on():
    async def scenario():
        heard = []
        bench = Bench(on_answer=heard.append)
        bench.answer = {"free": 7}
        await bench.pass_time(4)
        bench.answer = Pulse(0.0, {"free": 6})
        await bench.pass_time(3)
        assert heard == [{"free": 7}, {"free": 6}]

    run(scenario)


def test_time_in_which_nobody_looked_is_nobodys_silence():
    """The server was stopped for an hour, in the middle of a ping."""

    async def scenario():
        bench = Bench()
        bench.answering = False
        await bench.pass_time(4)
        bench.now += 3600
        bench.monitor.tick()
        assert bench.machine.snapshot.state is State.HEALTHY
        bench.waiting.set()
        bench.answering = True
        await bench.pass_time(30)
        assert bench.hangs == []

    run(scenario)


def test_a_suspect_is_not_judged_over_time_in_which_nobody_looked():
    async def scenario():
        bench = Bench()
        bench.answering = False
        await bench.pass_time(10.1)
        assert bench.replica is ReplicaState.SUSPECT
        bench.now += 5
        bench.monitor.tick()
        assert bench.hangs == []
        bench.waiting.set()
        bench.answering = True
        await bench.pass_time(1)
        assert bench.machine.snapshot.state is State.HEALTHY

    run(scenario)


@pytest.mark.parametrize("timeout_s", [3.0, 10.0, 300.0])
def test_a_hang_is_known_within_a_second_of_the_timeout(timeout_s):
    async def scenario():
        bench = Bench(timeout_s=timeout_s)
        await bench.pass_time(20)
        bench.answering = False
        stopped_at = bench.now
        while not bench.hangs:
            # As the orchestrator's loop does it.
            await bench.pass_time(1, step=min(1.0, bench.monitor.tick_s))
            assert bench.now < stopped_at + timeout_s + 1

    run(scenario)


@pytest.fixture
def stage():
    """A real process, watched as the core of a replica, with a name for its worker."""
    process = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
    core = open_watch((0, 0), os.getpid(), "engine core")
    worker = open_watch((0, 0), process.pid, "worker", 3)
    yield Replica(core=core.identity, processes=[core, worker]), process.pid
    os.close(core.pidfd)
    os.close(worker.pidfd)
    process.kill()
    process.wait()


def stop(pid):
    os.kill(pid, signal.SIGSTOP)
    os.waitid(os.P_PID, pid, os.WSTOPPED | os.WNOWAIT)


def let_go_on(pid):
    os.kill(pid, signal.SIGCONT)
    os.waitid(os.P_PID, pid, os.WCONTINUED | os.WNOWAIT)


def test_a_stopped_process_hangs_its_replica_though_the_others_answer(stage):
    async def scenario():
        replica, worker = stage
        bench = Bench(replica=replica)
        await bench.pass_time(5)
        stop(worker)
        await bench.pass_time(9)
        assert bench.machine.snapshot.state is State.HEALTHY
        await bench.pass_time(2)
        (fault,) = bench.hangs
        assert (fault.role, fault.rank, fault.pid) == ("worker", 3, worker)
        assert f"worker rank 3 (pid {worker}) is stopped, 0.00 s of CPU time" in fault.message
        assert f"engine core (pid {os.getpid()})" in fault.message

    run(scenario)


def test_a_process_that_goes_on_in_time_is_forgiven(stage):
    async def scenario():
        replica, worker = stage
        bench = Bench(replica=replica)
        stop(worker)
        await bench.pass_time(10.2)
        assert bench.machine.snapshot.state is State.DEGRADED
        let_go_on(worker)
        await bench.pass_time(0.3)
        assert bench.machine.snapshot.state is State.HEALTHY
        await bench.pass_time(20)
        assert bench.hangs == []

    run(scenario)


def test_zero_switches_it_off():
    async def scenario():
        bench = Bench(timeout_s=0)
        bench.answering = False
        await bench.pass_time(1000, step=1)
        assert (bench.pings, bench.hangs, bench.monitor.tick_s) == (0, [], float("inf"))

    run(scenario)
