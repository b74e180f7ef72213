# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-omni-health project
"""Load for the check: chat requests of growing length, and figures all the while."""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import httpx

from vllm_omni_health.memory_tool.client import PATH, NoFigures, read, unreachable
from vllm_omni_health.memory_tool.gate import Verdict

_LOOK_S = 0.5
_REQUEST_S = 600.0
"""Bound for one request: a long answer of a large model."""

_WORD = "memory "


@dataclass
class Plan:
    """What to send. ``body``: a request to send as it is, instead of chats of growing length."""

    url: str
    requests: int
    concurrency: int
    prompt_words: int
    max_tokens: int
    model: str | None = None
    path: str = "/v1/chat/completions"
    body: dict[str, Any] | None = None

    def request(self, number: int, model: str) -> dict[str, Any]:
        """The body of request ``number``, counted from 0."""
        if self.body is not None:
            return self.body
        words = max(1, self.prompt_words * (number + 1) // self.requests)
        return {
            "model": model,
            "messages": [{"role": "user", "content": _WORD * words}],
            "max_tokens": self.max_tokens,
        }


@dataclass
class Run:
    """What became of a run: answers by HTTP status (0: none at all), and the verdict."""

    verdict: Verdict
    answers: Counter[int] = field(default_factory=Counter)
    seconds: float = 0.0

    @property
    def failed(self) -> int:
        """Requests that were not answered with success."""
        return sum(count for status, count in self.answers.items() if not 200 <= status < 300)


async def drive(
    plan: Plan, verdict: Verdict, progress: Callable[[Run], None] = lambda _run: None
) -> Run:
    """Send everything and watch, then watch on until the verdict can be told.

    ``progress`` is called about twice a second. Raises NoFigures when the server has none.
    """
    run = Run(verdict)
    limits = httpx.Limits(max_connections=plan.concurrency + 2)
    async with httpx.AsyncClient(
        base_url=plan.url, timeout=httpx.Timeout(_REQUEST_S, connect=5.0), limits=limits
    ) as client:
        await _look(client, plan.url, verdict)
        model = plan.model or await _served_model(client, plan)
        began = time.monotonic()
        async with asyncio.TaskGroup() as group:
            load = group.create_task(_load(client, plan, model, run), name="memory-load")
            while not load.done():
                await asyncio.wait({load}, timeout=_LOOK_S)
                await _look(client, plan.url, verdict)
                progress(run)
        run.seconds = time.monotonic() - began
        # Longer than the rule asks for, so that the last figures count as well.
        until = time.monotonic() + verdict.for_s + 2 * _LOOK_S
        while time.monotonic() < until and not verdict.passed:
            await asyncio.sleep(_LOOK_S)
            await _look(client, plan.url, verdict)
            progress(run)
    return run


async def _look(client: httpx.AsyncClient, url: str, verdict: Verdict) -> None:
    try:
        response = await client.get(PATH, timeout=30.0)
    except httpx.HTTPError as exc:
        raise NoFigures(unreachable(url, exc)) from None
    verdict.feed(time.monotonic(), read(url, response))


async def _served_model(client: httpx.AsyncClient, plan: Plan) -> str:
    if plan.body is not None:
        return ""
    try:
        return str((await client.get("/v1/models", timeout=30.0)).json()["data"][0]["id"])
    except (httpx.HTTPError, ValueError, KeyError, IndexError, TypeError):
        raise NoFigures(f"{plan.url}/v1/models names no model; give --model") from None


async def _load(client: httpx.AsyncClient, plan: Plan, model: str, run: Run) -> None:
    numbers = iter(range(plan.requests))

    async def send_all() -> None:
        for number in numbers:
            try:
                response = await client.post(plan.path, json=plan.request(number, model))
                run.answers[response.status_code] += 1
            except httpx.HTTPError:
                run.answers[0] += 1

    async with asyncio.TaskGroup() as group:
        for _ in range(min(plan.concurrency, plan.requests)):
            group.create_task(send_all(), name="memory-load-client")
