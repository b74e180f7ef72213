"""The outermost ASGI layer: probes, admission, and an answer for every request in flight.

While the service lives the orchestrator fails requests one by one, those of a lost replica. When
the service is dead, or shuts down, this guard answers everything in flight: also requests that
are still being prepared, or that wait for an orchestrator whose thread is stuck. It belongs to
the API server's main loop.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from contextvars import ContextVar
from http import HTTPStatus
from typing import Any

from vllm_omni.entrypoints.cost_admission import enter
from vllm_omni.entrypoints.health_bodies import (
    DONE_EVENT,
    SHUTTING_DOWN,
    error_body,
    event,
    fault_body,
    refusal_body,
)
from vllm_omni.entrypoints.health_routes import (
    Message,
    Receive,
    Scope,
    Send,
    answer_probe,
    retry_after,
    send_json,
)
from vllm_omni.entrypoints.held_errors import HeldError, holds_errors
from vllm_omni.health.runtime import HealthRuntime

logger = logging.getLogger(__name__)

ASGIApp = Callable[[Scope, Receive, Send], Any]

_INTERNAL_ERROR_CLOSE = 1011
"""WebSocket close code for an unexpected condition on the server (RFC 6455, section 7.4.1)."""

_FREE_POSTS = frozenset({"/tokenize", "/detokenize", "/ping", "/v1/load_lora_adapter"})
"""POST routes that generate nothing and so need no stage."""

_ANSWER_S = 1.0
"""Bound for sending one failure answer: a client that does not read must not hold up the rest."""


_current_call: ContextVar[_Call | None] = ContextVar("health_current_call", default=None)


def current_request_id() -> str | None:
    """The id of the request that the calling code works for, where the guard has seen it."""
    call = _current_call.get()
    return None if call is None else call.request_id


class Cutoff(Exception):
    """Raised into the HTTP server to break off a response that has no way to say an error."""


class _Call:
    """One request in flight."""

    def __init__(self, scope: Scope, send: Send, runtime: HealthRuntime) -> None:
        self.scope = scope
        self.task = asyncio.current_task()
        self.started = False
        self.complete = False
        self.taken_over = False
        self.answered = asyncio.Event()
        self.running = True
        self.streams_events = False
        self._send = send
        self._runtime = runtime
        self._held: HeldError | None = None

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

    async def send(self, message: Message) -> None:
        """The application's ``send``; silent once this call has been taken over."""
        if self.taken_over:
            return
        if self._held is not None:
            await self._complete_error(self._held, message)
            return
        if message["type"] == "http.response.start":
            if holds_errors(message):
                self._held = HeldError(message)
                return
            self.started = True
            self.streams_events = any(
                name.lower() == b"content-type" and value.startswith(b"text/event-stream")
                for name, value in message.get("headers", ())
            )
        elif message["type"] == "http.response.body" and not message.get("more_body", False):
            self.complete = True
        await self._send(message)

    async def _complete_error(self, held: HeldError, message: Message) -> None:
        if message["type"] == "http.response.body" and held.add(message):
            self._held = None
            self.started = True
            self.complete = not message.get("more_body", False)
            await held.release(self._send, self._runtime, self.request_id)

    async def take_over(
        self, status: HTTPStatus, body: dict[str, Any], headers: dict[str, str]
    ) -> None:
        """Answer in the application's place, then end it."""
        if self.complete or self.taken_over:
            return
        self.taken_over = True
        try:
            async with asyncio.timeout(_ANSWER_S):
                await self._answer(status, body, headers)
        except TimeoutError:
            logger.warning("[health] a client did not take its failure answer")
        except Exception:
            # Whatever one connection does must not keep the others from their answers.
            logger.warning("[health] a failure answer could not be sent", exc_info=True)
        finally:
            self.answered.set()
            if self.running and self.task is not None:
                self.task.cancel()

    async def _answer(
        self, status: HTTPStatus, body: dict[str, Any], headers: dict[str, str]
    ) -> None:
        if self.scope["type"] == "websocket":
            await self._send(
                {
                    "type": "websocket.close",
                    "code": _INTERNAL_ERROR_CLOSE,
                    "reason": body["error"]["message"][:120],
                }
            )
        elif not self.started:
            await send_json(self._send, status, body, headers=headers)
            self.complete = True
        elif self.streams_events:
            payload = event(body) + DONE_EVENT
            await self._send({"type": "http.response.body", "body": payload})
            self.complete = True
        # Else: bytes of a file or raw audio are under way. No event can be sent among them;
        # the response is left incomplete, and the guard breaks the connection off.


