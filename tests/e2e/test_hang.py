# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-omni-health project
"""A stage that is alive and does nothing is noticed, named and ended; a slow one is left alone."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from checks import ended_with_the_reason, everyone_was_told, run_until_valid

from vllm_omni_health.drills import contract
from vllm_omni_health.drills.chat import Outcome, Request
from vllm_omni_health.drills.contract import ExpectedFault
from vllm_omni_health.drills.drill import Drill, Findings, fatal_drill, told
from vllm_omni_health.drills.faults import ImageMark, Injection, Mark, Signal
from vllm_omni_health.drills.images import ImageRequest
from vllm_omni_health.drills.server import Server
from vllm_omni_health.drills.tree import Role

STOP = signal.SIGSTOP

CASES = [
    pytest.param(Signal(0, Role.WORKER, signum=STOP, kind="hang"), id="worker stopped"),
    pytest.param(
        Signal(0, Role.ENGINE_CORE, signum=STOP, kind="hang"),
        id="engine core stopped",
        marks=pytest.mark.slow,
    ),
    pytest.param(Mark(0, "hang"), id="forward pass never returns", marks=pytest.mark.slow),
]


@pytest.mark.parametrize("injection", CASES)
def test_a_hang_ends_the_server_with_its_own_status(
    serve, termination_log: Path, injection: Injection
) -> None:
    async def drill() -> tuple[Server, Findings]:
        async with serve("ar-1", exit_grace_s=2, hang_timeout_s=5) as server:
            return server, await fatal_drill(server, (1,), injection)

    server, findings = run_until_valid(drill)
    fault = ExpectedFault("hang", 0)
    promises = everyone_was_told(findings, fault, plain=1, streams=1)
    promises += ended_with_the_reason(server, findings, fault, termination_log)
    promises += went_through_suspicion(findings)
    assert promises == [], told(findings)
    target = findings.target
    if target is not None:
        # The log names who it was, and what the kernel shows of it.
        assert f"(pid {target.pid}) is stopped" in server.stdout + server.stderr
        assert "state T, waits in" in server.stdout
    else:
        assert "omni_tiny_models/faults.py" in server.stdout
    # Where the others were, in their own words, and nothing of what they were working on.
    stacks = [line for line in server.stdout.splitlines() if "[health]" not in line]
    assert any("core.py" in line and "in run_busy_loop" in line for line in stacks) or (
        target is not None and target.role is Role.ENGINE_CORE
    )
    assert "seaside" not in server.stdout


@pytest.mark.slow
def test_a_deadlocked_output_thread_is_noticed(
    serve, termination_log: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The busy loop of that engine core turns, and what it answers goes nowhere."""
    monkeypatch.setenv("BLOCKER_DEADLOCK", "1")
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parent / "blocker"))

    async def drill() -> tuple[Server, Findings]:
        async with serve("ar-1", exit_grace_s=2, hang_timeout_s=5) as server:
            poison = Signal(0, Role.ENGINE_CORE, signum=signal.SIGUSR2, kind="hang")
            return server, await fatal_drill(server, (1,), poison)

    server, findings = run_until_valid(drill)
    fault = ExpectedFault("hang", 0)
    promises = everyone_was_told(findings, fault, plain=1, streams=1)
    promises += ended_with_the_reason(server, findings, fault, termination_log)
    promises += went_through_suspicion(findings)
    assert promises == [], told(findings)
    # The stacks say where.
    assert "in __setattr__" in server.stdout
    assert "in process_output_sockets" in server.stdout


def went_through_suspicion(findings: Findings) -> list[str]:
    """Suspect first, and only then hung."""
    history = [] if findings.after is None else findings.after.history
    causes = [move["cause"] for move in history]
    return [] if "replica suspect" in causes else [f"the history has no suspicion: {causes}"]


