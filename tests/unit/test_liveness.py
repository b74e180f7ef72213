"""Suspect, then hung, then nothing: the monitor on a clock of the test's own."""

import asyncio

import pytest
from vllm_omni.engine.liveness import SECOND_PING_S, LivenessMonitor
from vllm_omni.health.faults import FaultKind
from vllm_omni.health.machine import HealthMachine, ReplicaState, State


class Bench:
    """A monitor over one replica that answers pings only while ``answering``."""

    def __init__(self, timeout_s=10.0):
        self.now = 0.0
        self.answering = True
        self.pings = 0
        self.waiting = asyncio.Event()
        self.hangs = []
        self.machine = HealthMachine()
        self.machine.expect_stage(0, 1)
        self.machine.replica_ready(0, 0)
        self.machine.started()
        self.monitor = LivenessMonitor(
            self.machine, timeout_s, self.hangs.append, clock=lambda: self.now
        )
        self.monitor.watch(0, 0, self.ping)

    async def ping(self):
        self.pings += 1
        if not self.answering:
            await self.waiting.wait()

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


def test_zero_switches_it_off():
    async def scenario():
        bench = Bench(timeout_s=0)
        bench.answering = False
        await bench.pass_time(1000, step=1)
        assert (bench.pings, bench.hangs, bench.monitor.tick_s) == (0, [], float("inf"))

    run(scenario)
