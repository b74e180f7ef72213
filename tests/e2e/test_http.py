# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-omni-health project
"""Clients that ask for what cannot be, too much, or nothing at all, beside those that behave."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import socket
import struct
import time
from collections.abc import Coroutine
from pathlib import Path
from typing import Any

import httpx
import websockets

from vllm_omni_health.drills.server import Server

TOKENS = {"model": "tiny", "max_tokens": 3}
MESSAGES = [{"role": "user", "content": "Name a thing."}]
CHAT = {**TOKENS, "messages": MESSAGES}
LIMIT = 4
TIMEOUT_S = 60
"""A hang guard."""

IMPOSSIBLE: dict[str, dict[str, Any]] = {
    "max_tokens": {"max_tokens": 10**12},
    "temperature": {"temperature": float("nan")},
    "infinite": {"temperature": float("inf")},
    "stop_token_ids": {"stop_token_ids": [-1, 10**18]},
    "top_k": {"top_k": -7},
    "min_tokens": {"min_tokens": 10, "max_tokens": 2},
    "seed": {"seed": 10**30},
    "half a character": {"stop": ["\ud800"]},
    "n": {"n": 10**6},
    "nested": {"structured_outputs": "x"},
}
CHATS = {
    "top_logprobs": {"logprobs": True, "top_logprobs": 10**6},
    "extra_body": {"extra_body": 5},
    "no messages": {"messages": []},
    "too long": {"messages": [{"role": "user", "content": "word " * 20_000}]},
    # These ended the second stage's engine core.
    "later logprobs": {"sampling_params_list": [{"max_tokens": 3}, {"logprobs": 10**6}]},
    "later tokens": {"sampling_params_list": [{"max_tokens": 3}, {"allowed_token_ids": [10**9]}]},
    "later type": {"sampling_params_list": [{"max_tokens": 3}, {"bad_words": 5}]},
}
COMPLETIONS = {
    "an endless schema": {"structured_outputs": {"json": {"type": "array", "maxItems": 10**12}}},
    "logprobs": {"logprobs": 10**6},
    "prompt": {"prompt": [10**12]},
    "no object": {"prompt": {"a": 1}},
}
DEEP = b"[" * 100_000


def cases() -> list[tuple[str, str, bytes]]:
    """Label, path and body of everything that has to be refused."""
    found = []
    for stream in (False, True):
        more = {"stream": stream}
        for name, field in {**IMPOSSIBLE, **CHATS}.items():
            body = {**CHAT, **more, **field}
            found.append((f"chat {name} {stream}", "/v1/chat/completions", body))
        for name, field in {**IMPOSSIBLE, **COMPLETIONS}.items():
            if name == "top_k" and stream:
                continue
            body = {**TOKENS, "prompt": "Name a thing.", **more, **field}
            found.append((f"completions {name} {stream}", "/v1/completions", body))
        for name in ("temperature", "infinite"):
            body = {"model": "tiny", "input": "Name a thing.", "store": False, **more}
            found.append((f"responses {name} {stream}", "/v1/responses", body | IMPOSSIBLE[name]))
    return [(label, path, json.dumps(body).encode()) for label, path, body in found] + [
        ("deep", "/v1/chat/completions", DEEP),
        ("no JSON", "/v1/chat/completions", b"{"),
    ]


def blamed(status: int, payload: str) -> str | None:
    """What is wrong with an answer that has to blame the client; None if nothing is."""
    if status == httpx.codes.OK:
        *_, last, done = [line for line in payload.splitlines() if line.startswith("data:")]
        if done != "data: [DONE]":
            return f"ends in {done}"
        payload = last.removeprefix("data:")
        status = json.loads(payload)["error"]["code"]
    error = json.loads(payload).get("error") or {}
    if not 400 <= status < 500 or error.get("code") != status or not error.get("message"):
        return f"{status} {payload[:300]}"
    return None


async def everything_impossible_is_refused(server: Server) -> None:
    wrong = []
    for label, path, body in cases():
        answer = await server.client.post(
            path, content=body, headers={"content-type": "application/json"}, timeout=TIMEOUT_S
        )
        if problem := blamed(answer.status_code, answer.text):
            wrong.append(f"{label}: {problem}")
    assert wrong == []


class Stream:
    """A chat that goes on for a while, read as it comes."""

    def __init__(self, server: Server, tokens: int) -> None:
        self.events: list[str] = []
        self.begun = asyncio.Event()
        self.task = asyncio.create_task(self._read(server, tokens))

    async def _read(self, server: Server, tokens: int) -> None:
        second = {"max_tokens": tokens, "min_tokens": tokens, "ignore_eos": True}
        body = {**CHAT, "stream": True, "sampling_params_list": [{"max_tokens": 3}, second]}
        async with server.client.stream(
            "POST", "/v1/chat/completions", json=body, timeout=TIMEOUT_S
        ) as answer:
            assert answer.status_code == 200, await answer.aread()
            async for line in answer.aiter_lines():
                if line.startswith("data:"):
                    self.events.append(line)
                    self.begun.set()

    def check_whole(self) -> None:
        assert self.events[-1] == "data: [DONE]"
        assert not any('"error"' in event for event in self.events)


async def no_more_than_the_limit(server: Server) -> None:
    streams = [Stream(server, 300) for _ in range(LIMIT)]
    await asyncio.gather(*(stream.begun.wait() for stream in streams))
    refused = await server.client.post("/v1/chat/completions", json=CHAT, timeout=TIMEOUT_S)
    assert refused.status_code == 503, refused.text
    assert refused.headers["retry-after"] == "10"
    assert refused.json()["error"]["code"] == 503
    assert (await server.client.get("/health")).json()["state"] == "HEALTHY"
    await asyncio.gather(*(stream.task for stream in streams))
    for stream in streams:
        stream.check_whole()
    again = await server.client.post("/v1/chat/completions", json=CHAT, timeout=TIMEOUT_S)
    assert again.status_code == 200, again.text


def realtime(server: Server, **options: Any) -> websockets.connect:
    url = server.url.replace("http://", "ws://")
    return websockets.connect(f"{url}/v1/realtime", proxy=None, **options)


async def reset(server: Server) -> None:
    """Begin a session, and let the connection end by a reset."""
    ws = await realtime(server)
    await ws.recv()
    raw: socket.socket = ws.transport.get_extra_info("socket")
    raw.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    ws.transport.abort()


async def say(server: Server, message: str | bytes) -> None:
    """Begin a session, say this, and see what comes; then leave."""
    async with realtime(server, max_size=None) as ws:
        with contextlib.suppress(websockets.ConnectionClosed, TimeoutError):
            await ws.send(message)
            async with asyncio.timeout(1):
                await ws.recv()
                await ws.recv()


def open_files(server: Server) -> int:
    return len(os.listdir(f"/proc/{server.pid}/fd"))


async def rude_realtime_clients_harm_nobody(server: Server) -> None:
    await say(server, "{")
    before = open_files(server)
    stream = Stream(server, 3000)
    await stream.begun.wait()
    for number in range(50):
        rudeness: list[Coroutine[Any, Any, None]] = [reset(server)]
        rudeness.append(say(server, ["{", "[]", '"x"', '{"type": 5}'][number % 4]))
        rudeness.append(say(server, b"\xff" * 1000))
        if number % 5 == 0:
            rudeness.append(say(server, b"x" * 20_000_000 if number % 2 else "x" * 20_000_000))
        await asyncio.gather(*rudeness)
        assert (await server.client.get("/health")).json()["state"] == "HEALTHY"
    await stream.task
    stream.check_whole()
    async with asyncio.timeout(TIMEOUT_S):
        while open_files(server) > before:
            await asyncio.sleep(0.1)


async def a_drain_waits_for_work_alone(server: Server) -> None:
    async with realtime(server) as idle:
        await idle.recv()
        stream = Stream(server, 1000)
        await stream.begun.wait()
        await asyncio.sleep(0.6)
        server.send(signal.SIGTERM)
        with contextlib.suppress(websockets.ConnectionClosed):
            async with asyncio.timeout(5):
                await idle.recv()
        assert idle.close_code == 1001
        assert not stream.task.done()
        await stream.task
        stream.check_whole()
        since = time.monotonic()
        ending = await server.wait_end(TIMEOUT_S)
        assert ending is not None
        assert ending.status == 0
        # Hundreds of seconds of drain were allowed.
        assert ending.at - since < TIMEOUT_S
    assert await server.wait_processes_gone(5) == []


def test_clients_of_every_kind(serve, termination_log: Path) -> None:
    async def scenario() -> None:
        settings = {"drain_timeout_s": 600, "shutdown_timeout_s": 700, "error_budget": 1}
        option = ("--max-num-queued-reqs", str(LIMIT))
        async with serve("ar-2", *option, **settings) as server:
            await everything_impossible_is_refused(server)
            await no_more_than_the_limit(server)
            await rude_realtime_clients_harm_nobody(server)
            history = (await server.client.get("/health/history")).json()["transitions"]
            moves = [move["cause"] for move in history if move["from"] != move["to"]]
            assert moves == ["started"]
            await a_drain_waits_for_work_alone(server)

    asyncio.run(scenario())
    assert json.loads(termination_log.read_text())["exit_status"] == 0
