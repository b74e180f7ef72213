# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-omni-health project
"""Everything that a server says about itself at one moment, and how it meets a newcomer."""

from __future__ import annotations

import asyncio
import time
from dataclasses import dataclass, field
from typing import Any

import httpx

from vllm_omni_health.drills.chat import ChatCall, ChatRequest, carry_out

PROBES = ("/health", "/readyz", "/livez", "/ping", "/health/history")
_TIMEOUT_S = 10.0
"""A hang guard; a probe that takes longer has no answer."""


@dataclass(frozen=True)
class Answer:
    """One answer of a probe; ``status`` is None when there was none."""

    method: str
    path: str
    status: int | None
    body: Any = None
    headers: dict[str, str] = field(default_factory=dict)
    length: int = 0
    """Bytes of the body."""
    error: str | None = None


@dataclass(frozen=True)
class Survey:
    """What was said between ``began`` and ``ended`` (monotonic)."""

    began: float
    ended: float
    answers: dict[str, Answer]
    """By method and path: ``GET /health``."""
    newcomers: list[ChatCall] = field(default_factory=list)
    """New requests, one plain and one streaming, if they were asked for."""

    def answer(self, path: str, method: str = "GET") -> Answer:
        """The answer to one probe."""
        return self.answers[f"{method} {path}"]

    @property
    def health(self) -> dict[str, Any]:
        """The body of ``/health``; empty when it was not a JSON object."""
        body = self.answer("/health").body
        return body if isinstance(body, dict) else {}

    @property
    def history(self) -> list[dict[str, Any]]:
        """The entries of ``/health/history``."""
        body = self.answer("/health/history").body
        entries = body.get("transitions") if isinstance(body, dict) else None
        return list(entries or ())


async def survey(client: httpx.AsyncClient, *, newcomers: bool = False) -> Survey:
    """Ask everything at once; with ``newcomers`` also send two short new requests."""
    began = time.monotonic()
    asked = [("GET", path) for path in PROBES] + [("HEAD", "/health"), ("HEAD", "/livez")]
    calls: list[ChatCall] = []
    async with asyncio.TaskGroup() as group:
        tasks = [group.create_task(_ask(client, method, path)) for method, path in asked]
        if newcomers:
            for stream in (False, True):
                request = ChatRequest(stream=stream, max_tokens=4, label="newcomer")
                call = ChatCall(0, stream, request.label, f"newcomer-{stream}", time.monotonic())
                calls.append(call)
                group.create_task(_bounded(client, request, call))
    answers = {f"{a.method} {a.path}": a for a in (task.result() for task in tasks)}
    return Survey(began, time.monotonic(), answers, calls)


async def _bounded(client: httpx.AsyncClient, request: ChatRequest, call: ChatCall) -> None:
    try:
        async with asyncio.timeout(_TIMEOUT_S):
            await carry_out(client, request, call)
    except TimeoutError:
        call.broken = f"no answer in {_TIMEOUT_S:g} s"


async def _ask(client: httpx.AsyncClient, method: str, path: str) -> Answer:
    try:
        response = await client.request(method, path, timeout=_TIMEOUT_S)
    except httpx.HTTPError as exc:
        return Answer(method, path, None, error=type(exc).__name__)
    try:
        body = response.json()
    except ValueError:
        body = None
    return Answer(
        method, path, response.status_code, body, dict(response.headers), len(response.content)
    )
