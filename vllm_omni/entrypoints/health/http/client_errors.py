# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-omni-health project
"""What the application raises for a request that only its client can put right.

Upstream's routes turn much of it into an error of the server's. Who is to blame is read from the
exception's class, and from where it was raised, never from its text.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterator
from traceback import walk_tb
from typing import Any

import jinja2
from fastapi import HTTPException, Request
from fastapi.dependencies.utils import solve_dependencies
from starlette.responses import Response
from vllm_omni.engine.health.admission import UNFIT, refusal_of, unfit
from vllm_omni.entrypoints.health.http.call import GuardedCall, current_call
from vllm_omni.health import seams
from vllm_omni.health.faults.refusals import Refusal

_MISREAD = (LookupError, AttributeError, AssertionError, ArithmeticError)
"""What upstream's validators raise for a body of another shape than they expect."""

_UNREADABLE = Refusal("The body of the request does not have the form that this route expects.")

Handler = Callable[[Request, Exception], Awaitable[Response]]


def observe(app: Any) -> None:
    """Let the application's handlers of exceptions tell the call that each exception belongs to.

    Before it has served anything. What they answer is put right on its way out.
    """
    # Upstream's server wraps it in something that passes reads on, and nothing else.
    app = app.build_middleware_stack.__self__
    for kind in (HTTPException, Exception):
        handler = app.exception_handlers.get(kind)
        if handler is not None:
            app.add_exception_handler(kind, _telling(handler))
    # A library of upstream's has built it already, with the handlers that there were.
    seams.assign(app, middleware_stack=app.build_middleware_stack())


def _telling(handler: Handler) -> Handler:
    async def tell(request: Request, exc: Exception) -> Response:
        call = current_call()
        if call is not None and call.refused is None:
            call.refused = _refusal(exc, call)
        return await handler(request, exc)

    return tell


def _refusal(exc: BaseException, call: GuardedCall) -> Refusal | None:
    for one in _causes(exc):
        refusal = refusal_of(one)
        if refusal is not None:
            return refusal
        # Once the engine has a request for the call, these may have any reason.
        if not call.engine_ids:
            if isinstance(one, (*UNFIT, jinja2.TemplateError)):
                return unfit(one)
            if isinstance(one, _MISREAD) and _raised_in(one, solve_dependencies):
                return _UNREADABLE
    return None


def _causes(exc: BaseException | None) -> Iterator[BaseException]:
    """The exception, and, of an error that a route made of another, what it made it of."""
    while exc is not None:
        yield exc
        exc = (exc.__cause__ or exc.__context__) if isinstance(exc, HTTPException) else None


def _raised_in(exc: BaseException, function: Callable[..., Any]) -> bool:
    """Whether ``function`` was at work then."""
    frames = walk_tb(exc.__traceback__)
    return any(frame.f_code is getattr(function, "__code__", None) for frame, _ in frames)
