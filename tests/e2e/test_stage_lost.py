# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-omni-health project
"""A stage that can serve no more: everyone is told at once, and the server ends with the reason.

Each case breaks a server for good, so each starts one, and looks at everything in it.
"""

from __future__ import annotations

import json
import signal
from pathlib import Path

import pytest
from checks import ended_with_the_reason, everyone_was_told, run_until_valid

from vllm_omni_health.drills import contract
from vllm_omni_health.drills.contract import ExpectedFault
from vllm_omni_health.drills.drill import Drill, Findings, fatal_drill, told
from vllm_omni_health.drills.faults import Injection, Mark, Signal
from vllm_omni_health.drills.server import Server
from vllm_omni_health.drills.tree import Role

AR_1, AR_2, AR_3 = ("ar-1", (1,)), ("ar-2", (1, 1)), ("ar-3", (1, 1, 1))
TP_2 = ("ar-tp2", (1,))
INPROC = ("ar-inproc", (1,))
WORDS = ("accelerator", "collective", "exit", "kill")


def case(deployment, injection, *, slow=False):
    marks = [pytest.mark.slow] if slow else []
    name = f"{deployment[0]}: {injection.describe()}".replace(" ", "-")
    return pytest.param(*deployment, injection, marks=marks, id=name)


FATAL = [
    case(AR_1, Signal(stage_id=0)),
    case(AR_1, Mark(stage_id=0)),
    case(AR_1, Signal(stage_id=0, role=Role.WORKER)),
    # Told to stop alone, while its server is not.
    case(AR_1, Signal(stage_id=0, role=Role.WORKER, signum=signal.SIGTERM), slow=True),
    case(AR_2, Signal(stage_id=1, signum=signal.SIGTERM), slow=True),
    case(AR_2, Signal(stage_id=0), slow=True),
    case(AR_2, Signal(stage_id=1)),
    case(AR_2, Mark(stage_id=0), slow=True),
    case(AR_2, Mark(stage_id=1)),
    case(AR_2, Signal(stage_id=1, role=Role.WORKER), slow=True),
    case(AR_3, Signal(stage_id=0), slow=True),
    case(AR_3, Signal(stage_id=1)),
    case(AR_3, Signal(stage_id=2), slow=True),
    case(AR_3, Mark(stage_id=0), slow=True),
    case(AR_3, Mark(stage_id=1), slow=True),
    case(AR_3, Mark(stage_id=2), slow=True),
    # The exception's class survives, from a worker's forward pass to the exit status.
    case(AR_1, Mark(stage_id=0, word="oom")),
    *[case(AR_1, Mark(stage_id=0, word=word), slow=True) for word in WORDS],
    *[
        case(AR_3, Mark(stage_id=stage, word=word), slow=True)
        for stage in range(3)
        for word in ("oom", *WORDS)
    ],
    # Of rank 1 nobody reads what its calls end in.
    case(TP_2, Mark(stage_id=0, word="oom", rank=1)),
    *[case(TP_2, Mark(stage_id=0, word=word, rank=1), slow=True) for word in ("error", *WORDS)],
    case(TP_2, Mark(stage_id=0, word="oom", rank=0), slow=True),
    *[case(TP_2, Signal(stage_id=0, role=Role.WORKER, rank=r), slow=True) for r in (0, 1)],
    # The worker inside the engine core, as on a single device.
    *[case(INPROC, Mark(stage_id=0, word=word), slow=True) for word in ("oom", "error", *WORDS)],
]


@pytest.mark.parametrize(("deployment", "stages", "injection"), FATAL)
def test_fault_is_told_to_everyone_and_ends_the_server(
    serve, termination_log: Path, deployment: str, stages: tuple[int, ...], injection: Injection
) -> None:
    async def drill() -> tuple[Server, Findings]:
        async with serve(deployment, exit_grace_s=2) as server:
            return server, await fatal_drill(server, stages, injection)

    server, findings = run_until_valid(drill)
    fault = ExpectedFault(injection.kind, injection.stage_id)
    promises = everyone_was_told(findings, fault, plain=len(stages), streams=len(stages))
    assert findings.before is not None
    promises += contract.healthy(findings.before, stages)
    if findings.after is None:
        promises.append("/health never changed")
    else:
        promises += contract.dead(findings.after, stages, fault)
    promises += ended_with_the_reason(server, findings, fault, termination_log)
    assert promises == [], told(findings)


