# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-omni-health project
"""A diffusion engine that ends with its first fatal fault and says which it was.

Upstream's engine turns every exception of a forward pass into an error output and serves on, in
the server process (inline) as in a process of its own. This one tells a refused request from a
replica that cannot be trusted any more (faults.py). After a fatal fault it executes
nothing, answers nothing and waits to be closed: requests are failed by the orchestrator, which
knows all of them and why.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import logging
import os
import threading
import time
from collections.abc import AsyncGenerator, Callable, Iterator
from contextvars import ContextVar
from typing import Any

from vllm_omni.diffusion.data import DiffusionOutput
from vllm_omni.engine.health.device_memory import memory_figures
from vllm_omni.engine.health.diffusion.faults import (
    envelope,
    fault_of,
    host_fault_of,
    raise_envelope,
    refusal,
)
from vllm_omni.engine.health.diffusion.progress import last_step, watch_steps
from vllm_omni.engine.health.diffusion.steps import open_envelopes, type_failures
from vllm_omni.engine.health.envelope import WorkerError
from vllm_omni.engine.health.stage_memory import report_regularly
from vllm_omni.health import seams
from vllm_omni.health.faults.fault import Fault, FaultError, FaultKind
from vllm_omni.health.processes.watched import worker_lost
from vllm_omni.health.runtime import HealthRuntime, current
from vllm_omni.health.state.values import ReplicaKey

from vllm_omni_health.settings.sources import SettingsError

logger = logging.getLogger(__name__)

replica_being_started: ContextVar[ReplicaKey | None] = ContextVar(
    "replica_being_started", default=None
)
"""Upstream does not hand stage and replica down to where processes and engines are made."""

Outlet = Callable[[Fault], None]
"""Where an engine states its fault; called on any thread."""

_process_outlet: Outlet | None = None

_EXECUTE = frozenset({"execute_model", "execute_model_batch", "execute_stepwise"})
"""Worker calls that run a forward pass. All others are control calls: whoever made one is told
what went wrong, and only what the table names as fatal says anything about the replica."""

_CLOSE_S = 1.0
"""How long the end of a step is awaited when the engine is closed. A forward pass cannot be
interrupted, and who closes an engine that is at work ends the process next."""


class _EngineEnded(BaseException):
    """Ends the engine's busy loop. Not an Exception: upstream turns those into answers."""


def set_process_outlet(outlet: Outlet) -> None:
    """Say where the engine of this stage process states its fault."""
    global _process_outlet
    _process_outlet = outlet


def resolve_engine_class(config: Any) -> type[Any]:
    """Replaces upstream's: the same class, with health."""
    original = seams.original(
        "vllm_omni.diffusion.diffusion_engine:DiffusionEngine.resolve_engine_class"
    )
    return _with_health(original(config))


@functools.cache
def _with_health(engine_class: type[Any]) -> type[Any]:
    return type(f"Health{engine_class.__name__}", (HealthEngineMixin, engine_class), {})


