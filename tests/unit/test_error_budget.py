# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-omni-health project
"""Requests that fail one by one: counted in a window, told to the machine, forgotten in time."""

import pytest
from vllm_omni.health.faults.fault import REQUEST_SENTENCE, Fault, FaultKind, Severity
from vllm_omni.health.runtime import HealthRuntime
from vllm_omni.health.state.error_budget import ErrorBudget
from vllm_omni.health.state.machine import HealthMachine, State

from vllm_omni_health.settings.model import HealthSettings

FAILED = Fault(kind=FaultKind.ENGINE, severity=Severity.REQUEST, stage_id=0, message="a prompt")


class Clock:
    now = 1000.0

    def __call__(self):
        return self.now


@pytest.fixture
def clock():
    return Clock()


@pytest.fixture
def machine():
    machine = HealthMachine()
    machine.expect_stage(0, 1)
    machine.replica_ready(0, 0)
    machine.started()
    return machine


def test_more_than_the_budget_degrades_and_the_window_restores(machine, clock):
    budget = ErrorBudget(machine, 2, 10, monotonic=clock)
    for _ in range(2):
        budget.spend(FAILED)
    assert machine.snapshot.state is State.HEALTHY
    clock.now += 9
    budget.spend(FAILED)
    assert machine.snapshot.state is State.DEGRADED
    assert machine.snapshot.accepting
    assert machine.snapshot.fault.public()["message"] == REQUEST_SENTENCE
    clock.now += 0.5
    budget.tick()
    assert machine.snapshot.state is State.DEGRADED
    clock.now += 0.5
    budget.tick()
    assert machine.snapshot.state is State.HEALTHY
    assert machine.snapshot.fault is None
    causes = [move.cause for move in machine.history() if move.moved]
    assert causes[-2:] == ["error budget spent", "error budget restored"]


def test_failures_far_apart_never_add_up(machine, clock):
    budget = ErrorBudget(machine, 1, 10, monotonic=clock)
    for _ in range(5):
        budget.spend(FAILED)
        clock.now += 10
    assert machine.snapshot.state is State.HEALTHY


def test_a_burst_counts_as_long_as_its_last_failures(machine, clock):
    budget = ErrorBudget(machine, 1, 10, monotonic=clock)
    for _ in range(100):
        budget.spend(FAILED)
        clock.now += 0.01
    clock.now += 9.9
    budget.tick()
    assert machine.snapshot.state is State.DEGRADED
    clock.now += 0.1
    budget.tick()
    assert machine.snapshot.state is State.HEALTHY


def test_zero_switches_it_off(machine, clock):
    budget = ErrorBudget(machine, 0, 10, monotonic=clock)
    for _ in range(100):
        budget.spend(FAILED)
        budget.tick()
    assert machine.snapshot.state is State.HEALTHY


def test_a_spent_budget_is_not_the_reason_for_a_death(machine, clock):
    budget = ErrorBudget(machine, 1, 10, monotonic=clock)
    for _ in range(2):
        budget.spend(FAILED)
    fatal = Fault(kind=FaultKind.ENGINE, stage_id=0, replica_id=0)
    machine.replica_lost(0, 0, fatal)
    assert machine.snapshot.state is State.DEAD
    assert machine.reason.fatal


def test_only_failures_that_are_over_with_their_request_count():
    runtime = HealthRuntime(HealthSettings(error_budget=1))
    runtime.machine.expect_stage(0, 2)
    for replica_id in range(2):
        runtime.machine.replica_ready(0, replica_id)
    runtime.machine.started()
    for number in range(5):
        runtime.request_failed(f"lost-{number}", Fault(kind=FaultKind.OOM))
    for _ in range(5):
        runtime.request_failed("the same one", FAILED)
    assert runtime.machine.snapshot.state is State.HEALTHY
    runtime.request_failed("another", FAILED)
    assert runtime.machine.snapshot.state is State.DEGRADED


def test_it_is_off_by_default():
    assert HealthSettings().error_budget == 0


def test_a_spent_budget_is_nobody_elses_fault():
    runtime = HealthRuntime(HealthSettings(error_budget=1))
    runtime.machine.expect_stage(0, 1)
    runtime.machine.replica_ready(0, 0)
    runtime.machine.started()
    for number in range(2):
        runtime.request_failed(f"r{number}", FAILED)
    assert runtime.machine.reason is FAILED
    assert runtime.fault_of_stage(0) is None
