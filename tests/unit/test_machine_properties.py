# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-omni-health project
"""The state machine under any order of facts, from one thread and from several.

The model below knows the rules in another form than the machine does: it keeps every fact ever
told and works out from the whole list, each time anew, what must be true now.
"""

from __future__ import annotations

import itertools
import sys
import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from vllm_omni.health.faults.fault import Fault, FaultKind, Severity
from vllm_omni.health.state.causes import (
    ERROR_BUDGET_SPENT,
    FAILED_START,
    ORCHESTRATOR_ENDED,
    Cause,
    loop_stalled,
    memory_pressure,
)
from vllm_omni.health.state.machine import (
    HealthMachine,
    InvalidTransition,
    ReplicaState,
    Snapshot,
    State,
    Transition,
)

SETTLE_S = 0.1
LEGAL = {
    ("STARTING", "HEALTHY"),
    ("STARTING", "DEAD"),
    ("HEALTHY", "DEGRADED"),
    ("DEGRADED", "HEALTHY"),
    ("DEGRADED", "DEAD"),
}


CAUSES: dict[str, Callable[..., Cause]] = {
    "memory_pressure": memory_pressure,
    "error_budget": lambda: ERROR_BUDGET_SPENT,
    "loop_stalled": loop_stalled,
    "start_failed": lambda: FAILED_START,
    "orchestrator_ended": lambda: ORCHESTRATOR_ENDED,
}
"""By the name of the fact: its last argument is a fault, or None at its end."""


class Fact(NamedTuple):
    """A call of one of the machine's methods, after some seconds have passed."""

    name: str
    args: tuple[Any, ...] = ()
    after: float = 0.0

    def tell(self, machine: HealthMachine) -> bool:
        """Whether the machine took it."""
        try:
            if self.name not in CAUSES:
                getattr(machine, self.name)(*self.args)
                return True
            *which, fault = self.args
            cause = CAUSES[self.name](*which)
            if fault is None:
                machine.end(cause)
            else:
                machine.arise(cause, fault)
        except InvalidTransition:
            return False
        return True


numbers = itertools.count()


def _make_fault(kind: FaultKind, severity: Severity) -> Fault:
    # The time makes each one a value of its own.
    return Fault(kind=kind, severity=severity, time=float(next(numbers)))


fatal_faults = st.builds(_make_fault, st.sampled_from(FaultKind), st.just(Severity.FATAL))
any_faults = st.builds(_make_fault, st.sampled_from(FaultKind), st.sampled_from(Severity))
request_faults = st.builds(_make_fault, st.sampled_from(FaultKind), st.just(Severity.REQUEST))
stage_ids = st.integers(0, 2)
replica_ids = st.integers(0, 2)
devices = st.sampled_from(["cuda:0", "cuda:1"])
loops = st.sampled_from(["orchestrator", "API server"])
pids = st.none() | st.integers(1, 9)


def facts(after: st.SearchStrategy[float]) -> st.SearchStrategy[Fact]:
    def one(name: str, *args: st.SearchStrategy[Any]) -> st.SearchStrategy[Fact]:
        return st.builds(Fact, st.just(name), st.tuples(*args), after)

    # Often enough for long stories: what is common in a server's life.
    lively = [
        one("replica_lost", stage_ids, replica_ids, any_faults),
        one("replica_ready", stage_ids, replica_ids, pids),
        one("replica_suspect", stage_ids, replica_ids, st.none() | fatal_faults),
        one("replica_recovered", stage_ids, replica_ids),
        one("memory_pressure", devices, st.none() | fatal_faults),
        one("error_budget", st.none() | request_faults),
        one("loop_stalled", loops, st.none() | fatal_faults),
        one("fault_noted", any_faults),
    ]
    rare = [
        one("expect_stage", stage_ids, st.integers(1, 3)),
        one("expect_replica", stage_ids, replica_ids, pids),
        one("started"),
        one("drain"),
        one("start_failed", fatal_faults),
        one("orchestrator_ended", fatal_faults),
    ]
    return st.one_of(*lively, *lively, *rare)


proper_starts = st.builds(
    lambda sizes: [
        *(Fact("expect_stage", (stage, size)) for stage, size in enumerate(sizes)),
        *(
            Fact("replica_ready", (stage, replica))
            for stage, size in enumerate(sizes)
            for replica in range(size)
        ),
        Fact("started"),
    ],
    st.lists(st.integers(1, 3), min_size=1, max_size=3),
)