@pytest.mark.slow
def test_one_of_two_ranks_is_stopped_and_it_is_that_one(serve, termination_log: Path) -> None:
    """The other rank waits for it in a collective operation, and the engine core for both."""
    fault = ExpectedFault("hang", 0)

    async def drill() -> tuple[Server, Findings]:
        async with (
            serve("ar-tp2", exit_grace_s=2, hang_timeout_s=5) as server,
            Drill(server, (1,)) as drill,
        ):
            await drill.put_under_load(drill.one_of_each())
            workers = [m for m in server.tree.refresh() if m.role is Role.WORKER]
            assert len(workers) == 2
            # Ranks are started in order.
            second = max(workers, key=lambda member: member.pid)
            findings = await drill.inject(Signal(0, Role.WORKER, signum=signal.SIGCONT))
            assert second.id.send(STOP)
            await drill.until(lambda view: view.state == "DEAD", findings, 60)
            await drill.watch_to_the_end(findings, 90)
            return server, findings

    server, findings = run_until_valid(drill)
    promises = everyone_was_told(findings, fault, plain=1, streams=1)
    promises += ended_with_the_reason(server, findings, fault, termination_log)
    assert promises == [], told(findings)
    reason = json.loads(termination_log.read_text())
    assert reason["rank"] == 1, server.tail()


# ---- diffusion -----------------------------------------------------------------------------

INLINE, MP, BEHIND_AR = ("diffusion", (1,)), ("diffusion-mp", (1,)), ("ar-diffusion", (1, 1))


def case(deployment, injection, *, slow=True):
    marks = [pytest.mark.slow] if slow else []
    name = f"{deployment[0]}: {injection.describe()}".replace(" ", "-")
    return pytest.param(*deployment, injection, marks=marks, id=name)


@pytest.mark.parametrize(
    ("deployment", "stages", "injection"),
    [
        case(INLINE, ImageMark(0, "hang", after_s=4)),
        case(MP, ImageMark(0, "hang", after_s=4)),
        case(MP, Signal(0, Role.WORKER, signum=STOP, kind="hang")),
        case(BEHIND_AR, ImageMark(1, "hang", after_s=4)),
        case(BEHIND_AR, Signal(1, signum=STOP, kind="hang")),
    ],
)
def test_a_diffusion_stage_that_hangs_ends_the_server(
    serve, termination_log: Path, deployment: str, stages: tuple[int, ...], injection: Injection
) -> None:
    """Inline, it ends in the middle of a forward pass that never returns."""
    last = len(stages) - 1
    slow: list[Request] = [ImageRequest.slow(last), ImageRequest.slow(last)]
    fault = ExpectedFault("hang", last)

    async def drill() -> tuple[Server, Findings]:
        async with (
            serve(deployment, exit_grace_s=2, hang_timeout_s=5) as server,
            Drill(server, stages) as drill,
        ):
            if isinstance(injection, ImageMark):
                findings = await drill.inject(injection)
                load = await drill.put_under_load([ImageRequest(), ImageRequest()])
            else:
                load = await drill.put_under_load(slow)
                findings = await drill.inject(injection)
            if await drill.until(lambda view: view.state == "DEAD", findings, 60):
                findings.struck = list(load.calls)
                await drill.look_around(findings)
            await drill.watch_to_the_end(findings, 90)
            return server, findings

    server, findings = run_until_valid(drill)
    promises = everyone_was_told(findings, fault, plain=2, streams=0)
    promises += ended_with_the_reason(server, findings, fault, termination_log)
    promises += went_through_suspicion(findings)
    assert promises == [], told(findings) + server.tail()


@pytest.mark.slow
def test_one_of_two_diffusion_replicas_hangs_and_the_other_serves_on(serve) -> None:
    stages = (2,)
    first = ExpectedFault("hang", 0, 0)

    async def drill() -> tuple[Findings, list[str]]:
        async with (
            serve("diffusion-replicas", hang_timeout_s=5) as server,
            Drill(server, stages) as drill,
        ):
            load = await drill.put_under_load([ImageRequest.slow(steps=4)] * 4)
            findings = await drill.inject(Signal(0, signum=STOP, kind="hang"))
            await drill.until(lambda view: view.state != "HEALTHY", findings, 60)
            broken = []
            if not await load.settled(60):
                broken.append("requests were left without an answer")
            broken += [f"left: {one}" for one in await drill.watch_replica_gone(findings, 30)]
            await drill.look_around(findings)
            after = await drill.put_under_load([ImageRequest.slow(steps=2)])
            if not await after.settled(60) or after.calls[0].outcome is not Outcome.ANSWERED:
                broken.append("the survivor does not serve")
            drill.collect(findings)
            return findings, broken

    findings, promises = run_until_valid(drill)
    assert findings.after is not None, told(findings)
    promises += contract.degraded(findings.after, stages, first)
    outcomes = {call.outcome for call in findings.struck}
    assert outcomes == {Outcome.FAILED, Outcome.ANSWERED}, told(findings)
    for call in findings.struck:
        if call.outcome is Outcome.FAILED:
            promises += contract.failed_call(call, first)
    assert promises == [], told(findings)


