# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-omni-health project
"""The state machine, fact by fact."""

from __future__ import annotations

import threading
from collections.abc import Callable

import msgspec
import pytest
from vllm_omni.health.faults.fault import Fault, FaultKind, Severity
from vllm_omni.health.state import journal
from vllm_omni.health.state.causes import (
    FAILED_START,
    ORCHESTRATOR_ENDED,
    loop_stalled,
    memory_pressure,
)
from vllm_omni.health.state.machine import (
    HealthMachine,
    InvalidTransition,
    ReplicaState,
    ReplicaView,
    StageView,
    State,
    Transition,
)

SETTLE_S = 0.1


class Clock:
    """Wall and monotonic time that move only when told to."""

    def __init__(self) -> None:
        self.now = 1000.0

    def wall(self) -> float:
        return self.now + 1_000_000.0

    def monotonic(self) -> float:
        return self.now


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def starting(clock: Clock) -> HealthMachine:
    return HealthMachine(settle_s=SETTLE_S, clock=clock.wall, monotonic=clock.monotonic)


@pytest.fixture
def machine(starting: HealthMachine) -> HealthMachine:
    """HEALTHY, with stage 0 of one replica and stage 1 of two."""
    starting.expect_stage(0, 1)
    starting.expect_stage(1, 2)
    for stage_id, replica_id in ((0, 0), (1, 0), (1, 1)):
        starting.replica_ready(stage_id, replica_id, pid=10 * stage_id + replica_id)
    starting.started()
    return starting


def fault(kind: str = "engine", severity: str = "fatal", message: str = "") -> Fault:
    return Fault(kind=FaultKind(kind), severity=Severity(severity), message=message, time=5.0)


def moves(machine: HealthMachine) -> list[str]:
    return [entry.to_state.value for entry in machine.history() if entry.moved]


def causes(machine: HealthMachine) -> list[str]:
    return [entry.cause for entry in machine.history()]


def kind(machine: HealthMachine) -> str | None:
    return machine.reason.kind.value if machine.reason is not None else None


# ---- starting ------------------------------------------------------------------------------


def test_a_new_machine_is_starting_and_accepts_nothing(starting: HealthMachine) -> None:
    snapshot = starting.snapshot
    assert (snapshot.state, snapshot.accepting, snapshot.draining) == (State.STARTING, False, False)
    assert snapshot.fault is None
    assert not snapshot.started


def test_a_server_starts(machine: HealthMachine) -> None:
    snapshot = machine.snapshot
    assert snapshot.state is State.HEALTHY
    assert snapshot.accepting
    assert snapshot.started
    assert moves(machine) == ["HEALTHY"]
    assert snapshot.stages == (
        StageView(0, (ReplicaView(0, ReplicaState.LIVE, 0),)),
        StageView(
            1, (ReplicaView(0, ReplicaState.LIVE, 10), ReplicaView(1, ReplicaState.LIVE, 11))
        ),
    )


def test_a_stage_without_a_live_replica_cannot_have_started(starting: HealthMachine) -> None:
    with pytest.raises(InvalidTransition, match="stage any"):
        starting.started()
    starting.expect_stage(0, 1)
    with pytest.raises(InvalidTransition, match="stage 0"):
        starting.started()
    assert starting.snapshot.state is State.STARTING


def test_one_live_replica_is_enough_to_start(starting: HealthMachine) -> None:
    starting.expect_stage(0, 2)
    starting.replica_ready(0, 1)
    starting.started()
    assert starting.snapshot.state is State.HEALTHY
    assert starting.replica_state(0, 0) is ReplicaState.STARTING


def test_a_server_does_not_start_twice(machine: HealthMachine) -> None:
    with pytest.raises(InvalidTransition, match="HEALTHY"):
        machine.started()


def test_a_stage_needs_a_replica(starting: HealthMachine) -> None:
    with pytest.raises(ValueError, match="at least one replica"):
        starting.expect_stage(0, 0)


def test_a_stage_is_not_announced_after_the_start(machine: HealthMachine) -> None:
    with pytest.raises(InvalidTransition):
        machine.expect_stage(2, 1)
    with pytest.raises(InvalidTransition):
        machine.expect_replica(2, 0)
    with pytest.raises(InvalidTransition):
        machine.replica_lost(2, 0, fault())
    assert [stage.stage_id for stage in machine.snapshot.stages] == [0, 1]
    assert machine.snapshot.state is State.HEALTHY


