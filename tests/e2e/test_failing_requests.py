# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-omni-health project
"""Requests that fail while the service lives, by every route that the tiny models can serve.

The fault is in the orchestrator, where the next stage's input is made: each route then makes an
answer of it in its own way.
"""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import httpx
import pytest
from PIL import Image

from vllm_omni_health.drills.server import Server

pytestmark = pytest.mark.slow

PROMPT = "Please fail. <|fault:router@1|>"
SENTENCE = "The server failed to process a request."
FAULT = {"kind": "orchestrator", "stage_id": 1, "replica_id": None}
MESSAGES = [{"role": "user", "content": PROMPT}]
TOKENS = {"model": "tiny", "max_tokens": 4}


def texts(*, stream: bool) -> dict[str, dict[str, Any]]:
    """Path → body, for the routes that make text."""
    return {
        "/v1/chat/completions": {**TOKENS, "messages": MESSAGES, "stream": stream},
        "/v1/completions": {**TOKENS, "prompt": PROMPT, "stream": stream},
        "/v1/responses": {"model": "tiny", "input": PROMPT, "stream": stream, "store": False},
        "/v1/messages": {**TOKENS, "messages": MESSAGES, "stream": stream},
    }


def check_error(error: dict[str, Any], request_id: str) -> None:
    assert error["fault"] == FAULT
    assert (error["code"], error["message"]) == (500, SENTENCE)
    assert request_id in error["request_id"]
    assert "Please fail" not in json.dumps(error)


async def fails(client: httpx.AsyncClient, path: str, **request: Any) -> None:
    """Send it, and look at what came of it."""
    request_id = f"mine-{path.replace('/', '-')}"
    headers = {"X-Request-Id": request_id}
    async with client.stream("POST", path, headers=headers, **request) as answer:
        payload = (await answer.aread()).decode()
    where = f"{path}: {answer.status_code} {payload[:500]}"
    if answer.headers["content-type"].startswith("text/event-stream"):
        assert answer.status_code == 200, where
        events = [line for line in payload.splitlines() if line.startswith("data:")]
        assert events[-1] == "data: [DONE]", where
        assert events.count("data: [DONE]") == 1, where
        check_error(json.loads(events[-2].removeprefix("data:"))["error"], request_id)
        assert not any('"error":{' in event.replace(" ", "") for event in events[:-2]), where
    else:
        assert answer.status_code == 500, where
        check_error(json.loads(payload)["error"], request_id)


async def lives(server: Server) -> dict[str, Any]:
    """The server still answers, and what its health is."""
    body = {**TOKENS, "messages": [{"role": "user", "content": "Name a thing."}]}
    answer = await server.client.post("/v1/chat/completions", json=body, timeout=60)
    assert answer.status_code == 200, answer.text
    health = await server.client.get("/health")
    assert health.status_code == 200
    found: dict[str, Any] = health.json()
    return found


def test_every_text_route_tells_it_and_the_server_lives(serve) -> None:
    async def drill() -> None:
        async with serve("ar-2") as server:
            client = server.client
            for stream in (False, True):
                for path, body in texts(stream=stream).items():
                    await fails(client, path, json=body, timeout=60)
            batch = {**TOKENS, "messages": [MESSAGES, MESSAGES]}
            await fails(client, "/v1/chat/completions/batch", json=batch, timeout=60)
            assert (await lives(server))["state"] == "HEALTHY"
            server.send(15)
            await server.wait_end(60)
            assert server.ending is not None
            assert server.ending.status == 0

    asyncio.run(drill())


def test_every_image_route_tells_it_and_the_server_lives(serve, tmp_path: Path) -> None:
    picture = tmp_path / "boat.png"
    Image.new("RGB", (64, 64)).save(picture)

    async def drill() -> None:
        async with serve("ar-diffusion") as server:
            client = server.client
            body = {"model": "tiny", "prompt": PROMPT, "size": "64x64"}
            await fails(client, "/v1/images/generations", json=body, timeout=60)
            for stream in ("false", "true"):
                await fails(
                    client,
                    "/v1/images/edits",
                    data={"prompt": PROMPT, "size": "64x64", "stream": stream},
                    files={"image": picture.read_bytes()},
                    timeout=60,
                )
            good = {"model": "tiny", "prompt": "A boat", "size": "64x64", "num_inference_steps": 2}
            answer = await client.post("/v1/images/generations", json=good, timeout=60)
            assert answer.status_code == 200, answer.text
            assert (await client.get("/health")).json()["state"] == "HEALTHY"

    asyncio.run(drill())


def test_the_error_budget_degrades_and_recovers(serve) -> None:
    async def drill() -> None:
        async with serve("ar-2", error_budget=2, error_budget_window_s=5) as server:
            body = texts(stream=False)["/v1/chat/completions"]
            wrong = {**body, "model": "none"}
            for _ in range(2):
                await server.client.post("/v1/chat/completions", json=body, timeout=60)
            for _ in range(5):
                refused = await server.client.post("/v1/chat/completions", json=wrong)
                assert refused.status_code == 404, refused.text
            assert (await lives(server))["state"] == "HEALTHY"
            await server.client.post("/v1/chat/completions", json=body, timeout=60)
            health = await lives(server)
            assert (health["state"], health["accepting"]) == ("DEGRADED", True)
            assert health["fault"]["kind"] == "orchestrator"
            assert health["fault"]["message"] == SENTENCE
            async with asyncio.timeout(30):
                while (await server.client.get("/health")).json()["state"] != "HEALTHY":
                    await asyncio.sleep(0.2)
            history = (await server.client.get("/health/history")).json()["transitions"]
            causes = [move["cause"] for move in history if move["from"] != move["to"]]
            assert causes == ["started", "error budget spent", "error budget restored"]

    asyncio.run(drill())


def test_the_orchestrators_loop_ends_and_so_does_the_server(serve, termination_log: Path) -> None:
    async def drill() -> None:
        async with serve("ar-2", exit_grace_s=1) as server:
            long = {**TOKENS, "max_tokens": 1500, "ignore_eos": True, "messages": MESSAGES}
            prompt = [{"role": "user", "content": "Name a thing."}]
            ends = [{"role": "user", "content": "<|fault:loop@1|>"}]
            calls = [
                asyncio.create_task(
                    server.client.post("/v1/chat/completions", json=body, timeout=60)
                )
                for body in (
                    {**long, "messages": prompt},
                    {**TOKENS, "messages": ends},
                )
            ]
            for call in calls:
                answer = await call
                assert answer.status_code == 500, answer.text
                assert answer.json()["error"]["fault"]["kind"] == "orchestrator"
            await server.wait_end(60)
            assert server.ending is not None
            assert server.ending.status == 87, server.tail()
            assert await server.wait_processes_gone(5) == []

    asyncio.run(drill())
    reason = json.loads(termination_log.read_text())
    assert (reason["exit_status"], reason["kind"]) == (87, "orchestrator")
