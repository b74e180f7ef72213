# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-omni-health project
"""Starts that are unlike others: a stage that is lost meanwhile, streams that are missing."""

from __future__ import annotations

import asyncio
import json
import signal
import time
from pathlib import Path

import pytest

from vllm_omni_health.drills.faults import START_FAILED
from vllm_omni_health.drills.server import Ending, Server
from vllm_omni_health.drills.tree import Member, Role


async def engine_core(server: Server, role: Role, stage_id: int, timeout_s: float) -> Member:
    """The process as soon as it is there and says of which stage it is."""
    deadline = time.monotonic() + timeout_s
    while time.monotonic() < deadline:
        for member in server.tree.refresh():
            if member.role is role and member.stage_id == stage_id:
                return member
        assert server.ending is None, server.tail()
        await asyncio.sleep(0.05)
    raise AssertionError(f"no {role} of stage {stage_id} in {timeout_s:g} s\n{server.tail()}")


@pytest.mark.parametrize(
    ("deployment", "role", "stage_id"),
    [
        pytest.param("ar-1", Role.WORKER, 0, id="ar-1-loading-the-model"),
        pytest.param("ar-2", Role.ENGINE_CORE, 1, id="ar-2-one-of-two", marks=pytest.mark.slow),
    ],
)
def test_engine_core_lost_during_start(
    serve, termination_log: Path, deployment: str, role: Role, stage_id: int
) -> None:
    async def drill() -> tuple[Server, Ending | None, list[Member]]:
        async with serve(deployment, ready=False) as server:
            # When there is a worker, the engine core waits for it to load the model.
            await engine_core(server, role, stage_id, 120)
            core = await engine_core(server, Role.ENGINE_CORE, stage_id, 120)
            assert core.id.send(9)
            ending = await server.wait_end(120)
            return server, ending, await server.wait_processes_gone(5)

    server, ending, left = asyncio.run(drill())
    assert ending is not None, "the start hangs\n" + server.tail()
    assert ending.status == START_FAILED, server.tail()
    assert left == []
    line = termination_log.read_text()
    reason = json.loads(line)
    assert (reason["kind"], reason["stage_id"]) == ("process_lost", stage_id)
    assert reason["exit_status"] == START_FAILED
    assert line.strip() in server.stderr.splitlines()
    told = [line for line in server.stderr.splitlines() if "start-up failed" in line]
    assert len(told) == 1, server.tail()
    assert f"stage {stage_id}" in told[0]


@pytest.mark.parametrize(
    "closed",
    [
        pytest.param("<&- >&- 2>&-", id="no-streams"),
        pytest.param("2>&-", id="no-stderr", marks=pytest.mark.slow),
        pytest.param(">&-", id="no-stdout", marks=pytest.mark.slow),
    ],
)
def test_serves_without_standard_streams(serve, termination_log: Path, closed: str) -> None:
    async def drill() -> tuple[Server, int, Ending | None, list[Member]]:
        # As some daemons are started.
        wrapper = ("bash", "-c", f'exec "$@" {closed}', "-")
        async with serve("ar-1", wrapper=wrapper) as server:
            answer = await server.client.post(
                "/v1/completions", json={"model": "tiny", "prompt": "a", "max_tokens": 2}
            )
            server.send(signal.SIGTERM)
            ending = await server.wait_end(60)
            return server, answer.status_code, ending, await server.wait_processes_gone(5)

    server, status, ending, left = asyncio.run(drill())
    assert status == 200
    assert ending is not None
    assert ending.status == 0, server.tail()
    assert left == []
    assert json.loads(termination_log.read_text())["exit_status"] == 0