def test_the_last_replica_lost_while_starting_is_the_end(starting: HealthMachine) -> None:
    starting.expect_stage(0, 2)
    starting.replica_lost(0, 0, fault("process_lost"))
    assert starting.snapshot.state is State.STARTING
    starting.replica_lost(0, 1, fault("oom"))
    assert starting.snapshot.state is State.DEAD
    assert moves(starting) == ["DEAD"]
    assert kind(starting) == "oom"
    assert not starting.snapshot.started


def test_a_replica_lost_while_starting_makes_the_start_degraded(starting: HealthMachine) -> None:
    starting.expect_stage(0, 2)
    starting.replica_ready(0, 0)
    starting.replica_lost(0, 1, fault("oom"))
    starting.started()
    assert moves(starting) == ["HEALTHY", "DEGRADED"]
    assert kind(starting) == "oom"
    assert starting.snapshot.accepting
    first, second = (entry for entry in starting.history() if entry.moved)
    assert first.fault is None
    assert second.fault is not None
    assert second.fault["kind"] == "oom"


def test_a_failed_start_is_the_end(starting: HealthMachine) -> None:
    starting.arise(FAILED_START, fault("accelerator"))
    assert moves(starting) == ["DEAD"]
    assert kind(starting) == "accelerator"


def test_a_start_does_not_fail_after_it(machine: HealthMachine) -> None:
    with pytest.raises(InvalidTransition):
        machine.arise(FAILED_START, fault())
    assert machine.snapshot.state is State.HEALTHY
    assert machine.reason is None


def test_the_orchestrator_can_end_while_starting(starting: HealthMachine) -> None:
    starting.arise(ORCHESTRATOR_ENDED, fault("orchestrator"))
    assert moves(starting) == ["DEAD"]


def test_a_start_that_completes_too_late_is_only_noted(starting: HealthMachine) -> None:
    starting.arise(FAILED_START, fault())
    starting.started()
    starting.expect_stage(0, 1)
    assert moves(starting) == ["DEAD"]
    assert causes(starting) == ["start failed", "started"]


# ---- losing replicas -----------------------------------------------------------------------


def test_one_of_two_replicas_lost_leaves_a_service(machine: HealthMachine) -> None:
    machine.replica_lost(1, 0, fault("process_lost"))
    snapshot = machine.snapshot
    assert (snapshot.state, snapshot.accepting) == (State.DEGRADED, True)
    assert kind(machine) == "process_lost"
    assert machine.replica_state(1, 0) is ReplicaState.LOST


def test_a_replica_that_comes_back_heals(machine: HealthMachine) -> None:
    machine.replica_lost(1, 0, fault())
    machine.expect_replica(1, 0, pid=99)
    assert machine.snapshot.state is State.DEGRADED
    assert machine.replica_state(1, 0) is ReplicaState.LOST
    machine.replica_ready(1, 0)
    assert machine.snapshot.state is State.HEALTHY
    assert machine.reason is None
    assert moves(machine) == ["HEALTHY", "DEGRADED", "HEALTHY"]
    assert machine.snapshot.stages[1].replicas[0].pid == 99


def test_the_last_replica_of_a_stage_lost_passes_through_degraded(machine: HealthMachine) -> None:
    machine.replica_lost(0, 0, fault("oom"))
    assert moves(machine) == ["HEALTHY", "DEGRADED", "DEAD"]
    assert not machine.snapshot.accepting
    entries = [entry for entry in machine.history() if entry.moved][1:]
    assert [entry.cause for entry in entries] == ["replica lost", "replica lost"]
    assert [entry.fault and entry.fault["kind"] for entry in entries] == ["oom", "oom"]


def test_a_lost_replica_is_named_in_its_fault(machine: HealthMachine) -> None:
    machine.replica_lost(1, 1, fault())
    assert machine.reason is not None
    assert (machine.reason.stage_id, machine.reason.replica_id) == (1, 1)


def test_a_replica_added_later_counts(machine: HealthMachine) -> None:
    machine.replica_ready(0, 1, pid=7)
    machine.replica_lost(0, 0, fault())
    assert machine.snapshot.state is State.DEGRADED
    assert machine.snapshot.accepting


