# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-omni-health project
"""The probes: ``/health``, ``/readyz``, ``/livez``, ``/ping``, and the two that tell more,
``/health/history`` and ``/health/memory``.

They are answered ahead of the application, from one read of the machine's snapshot, so that
they answer in any state, under load, and while the orchestrator's thread is stuck.
"""

from __future__ import annotations

from collections.abc import Callable
from http import HTTPStatus
from typing import Any

from starlette.responses import JSONResponse
from starlette.types import Message, Scope, Send
from vllm_omni.entrypoints.health.http.bodies import health_body, history_body
from vllm_omni.health.runtime import HealthRuntime
from vllm_omni.health.state.machine import State

_Answer = tuple[HTTPStatus, dict[str, Any]]


def _health(runtime: HealthRuntime) -> _Answer:
    snapshot = runtime.machine.snapshot
    degraded_counts = runtime.settings.degraded_is_unhealthy and snapshot.state is State.DEGRADED
    healthy = snapshot.accepting and not degraded_counts
    status = HTTPStatus.OK if healthy else HTTPStatus.SERVICE_UNAVAILABLE
    return status, health_body(snapshot, healthy=healthy, memory=runtime.memory.view.short)


def _livez(runtime: HealthRuntime) -> _Answer:
    stalled = runtime.orchestrator_stalled()
    alive = not runtime.restart_needed()
    body = {
        "status": "alive" if alive else "restart",
        "state": runtime.machine.snapshot.state.value,
        "orchestrator_stalled": stalled,
    }
    return HTTPStatus.OK if alive else HTTPStatus.SERVICE_UNAVAILABLE, body


def _history(runtime: HealthRuntime) -> _Answer:
    return HTTPStatus.OK, history_body(runtime.machine.history())


def _memory(runtime: HealthRuntime) -> _Answer:
    return HTTPStatus.OK, runtime.memory.view.full


PROBES: dict[str, Callable[[HealthRuntime], _Answer]] = {
    "/health": _health,
    "/readyz": _health,
    "/ping": _health,
    "/livez": _livez,
    "/health/history": _history,
    "/health/memory": _memory,
}


async def answer_probe(runtime: HealthRuntime, scope: Scope, path: str, send: Send) -> bool:
    """Answer if ``path`` is a probe; says whether it was."""
    probe = PROBES.get(path)
    if probe is None or scope["method"] not in ("GET", "HEAD", "POST"):
        return False
    if scope["method"] == "POST" and path != "/ping":
        return False
    status, body = probe(runtime)
    headers = {}
    if status is HTTPStatus.SERVICE_UNAVAILABLE and path != "/livez":
        headers["Retry-After"] = retry_after(runtime)
    await send_json(scope, send, status, body, headers)
    return True


def retry_after(runtime: HealthRuntime) -> str:
    """The value of a ``Retry-After`` header: whole seconds."""
    return str(runtime.settings.retry_after_s)


async def send_json(
    scope: Scope,
    send: Send,
    status: int,
    body: dict[str, Any],
    headers: dict[str, str] | None = None,
) -> None:
    """Send a whole JSON response, be it to a request or to a websocket's handshake."""
    response = JSONResponse(body, status, {"Cache-Control": "no-store", **(headers or {})})
    await response(scope, _unread, send)


async def _unread() -> Message:
    raise RuntimeError("an answer does not read")
