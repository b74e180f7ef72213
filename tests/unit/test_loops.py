# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-omni-health project
"""An event loop that does not turn: the judgement on a clock of the test's, then real loops."""

import asyncio
import threading
import time

import pytest
from vllm_omni.health.liveness.loops import BEAT_S, LoopBeat, LoopWatch
from vllm_omni.health.runtime import HealthRuntime
from vllm_omni.health.state.machine import HealthMachine, State

from vllm_omni_health.settings.model import HealthSettings

WAIT_S = 20


class FakeLoop:
    """Turns when the test says so."""

    def __init__(self):
        self.later = None

    def call_later(self, _seconds, call):
        self.later = call


class Bench:
    """A watch over a loop whose time passes as the test says."""

    def __init__(self, stall_s=10.0, end_s=60.0):
        self.now = 100.0
        self.ends = []
        self.machine = HealthMachine()
        self.machine.expect_stage(0, 1)
        self.machine.replica_ready(0, 0)
        self.machine.started()
        self.beat = LoopBeat("orchestrator", clock=lambda: self.now)
        self.watch = LoopWatch(
            self.beat,
            self.machine,
            stall_s=stall_s,
            end_s=end_s,
            on_end=lambda: self.ends.append(self.now),
            clock=lambda: self.now,
        )
        self.loop = FakeLoop()
        self.beat.start(self.loop)
        self.watch.check()

    def pass_time(self, seconds, turning):
        for _ in range(round(seconds / self.watch.period_s)):
            self.now += self.watch.period_s
            if turning:
                self.loop.later()
            self.watch.check()

    @property
    def state(self):
        return self.machine.snapshot.state


def test_a_loop_that_turns_is_left_alone():
    bench = Bench()
    bench.pass_time(1000, turning=True)
    assert (bench.state, bench.ends) == (State.HEALTHY, [])


def test_a_stall_degrades_and_passes():
    bench = Bench()
    bench.pass_time(9, turning=False)
    assert bench.state is State.HEALTHY
    bench.pass_time(3, turning=False)
    assert bench.state is State.DEGRADED
    assert not bench.machine.snapshot.accepting
    assert bench.machine.reason.role == "orchestrator"
    bench.pass_time(1, turning=True)
    assert bench.state is State.HEALTHY
    assert bench.machine.snapshot.accepting
    assert bench.ends == []


def test_a_stall_without_end_is_given_up_once():
    bench = Bench()
    bench.pass_time(55, turning=False)
    assert (bench.state, bench.ends) == (State.DEGRADED, [])
    bench.pass_time(60, turning=False)
    assert bench.state is State.DEAD
    assert len(bench.ends) == 1


def test_zero_means_never_to_give_up():
    bench = Bench(end_s=0)
    bench.pass_time(10_000, turning=False)
    assert (bench.state, bench.ends) == (State.DEGRADED, [])


def test_a_process_that_was_stopped_as_a_whole_has_not_stalled():
    bench = Bench()
    for _ in range(20):
        bench.now += 3600
        bench.watch.check()
        bench.loop.later()
        bench.watch.check()
    assert [entry.cause for entry in bench.machine.history()].count("loop stalled") == 0


def test_a_loop_that_ends_as_it_should_is_not_expected_to_turn():
    bench = Bench()
    bench.beat.stop()
    bench.pass_time(1000, turning=False)
    assert (bench.state, bench.ends) == (State.HEALTHY, [])
    assert bench.beat.age() == 0.0


@pytest.fixture
def runtime():
    runtime = HealthRuntime(HealthSettings(loop_stall_s=1, hang_timeout_s=2))
    runtime.machine.expect_stage(0, 1)
    runtime.machine.replica_ready(0, 0)
    runtime.machine.started()
    yield runtime
    runtime.stop()


def until(condition):
    deadline = time.monotonic() + WAIT_S
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def blocked(beat, release):
    """A thread with a real loop that is blocked until ``release`` is set."""

    async def main():
        loop = asyncio.get_running_loop()
        beat.start(loop)
        loop.call_soon(release.wait)
        await asyncio.sleep(3 * BEAT_S)
        beat.stop()

    thread = threading.Thread(target=lambda: asyncio.run(main()))
    thread.start()
    return thread


def test_a_really_blocked_orchestrator_is_found_named_and_given_up(runtime):
    release = threading.Event()
    thread = blocked(runtime.orchestrator_beat, release)
    runtime.start()
    try:
        until(lambda: runtime.machine.snapshot.state is State.DEGRADED)
        # The log is told what holds it up.
        assert "in wait" in runtime.machine.reason.traceback
        until(lambda: runtime.machine.snapshot.state is State.DEAD)
        assert runtime.thread_stuck()
        assert runtime.restart_needed()
    finally:
        release.set()
        thread.join(WAIT_S)


def test_a_really_blocked_api_loop_has_the_process_ended(runtime):
    forced, release = threading.Event(), threading.Event()
    runtime.end_by_force = forced.set
    thread = blocked(runtime.api_beat, release)
    runtime.start()
    try:
        assert forced.wait(WAIT_S)
        assert runtime.machine.snapshot.state is State.DEAD
    finally:
        release.set()
        thread.join(WAIT_S)


def test_a_shutdown_that_takes_too_long_is_ended_by_force():
    runtime = HealthRuntime(HealthSettings(shutdown_timeout_s=1))
    forced = threading.Event()
    runtime.end_by_force = forced.set
    runtime.start()
    try:
        runtime.begin_shutdown()
        assert forced.wait(WAIT_S)
    finally:
        runtime.stop()