def test_what_waits_for_a_replica_to_start_is_not_dead_yet(starting: HealthMachine) -> None:
    starting.expect_stage(0, 2)
    starting.replica_ready(0, 0)
    starting.started()
    starting.replica_lost(0, 0, fault())
    assert starting.snapshot.state is State.DEGRADED
    assert not starting.snapshot.accepting
    starting.replica_ready(0, 1)
    assert starting.snapshot.accepting


def test_even_a_request_scoped_fault_can_end_a_replica(machine: HealthMachine) -> None:
    machine.replica_lost(0, 0, fault("engine", "request"))
    assert machine.snapshot.state is State.DEAD
    assert kind(machine) == "engine"


def test_the_stage_tells_its_own_fault(machine: HealthMachine, clock: Clock) -> None:
    assert machine.stage_fault(1) is None
    machine.replica_lost(1, 0, fault("collective"))
    clock.now += 1
    machine.replica_lost(0, 0, fault("oom"))
    for stage_id, expected in ((0, "oom"), (1, "collective")):
        found = machine.stage_fault(stage_id)
        assert found is not None
        assert found.kind.value == expected
    assert machine.stage_fault(7) is None


def test_a_stage_settles_on_its_most_telling_fault(machine: HealthMachine, clock: Clock) -> None:
    machine.replica_lost(0, 0, fault("collective"))
    machine.fault_noted(fault("oom").with_context(stage_id=0, replica_id=0))
    assert machine.stage_fault(0) == fault("oom").with_context(stage_id=0, replica_id=0)
    clock.now += 2 * SETTLE_S
    machine.replica_lost(1, 0, fault("engine"))
    machine.fault_noted(fault("hang").with_context(stage_id=1, replica_id=1))
    found = machine.stage_fault(1)
    assert found is not None
    assert found.kind is FaultKind.ENGINE


# ---- suspicion -----------------------------------------------------------------------------


def test_a_suspect_replica_takes_no_requests_and_may_recover(machine: HealthMachine) -> None:
    machine.replica_suspect(0, 0, fault("hang"))
    assert (machine.snapshot.state, machine.snapshot.accepting) == (State.DEGRADED, False)
    assert kind(machine) == "hang"
    machine.replica_recovered(0, 0)
    assert (machine.snapshot.state, machine.snapshot.accepting) == (State.HEALTHY, True)
    assert machine.reason is None


def test_others_serve_while_one_is_suspect(machine: HealthMachine) -> None:
    machine.replica_suspect(1, 0)
    assert (machine.snapshot.state, machine.snapshot.accepting) == (State.DEGRADED, True)
    assert machine.reason is None


def test_what_a_suspicion_turns_out_to_be_becomes_the_reason(
    machine: HealthMachine, clock: Clock
) -> None:
    machine.replica_suspect(1, 0, fault("hang"))
    clock.now += 5
    machine.replica_lost(1, 0, fault("host_oom"))
    assert machine.snapshot.state is State.DEGRADED
    assert kind(machine) == "host_oom"


@pytest.mark.parametrize("late", ["replica_suspect", "replica_recovered"])
def test_a_lost_replica_is_neither_suspect_nor_recovered(machine: HealthMachine, late: str) -> None:
    machine.replica_lost(1, 0, fault())
    before = machine.snapshot
    getattr(machine, late)(1, 0)
    assert machine.snapshot is before
    assert causes(machine)[-1] == "replica lost"


def test_a_replica_that_starts_is_not_suspect(starting: HealthMachine) -> None:
    starting.expect_stage(0, 1)
    starting.replica_suspect(0, 0, fault("hang"))
    assert starting.replica_state(0, 0) is ReplicaState.STARTING
    assert starting.reason is None


# ---- memory --------------------------------------------------------------------------------


def test_memory_pressure_stops_new_requests_until_every_device_is_well(
    machine: HealthMachine,
) -> None:
    machine.arise(memory_pressure("cuda:0"), fault("oom"))
    machine.arise(memory_pressure("cuda:1"), fault("oom"))
    assert (machine.snapshot.state, machine.snapshot.accepting) == (State.DEGRADED, False)
    machine.end(memory_pressure("cuda:0"))
    assert (machine.snapshot.state, machine.snapshot.accepting) == (State.DEGRADED, False)
    machine.end(memory_pressure("cuda:1"))
    assert (machine.snapshot.state, machine.snapshot.accepting) == (State.HEALTHY, True)


