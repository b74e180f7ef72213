"""Error answers of the application, held until they are whole, and corrected where a fault is
behind them.

Upstream has some thirty routes, and each makes text of what is raised in its own way: some give
the engine's death as a client's mistake, some as an error without a cause. Here every plain
answer passes, so here it is put right, whatever route it comes from.
"""

from __future__ import annotations

import json
from http import HTTPStatus
from typing import Any

from vllm_omni.entrypoints.health_bodies import fault_body
from vllm_omni.entrypoints.health_routes import Message, Send, send_json
from vllm_omni.health.faults import Fault
from vllm_omni.health.machine import State
from vllm_omni.health.runtime import HealthRuntime

_LONGEST = 1 << 20
"""Bytes of an error body beyond which it is passed on as it is."""


def holds_errors(message: Message) -> bool:
    """Whether the answer that begins with ``message`` is a plain error."""
    return message["status"] >= HTTPStatus.BAD_REQUEST and not any(
        name.lower() == b"content-type" and value.startswith(b"text/event-stream")
        for name, value in message.get("headers", ())
    )


class HeldError:
    """An error answer whose body is not complete yet."""

    def __init__(self, start: Message) -> None:
        self._start = start
        self._body = b""

    def add(self, message: Message) -> bool:
        """Take a piece of the body; whether the answer can be sent now."""
        self._body += message.get("body", b"")
        self._more = bool(message.get("more_body", False))
        return not self._more or len(self._body) > _LONGEST

    async def release(self, send: Send, runtime: HealthRuntime, request_id: str | None) -> None:
        """Send what is held: as the application made it, or as the fault behind it demands."""
        fault = None if self._more else fault_behind(runtime, self._start["status"], self._body)
        if fault is not None:
            status = HTTPStatus.INTERNAL_SERVER_ERROR
            await send_json(send, status, fault_body(fault, request_id=request_id))
            return
        await send(self._start)
        await send({"type": "http.response.body", "body": self._body, "more_body": self._more})


def fault_behind(runtime: HealthRuntime, status: int, body: bytes) -> Fault | None:
    """The fault that an error answer comes from without naming it; None if it does, or if none.

    A request that the orchestrator failed gets the sentence of its fault as the text of its
    exception, which routes then wrap: by our own sentence we know it again.
    """
    machine = runtime.machine
    snapshot = machine.snapshot
    if snapshot.state not in (State.DEGRADED, State.DEAD):
        return None
    error = _error_of(body)
    if error.get("fault") is not None:
        return None
    message = str(error.get("message"))
    for stage in snapshot.stages:
        fault = machine.stage_fault(stage.stage_id)
        if fault is not None and fault.kind.sentence in message:
            return fault
    # With the service dead there is no other reason for an error of the server's.
    dead = snapshot.state is State.DEAD and status >= HTTPStatus.INTERNAL_SERVER_ERROR
    return machine.reason if dead else None


def _error_of(body: bytes) -> dict[str, Any]:
    try:
        error = json.loads(body)["error"]
    except (ValueError, KeyError, TypeError):
        return {}
    return error if isinstance(error, dict) else {}
