# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-omni-health project
"""A bad request is the client's, and costs nobody else anything; a stop is clean."""

from __future__ import annotations

import asyncio
import signal
import time

import pytest

from vllm_omni_health.drills import contract
from vllm_omni_health.drills.chat import ChatCall, Outcome
from vllm_omni_health.drills.images import ImageRequest
from vllm_omni_health.drills.load import Load
from vllm_omni_health.drills.server import Server
from vllm_omni_health.drills.survey import survey

DEPLOYMENTS = [
    "diffusion",
    pytest.param("diffusion-mp", marks=pytest.mark.slow),
    pytest.param("diffusion-replicas", marks=pytest.mark.slow),
    pytest.param("diffusion-steps-mp", marks=pytest.mark.slow),
]

BAD = {
    "a size that is none": ImageRequest(size="64xx", label="400"),
    "a size that the pipeline does not make": ImageRequest(size="72x72", steps=2, label="400"),
    "an impossible number of steps": ImageRequest(steps=-3, label="400"),
}

_ANSWERED_S = 1.0
"""How soon a server that is told to stop answers what is in flight."""

_STOPPED_S = 6.0
"""How long a stop may take; it takes about two seconds on two idle cores."""


@pytest.mark.parametrize("deployment", DEPLOYMENTS)
def test_bad_requests_are_refused_and_a_stop_is_clean(serve, deployment: str) -> None:
    async def drill() -> tuple[Server, list[ChatCall], list[ChatCall]]:
        async with serve(deployment) as server:
            bad = await answers(server, list(BAD.values()))
            good = await answers(server, [ImageRequest(steps=2)])
            after = await survey(server.client)
            assert after.health["state"] == "HEALTHY"
            assert after.health["fault"] is None
            assert contract.history(after.history, contract.UP) == []
            async with Load(server.url, [ImageRequest.slow()] * 3) as load:
                assert await load.under_way(30)
                told = time.monotonic()
                server.send(signal.SIGTERM)
                await load.settled(30)
                await server.wait_end(60)
                for call in load.calls:
                    assert call.outcome is Outcome.REFUSED, call.describe()
                    assert call.ended is not None
                    assert call.ended - told < _ANSWERED_S
            assert server.ending is not None
            assert server.ending.status == 0, server.tail()
            assert server.ending.at - told < _STOPPED_S
            assert await server.wait_processes_gone(5) == []
            return server, bad, good

    server, bad, good = asyncio.run(drill())
    for (what, _), call in zip(BAD.items(), bad, strict=True):
        assert call.status == 400, f"{what}: {call.describe()}"
        assert call.error is not None
        assert call.error["message"]
    assert [call.outcome for call in good] == [Outcome.ANSWERED]
    assert "destroy_process_group() was not called" not in server.stdout + server.stderr


@pytest.mark.slow
@pytest.mark.parametrize("deployment", ["diffusion", "diffusion-mp", "diffusion-replicas"])
def test_an_idle_server_stops_cleanly(serve, deployment: str) -> None:
    async def drill() -> Server:
        async with serve(deployment) as server:
            told = time.monotonic()
            server.send(signal.SIGTERM)
            assert await server.wait_end(60) is not None
            assert server.ending is not None
            assert server.ending.at - told < _STOPPED_S
            assert await server.wait_processes_gone(5) == []
            return server

    server = asyncio.run(drill())
    assert server.ending is not None
    assert server.ending.status == 0, server.tail()
    assert "destroy_process_group() was not called" not in server.stdout + server.stderr


async def answers(server: Server, requests: list[ImageRequest]) -> list[ChatCall]:
    async with Load(server.url, requests) as load:
        assert await load.settled(60)
        return load.calls