def test_repeating_what_is_known_of_memory_changes_nothing(machine: HealthMachine) -> None:
    machine.end(memory_pressure("cuda:0"))
    machine.arise(memory_pressure("cuda:0"), fault("oom", message="first"))
    before, count = machine.snapshot, len(machine.history())
    machine.arise(memory_pressure("cuda:0"), fault("oom", message="second"))
    assert machine.snapshot is before
    assert len(machine.history()) == count


# ---- DEAD ----------------------------------------------------------------------------------


def test_nothing_leads_out_of_dead(machine: HealthMachine) -> None:
    machine.arise(ORCHESTRATOR_ENDED, fault("orchestrator"))
    since = machine.snapshot.since
    machine.replica_ready(0, 0)
    machine.replica_recovered(0, 0)
    machine.end(memory_pressure("cuda:0"))
    machine.started()
    machine.arise(FAILED_START, fault())
    machine.arise(ORCHESTRATOR_ENDED, fault())
    assert moves(machine) == ["HEALTHY", "DEGRADED", "DEAD"]
    assert machine.snapshot.since == since
    assert kind(machine) == "engine"  # within the settling time


def test_replicas_that_end_after_death_are_shown_and_recorded(machine: HealthMachine) -> None:
    machine.replica_lost(0, 0, fault("oom"))
    machine.replica_lost(1, 0, fault("process_lost"))
    assert machine.replica_state(1, 0) is ReplicaState.LOST
    last = machine.history()[-1]
    assert (last.from_state, last.to_state, last.cause) == (State.DEAD, State.DEAD, "replica lost")
    assert last.fault is not None
    assert last.fault["kind"] == "process_lost"


def test_an_unknown_replica_after_death_is_no_error(machine: HealthMachine) -> None:
    machine.replica_lost(0, 0, fault("oom"))
    machine.replica_lost(9, 9, fault())
    assert machine.snapshot.state is State.DEAD


# ---- draining ------------------------------------------------------------------------------


def test_draining_is_no_fault_and_no_move(machine: HealthMachine) -> None:
    machine.drain()
    machine.drain()
    snapshot = machine.snapshot
    assert (snapshot.state, snapshot.accepting, snapshot.draining) == (State.HEALTHY, False, True)
    assert causes(machine).count("draining") == 1
    assert machine.reason is None


def test_draining_is_never_taken_back(machine: HealthMachine) -> None:
    machine.drain()
    machine.replica_lost(1, 0, fault())
    machine.replica_ready(1, 0)
    assert machine.snapshot.state is State.HEALTHY
    assert not machine.snapshot.accepting


def test_a_start_while_draining_accepts_nothing(starting: HealthMachine) -> None:
    starting.drain()
    starting.expect_stage(0, 1)
    starting.replica_ready(0, 0)
    starting.started()
    assert starting.snapshot.state is State.HEALTHY
    assert not starting.snapshot.accepting


# ---- the reason ----------------------------------------------------------------------------


def test_a_more_telling_fault_in_time_becomes_the_reason(
    machine: HealthMachine, clock: Clock
) -> None:
    machine.replica_lost(0, 0, fault("collective"))
    clock.now += SETTLE_S / 2
    machine.fault_noted(fault("oom"))
    clock.now += SETTLE_S / 4
    machine.fault_noted(fault("process_lost"))
    assert kind(machine) == "oom"
    assert causes(machine)[-2:] == ["fault noted", "fault noted"]
    assert moves(machine) == ["HEALTHY", "DEGRADED", "DEAD"]


def test_a_more_telling_fault_too_late_is_only_recorded(
    machine: HealthMachine, clock: Clock
) -> None:
    machine.replica_lost(0, 0, fault("collective"))
    clock.now += SETTLE_S * 0.9
    machine.fault_noted(fault("hang"))
    clock.now += SETTLE_S * 0.9  # counted from the first fault, not from the last
    machine.fault_noted(fault("oom"))
    assert kind(machine) == "hang"
    assert machine.history()[-1].fault == fault("oom").public()


