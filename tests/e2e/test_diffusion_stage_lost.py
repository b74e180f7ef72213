# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-omni-health project
"""Diffusion stages end with their first fatal fault, wherever they run, and only then.

Inline: engine and worker in the server's own process. mp: a worker below the server. Replicas,
and behind an AR stage: a process of its own for each. Each case breaks a server for good.
"""

from __future__ import annotations

import asyncio
import signal
from pathlib import Path

import pytest
from checks import ended_with_the_reason, everyone_was_told, run_until_valid

from vllm_omni_health.drills import contract
from vllm_omni_health.drills.chat import ChatRequest, Outcome, Request
from vllm_omni_health.drills.contract import ExpectedFault
from vllm_omni_health.drills.drill import Drill, Findings, fatal_drill, told
from vllm_omni_health.drills.faults import ImageMark, Injection, Signal
from vllm_omni_health.drills.images import ImageRequest
from vllm_omni_health.drills.server import Server
from vllm_omni_health.drills.tree import Role

INLINE, MP, REPLICAS = ("diffusion", (1,)), ("diffusion-mp", (1,)), ("diffusion-replicas", (2,))
STEPS, STEPS_MP = ("diffusion-steps", (1,)), ("diffusion-steps-mp", (1,))
BEHIND_AR = ("ar-diffusion", (1, 1))
TP_2 = ("diffusion-tp2", (1,))

QUEUED: list[Request] = [
    ImageRequest(),
    ImageRequest(label="another image"),
    # Behind an AR stage this one is still in there when the diffusion stage fails.
    ChatRequest(label="an image by way of chat"),
]


# Upstream's step scheduler knows no default for the number of steps.
QUEUED_STEPS: list[Request] = [
    ImageRequest(steps=2, label=label) for label in ("an image", "another image", "a third image")
]


def case(deployment, injection, *, slow=False):
    marks = [pytest.mark.slow] if slow else []
    name = f"{deployment[0]}: {injection.describe()}".replace(" ", "-")
    return pytest.param(*deployment, injection, marks=marks, id=name)


@pytest.mark.parametrize(
    ("deployment", "stages", "injection"),
    [
        case(INLINE, ImageMark(0, "oom", after_s=4)),
        case(INLINE, ImageMark(0, "accelerator", after_s=4), slow=True),
        case(INLINE, ImageMark(0, "collective", after_s=4), slow=True),
        case(INLINE, ImageMark(0, "error", after_s=4), slow=True),
        case(MP, ImageMark(0, "oom", after_s=4)),
        case(MP, ImageMark(0, "error", after_s=4), slow=True),
        *[
            case(MP, ImageMark(0, word, after_s=4), slow=True)
            for word in ("exit", "kill", "accelerator", "collective")
        ],
        # Of rank 1 nobody reads what its calls end in.
        case(TP_2, ImageMark(0, "oom", rank=1, after_s=4), slow=True),
        # What upstream makes a text of, and serves on after.
        case(STEPS, ImageMark(0, "oom", after_s=4, preparing=True), slow=True),
        case(STEPS_MP, ImageMark(0, "accelerator", after_s=4, preparing=True), slow=True),
        case(STEPS_MP, ImageMark(0, "oom", after_s=4), slow=True),
        case(BEHIND_AR, ImageMark(1, "oom", after_s=4)),
        *[
            case(BEHIND_AR, ImageMark(1, word, after_s=4), slow=True)
            for word in ("kill", "exit", "accelerator", "collective", "error")
        ],
    ],
)
def test_fatal_fault_in_a_step_fails_all_and_ends_the_server(
    serve, termination_log: Path, deployment: str, stages: tuple[int, ...], injection: ImageMark
) -> None:
    """The request with the mark is in a step already when the others arrive behind it."""
    fault = ExpectedFault(injection.kind, injection.stage_id)
    queued = QUEUED_STEPS if deployment in (STEPS[0], STEPS_MP[0]) else QUEUED

    async def drill() -> tuple[Server, Findings]:
        async with serve(deployment, exit_grace_s=2) as server, Drill(server, stages) as drill:
            findings = await drill.inject(injection)
            load = await drill.put_under_load(queued)
            if await drill.until(lambda view: view.status != 200, findings, 60):
                findings.struck = list(load.calls)
                await drill.look_around(findings)
            await drill.watch_to_the_end(findings, 90)
            return server, findings

    server, findings = run_until_valid(drill)
    promises = everyone_was_told(findings, fault, plain=len(QUEUED), streams=0)
    (marked,) = [call for call in findings.calls if call.label == "the one with the mark"]
    promises += contract.failed_call(marked, fault)
    promises += went_down(server, findings, stages, fault, termination_log)
    assert promises == [], told(findings)