gaps = st.sampled_from([0.0, SETTLE_S / 3, 2 * SETTLE_S])


def stories(after: st.SearchStrategy[float] = gaps) -> st.SearchStrategy[list[Fact]]:
    """Facts in any order; in half of the stories after a proper start."""
    rest = st.lists(facts(after), max_size=30)
    return st.one_of(rest, st.builds(lambda first, more: first + more, proper_starts, rest))


# ---- the model -----------------------------------------------------------------------------


@dataclass
class Model:
    """All facts that were taken, and the rules in terms of them."""

    told: list[Fact] = field(default_factory=list)
    start_at: int | None = None
    dead_at: int | None = None

    def tell(self, fact: Fact) -> bool:
        """Take a fact, or say that it must be refused."""
        running = self.state() in ("HEALTHY", "DEGRADED")
        if fact.name == "expect_stage" and running:
            return False
        if fact.name == "start_failed" and running:
            return False
        if fact.name == "started":
            if running:
                return False
            stages = self.stages()
            if self.dead_at is None and (
                not stages or any("live" not in states.values() for states in stages.values())
            ):
                return False
        touched = fact.name in ("expect_replica",) or fact.name.startswith("replica_")
        if touched and running and fact.args[0] not in self.stages():
            return False
        self.told.append(fact)
        if fact.name == "started" and self.start_at is None and self.dead_at is None:
            self.start_at = len(self.told)
        if self.dead_at is None and self.hopeless():
            self.dead_at = len(self.told)
        return True

    def stages(self) -> dict[int, dict[int, str]]:
        """State of every replica ever named, from its own facts alone."""
        found: dict[int, dict[int, str]] = {}
        for fact in self.told:
            if fact.name == "expect_stage":
                for replica_id in range(fact.args[1]):
                    found.setdefault(fact.args[0], {}).setdefault(replica_id, "starting")
            elif fact.name == "expect_replica" or fact.name.startswith("replica_"):
                stage_id, replica_id = fact.args[:2]
                replicas = found.setdefault(stage_id, {})
                old = replicas.get(replica_id, "starting")
                replicas[replica_id] = {
                    "expect_replica": old,
                    "replica_ready": "live",
                    "replica_lost": "lost",
                    "replica_suspect": "suspect" if old == "live" else old,
                    "replica_recovered": "live" if old == "suspect" else old,
                }[fact.name]
        return found

    def pressed(self) -> set[str]:
        """Devices whose last word was of pressure."""
        last = {fact.args[0]: fact.args[1] for fact in self.told if fact.name == "memory_pressure"}
        return {device for device, fault in last.items() if fault is not None}

    def overspent(self) -> bool:
        """Whether the last word on the error budget was that it is spent."""
        last = [fact.args[0] for fact in self.told if fact.name == "error_budget"]
        return bool(last) and last[-1] is not None

    def stalled(self) -> set[str]:
        """Loops whose last word was that they stand still."""
        last = {fact.args[0]: fact.args[1] for fact in self.told if fact.name == "loop_stalled"}
        return {loop for loop, fault in last.items() if fault is not None}

    def hopeless(self) -> bool:
        """Whether the last fact leaves no way to serve."""
        if any(fact.name in ("start_failed", "orchestrator_ended") for fact in self.told):
            return True
        return any(set(states.values()) == {"lost"} for states in self.stages().values())

    def state(self) -> str:
        if self.dead_at is not None:
            return "DEAD"
        if self.start_at is None:
            return "STARTING"
        ill = any({"lost", "suspect"} & set(states.values()) for states in self.stages().values())
        ill = ill or self.pressed() or self.overspent() or self.stalled()
        return "DEGRADED" if ill else "HEALTHY"

    def accepting(self) -> bool:
        return (
            self.state() in ("HEALTHY", "DEGRADED")
            and not self.pressed()
            and not self.stalled()
            and not any(fact.name == "drain" for fact in self.told)
            and all("live" in states.values() for states in self.stages().values())
        )


class Told:
    """A machine with a clock of its own, and the model beside it."""

    def __init__(self) -> None:
        self.now = 1000.0
        self.machine = HealthMachine(
            settle_s=SETTLE_S, history=10_000, clock=self.read, monotonic=self.read
        )
        self.model = Model()

    def read(self) -> float:
        return self.now

    def tell(self, fact: Fact) -> bool:
        self.now += fact.after
        taken = fact.tell(self.machine)
        assert taken == self.model.tell(fact)
        return taken


