# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-omni-health project
"""More than one thing goes wrong, or it does so late: everyone is told, and nothing hangs."""

from __future__ import annotations

import json
import signal
from pathlib import Path

import pytest
from checks import ended_with_the_reason, everyone_was_told, run_until_valid

from vllm_omni_health.drills import contract
from vllm_omni_health.drills.contract import ExpectedFault
from vllm_omni_health.drills.drill import Drill, Findings, told
from vllm_omni_health.drills.faults import EXIT_STATUS, Mark, Signal
from vllm_omni_health.drills.server import Server

END_S = 90
AR_2 = (1, 1)


def not_answered(findings: Findings) -> list[str]:
    return [
        f"request {call.number} {call.label}: {call.describe()}"
        for call in findings.calls
        if call.pending or str(call.outcome) not in ("failed", "refused", "answered")
    ]


@pytest.mark.slow
def test_two_stages_are_killed_at_once(serve, termination_log: Path) -> None:
    async def drill() -> tuple[Server, Findings]:
        async with serve("ar-2", exit_grace_s=2) as server, Drill(server, AR_2) as drill:
            await drill.put_under_load(drill.one_of_each())
            findings = await drill.inject(Signal(stage_id=0))
            await drill.inject(Signal(stage_id=1))
            if await drill.until(lambda view: view.status != 200, findings, 30):
                await drill.look_around(findings)
            await drill.watch_to_the_end(findings, END_S)
            return server, findings

    server, findings = run_until_valid(drill)
    assert findings.after is not None, told(findings)
    first = findings.after.health["fault"]["stage_id"]
    fault = ExpectedFault("process_lost", first)
    promises = everyone_was_told(findings, fault, plain=2, streams=2)
    promises += ended_with_the_reason(server, findings, fault, termination_log)
    assert promises == [], told(findings)


@pytest.mark.slow
def test_out_of_memory_and_a_kill_at_once(serve, termination_log: Path) -> None:
    """Whichever is first, what is told, stated and returned is one and the same fault."""

    async def drill() -> tuple[Server, Findings]:
        async with serve("ar-1", exit_grace_s=2) as server, Drill(server, (1,)) as drill:
            await drill.put_under_load(drill.one_of_each())
            findings = await drill.inject(Mark(stage_id=0, word="oom"))
            await drill.inject(Signal(stage_id=0))
            if await drill.until(lambda view: view.status != 200, findings, 30):
                await drill.look_around(findings)
            await drill.watch_to_the_end(findings, END_S)
            return server, findings

    server, findings = run_until_valid(drill)
    stated = json.loads(termination_log.read_text())
    assert stated["kind"] in ("oom", "process_lost"), told(findings)
    fault = ExpectedFault(stated["kind"], 0)
    promises = ended_with_the_reason(server, findings, fault, termination_log)
    assert promises + not_answered(findings) == [], told(findings)


def test_a_fault_while_it_drains_ends_it_with_the_faults_status(
    serve, termination_log: Path
) -> None:
    fault = ExpectedFault("process_lost", 1)

    async def drill() -> tuple[Server, Findings]:
        async with (
            serve("ar-2", exit_grace_s=2, drain_timeout_s=60, shutdown_timeout_s=80) as server,
            Drill(server, AR_2) as drill,
        ):
            await drill.put_under_load(drill.one_of_each())
            server.send(signal.SIGTERM)
            drained = await drill.inject(Signal(stage_id=1, signum=signal.SIGCONT))
            assert await drill.until(lambda view: view.status != 200, drained, 30)
            findings = await drill.inject(Signal(stage_id=1))
            await drill.watch_to_the_end(findings, END_S)
            return server, findings

    server, findings = run_until_valid(drill)
    promises = everyone_was_told(findings, fault, plain=2, streams=2)
    promises += ended_with_the_reason(server, findings, fault, termination_log)
    assert promises == [], told(findings)


@pytest.mark.slow
def test_a_signal_in_the_grace_ends_it_at_once_with_the_faults_status(
    serve, termination_log: Path
) -> None:
    fault = ExpectedFault("process_lost", 0)

    async def drill() -> tuple[Server, Findings]:
        async with serve("ar-1", exit_grace_s=600) as server, Drill(server, (1,)) as drill:
            await drill.put_under_load(drill.one_of_each())
            findings = await drill.inject(Signal(stage_id=0))
            assert await drill.until(lambda view: view.status != 200, findings, 30)
            server.send(signal.SIGTERM)
            await drill.watch_to_the_end(findings, END_S)
            return server, findings

    server, findings = run_until_valid(drill)
    promises = everyone_was_told(findings, fault, plain=1, streams=1)
    promises += ended_with_the_reason(server, findings, fault, termination_log)
    assert promises == [], told(findings)


@pytest.mark.slow
def test_a_kill_in_the_middle_of_a_stop(serve, termination_log: Path) -> None:
    """A stop and a fault race; one of the two statuses it is, and everything is gone."""

    async def drill() -> tuple[Server, Findings]:
        async with serve("ar-2", exit_grace_s=2) as server, Drill(server, AR_2) as drill:
            await drill.put_under_load(drill.one_of_each())
            server.send(signal.SIGTERM)
            findings = await drill.inject(Signal(stage_id=1))
            await drill.watch_to_the_end(findings, END_S)
            return server, findings

    _, findings = run_until_valid(drill)
    assert findings.ending is not None, told(findings)
    assert findings.ending.status in (0, EXIT_STATUS["process_lost"]), told(findings)
    assert json.loads(termination_log.read_text())["exit_status"] == findings.ending.status
    left = [member.describe() for member in findings.processes_left] + findings.traces_left
    assert left + not_answered(findings) == [], told(findings)


@pytest.mark.slow
def test_a_fault_before_the_first_request(serve, termination_log: Path) -> None:
    fault = ExpectedFault("process_lost", 0)

    async def drill() -> tuple[Server, Findings]:
        async with serve("ar-1", exit_grace_s=2) as server, Drill(server, (1,)) as drill:
            findings = await drill.inject(Signal(stage_id=0))
            assert await drill.until(lambda view: view.status != 200, findings, 30)
            await drill.look_around(findings)
            await drill.watch_to_the_end(findings, END_S)
            return server, findings

    server, findings = run_until_valid(drill)
    assert findings.after is not None
    promises = contract.dead(findings.after, (1,), fault)
    promises += ended_with_the_reason(server, findings, fault, termination_log)
    assert promises == [], told(findings)