class RequestGuard:
    """ASGI application around the server's application."""

    def __init__(self, app: Any, runtime: HealthRuntime) -> None:
        self._app = app
        self._runtime = runtime
        self._calls: set[_Call] = set()
        self._idle = asyncio.Event()
        self._idle.set()

    def __getattr__(self, name: str) -> Any:
        # Upstream's launcher reads ``routes`` and ``state`` of the application it serves.
        return getattr(self._app, name)

    @property
    def in_flight(self) -> int:
        """How many guarded requests have not ended."""
        return len(self._calls)

    async def idle(self) -> None:
        """Wait until no guarded request is in flight."""
        await self._idle.wait()

    async def fail_all_by_fault(self) -> None:
        """Answer everything in flight with the server's fault (HTTP 500)."""
        fault = self._runtime.machine.reason
        await self._fail_all(
            HTTPStatus.INTERNAL_SERVER_ERROR,
            lambda call: fault_body(fault, request_id=call.request_id),
        )

    async def fail_all_by_shutdown(self) -> None:
        """Answer everything in flight with 503: the server is going away, the request is fine."""
        await self._fail_all(
            HTTPStatus.SERVICE_UNAVAILABLE,
            lambda call: error_body(
                HTTPStatus.SERVICE_UNAVAILABLE, SHUTTING_DOWN, request_id=call.request_id
            ),
        )

    async def _fail_all(
        self, status: HTTPStatus, body_for: Callable[[_Call], dict[str, Any]]
    ) -> None:
        calls = [call for call in self._calls if not call.complete]
        if not calls:
            return
        logger.warning("[health] answering %d request(s) in flight with %d", len(calls), status)
        headers = {}
        if status is HTTPStatus.SERVICE_UNAVAILABLE:
            headers["Retry-After"] = retry_after(self._runtime)
        async with asyncio.TaskGroup() as group:
            for call in calls:
                group.create_task(
                    call.take_over(status, body_for(call), headers), name="health-answer"
                )

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one ASGI connection."""
        if scope["type"] == "lifespan":
            await self._app(scope, receive, send)
            return
        path = _route_path(scope)
        if scope["type"] == "http":
            if await answer_probe(self._runtime, scope, path, send):
                return
            if scope["method"] != "POST" or path in _FREE_POSTS:
                await self._app(scope, receive, send)
                return
        if not self._runtime.machine.snapshot.accepting:
            await self._refuse(scope, receive, send)
            return
        if self._runtime.admission is None or scope["type"] != "http":
            await self._guarded(scope, receive, send)
            return
        entry = await enter(self._runtime.admission, scope, path, receive)
        try:
            # The state may have changed while the body came in.
            if entry.refused or not self._runtime.machine.snapshot.accepting:
                await self._refuse(scope, entry.receive, send, too_costly=entry.refused)
            else:
                await self._guarded(scope, entry.receive, send)
        finally:
            if entry.ticket is not None:
                self._runtime.admission.leave(entry.ticket)

    async def _refuse(
        self, scope: Scope, receive: Receive, send: Send, *, too_costly: bool = False
    ) -> None:
        snapshot = self._runtime.machine.snapshot
        request_id = _Call(scope, send, self._runtime).request_id
        body = refusal_body(snapshot, request_id=request_id, too_costly=too_costly)
        if scope["type"] == "websocket":
            await receive()
            reason = body["error"]["message"][:120]
            code = _INTERNAL_ERROR_CLOSE
            await send({"type": "websocket.close", "code": code, "reason": reason})
            return
        headers = {"Retry-After": retry_after(self._runtime)}
        await send_json(send, HTTPStatus.SERVICE_UNAVAILABLE, body, headers=headers)

    async def _guarded(self, scope: Scope, receive: Receive, send: Send) -> None:
        call = _Call(scope, send, self._runtime)
        self._calls.add(call)
        self._idle.clear()
        _current_call.set(call)
        try:
            await self._run_application(call, scope, receive)
        finally:
            self._calls.discard(call)
            if not self._calls:
                self._idle.set()
        if call.taken_over and scope["type"] == "http" and not call.complete:
            raise Cutoff("the server failed in the middle of this response")

    async def _run_application(self, call: _Call, scope: Scope, receive: Receive) -> None:
        try:
            await self._app(scope, receive, call.send)
        except asyncio.CancelledError:
            if not call.taken_over:
                raise
        except Exception:
            if not call.taken_over:
                raise
            logger.debug(
                "[health] the application failed after its call was taken over", exc_info=True
            )
        call.running = False
        if call.taken_over:
            if call.task is not None and call.answered.is_set():
                # Our own cancel() is spent; one by somebody else still counts.
                if call.task.uncancel() > 0:
                    raise asyncio.CancelledError
            else:
                # The application ended first. The answer must not be cut off by our return.
                await call.answered.wait()


def _route_path(scope: Scope) -> str:
    path = str(scope.get("path", ""))
    root = str(scope.get("root_path", ""))
    if root and path.startswith(root):
        path = path[len(root) :]
    return path if len(path) <= 1 else path.rstrip("/")