def test_the_settling_time_includes_its_end(clock: Clock) -> None:
    settle_s = 0.25  # has no rounding error, unlike 0.1
    machine = HealthMachine(settle_s=settle_s, clock=clock.wall, monotonic=clock.monotonic)
    machine.expect_stage(0, 2)
    machine.fault_noted(fault("hang"))
    clock.now += settle_s
    machine.replica_lost(0, 0, fault("engine"))
    assert kind(machine) == "hang"
    machine.replica_lost(0, 1, fault("process_lost"))
    assert kind(machine) == "process_lost"
    machine.fault_noted(fault("oom").with_context(stage_id=0, replica_id=1))
    clock.now += settle_s
    machine.fault_noted(fault("host_oom").with_context(stage_id=0, replica_id=0))
    assert kind(machine) == "oom"
    machine.replica_ready(0, 1)
    found = machine.stage_fault(0)
    assert found is not None
    assert found.kind is FaultKind.HOST_OOM


def test_of_two_of_one_kind_the_first_is_the_reason(machine: HealthMachine) -> None:
    machine.replica_lost(0, 0, fault("oom", message="first"))
    machine.replica_lost(1, 0, fault("oom", message="second"))
    assert machine.reason is not None
    assert machine.reason.message == "first"


def test_last_words_just_before_the_loss_are_the_reason(
    machine: HealthMachine, clock: Clock
) -> None:
    machine.fault_noted(fault("oom"))
    assert machine.snapshot.state is State.HEALTHY
    assert machine.reason is None
    clock.now += SETTLE_S / 2
    machine.replica_lost(0, 0, fault("process_lost"))
    assert kind(machine) == "oom"


def test_a_fault_noted_long_before_the_loss_is_not_the_reason(
    machine: HealthMachine, clock: Clock
) -> None:
    machine.fault_noted(fault("oom"))
    clock.now += 2 * SETTLE_S
    machine.replica_lost(0, 0, fault("process_lost"))
    assert kind(machine) == "process_lost"


def test_a_failed_request_is_no_reason(machine: HealthMachine) -> None:
    machine.fault_noted(fault("oom", "request"))
    machine.replica_lost(0, 0, fault("engine"))
    machine.fault_noted(fault("oom", "request"))
    assert kind(machine) == "engine"


def test_what_ended_the_service_is_the_reason_not_what_degraded_it_long_before(
    machine: HealthMachine, clock: Clock
) -> None:
    machine.replica_lost(1, 0, fault("oom"))
    clock.now += 3600
    machine.replica_lost(1, 1, fault("hang"))
    assert machine.snapshot.state is State.DEAD
    assert kind(machine) == "hang"


def test_what_degraded_it_just_before_may_be_the_reason(
    machine: HealthMachine, clock: Clock
) -> None:
    machine.replica_lost(1, 0, fault("oom"))
    clock.now += SETTLE_S / 2
    machine.replica_lost(1, 1, fault("collective"))
    assert machine.snapshot.state is State.DEAD
    assert kind(machine) == "oom"


def test_the_reason_passes_to_what_is_still_wrong(machine: HealthMachine, clock: Clock) -> None:
    machine.arise(loop_stalled("API server"), fault("orchestrator"))
    clock.now += 1
    machine.replica_lost(1, 0, fault("hang"))
    assert kind(machine) == "orchestrator"
    machine.end(loop_stalled("API server"))
    assert machine.snapshot.state is State.DEGRADED
    assert kind(machine) == "hang"


def test_the_reason_says_when_it_is_final(machine: HealthMachine, clock: Clock) -> None:
    assert machine.settles_in() == 0
    machine.replica_lost(0, 0, fault())
    clock.now += SETTLE_S / 4
    assert machine.settles_in() == pytest.approx(SETTLE_S * 3 / 4)
    clock.now += SETTLE_S
    assert machine.settles_in() == 0


# ---- history -------------------------------------------------------------------------------


def test_an_entry_says_when_and_why(machine: HealthMachine, clock: Clock) -> None:
    clock.now += 7
    machine.replica_lost(1, 0, fault("oom"))
    last = machine.history()[-1]
    assert (last.wall, last.monotonic) == (clock.wall(), clock.monotonic())
    assert last.cause == "replica lost"
    assert last.fault == fault("oom").with_context(stage_id=1, replica_id=0).public()
    assert machine.snapshot.since == clock.wall()


