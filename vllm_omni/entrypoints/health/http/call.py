# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-omni-health project
"""One request or websocket in flight, between the application and the HTTP server.

What the application sends passes here. Once a request that the engine had for this call has
failed, the rest of the answer is made to say so, in the form that the answer has by then.
"""

from __future__ import annotations

import asyncio
import logging
import time
from contextvars import ContextVar
from http import HTTPStatus
from typing import Any

from starlette.types import Message, Scope, Send
from vllm_omni.entrypoints.health.http.bodies import (
    DONE_EVENT,
    error_body,
    event,
    fault_body,
    refused_body,
)
from vllm_omni.entrypoints.health.http.event_streams import before_the_end
from vllm_omni.entrypoints.health.http.held_answers import HeldAnswer, content_type, is_error
from vllm_omni.entrypoints.health.http.held_errors import LONGEST, in_place_of
from vllm_omni.entrypoints.health.http.probes import send_json
from vllm_omni.health.faults.by_request import is_request_of
from vllm_omni.health.faults.fault import REQUEST_SENTENCE, Fault
from vllm_omni.health.faults.refusals import Refusal
from vllm_omni.health.runtime import HealthRuntime
from vllm_omni.health.state.machine import State

logger = logging.getLogger(__name__)

GOING_AWAY_CLOSE = 1001
"""WebSocket close code for a server that goes down (RFC 6455, section 7.4.1)."""

INTERNAL_ERROR_CLOSE = 1011
"""WebSocket close code for an unexpected condition on the server (RFC 6455, section 7.4.1)."""

_REASON_LIMIT = 120
"""Bytes of a close frame's reason: 125 less the code (RFC 6455, section 5.5)."""

_ANSWER_S = 1.0
"""Bound for sending one failure answer: a client that does not read must not hold up the rest."""

_current_call: ContextVar[GuardedCall | None] = ContextVar("health_current_call", default=None)


def current_call() -> GuardedCall | None:
    """The call that the calling code works for, where the guard has seen it."""
    return _current_call.get()


def set_current_call(call: GuardedCall) -> None:
    """Say whose work the calling task is, and every task that it starts."""
    _current_call.set(call)