class HealthEngineMixin:
    """What every diffusion engine gets. Its busy loop has a thread of its own."""

    # Upstream's, used here.
    executor: Any
    execute_fn: Callable[[Any], Any]
    worker_thread: threading.Thread | None
    stop_event: threading.Event | None
    _cv: threading.Condition
    _loop_started: bool
    _scheduling_paused: bool
    scheduler: Any
    _closed: bool
    _fail_pending_rpcs: Callable[[BaseException], None]

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        self.fault: Fault | None = None
        self._closing = False
        self._at_work = 0
        self._moved_at = time.monotonic()
        self._workers: tuple[Any, ...] = ()
        self._end_reports: Callable[[], None] = lambda: None
        self._outlet = _outlet()
        super().__init__(*args, **kwargs)

    # ---- what upstream's constructor and busy loop call --------------------------------------

    def _init_executor(self, od_config: Any) -> None:
        super()._init_executor(od_config)  # type: ignore[misc]
        executor = self.executor
        # Shadowed on the instance: an executor's own methods go through these as well, and the
        # executor's class is for the deployment to choose.
        call = functools.partial(self._call_workers, executor.collective_rpc)
        seams.assign(executor, collective_rpc=call)
        dequeue = getattr(executor, "_dequeue_one_with_failure_polling", None)
        if dequeue is not None:
            raising = functools.partial(_dequeue, dequeue)
            seams.assign(executor, _dequeue_one_with_failure_polling=raising)
        self._workers = tuple(getattr(executor, "_processes", ()))
        # Only an executor without worker processes has one; theirs watch their steps themselves.
        watch_steps(getattr(executor, "driver_worker", None))
        if not self._workers:
            # The worker is in this process.
            self._end_reports = report_regularly(getattr(executor, "driver_worker", None))
        executor.register_failure_callback(self._executor_failed)

    def _init_execute_fn(self) -> None:
        super()._init_execute_fn()  # type: ignore[misc]
        self.execute_fn = functools.partial(self._execute, self.execute_fn)

    def _busy_loop(self) -> None:
        try:
            super()._busy_loop()  # type: ignore[misc]
        except _EngineEnded:
            logger.error("[health] the diffusion engine has ended")
        except BaseException as exc:
            # The loop itself failed. Upstream would leave requests waiting for a thread that is
            # gone.
            self._state(fault_of(exc).as_fatal())
        if self.fault is not None:
            self._fail_pending_rpcs(FaultError(self.fault))

    def _fail_engine(self, exc: Exception) -> None:
        """Upstream gives up for a reason of its own, such as a scheduler that fails."""
        if self._closing or not self._loop_started:
            super()._fail_engine(exc)  # type: ignore[misc]
            return
        self._state(fault_of(exc).as_fatal())
        if threading.current_thread() is self.worker_thread:
            raise _EngineEnded from exc

    def _prepare_request_for_admission(self, request: Any) -> Any:
        """Upstream's preprocessing and validation; on the host, before anything is queued."""
        try:
            return super()._prepare_request_for_admission(request)  # type: ignore[misc]
        except Exception as exc:
            client_error = None if host_fault_of(exc).fatal else refusal(exc)
            if client_error is None or client_error is exc:
                raise
            raise client_error from exc

    async def step_streaming(self, request: Any) -> AsyncGenerator[Any, None]:
        """Upstream's: admission, outputs, post-processing. On the event loop."""
        streaming = super().step_streaming(request)  # type: ignore[misc]
        async with contextlib.aclosing(streaming) as outputs:
            try:
                async for output in outputs:
                    yield output
            except Exception as exc:
                fault = host_fault_of(exc)
                if self.fault is None and (not fault.fatal or self._closing):
                    raise
                if self.fault is None:
                    self._state(fault)
                # The orchestrator answers, with the reason; an answer of this request's own
                # would be in a race with that.
                await asyncio.Event().wait()

    def close(self) -> None:
        """Upstream's, bounded: an engine that is at work is not waited for."""
        self._closing = True
        self._end_reports()
        if self._stop_busy_loop():
            super().close()  # type: ignore[misc]
        else:
            logger.warning("[health] closed the diffusion engine in the middle of a forward pass")

    # ---- liveness ----------------------------------------------------------------------------

    @contextlib.contextmanager
    def _work(self) -> Iterator[None]:
        self._moved_at = time.monotonic()
        self._at_work += 1
        try:
            yield
        finally:
            self._at_work -= 1
            self._moved_at = time.monotonic()

    def _process_aborts_queue(self) -> None:
        """Upstream's, called at every turn of the busy loop: it turns."""
        self._moved_at = time.monotonic()
        super()._process_aborts_queue()  # type: ignore[misc]

    def silent_s(self) -> float:
        """For how long the engine has had work and got nowhere, in seconds. Any thread."""
        now = time.monotonic()
        waiting = self.scheduler.has_requests() and not self._scheduling_paused
        if not self._at_work and not waiting:
            self._moved_at = now
        return max(0.0, now - max(self._moved_at, last_step()))

    # ---- faults ------------------------------------------------------------------------------

    def _call_workers(
        self, call: Callable[..., Any], method: str, *args: Any, **kwargs: Any
    ) -> Any:
        """``collective_rpc`` of the executor, on the busy loop's thread or before there is one."""
        forward = method in _EXECUTE
        if forward:
            type_failures(getattr(self.executor, "driver_worker", None), _envelope)
        try:
            with self._work():
                answer = call(method, *args, **kwargs)
        except Exception as exc:
            if self._closing:
                raise
            fault = worker_lost(fault_of(exc), enumerate(self._workers))
            if fault.fatal:
                if forward or fault.kind is not FaultKind.ENGINE:
                    self._state(fault)
                raise
            if not forward:
                raise
            client_error = refusal(exc)
            if client_error is None:
                raise envelope(exc, fault) from exc
            if method == "execute_model" and kwargs.get("unique_reply_rank") is not None:
                # Upstream makes a text of an exception here, and with it 500 of a 4xx.
                return DiffusionOutput.from_exception(client_error)
            if client_error is exc:
                raise
            raise client_error from exc
        fatal = open_envelopes(answer) if forward else None
        if fatal is not None and not self._closing:
            self._state(worker_lost(fatal, enumerate(self._workers)))
        return answer

    def _execute(self, execute: Callable[[Any], Any], scheduled: Any) -> Any:
        """One step, or one batch of requests; never returns after a fatal fault."""
        try:
            with self._work():
                output = execute(scheduled)
        except Exception as exc:
            if self.fault is None and not self._closing:
                fault = worker_lost(fault_of(exc), enumerate(self._workers))
                if fault.fatal:
                    self._state(fault)
            self._end_after_fault(exc)
            raise
        self._end_after_fault(None)
        return output

    def _end_after_fault(self, exc: Exception | None) -> None:
        if self.fault is None:
            return
        if self._loop_started:
            raise _EngineEnded from exc
        # The warm-up at the start, where an exception is what the caller expects.
        raise FaultError(self.fault) from exc

    def _executor_failed(self) -> None:
        """Called by the executor when it has seen its end; by itself it knows no reason."""
        lost = worker_lost(Fault(kind=FaultKind.ENGINE), enumerate(self._workers))
        if lost.kind is FaultKind.PROCESS_LOST and not self._closing:
            self._state(lost)

    def _state(self, fault: Fault) -> None:
        """The engine cannot go on: say so. The first fault is the one that ends it."""
        fault = fault.with_context(role="diffusion engine", pid=os.getpid())
        if not self._workers:
            # The worker is in here.
            fault = fault.with_context(memory=memory_figures())
        if self.fault is None:
            self.fault = fault
        self._outlet(fault)

    # ---- closing -----------------------------------------------------------------------------

    def _stop_busy_loop(self) -> bool:
        """Make the busy loop end; whether it has. Workers at work are killed for it."""
        if self.fault is not None:
            self._kill_workers()
        thread = getattr(self, "worker_thread", None)
        if thread is None or not thread.is_alive():
            return True
        with self._cv:
            if self.stop_event is not None:
                self.stop_event.set()
            self._cv.notify_all()
        thread.join(_CLOSE_S)
        if thread.is_alive() and self._workers:
            # Upstream's own watch on its workers is not to take this for a fault.
            seams.assign(self.executor, _closed=True)
            self._kill_workers()
            # Fails the call that the loop waits for.
            self.executor.shutdown()
            thread.join(_CLOSE_S)
        return not thread.is_alive()

    def _kill_workers(self) -> None:
        for worker in self._workers:
            worker.kill()


def _envelope(exc: Exception) -> WorkerError:
    return envelope(exc, fault_of(exc))


def _dequeue(dequeue: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """A worker's answer; what it carries of ours is raised before upstream makes text of it."""
    answer = dequeue(*args, **kwargs)
    raise_envelope(answer)
    return answer


def _outlet() -> Outlet:
    """Where the engine that is being made states its fault."""
    runtime = current()
    key = replica_being_started.get()
    if runtime is None or key is None:
        return _process_outlet or _log_only
    return _inline_outlet(runtime, key)


def _inline_outlet(runtime: HealthRuntime, key: ReplicaKey) -> Outlet:
    """The engine is about to run in the server process."""
    stage_id, replica_id = key
    policy = runtime.settings.policy
    if policy != "exit":
        raise SettingsError(
            f"policy {policy}: stage {stage_id} is an inline diffusion stage, which runs in the "
            "server process and cannot be closed apart from it; only policy exit is possible"
        )
    runtime.supervisor.watch_inline(stage_id, replica_id)

    def state(fault: Fault) -> None:
        runtime.supervisor.report(fault.with_context(stage_id=stage_id, replica_id=replica_id))

    return state


def _log_only(fault: Fault) -> None:
    logger.error("[health] %s", fault.log_line())