def test_one_of_two_replicas_is_lost_then_the_other(serve, termination_log: Path) -> None:
    """With a survivor the server goes on, degraded; without one it ends."""
    stages = (2,)
    first, second = ExpectedFault("process_lost", 0, 0), ExpectedFault("process_lost", 0, 1)

    async def drill() -> tuple[Server, Findings, Findings]:
        async with (
            serve("ar-replicas", exit_grace_s=2) as server,
            Drill(server, stages) as drill,
        ):
            # Two of each, so that each replica has work.
            load = await drill.put_under_load(drill.one_of_each() * 2)
            degraded = await drill.inject(Signal(stage_id=0, replica_id=0))
            await drill.until(lambda view: view.state != "HEALTHY", degraded, 30)
            await drill.look_around(degraded)
            await load.settled(120)
            assert await drill.watch_replica_gone(degraded, 30) == []
            drill.collect(degraded)

            await drill.put_under_load(drill.one_of_each())
            dead = await drill.inject(Signal(stage_id=0, replica_id=1))
            if await drill.until(lambda view: view.status != 200, dead, 30):
                await drill.look_around(dead)
            await drill.watch_to_the_end(dead, 90)
            return server, degraded, dead

    server, degraded, dead = run_until_valid(drill)
    promises = []
    assert degraded.before is not None
    promises += contract.healthy(degraded.before, stages)
    assert degraded.after is not None, told(degraded)
    promises += contract.degraded(degraded.after, stages, first)
    failed = [call for call in degraded.struck if call.outcome == "failed"]
    for call in failed:
        promises += contract.failed_call(call, first)
    assert {call.outcome for call in degraded.struck} == {"failed", "answered"}, told(degraded)
    statuses = {view.status for view in degraded.health if view.at < dead.zero}
    assert statuses == {200}, told(degraded)

    promises += everyone_was_told(dead, second, plain=1, streams=1)
    assert dead.after is not None, told(dead)
    promises += contract.dead(dead.after, stages, second, lost=[(0, 0)])
    promises += ended_with_the_reason(server, dead, second, termination_log)
    assert promises == [], told(degraded) + "\n" + told(dead)


def test_hold_stays_up_with_503_and_frees_the_stages(serve, termination_log: Path) -> None:
    """Policy ``hold``: stages are closed, the answers stay, the status is the fault's."""
    stages = (1, 1)
    fault = ExpectedFault("process_lost", 0)

    async def drill() -> tuple[Server, Findings, list[str]]:
        async with serve("ar-2", policy="hold") as server, Drill(server, stages) as drill:
            await drill.put_under_load(drill.one_of_each())
            findings = await drill.inject(Signal(stage_id=0))
            await drill.until(lambda view: view.status != 200, findings, 30)
            left = await drill.watch_stages_gone(findings, 60)
            # Longer than a server under policy exit would have stayed.
            held = await server.wait_end(8)
            await drill.look_around(findings)
            server.send(15)
            await drill.watch_to_the_end(findings, 90)
            broken = [f"the server holds {member.describe()}" for member in left]
            if held is not None:
                broken.append(f"the server ended by itself with {held.status}")
            return server, findings, broken

    server, findings, promises = run_until_valid(drill)
    promises += everyone_was_told(findings, fault, plain=2, streams=2)
    assert findings.after is not None
    promises += contract.dead(findings.after, stages, fault)
    promises += ended_with_the_reason(server, findings, fault, termination_log)
    assert promises == [], told(findings)


@pytest.mark.slow
def test_everything_is_killed_at_once_and_the_rest_while_it_ends(
    serve, termination_log: Path
) -> None:
    """Whichever was seen first is the reason; nothing is answered twice or left."""

    async def drill() -> tuple[Server, Findings]:
        async with serve("ar-2", exit_grace_s=2) as server, Drill(server, (1, 1)) as drill:
            await drill.put_under_load(drill.one_of_each())
            members = server.tree.refresh()
            cores = [member for member in members if member.role is Role.ENGINE_CORE]
            workers = [member for member in members if member.role is Role.WORKER]
            findings = await drill.inject(Signal(stage_id=0))
            for member in (*cores, workers[0]):
                member.id.send(signal.SIGKILL)
            await drill.until(lambda view: view.status != 200, findings, 30)
            for member in workers:
                member.id.send(signal.SIGKILL)
            await drill.watch_to_the_end(findings, 90)
            return server, findings

    server, findings = run_until_valid(drill)
    stage_id = json.loads(termination_log.read_text())["stage_id"]
    assert stage_id in (0, 1)
    fault = ExpectedFault("process_lost", stage_id)
    promises = everyone_was_told(findings, fault, plain=2, streams=2)
    promises += ended_with_the_reason(server, findings, fault, termination_log)
    assert promises == [], told(findings)