@pytest.mark.slow
@pytest.mark.parametrize(("deployment", "stages"), [INLINE, MP, BEHIND_AR])
def test_an_image_that_takes_longer_than_the_timeout_is_no_hang(
    serve, deployment: str, stages: tuple[int, ...]
) -> None:
    """Two seconds a step: each is progress, though the whole takes four times the timeout."""
    last = len(stages) - 1

    async def drill() -> tuple[list[str], list[str]]:
        async with (
            serve(deployment, hang_timeout_s=5) as server,
            Drill(server, stages) as drill,
        ):
            load = await drill.put_under_load([ImageRequest.slow(last, steps=10)])
            settled = await load.settled(120)
            history = (await server.client.get("/health/history")).json()["transitions"]
            moves = [f"{m['from']} {m['to']} {m['cause']}" for m in history if m["from"] != m["to"]]
            return moves, [str(call.outcome) for call in load.calls if settled]

    moves, outcomes = run_until_valid(drill)
    assert len(moves) == 1, moves
    assert outcomes == ["answered"]


@pytest.mark.slow
def test_steps_slower_than_pings_are_no_hang(serve) -> None:
    """Two seconds a step, a ping every 1.25 s: late answers, and no alarm."""

    async def drill() -> tuple[int, Findings]:
        async with serve("ar-1", hang_timeout_s=5) as server, Drill(server, (1,)) as drill:
            findings = await drill.inject(Mark(0, "slow"))
            alarm = await drill.until(lambda view: view.state != "HEALTHY", findings, 30)
            drill.collect(findings)
            return alarm, findings

    alarm, findings = run_until_valid(drill)
    assert alarm is None, told(findings)


BUSY_S = 45
"""Nine times the timeout below."""


@contextlib.contextmanager
def no_free_core() -> Iterator[None]:
    """Two processes a core that compute for nobody."""
    hogs = [
        subprocess.Popen([sys.executable, "-c", "while True: pass"])
        for _ in range(2 * (os.cpu_count() or 1))
    ]
    try:
        yield
    finally:
        for hog in hogs:
            hog.kill()
            hog.wait()


@pytest.mark.slow
def test_a_machine_without_a_free_core_is_no_hang(serve) -> None:
    async def drill() -> tuple[list[str], int]:
        async with serve("ar-1", hang_timeout_s=5) as server, Drill(server, (1,)) as drill:
            with no_free_core():
                load = await drill.put_under_load(drill.one_of_each() * 4, repeat=True)
                await asyncio.sleep(BUSY_S)
            history = (await server.client.get("/health/history")).json()["transitions"]
            moves = [f"{m['from']} {m['to']} {m['cause']}" for m in history if m["from"] != m["to"]]
            return moves, load.counts()[Outcome.ANSWERED]

    moves, answered = run_until_valid(drill)
    assert len(moves) == 1, moves
    assert answered


SOAK_S = float(os.environ.get("SOAK_S", "60"))
"""How long the load lasts; ten minutes are a good measure."""

STOPPED_S = 5
STOPS = 10


@pytest.mark.slow
def test_neither_load_nor_stops_shorter_than_the_timeout_are_hangs(serve) -> None:
    async def drill() -> tuple[list[str], dict[Outcome, int]]:
        async with serve("ar-2", hang_timeout_s=10) as server, Drill(server, (1, 1)) as drill:
            load = await drill.put_under_load(drill.one_of_each() * 2, repeat=True)
            await asyncio.sleep(SOAK_S)
            cores = [m for m in server.tree.refresh() if m.role is Role.ENGINE_CORE]
            assert len(cores) == 2
            for core in cores * STOPS:
                assert core.id.send(STOP)
                await asyncio.sleep(STOPPED_S)
                assert core.id.send(signal.SIGCONT)
                await asyncio.sleep(1)
            load.stop()
            assert await load.settled(120)
            history = (await server.client.get("/health/history")).json()["transitions"]
            moves = [f"{m['from']} {m['to']} {m['cause']}" for m in history if m["from"] != m["to"]]
            return moves, load.counts()

    moves, counts = run_until_valid(drill)
    assert len(moves) == 1, moves
    assert set(counts) == {Outcome.ANSWERED}, counts