def test_expecting_something_is_no_event(starting: HealthMachine) -> None:
    starting.expect_stage(0, 1)
    starting.expect_replica(0, 0, pid=3)
    assert starting.history() == ()
    assert starting.snapshot.stages[0].replicas == (ReplicaView(0, ReplicaState.STARTING, 3),)


def test_a_flood_of_events_does_not_push_out_the_moves(clock: Clock) -> None:
    machine = HealthMachine(history=4, clock=clock.wall, monotonic=clock.monotonic)
    machine.expect_stage(0, 1)
    machine.replica_ready(0, 0)
    machine.started()
    for _ in range(100):
        machine.fault_noted(fault())
    history = machine.history()
    assert moves(machine) == ["HEALTHY"]
    assert len(history) == 5
    assert [entry.seq for entry in history] == [1, 98, 99, 100, 101]


def test_the_moves_are_bounded_too(clock: Clock) -> None:
    machine = HealthMachine(history=4, clock=clock.wall, monotonic=clock.monotonic)
    machine.expect_stage(0, 1)
    machine.replica_ready(0, 0)
    machine.started()
    for _ in range(10):
        machine.replica_suspect(0, 0)
        machine.replica_recovered(0, 0)
    assert moves(machine) == ["DEGRADED", "HEALTHY"] * 2


def test_a_snapshot_cannot_be_changed_and_an_old_one_stays_true(machine: HealthMachine) -> None:
    before = machine.snapshot
    with pytest.raises(AttributeError):
        before.accepting = False  # type: ignore[misc]
    machine.drain()
    assert before.accepting
    assert machine.snapshot.version == before.version + 1


def test_a_snapshot_can_be_encoded(machine: HealthMachine) -> None:
    machine.replica_lost(0, 0, fault("oom"))
    encoded = msgspec.json.encode(machine.snapshot)
    assert msgspec.json.decode(encoded, type=type(machine.snapshot)) == machine.snapshot


# ---- observers -----------------------------------------------------------------------------


def test_an_observer_sees_what_happens_from_now_on_in_order(machine: HealthMachine) -> None:
    seen: list[Transition] = []
    so_far = len(machine.history())
    machine.observe(seen.append)
    machine.replica_lost(0, 0, fault())
    machine.drain()
    assert tuple(seen) == machine.history()[so_far:]
    assert [entry.to_state.value for entry in seen] == ["DEGRADED", "DEAD", "DEAD"]


def test_an_observer_finds_the_machine_already_moved(machine: HealthMachine) -> None:
    seen: list[State] = []
    machine.observe(lambda _: seen.append(machine.snapshot.state))
    machine.replica_lost(1, 0, fault())
    assert seen == [State.DEGRADED]


def test_an_observer_may_read_everything_and_is_on_the_thread_of_the_fact(
    machine: HealthMachine,
) -> None:
    seen: list[object] = []

    def look(_: Transition) -> None:
        seen.append(threading.current_thread())
        machine.history()
        machine.settles_in()
        machine.stage_fault(0)

    machine.observe(look)
    machine.drain()
    assert seen == [threading.current_thread()]


def test_an_observer_that_fails_stops_nobody(
    machine: HealthMachine, monkeypatch: pytest.MonkeyPatch
) -> None:
    logged: list[str] = []
    monkeypatch.setattr(journal.logger, "exception", logged.append)

    def fail(_: Transition) -> None:
        raise ValueError("observer bug")

    seen: list[Transition] = []
    machine.observe(fail)
    machine.observe(seen.append)
    machine.drain()
    machine.replica_lost(1, 0, fault())
    assert len(seen) == 2
    assert len(logged) == 2


def test_an_observer_that_left_is_not_called(machine: HealthMachine) -> None:
    seen: list[Transition] = []
    unsubscribe = machine.observe(seen.append)
    unsubscribe()
    unsubscribe()
    machine.drain()
    assert seen == []


def test_one_callback_can_be_subscribed_twice(machine: HealthMachine) -> None:
    seen: list[Transition] = []
    first = machine.observe(seen.append)
    machine.observe(seen.append)
    first()
    machine.drain()
    assert len(seen) == 1