# ---- what must always be true --------------------------------------------------------------


def check_snapshot(snapshot: Snapshot) -> None:
    """What any reader may rely on, whenever it looks."""
    states = [{replica.state for replica in stage.replicas} for stage in snapshot.stages]
    ill = any(states_ & {ReplicaState.LOST, ReplicaState.SUSPECT} for states_ in states)
    hopeless = any(states_ == {ReplicaState.LOST} for states_ in states)
    if snapshot.accepting:
        assert snapshot.state in (State.HEALTHY, State.DEGRADED)
        assert not snapshot.draining
        assert all(ReplicaState.LIVE in states_ for states_ in states)
    if snapshot.state is State.HEALTHY:
        assert not ill
        assert snapshot.fault is None
        assert snapshot.accepting is not snapshot.draining
    if snapshot.state is State.DEAD:
        assert snapshot.fault is not None
    elif hopeless:
        raise AssertionError("a stage without replicas, and not DEAD")
    if snapshot.state in (State.HEALTHY, State.DEGRADED):
        assert snapshot.started


def check_history(history: tuple[Transition, ...], snapshot: Snapshot) -> None:
    """One unbroken line of legal moves that ends where the snapshot is."""
    assert [entry.seq for entry in history] == list(range(len(history)))
    state = State.STARTING
    for entry in history:
        assert entry.from_state is state
        state = entry.to_state
        if entry.moved:
            assert (entry.from_state.value, entry.to_state.value) in LEGAL
        if entry.moved and entry.to_state is State.DEAD:
            assert entry.fault is not None
    assert state is snapshot.state
    assert [entry.monotonic for entry in history] == sorted(entry.monotonic for entry in history)
    entered = [entry.wall for entry in history if entry.moved]
    if entered:
        assert snapshot.since == entered[-1]


# ---- one thread ----------------------------------------------------------------------------


@settings(deadline=None, max_examples=400)
@given(stories())
def test_the_machine_follows_the_rules_in_any_order_of_facts(story: list[Fact]) -> None:
    told = Told()
    seen: list[Transition] = []
    told.machine.observe(seen.append)
    for fact in story:
        before = told.machine.snapshot
        taken = told.tell(fact)
        after = told.machine.snapshot
        assert taken or after is before
        assert after.state.value == told.model.state()
        assert after.accepting == told.model.accepting()
        assert {
            stage.stage_id: {view.replica_id: view.state.value for view in stage.replicas}
            for stage in after.stages
        } == told.model.stages()
        assert after is before or after.version == before.version + 1
        check_snapshot(after)
    check_history(told.machine.history(), told.machine.snapshot)
    assert tuple(seen) == told.machine.history()


def _at_once(name: str, *args: st.SearchStrategy[Any]) -> st.SearchStrategy[Fact]:
    return st.builds(Fact, st.just(name), st.tuples(*args), st.just(0.0))


worse = st.lists(
    _at_once("replica_lost", stage_ids, replica_ids, any_faults)
    | _at_once("fault_noted", any_faults),
    max_size=8,
)


@settings(deadline=None)
@given(proper_starts, worse, fatal_faults, worse)
def test_of_what_is_told_at_once_the_most_telling_fault_is_the_reason(
    start: list[Fact], before: list[Fact], ending: Fault, after: list[Fact]
) -> None:
    told = Told()
    story = [*start, *before, Fact("orchestrator_ended", (ending,)), *after]
    taken = [fact for fact in story if told.tell(fact)]
    # Whatever ended a replica or the orchestrator counts; a note only if it is fatal.
    competing = [
        fact.args[-1]
        for fact in taken
        if fact.name in ("replica_lost", "orchestrator_ended")
        or (fact.name == "fault_noted" and fact.args[0].fatal)
    ]
    reason = told.machine.reason
    assert reason is not None
    # min() takes the first of those that are equally telling.
    assert reason.time == min(competing, key=lambda fault: fault.kind.precedence).time


@settings(deadline=None)
@given(stories(after=st.just(10 * SETTLE_S)))
def test_of_what_is_told_far_apart_the_fault_that_ended_it_is_the_reason(
    story: list[Fact],
) -> None:
    told = Told()
    for fact in story:
        alive = told.machine.snapshot.state is not State.DEAD
        told.tell(fact)
        if alive and told.machine.snapshot.state is State.DEAD:
            ended_by = next(arg for arg in fact.args if isinstance(arg, Fault))
            reason = told.machine.reason
            assert reason is not None
            assert reason.time == ended_by.time
    # Whatever came later did not change it, so look again.
    if told.machine.snapshot.state is State.DEAD:
        assert told.machine.reason is not None
        assert told.machine.reason.time == ended_by.time


