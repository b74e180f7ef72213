# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-omni-health project
"""The HTTP server's life: serve, notice why to end, end in order, within bounds.

Runs on the API server's main loop around upstream's own ``serve_http``, which keeps what it is
good at (sockets, TLS, header limits). What is ours is the order in which a server ends: stop
accepting, answer everyone, close the stages, stop serving, leave with the right status.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import threading
from collections.abc import AsyncIterator, Coroutine
from functools import partial
from typing import Any

from vllm_omni.entrypoints.health.http import client_errors
from vllm_omni.entrypoints.health.http.guard import RequestGuard
from vllm_omni.entrypoints.health.server import signals
from vllm_omni.entrypoints.health.server.exit import (
    end_now,
    end_process,
    note_exit,
    remove_socket_folder,
    state_exit,
)
from vllm_omni.health import seams
from vllm_omni.health.liveness import stacks
from vllm_omni.health.runtime import HealthRuntime, require
from vllm_omni.health.state.machine import State

logger = logging.getLogger(__name__)

_ANSWERED_S = 1.0
"""Bound for the last answers to be written before the stages are closed."""

_CONNECTIONS_S = 2
"""Bound for open connections to close once the server stops serving."""


class _Reasons:
    """What has happened to this server so far: signals, and the death of the service."""

    def __init__(self, runtime: HealthRuntime) -> None:
        self._runtime = runtime
        self._loop = asyncio.get_running_loop()
        self.signals: list[int] = []
        self.signalled = asyncio.Event()
        self.dead = asyncio.Event()

    def __enter__(self) -> _Reasons:
        for signum in signals.to_stop():
            self._loop.add_signal_handler(signum, self._on_signal, signum)
        self._unsubscribe = self._runtime.machine.observe(lambda _move: self._look_soon())
        self._look()
        return self

    def __exit__(self, *exc: object) -> None:
        self._unsubscribe()

    def _look_soon(self) -> None:
        with contextlib.suppress(RuntimeError):
            self._loop.call_soon_threadsafe(self._look)

    def _look(self) -> None:
        if self._runtime.machine.snapshot.state is State.DEAD:
            self.dead.set()

    def _on_signal(self, signum: int) -> None:
        at_once = signals.insists(signum, self.signals)
        self.signals.append(signum)
        if not at_once:
            self.signalled.set()
            return
        # The second one means now: no more answers, no more order.
        logger.error("[health] second signal: ending at once")
        self._runtime.supervisor.kill_all()
        remove_socket_folder()
        state_exit(self._runtime, 128 + signum)
        end_process(128 + signum)


async def _first_of(*events: asyncio.Event, timeout: float | None = None) -> None:
    waits = [asyncio.ensure_future(event.wait()) for event in events]
    try:
        await asyncio.wait(waits, timeout=timeout, return_when=asyncio.FIRST_COMPLETED)
    finally:
        for wait in waits:
            wait.cancel()


async def _settle(guard: RequestGuard, reasons: _Reasons, runtime: HealthRuntime) -> None:
    """Wait for a reason to end, then do all that clients are to see of it."""
    settings = runtime.settings
    await _first_of(reasons.signalled, reasons.dead)
    if not reasons.dead.is_set():
        logger.warning("[health] signal %d: no new requests from now on", reasons.signals[0])
        runtime.begin_shutdown()
        runtime.machine.drain()
        guard.dismiss_sessions()
        if settings.drain_timeout_s > 0:
            idle = asyncio.ensure_future(guard.all_done())
            dead = asyncio.ensure_future(reasons.dead.wait())
            await asyncio.wait(
                {idle, dead},
                timeout=settings.drain_timeout_s,
                return_when=asyncio.FIRST_COMPLETED,
            )
            idle.cancel()
            dead.cancel()
        if not reasons.dead.is_set():
            await guard.fail_all_by_shutdown()
            await _bounded(guard.idle(), _ANSWERED_S)
            return
    # The service is dead, from the start or by a fault during the drain. The orchestrator fails
    # the requests that it knows as well, but each of those messages goes through upstream's own
    # error handling, at milliseconds a request, and it cannot know the requests that are still
    # being prepared, or send anything when its thread is stuck.
    await guard.fail_all_by_fault()
    await asyncio.sleep(runtime.machine.settles_in())
    note_exit(runtime)
    if settings.policy == "hold":
        logger.error("[health] the service is dead; holding with 503 until told to stop")
        await reasons.signalled.wait()
    else:
        await _first_of(reasons.signalled, timeout=settings.exit_grace_s)
    await guard.fail_all_by_fault()
    await _bounded(guard.idle(), _ANSWERED_S)


async def _bounded(work: Coroutine[Any, Any, Any], timeout: float) -> bool:
    """Await ``work`` for up to ``timeout`` seconds; whether it ended."""
    try:
        async with asyncio.timeout(timeout):
            await work
    except TimeoutError:
        return False
    return True


async def _stop_engine(engine_client: Any, runtime: HealthRuntime) -> None:
    """Close the engine, off the loop; whatever does not close in time is killed."""
    runtime.begin_shutdown()
    runtime.supervisor.all_closing()
    loop = asyncio.get_running_loop()
    done = asyncio.Event()

    def shut_down() -> None:
        try:
            engine_client.shutdown()
        except Exception:
            logger.exception("[health] closing the engine failed")
        with contextlib.suppress(RuntimeError):
            loop.call_soon_threadsafe(done.set)

    # A daemon thread: one that hangs must not be joined by the interpreter's exit.
    threading.Thread(target=shut_down, name="health-stop-engine", daemon=True).start()
    if runtime.thread_stuck():
        logger.error("[health] not waiting for a thread that is stuck to close the engine")
    # What follows needs a part of the allowance as well.
    elif not await _bounded(done.wait(), max(0.0, runtime.shutdown_left() - _CONNECTIONS_S)):
        logger.error(
            "[health] the engine did not close in time (shutdown_timeout_s=%g)",
            runtime.settings.shutdown_timeout_s,
        )
        threading.Thread(target=stacks.log_own, name="health-own-stacks", daemon=True).start()
    killed = runtime.supervisor.kill_all()
    if killed:
        logger.error("[health] killed stage processes that were left: %s", killed)


async def serve_http(app: Any, sock: Any, *args: Any, **kwargs: Any) -> Coroutine[Any, Any, None]:
    """Replaces the name that upstream's API server serves its application with.

    Returns, as upstream's does, an awaitable with nothing left to do.
    """
    runtime = require()
    client_errors.observe(app)
    guard = RequestGuard(app, runtime, max_requests=app.state.args.max_num_queued_reqs)
    guard.book.keep(app.state.engine_client)
    kwargs.setdefault("timeout_graceful_shutdown", _CONNECTIONS_S)
    upstream_serve_http = seams.original("vllm_omni.entrypoints.openai.api_server:serve_http")
    async with _beating(app, runtime), asyncio.TaskGroup() as group:
        serving = group.create_task(
            _serve(partial(upstream_serve_http, guard, sock, *args, **kwargs)),
            name="health-serve-http",
        )
        # Up to its first wait upstream installs signal handlers, which ours then replace.
        await asyncio.sleep(0)
        with _Reasons(runtime) as reasons:
            ending = group.create_task(_settle(guard, reasons, runtime), name="health-ending")
            await asyncio.wait({serving, ending}, return_when=asyncio.FIRST_COMPLETED)
            if serving.done():
                # The listening socket failed, or something else told uvicorn to stop.
                ending.cancel()
            else:
                await _stop_engine(app.state.engine_client, runtime)
                seams.assign(app.state.server, should_exit=True)
                await serving
    if runtime.thread_stuck():
        # What upstream does from here on waits for that thread, as does the interpreter's end.
        end_now(runtime)
    return _nothing()


@contextlib.asynccontextmanager
async def _beating(app: Any, runtime: HealthRuntime) -> AsyncIterator[None]:
    """This loop says that it turns, and that the server listens, of which uvicorn tells no one."""

    def look() -> None:
        if getattr(getattr(app.state, "server", None), "started", False):
            runtime.listening()

    runtime.api_beat.start(asyncio.get_running_loop(), look)
    try:
        yield
    finally:
        runtime.api_beat.stop()


async def _serve(start: Any) -> None:
    await (await start())


async def _nothing() -> None:
    return None
