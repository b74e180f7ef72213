"""Answers of the application that may hide a fault, held until they are whole and put right.

Upstream has some sixty routes, and each makes text of what is raised in its own way: some give
the engine's failure as a client's mistake, some without a cause, some with status 200. Here
every plain answer passes, so here it is put right, whatever route it comes from.
"""

from __future__ import annotations

import json
from http import HTTPStatus
from typing import Any

from vllm_omni.entrypoints.health.http.bodies import error_body, fault_body
from vllm_omni.entrypoints.health.http.probes import Message, Send, send_json
from vllm_omni.health.faults.fault import REQUEST_SENTENCE, Fault
from vllm_omni.health.runtime import HealthRuntime
from vllm_omni.health.state.machine import State

_LONGEST = 1 << 20
"""Bytes of a body beyond which it is passed on as it is. Errors are shorter."""


def content_type(message: Message) -> bytes:
    """The media type of the answer that begins with ``message``, without its parameters."""
    for name, value in message.get("headers", ()):
        if name.lower() == b"content-type":
            return bytes(value).partition(b";")[0].strip().lower()
    return b""


def is_error(message: Message) -> bool:
    """Whether the answer that begins with ``message`` is a plain error."""
    failed = message["status"] >= HTTPStatus.BAD_REQUEST
    return failed and content_type(message) != b"text/event-stream"


class HeldAnswer:
    """An answer whose body is not complete yet."""

    def __init__(self, start: Message) -> None:
        self._start = start
        self._body = b""

    def add(self, message: Message) -> bool:
        """Take a piece of the body; whether the answer can be sent now."""
        self._body += message.get("body", b"")
        self._more = bool(message.get("more_body", False))
        return not self._more or len(self._body) > _LONGEST

    async def release(
        self,
        send: Send,
        runtime: HealthRuntime,
        request_id: str | None,
        fault: Fault | None = None,
    ) -> None:
        """Send what is held: as the application made it, or as it must be.

        ``fault``: why a request that the engine had for this answer failed, if one did.
        """
        body = None
        if not self._more:
            body = _body_in_place_of(self._start["status"], self._body, fault, runtime, request_id)
        if body is not None:
            await send_json(send, HTTPStatus.INTERNAL_SERVER_ERROR, body)
            return
        await send(self._start)
        await send({"type": "http.response.body", "body": self._body, "more_body": self._more})


def _body_in_place_of(
    status: int,
    payload: bytes,
    fault: Fault | None,
    runtime: HealthRuntime,
    request_id: str | None,
) -> dict[str, Any] | None:
    """The body of the answer that is due instead, always with status 500; None if none is."""
    answer = _object(payload)
    error = answer.get("error")
    if isinstance(error, dict) and error.get("fault") is not None:
        return None
    if status < HTTPStatus.BAD_REQUEST:
        # An answer that is whole in spite of a failure: of one item in a batch, perhaps.
        return fault_body(fault, request_id=request_id) if fault and _hides_error(answer) else None
    if fault is None and status >= HTTPStatus.INTERNAL_SERVER_ERROR:
        if runtime.machine.snapshot.state is State.DEAD:
            # There is no other reason for an error of the server's then.
            fault = runtime.machine.reason
        elif status == HTTPStatus.INTERNAL_SERVER_ERROR and not _message(error):
            return error_body(
                HTTPStatus.INTERNAL_SERVER_ERROR, REQUEST_SENTENCE, request_id=request_id
            )
    return None if fault is None else fault_body(fault, request_id=request_id)


def _object(payload: bytes) -> dict[str, Any]:
    try:
        answer = json.loads(payload)
    except ValueError:
        return {}
    return answer if isinstance(answer, dict) else {}


def _message(error: object) -> str:
    return str(error.get("message") or "").strip() if isinstance(error, dict) else ""


def _hides_error(answer: dict[str, Any]) -> bool:
    """Whether an answer with status 200 is no answer: it holds an error, or ended in one."""
    if answer.get("error"):
        return True
    choices = answer.get("choices")
    return isinstance(choices, list) and any(
        isinstance(choice, dict) and choice.get("finish_reason") == "error" for choice in choices
    )
