# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-omni-health project
"""The outermost ASGI layer: probes, admission, and an answer for every request in flight.

While the service lives the orchestrator fails requests one by one, those of a lost replica. When
the service is dead, or shuts down, this guard answers everything in flight: also requests that
are still being prepared, or that wait for an orchestrator whose thread is stuck. It belongs to
the API server's main loop.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Callable, Coroutine
from http import HTTPStatus
from typing import Any

from starlette.types import Receive, Scope, Send
from vllm_omni.entrypoints.health.http.bodies import (
    SHUTTING_DOWN,
    error_body,
    fault_body,
    refusal_body,
)
from vllm_omni.entrypoints.health.http.call import (
    GOING_AWAY_CLOSE,
    GuardedCall,
    refuse_handshake,
    set_current_call,
)
from vllm_omni.entrypoints.health.http.job_answers import JobAnswer
from vllm_omni.entrypoints.health.http.probes import answer_probe, retry_after, send_json
from vllm_omni.entrypoints.health.http.request_book import RequestBook
from vllm_omni.entrypoints.health.http.routes import (
    RouteKind,
    asks_for_work,
    job_id_of,
    kind_of,
)
from vllm_omni.health.faults.fault import Fault
from vllm_omni.health.runtime import HealthRuntime

logger = logging.getLogger(__name__)

_REACT_S = 5.0
"""How long a route may take to answer after the last request that the engine had for it has
failed. First comes an abort, which upstream gives its engine 2 s to acknowledge."""


_QUIET_S = 0.5
"""How long a websocket session must have said nothing to count as idle. A route has a last message
to send when its request has ended, and a duplex session is known to be at work by that alone."""


class Cutoff(Exception):
    """Raised into the HTTP server to break off a response that has no way to say an error."""


class RequestGuard:
    """ASGI application around the server's application."""

    def __init__(
        self, app: Any, runtime: HealthRuntime, *, max_requests: int | None = None
    ) -> None:
        self._app = app
        self._max_requests = max_requests
        self._runtime = runtime
        self._loop = asyncio.get_running_loop()
        self._calls: set[GuardedCall] = set()
        self._asking: set[GuardedCall] = set()
        """Those of them that ask for a job."""
        self._answers: set[asyncio.Task[None]] = set()
        self._idle = asyncio.Event()
        self._idle.set()
        self._all_done = asyncio.Event()
        self._all_done.set()
        self._dismissing = False
        self.book = RequestBook(on_close=self._request_ended)
        runtime.request_faults.observe(self._request_failed)

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

    async def all_done(self) -> None:
        """Wait until the engine has nothing to do either, such as for jobs."""
        self._note_end()
        await self._all_done.wait()

    def _note_end(self) -> None:
        busy = bool(self._calls)
        for event, wait in ((self._idle, busy), (self._all_done, busy or self.book.requests)):
            if wait:
                event.clear()
            else:
                event.set()

    def _request_ended(self, call: GuardedCall | None) -> None:
        self._note_end()
        if self._dismissing and call is not None and call.is_websocket:
            self._dismiss_when_idle(call)

    # ---- sessions, when the server is to end ---------------------------------------------------

    def dismiss_sessions(self) -> None:
        """Close every websocket with 1001 as soon as it has nothing in flight, if need be now."""
        self._dismissing = True
        for call in self._calls:
            if call.is_websocket:
                self._dismiss_when_idle(call)

    def _dismiss_when_idle(self, call: GuardedCall) -> None:
        if call not in self._calls or self.book.at_work(call):
            return
        soon = _QUIET_S - call.quiet_for()
        if soon > 0:
            self._loop.call_later(soon, self._dismiss_when_idle, call)
            return
        status = HTTPStatus.SERVICE_UNAVAILABLE
        body = error_body(status, SHUTTING_DOWN, request_id=call.request_id)
        headers = {"Retry-After": retry_after(self._runtime)}
        self._answer_soon(call.take_over(status, body, headers, GOING_AWAY_CLOSE))

    # ---- answers to everyone -----------------------------------------------------------------

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
        self, status: HTTPStatus, body_for: Callable[[GuardedCall], dict[str, Any]]
    ) -> None:
        calls = [call for call in self._calls if call.unanswered]
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

    # ---- one request has failed --------------------------------------------------------------

    def _request_failed(self, request_id: str, fault: Fault) -> None:
        """On the thread that found out, before the application hears of it."""
        with contextlib.suppress(RuntimeError):  # the loop may be closed by then
            self._loop.call_soon_threadsafe(self._see_to, request_id, fault)

    def _see_to(self, request_id: str, fault: Fault) -> None:
        call = self.book.call_of(request_id)
        # When all fail at once this runs once for each, so it must not look at all of them.
        waiting = [asking for asking in self._asking if asking.tells_of(request_id)]
        for concerned in waiting if call is None else (call, *waiting):
            if not concerned.is_websocket:
                self._loop.call_later(_REACT_S, self._see_to_silence, concerned, fault)
            elif fault.fatal:
                # What the session was about is gone with the replica. A request of a session
                # that fails alone is the application's to report; the session goes on.
                self._answer_with_fault(concerned, fault)

    def _see_to_silence(self, call: GuardedCall, fault: Fault) -> None:
        if call not in self._calls or call.complete:
            return
        if self.book.at_work(call):
            self._loop.call_later(_REACT_S, self._see_to_silence, call, fault)
            return
        logger.error("[health] a failed request has got no answer; answering it")
        self._answer_with_fault(call, fault)

    def _answer_with_fault(self, call: GuardedCall, fault: Fault) -> None:
        body = fault_body(fault, request_id=call.request_id)
        self._answer_soon(call.take_over(HTTPStatus.INTERNAL_SERVER_ERROR, body))

    def _answer_soon(self, answer: Coroutine[Any, Any, None]) -> None:
        task = self._loop.create_task(answer, name="health-answer")
        self._answers.add(task)
        task.add_done_callback(self._answers.discard)

    # ---- the ASGI application ----------------------------------------------------------------

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one ASGI connection."""
        if scope["type"] == "lifespan":
            await self._app(scope, receive, send)
            return
        path = _route_path(scope)
        if scope["type"] == "http":
            if await answer_probe(self._runtime, scope, path, send):
                return
            kind = kind_of(scope["method"], path)
            if kind is RouteKind.FREE:
                await self._app(scope, receive, send)
                return
            if kind is RouteKind.JOB:
                await self._tell_of_job(scope, receive, send, job_id_of(path))
                return
        if not self._runtime.machine.snapshot.accepting:
            await self._refuse(scope, receive, send)
            return
        if self._full() and (scope["type"] == "websocket" or asks_for_work(path)):
            await self._refuse(scope, receive, send, full=True)
            return
        await self._guarded(GuardedCall(scope, send, self._runtime), receive)

    def _full(self) -> bool:
        """Whether as many requests are in flight as there may be (``--max-num-queued-reqs``)."""
        if self._max_requests is None:
            return False
        at_work = self.book.requests
        # Each call counts as many as the engine has for it, and one before it has any.
        if at_work + len(self._calls) < self._max_requests:
            return False
        entering = sum(
            not call.is_websocket
            and not call.asks_for_job
            and asks_for_work(_route_path(call.scope))
            and not self.book.at_work(call)
            for call in self._calls
        )
        return at_work + entering >= self._max_requests

    async def _refuse(
        self, scope: Scope, receive: Receive, send: Send, *, full: bool = False
    ) -> None:
        snapshot = self._runtime.machine.snapshot
        request_id = GuardedCall(scope, send, self._runtime).request_id
        body = refusal_body(snapshot, request_id=request_id, full=full)
        headers = {"Retry-After": retry_after(self._runtime)}
        status = HTTPStatus.SERVICE_UNAVAILABLE
        if scope["type"] == "websocket":
            await receive()
            await refuse_handshake(scope, send, status, body, headers)
        else:
            await send_json(scope, send, status, body, headers)

    async def _tell_of_job(
        self, scope: Scope, receive: Receive, send: Send, job_id: str | None
    ) -> None:
        call = GuardedCall(scope, JobAnswer(scope, send, self._runtime, job_id).send, self._runtime)
        call.asks_for_job = True
        call.job_id = job_id
        self._asking.add(call)
        try:
            await self._guarded(call, receive)
        finally:
            self._asking.discard(call)

    async def _guarded(self, call: GuardedCall, receive: Receive) -> None:
        self._calls.add(call)
        self._note_end()
        set_current_call(call)
        try:
            await self._run_application(call, receive)
        finally:
            self._calls.discard(call)
            self._note_end()
        if call.broken_off:
            raise Cutoff("the server failed in the middle of this response")

    async def _run_application(self, call: GuardedCall, receive: Receive) -> None:
        try:
            await self._app(call.scope, receive, call.send)
        except asyncio.CancelledError:
            if not call.taken_over:
                raise
        except Exception as exc:
            if not await call.application_raised(exc):
                raise
        await call.application_ended()


def _route_path(scope: Scope) -> str:
    path = str(scope.get("path", ""))
    root = str(scope.get("root_path", ""))
    if root and path.startswith(root):
        path = path[len(root) :]
    return path if len(path) <= 1 else path.rstrip("/")