@settings(deadline=None)
@given(stories(), stories())
def test_a_settled_reason_for_death_stays(first: list[Fact], then: list[Fact]) -> None:
    told = Told()
    for fact in [
        *first,
        Fact("orchestrator_ended", (_make_fault(FaultKind.ENGINE, Severity.FATAL),)),
    ]:
        told.tell(fact)
    told.now += 1.01 * SETTLE_S
    reason = told.machine.reason
    for fact in then:
        told.tell(fact)
    assert told.machine.reason == reason
    assert told.machine.snapshot.state is State.DEAD


# ---- several threads -----------------------------------------------------------------------


def _together(jobs: list[Callable[[], None]]) -> None:
    """Run jobs on threads that begin at the same moment; re-raise what one of them raised."""
    barrier = threading.Barrier(len(jobs))
    errors: list[BaseException] = []

    def run(job: Callable[[], None]) -> None:
        barrier.wait(10)
        try:
            job()
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=run, args=(job,)) for job in jobs]
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)  # as many interleavings as can be had
    try:
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(30)
            assert not thread.is_alive(), "a deadlock"
    finally:
        sys.setswitchinterval(interval)
    for error in errors:
        raise error


@settings(deadline=None, max_examples=50)
@given(st.lists(stories(after=st.just(0.0)), min_size=2, max_size=4))
def test_the_machine_follows_the_rules_whatever_threads_tell_it(
    stories_: list[list[Fact]],
) -> None:
    machine = HealthMachine(settle_s=SETTLE_S, history=10_000)
    seen: list[Transition] = []
    running: list[int] = []

    def observe(entry: Transition) -> None:
        running.append(entry.seq)
        assert len(running) == 1, "two observers at once"
        check_snapshot(machine.snapshot)
        seen.append(entry)
        running.pop()

    machine.observe(observe)
    done = threading.Event()

    def read() -> None:
        version = -1
        while True:
            last = done.is_set()
            snapshot = machine.snapshot
            check_snapshot(snapshot)
            assert snapshot.version >= version
            version = snapshot.version
            if last:
                return

    def tell(story: list[Fact]) -> None:
        for fact in story:
            fact.tell(machine)

    def tell_all() -> None:
        try:
            _together([lambda story=story: tell(story) for story in stories_])  # type: ignore[misc]
        finally:
            done.set()

    _together([read, tell_all])
    check_history(machine.history(), machine.snapshot)
    assert tuple(seen) == machine.history()


@pytest.mark.parametrize("round_", range(20))
def test_two_replicas_lost_at_once_by_two_threads_end_the_stage_once(round_: int) -> None:
    machine = HealthMachine(settle_s=10.0)
    machine.expect_stage(0, 2)
    machine.replica_ready(0, 0)
    machine.replica_ready(0, 1)
    machine.started()
    kinds = (FaultKind.COLLECTIVE, FaultKind.OOM)
    _together(
        [
            lambda replica_id=replica_id, kind=kind: machine.replica_lost(  # type: ignore[misc]
                0, replica_id, Fault(kind=kind)
            )
            for replica_id, kind in enumerate(kinds)
        ]
    )
    assert [entry.to_state.value for entry in machine.history() if entry.moved] == [
        "HEALTHY",
        "DEGRADED",
        "DEAD",
    ]
    assert machine.reason is not None
    assert machine.reason.kind is FaultKind.OOM


def test_facts_told_by_observers_on_several_threads_neither_hang_nor_get_lost() -> None:
    machine = HealthMachine(history=10_000)
    machine.expect_stage(0, 1)
    machine.replica_ready(0, 0)
    machine.started()
    seen: list[int] = []

    def echo(entry: Transition) -> None:
        seen.append(entry.seq)
        if entry.cause == "draining":
            return
        if len(seen) < 2000 and entry.seq % 2 == 0:
            machine.fault_noted(Fault(kind=FaultKind.ENGINE))

    machine.observe(echo)

    def note() -> None:
        for _ in range(200):
            machine.fault_noted(Fault(kind=FaultKind.ENGINE))

    _together([note] * 4)
    assert seen == [entry.seq for entry in machine.history()][-len(seen) :]
    assert len(seen) >= 800