class GuardedCall:
    """One call. Made in the task that runs the application for it."""

    def __init__(self, scope: Scope, send: Send, runtime: HealthRuntime) -> None:
        self.scope = scope
        self.engine_ids: list[str] = []
        """The engine's requests for this call, also those that have ended."""
        self.asks_for_job = False
        """Whether it asks for jobs and needs no stage itself."""
        self.job_id: str | None = None
        """The one job that it asks for."""
        self.refused: Refusal | None = None
        """Why the application refused it, where the client is to blame."""
        self.complete = False
        self.taken_over = False
        self._cut_off = False
        self._sent_at = float("-inf")
        self._started = False
        self._streams_events = False
        self._streams_bytes = False
        self._task = asyncio.current_task()
        self._running = True
        self._answered = asyncio.Event()
        self._send = send
        self._runtime = runtime
        self._held: HeldAnswer | None = None

    @property
    def is_websocket(self) -> bool:
        """Whether this is a websocket and not a request."""
        return bool(self.scope["type"] == "websocket")

    def tells_of(self, request_id: str) -> bool:
        """Whether this engine's request is the work for the job that this call asks for."""
        return self.job_id is not None and is_request_of(request_id, self.job_id)

    def quiet_for(self) -> float:
        """Seconds since the application last sent something on this websocket."""
        return time.monotonic() - self._sent_at

    @property
    def unanswered(self) -> bool:
        """Whether it waits for something that a stage would have to do."""
        downloads = self.asks_for_job and self._started and not self._streams_events
        return not self.complete and not downloads

    @property
    def broken_off(self) -> bool:
        """Whether the answer ends in mid-air, as one that has no way to say an error must."""
        return not self.complete and not self.is_websocket and (self.taken_over or self._cut_off)

    @property
    def request_id(self) -> str | None:
        """The id by which the client knows its request, else the one upstream gave it.

        Most routes make the client's own X-Request-Id a part of theirs.
        """
        metadata = self.scope.get("state", {}).get("request_metadata")
        given = getattr(metadata, "request_id", None)
        for name, value in self.scope.get("headers", ()):
            if name == b"x-request-id":
                own = bytes(value).decode("latin-1")
                return str(given) if given is not None and own in str(given) else own
        return None if given is None else str(given)

    @property
    def failure(self) -> Fault | None:
        """Why a request that the engine had for this call failed, if one did."""
        faults = self._runtime.request_faults
        for request_id in self.engine_ids:
            if (fault := faults.of(request_id)) is not None:
                return fault
        return None if self.job_id is None else faults.of_job(self.job_id)

    @property
    def refusal(self) -> Refusal | None:
        """Why it was refused, by the application or by the engine, if the client is to blame."""
        for request_id in self.engine_ids:
            if (refusal := self._runtime.refusals.of(request_id)) is not None:
                return refusal
        return self.refused

    # ---- what the application sends ----------------------------------------------------------

    async def send(self, message: Message) -> None:
        """The application's ``send``; silent once this call has its answer."""
        if self.taken_over or self.complete:
            return
        if self.is_websocket:
            await self._send_on_websocket(message)
        elif self._held is not None:
            await self._hold(self._held, message)
        elif message["type"] == "http.response.start":
            await self._begin(message)
        elif message["type"] == "http.response.body":
            await self._continue(message)
        else:
            await self._send(message)

    async def _send_on_websocket(self, message: Message) -> None:
        self._sent_at = time.monotonic()
        if message["type"] == "websocket.accept":
            self._started = True
        elif message["type"] == "websocket.close":
            self.complete = True
        await self._send(message)

    async def _begin(self, message: Message) -> None:
        media_type = content_type(message)
        failed_but_whole = media_type == b"application/json" and self.failure is not None
        if is_error(message) or failed_but_whole:
            self._held = HeldAnswer(message, LONGEST)
            return
        self._started = True
        self._streams_events = media_type == b"text/event-stream"
        self._streams_bytes = not self._streams_events and not any(
            name.lower() == b"content-length" for name, _ in message.get("headers", ())
        )
        await self._send(message)

    async def _continue(self, message: Message) -> None:
        last = not message.get("more_body", False)
        if self._streams_events:
            fault = self.failure or self._death()
            if fault is not None or self.refusal is not None:
                body = message.get("body", b"")
                kept = before_the_end(body)
                if kept is not None or last:
                    await self._end_events(fault, body if kept is None else kept)
                    return
        elif self._streams_bytes and last and self.failure is not None:
            # Ended in order, it would pass for whole.
            self._cut_off = True
            return
        self.complete = last
        await self._send(message)

    async def _hold(self, held: HeldAnswer, message: Message) -> None:
        if message["type"] == "http.response.body" and held.add(message):
            self._held = None
            self._started = True
            self.complete = not message.get("more_body", False)
            request_id = self.request_id
            body = in_place_of(held, self._runtime, request_id, self.failure, self.refusal)
            if body is None:
                await held.release(self._send)
            else:
                await send_json(self.scope, self._send, body["error"]["code"], body)

    def _death(self) -> Fault | None:
        machine = self._runtime.machine
        return machine.reason if machine.snapshot.state is State.DEAD else None

    async def _end_events(self, fault: Fault | None, before: bytes = b"") -> None:
        self.complete = True
        if fault is not None:
            body = fault_body(fault, request_id=self.request_id)
        elif (refusal := self.refusal) is not None:
            body = refused_body(refusal)
        else:
            body = error_body(
                HTTPStatus.INTERNAL_SERVER_ERROR, REQUEST_SENTENCE, request_id=self.request_id
            )
        payload = before + event(body) + DONE_EVENT
        await self._send({"type": "http.response.body", "body": payload})

    async def application_raised(self, exc: Exception) -> bool:
        """The application ended by an exception; whether that is settled with the client."""
        if self.taken_over:
            logger.debug("[health] the application failed after its answer", exc_info=exc)
            return True
        if self.complete:
            # Starlette answers with 500 and raises again. The HTTP server would then close the
            # connection, on which the client may have sent its next request.
            logger.error("[health] the application failed", exc_info=exc)
            return True
        if not self._streams_events:
            return False
        logger.error("[health] a stream of events broke off", exc_info=exc)
        await self._end_events(self.failure or self._death())
        return True

    async def application_ended(self) -> None:
        """Called when the application has returned, by the task that ran it."""
        self._running = False
        if not self.taken_over:
            return
        if self._task is not None and self._answered.is_set():
            # Our own cancel() is spent; one by somebody else still counts.
            if self._task.uncancel() > 0:
                raise asyncio.CancelledError
        else:
            # The application ended first. The answer must not be cut off by our return.
            await self._answered.wait()

    # ---- what the guard sends ----------------------------------------------------------------

    async def take_over(
        self,
        status: HTTPStatus,
        body: dict[str, Any],
        headers: dict[str, str] | None = None,
        close_code: int = INTERNAL_ERROR_CLOSE,
    ) -> None:
        """Answer in the application's place, then end it."""
        if self.complete or self.taken_over:
            return
        self.taken_over = True
        try:
            async with asyncio.timeout(_ANSWER_S):
                await self._answer(status, body, headers or {}, close_code)
        except TimeoutError:
            logger.warning("[health] a client did not take its failure answer")
        except Exception:
            # Whatever one connection does must not keep the others from their answers.
            logger.warning("[health] a failure answer could not be sent", exc_info=True)
        finally:
            self._answered.set()
            if self._running and self._task is not None:
                self._task.cancel()

    async def _answer(
        self, status: HTTPStatus, body: dict[str, Any], headers: dict[str, str], close_code: int
    ) -> None:
        if self.is_websocket and self._started:
            reason = body["error"]["message"][:_REASON_LIMIT]
            await self._send({"type": "websocket.close", "code": close_code, "reason": reason})
        elif self.is_websocket:
            await refuse_handshake(self.scope, self._send, status, body, headers)
            self.complete = True
        elif not self._started:
            await send_json(self.scope, self._send, status, body, headers)
            self.complete = True
        elif self._streams_events:
            payload = event(body) + DONE_EVENT
            await self._send({"type": "http.response.body", "body": payload})
            self.complete = True
        # Else: bytes of a file or raw audio are under way. No event can be sent among them; the
        # response is left incomplete, and the guard breaks the connection off.


async def refuse_handshake(
    scope: Scope, send: Send, status: HTTPStatus, body: dict[str, Any], headers: dict[str, str]
) -> None:
    """Answer a websocket's handshake with an error, as any request's."""
    if "websocket.http.response" in scope.get("extensions", {}):
        await send_json(scope, send, status, body, headers)
        return
    # Then the HTTP server makes 403 of it.
    reason = body["error"]["message"][:_REASON_LIMIT]
    await send({"type": "websocket.close", "code": INTERNAL_ERROR_CLOSE, "reason": reason})
