# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-omni-health project
"""An event loop of the server that is blocked is noticed from outside of it."""

from __future__ import annotations

import asyncio
import json
import os
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from vllm_omni_health.drills import contract
from vllm_omni_health.drills.contract import ExpectedFault
from vllm_omni_health.drills.drill import Drill
from vllm_omni_health.drills.server import Server

pytestmark = pytest.mark.slow

GUARD_S = 60
FAULT = ExpectedFault("orchestrator", None, None)
FOR_EVER = 10_000


@pytest.fixture
def block(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str, float], None]:
    """``block("orchestrator", 3)`` keeps that loop of the server from turning for 3 seconds."""
    pipe = tmp_path / "blocker"
    os.mkfifo(pipe)
    # For reading as well: opening waits for nobody, and the server sees no end of file.
    orders = os.fdopen(os.open(pipe, os.O_RDWR), "w")
    monkeypatch.setenv("BLOCKER_PIPE", str(pipe))
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parent / "blocker"))

    def order(loop: str, seconds: float) -> None:
        orders.write(f"{loop} {seconds}\n")
        orders.flush()

    yield order
    orders.close()


def test_the_orchestrators_loop_stalls_recovers_and_is_given_up(
    serve, termination_log: Path, block, notifications
) -> None:
    async def scenario() -> tuple[Server, list[str]]:
        async with (
            serve("ar-2", loop_stall_s=1, hang_timeout_s=6, exit_grace_s=3) as server,
            Drill(server, (1, 1)) as drill,
        ):
            broken = []

            async def until(wanted) -> None:
                async with asyncio.timeout(GUARD_S):
                    while True:
                        answer = await server.client.get("/health")
                        if wanted(answer):
                            return
                        await asyncio.sleep(0.05)

            block("orchestrator", 4)
            await until(lambda answer: answer.status_code == 503)
            body = (await server.client.get("/health")).json()
            if (body["state"], body["accepting"]) != ("DEGRADED", False):
                broken.append(f"stalled: {body}")
            if not FAULT.matches(body["fault"]):
                broken.append(f"stalled: {body['fault']}")
            await until(lambda answer: answer.status_code == 200)

            load = await drill.put_under_load(drill.one_of_each())
            struck = load.in_flight()
            block("orchestrator", FOR_EVER)
            await until(lambda answer: answer.json()["state"] == "DEAD")
            # A message may be on its way.
            dead_at = time.monotonic() + 0.1
            live = await server.client.get("/livez")
            history = (await server.client.get("/health/history")).json()["transitions"]
            moves = [(m["from"], m["to"]) for m in history if m["from"] != m["to"]]
            there_and_back = [("HEALTHY", "DEGRADED"), ("DEGRADED", "HEALTHY")]
            if moves[1:] != [*there_and_back, ("HEALTHY", "DEGRADED"), ("DEGRADED", "DEAD")]:
                broken.append(f"moves {moves}")
            if live.status_code != 503:
                broken.append(f"/livez {live.status_code} with a loop that stands still")
            if not await load.settled(GUARD_S):
                broken.append("requests were left without an answer")
            for call in struck:
                broken += contract.failed_call(call, FAULT)
            if len(struck) != 4:
                broken.append(f"{len(struck)} requests in flight, not 4")
            ending = await server.wait_end(GUARD_S)
            broken += [f"left: {m.describe()}" for m in await server.wait_processes_gone(5)]
            if ending is None or ending.status != FAULT.exit_status:
                broken.append(f"ended with {ending}")
            fed = notifications.watchdog_fed()
            if fed is None or fed > dead_at:
                broken.append(f"the watchdog was last kept quiet at {fed}, dead at {dead_at}")
            return server, broken

    server, broken = asyncio.run(scenario())
    text = termination_log.read_text() if termination_log.exists() else None
    broken += contract.reason(text, server.stderr, FAULT)
    assert broken == [], server.tail()
    assert "it stands at:" in server.stdout + server.stderr


def test_a_blocked_api_loop_ends_the_process_with_everything(
    serve, termination_log: Path, block
) -> None:
    async def scenario() -> tuple[Server, list[str]]:
        async with serve("ar-1", loop_stall_s=1, hang_timeout_s=4, policy="hold") as server:
            block("api", FOR_EVER)
            ending = await server.wait_end(GUARD_S)
            broken = [f"left: {m.describe()}" for m in await server.wait_processes_gone(5)]
            if ending is None or ending.status != FAULT.exit_status:
                broken.append(f"ended with {ending}")
            return server, broken

    server, broken = asyncio.run(scenario())
    assert broken == [], server.tail()
    reason = json.loads(termination_log.read_text())
    assert (reason["kind"], reason["exit_status"]) == ("orchestrator", 87)