@pytest.mark.parametrize(
    ("deployment", "stages", "injection"),
    [
        case(MP, Signal(stage_id=0, role=Role.WORKER)),
        case(MP, Signal(stage_id=0, role=Role.WORKER, signum=signal.SIGTERM), slow=True),
        *[case(TP_2, Signal(stage_id=0, role=Role.WORKER, rank=r), slow=True) for r in (0, 1)],
        case(BEHIND_AR, Signal(stage_id=1)),
        case(BEHIND_AR, Signal(stage_id=0), slow=True),
        *[
            case(BEHIND_AR, ImageMark(0, word), slow=True)
            for word in ("oom", "accelerator", "collective", "error", "exit", "kill")
        ],
    ],
)
def test_fault_during_steps_fails_all_and_ends_the_server(
    serve, termination_log: Path, deployment: str, stages: tuple[int, ...], injection: Injection
) -> None:
    last = len(stages) - 1
    requests = [ImageRequest.slow(last), ImageRequest.slow(last)]
    fault = ExpectedFault(injection.kind, injection.stage_id)

    async def drill() -> tuple[Server, Findings]:
        async with serve(deployment, exit_grace_s=2) as server:
            return server, await fatal_drill(server, stages, injection, requests=requests)

    server, findings = run_until_valid(drill)
    promises = everyone_was_told(findings, fault, plain=len(requests), streams=0)
    promises += went_down(server, findings, stages, fault, termination_log)
    assert promises == [], told(findings)


@pytest.mark.parametrize(
    "kind",
    [
        "process_lost",
        *[
            pytest.param(kind, marks=pytest.mark.slow)
            for kind in ("oom", "accelerator", "collective", "engine")
        ],
    ],
)
def test_one_of_two_replicas_is_lost_then_the_other(
    serve, termination_log: Path, kind: str
) -> None:
    """With a survivor the server goes on, degraded; without one it ends."""
    stages = (2,)

    def injection(replica_id: int) -> Injection:
        if kind == "process_lost":
            return Signal(stage_id=0, replica_id=replica_id)
        return ImageMark(0, "error" if kind == "engine" else kind, after_s=2)

    async def drill() -> tuple[Server, Findings, Findings]:
        async with (
            serve("diffusion-replicas", exit_grace_s=2) as server,
            Drill(server, stages) as drill,
        ):
            load = await drill.put_under_load([ImageRequest.slow(steps=2)] * 4)
            degraded = await drill.inject(injection(0))
            await drill.until(lambda view: view.state != "HEALTHY", degraded, 60)
            await drill.look_around(degraded)
            assert await load.settled(60), "upstream's wedge: a survivor that does not answer"
            drill.collect(degraded)
            await drill.put_under_load([ImageRequest.slow(steps=2)] * 2)
            dead = await drill.inject(injection(1))
            if await drill.until(lambda view: view.status != 200, dead, 60):
                await drill.look_around(dead)
            await drill.watch_to_the_end(dead, 90)
            return server, degraded, dead

    server, degraded, dead = run_until_valid(drill)
    assert degraded.after is not None, told(degraded)
    lost = [
        replica["replica_id"]
        for replica in degraded.after.health["stages"][0]["replicas"]
        if replica["state"] == "lost"
    ]
    assert len(lost) == 1, told(degraded)
    first = ExpectedFault(kind, 0, lost[0])
    second = ExpectedFault(kind, 0, 1 - lost[0])
    health = degraded.after.health
    assert (health["state"], health["accepting"]) == ("DEGRADED", True)
    assert first.matches(health["fault"])
    assert {view.status for view in degraded.health if view.at < dead.zero} == {200}
    # Whoever was with the survivor was answered, the others know why not.
    outcomes = [call.outcome for call in degraded.struck + degraded.raced]
    assert set(outcomes) <= {Outcome.FAILED, Outcome.ANSWERED}, told(degraded)
    assert Outcome.ANSWERED in outcomes
    promises = []
    for call in (*degraded.struck, *dead.struck):
        if call.outcome is Outcome.FAILED:
            expected = first if call in degraded.struck else second
            promises += contract.failed_call(call, expected)
    assert dead.after is not None, told(dead)
    promises += contract.dead(dead.after, stages, second, lost=[(0, lost[0])])
    promises += ended_with_the_reason(server, dead, second, termination_log)
    assert promises == [], told(degraded) + "\n" + told(dead)


def went_down(
    server: Server,
    findings: Findings,
    stages: tuple[int, ...],
    fault: ExpectedFault,
    termination_log: Path,
) -> list[str]:
    """All that is promised of the server itself, from the fault to its end."""
    assert findings.before is not None
    promises = contract.healthy(findings.before, stages)
    if findings.after is None:
        return [*promises, "/health never changed"]
    promises += contract.dead(findings.after, stages, fault)
    return promises + ended_with_the_reason(server, findings, fault, termination_log)


def test_hold_is_refused_where_the_stage_is_inline(serve, termination_log: Path) -> None:
    async def drill() -> Server:
        async with serve("diffusion", ready=False, policy="hold") as server:
            assert await server.wait_end(120) is not None
            return server

    server = asyncio.run(drill())
    assert server.ending is not None
    assert server.ending.status == 1
    ours = [line for line in server.stderr.splitlines() if "vllm serve --omni:" in line]
    assert len(ours) == 1, server.tail()
    for word in ("policy hold", "stage 0", "inline", "exit"):
        assert word in ours[0]