def test_an_observer_that_leaves_during_delivery_stops_the_next(machine: HealthMachine) -> None:
    seen: list[Transition] = []
    later: list[Callable[[], None]] = []
    machine.observe(lambda _: later[0]())
    later.append(machine.observe(seen.append))
    machine.drain()
    assert seen == []


def test_a_fact_told_by_an_observer_keeps_the_order(machine: HealthMachine) -> None:
    first: list[int] = []
    second: list[int] = []

    def react(entry: Transition) -> None:
        first.append(entry.seq)
        if entry.to_state is State.DEGRADED:
            machine.replica_lost(0, 0, fault())

    machine.observe(react)
    machine.observe(lambda entry: second.append(entry.seq))
    machine.replica_lost(1, 0, fault())
    assert moves(machine) == ["HEALTHY", "DEGRADED", "DEAD"]
    assert first == second == sorted(first)
    assert len(first) == 2


def test_a_slow_observer_holds_up_no_other_thread(machine: HealthMachine) -> None:
    entered, release = threading.Event(), threading.Event()
    seen: list[int] = []

    def slow(entry: Transition) -> None:
        seen.append(entry.seq)
        entered.set()
        assert release.wait(10)

    machine.observe(slow)
    thread = threading.Thread(target=machine.drain)
    thread.start()
    assert entered.wait(10)
    machine.replica_lost(0, 0, fault())  # returns although the observer still runs
    assert machine.snapshot.state is State.DEAD
    release.set()
    thread.join(10)
    assert seen == sorted(seen)
    assert len(seen) == 3


def test_an_observer_that_ends_its_thread_does_not_silence_the_machine(
    machine: HealthMachine,
) -> None:
    seen: list[Transition] = []

    def leave(entry: Transition) -> None:
        seen.append(entry)
        if len(seen) == 1:
            raise SystemExit

    machine.observe(leave)
    with pytest.raises(SystemExit):
        machine.drain()
    machine.replica_lost(1, 0, fault())
    assert len(seen) == 2


# ---- memory ----------------------------------------------------------------------------------


def test_what_is_worth_a_line_is_in_the_history_and_moves_nothing(machine: HealthMachine) -> None:
    before = machine.snapshot
    machine.noted("memory discrepancy", {"device": "gpu:0", "percent": 7.5})
    last = machine.history()[-1]
    assert (last.cause, last.fault, last.moved) == ("memory discrepancy", None, False)
    assert last.detail == {"device": "gpu:0", "percent": 7.5}
    assert machine.snapshot == before


def shortage() -> Fault:
    return Fault(kind=FaultKind.HOST_OOM, severity=Severity.REQUEST, device="host", time=5.0)


def test_a_shortage_gives_way_to_what_really_fails_and_comes_back(
    machine: HealthMachine, clock: Clock
) -> None:
    machine.arise(memory_pressure("host"), shortage())
    assert machine.reason == shortage()
    clock.now += 0.01
    machine.replica_lost(1, 0, fault("process_lost"))
    assert machine.reason is not None
    assert machine.reason.kind is FaultKind.PROCESS_LOST
    machine.replica_ready(1, 0)
    assert machine.reason == shortage()
    machine.end(memory_pressure("host"))
    assert (machine.snapshot.state, machine.reason) == (State.HEALTHY, None)


def test_a_shortage_does_not_take_the_place_of_a_fault(
    machine: HealthMachine, clock: Clock
) -> None:
    machine.replica_lost(1, 0, fault("process_lost"))
    clock.now += 0.01
    machine.arise(memory_pressure("host"), shortage())
    assert machine.reason is not None
    assert machine.reason.kind is FaultKind.PROCESS_LOST
    machine.replica_lost(1, 1, fault("engine"))
    assert machine.snapshot.state is State.DEAD
    assert machine.reason.kind is FaultKind.PROCESS_LOST


def test_clients_read_of_a_shortage_that_it_is_one() -> None:
    assert "short of host memory" in shortage().public()["message"]
    fatal = msgspec.structs.replace(shortage(), severity=Severity.FATAL)
    assert fatal.public()["message"] == FaultKind.HOST_OOM.sentence
