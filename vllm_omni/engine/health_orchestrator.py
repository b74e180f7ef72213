"""The orchestrator with a health state: it moves the machine, and does what a move demands.

Data flows one way. Facts reach the machine (from the fault sink and from upstream's own
detection on this loop, from the supervisor on its thread); a move of the machine wakes one task
here, which brings the orchestrator in line with the snapshot: lost replicas leave their pools,
their requests are failed, and when the service is dead everything pending is.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import logging
import os
import sys
import threading
from collections.abc import Callable, Coroutine
from typing import Any

from vllm_omni.engine.duplex_orchestrator import DuplexOrchestrator
from vllm_omni.engine.liveness import PING, LivenessMonitor
from vllm_omni.engine.messages import EngineQueueMessage, ErrorMessage
from vllm_omni.engine.orchestrator import Orchestrator
from vllm_omni.engine.output_bell import OutputBell, RingingQueue
from vllm_omni.health.classify import fault_from_exception
from vllm_omni.health.faults import Fault, FaultKind, process_lost
from vllm_omni.health.machine import ReplicaState, State
from vllm_omni.health.memory.preflight import when_ready
from vllm_omni.health.runtime import HealthRuntime, require

logger = logging.getLogger(__name__)

_BEAT_S = 1.0
"""How often an idle loop says that it turns; a fraction of any sensible ``loop_stall_s``."""

_CLIENT_CLOSE_S = 10.0
"""Bound for one stage client's own shutdown; after it the replica's process group is killed.
Upstream allows its processes 5 s after SIGTERM before it kills them itself."""


class HealthOrchestratorMixin:
    """What both orchestrators get. Lives on the orchestrator's loop, in its thread."""

    # Upstream's, used here.
    stage_pools: list[Any]
    request_states: dict[str, Any]
    output_async_queue: Any
    _shutdown_event: asyncio.Event
    _cfg_tracker: Any
    _remove_stage_replica_waiting: Callable[[int, int], None]
    _cleanup_request_ids: Callable[..., Coroutine[Any, Any, Any]]

    def __init__(
        self, request_async_queue: Any, output_async_queue: Any, *args: Any, **kwargs: Any
    ) -> None:
        self._health: HealthRuntime = require()
        bell = self._health.output_bell = OutputBell()
        output = RingingQueue(output_async_queue, bell)
        super().__init__(request_async_queue, output, *args, **kwargs)  # type: ignore[call-arg]
        self._wake = asyncio.Event()
        self._evicted: set[tuple[int, int]] = set()
        self._closers: set[asyncio.Task[None]] = set()
        self._failed_all = False
        self._liveness = LivenessMonitor(
            self._health.machine,
            self._health.settings.hang_timeout_s,
            on_hang=self._health.supervisor.report,
            on_answer=self._health.memory.receive,
        )
        self._announce_replicas()

    def _announce_replicas(self) -> None:
        machine = self._health.machine
        for stage_id, pool in enumerate(self.stage_pools):
            for replica_id in pool.live_replica_ids():
                self._health.supervisor.replica_ready(stage_id, replica_id)
                call_utility = getattr(pool.clients[replica_id], "call_utility_async", None)
                if call_utility is not None:
                    ping = functools.partial(call_utility, PING)
                    self._liveness.watch(stage_id, replica_id, ping)
        if machine.snapshot.state is State.STARTING:
            # Raises, and with it the start fails, where that is wanted.
            when_ready(self._health.memory, self._health.settings.preflight)
            machine.started()

    # ---- hooks of upstream's run() ---------------------------------------------------------

    async def run(self) -> None:
        """Upstream's loop, woken by every move of the machine."""
        loop = asyncio.get_running_loop()
        # The machine calls from any thread; this loop may be closed by then.
        unsubscribe = self._health.machine.observe(lambda _move: _call_soon(loop, self._wake.set))
        try:
            await super().run()  # type: ignore[misc]
        finally:
            unsubscribe()

    def _orchestrator_fault(self, exc: BaseException | None) -> Fault:
        if exc is None:
            return Fault(kind=FaultKind.ORCHESTRATOR, role="orchestrator", pid=os.getpid())
        fault = fault_from_exception(exc, role="orchestrator", pid=os.getpid())
        # An inline stage's engine runs on this loop's side: its OOM is an OOM here as well.
        return fault.with_kind(FaultKind.ORCHESTRATOR) if fault.kind is FaultKind.ENGINE else fault

    def _background_tasks(self) -> list[Coroutine[Any, Any, None]]:
        return [*super()._background_tasks(), self._follow_health()]  # type: ignore[misc]

    async def _dispatch_message(self, msg: EngineQueueMessage) -> bool:
        if msg.type == "shutdown":
            self._health.supervisor.all_closing()
        elif self._failed_all:
            request_id = getattr(msg, "request_id", None)
            if request_id is not None:
                # It passed admission before the service died and arrives after the sweep.
                await self._send_failure(request_id, None, self._health.machine.reason)
                return True
        return await super()._dispatch_message(msg)  # type: ignore[misc]

    async def _handle_dead_replica(
        self, stage_id: int, replica_id: int, error: BaseException
    ) -> None:
        """Upstream noticed a dead engine on one of its own calls."""
        del error
        if (stage_id, replica_id) in self._evicted:
            return
        # The cause is on its way from the process itself or from its pidfd.
        await self._until_lost(stage_id, replica_id)
        if not self._is_lost(stage_id, replica_id):
            # An end that neither can see, such as that of a replica on another host.
            fault = process_lost(None, stage_id=stage_id, replica_id=replica_id)
            self._health.supervisor.report(fault)
        await self._align()

    async def _shutdown_extensions(self) -> None:
        """Upstream's last hook before it would close the stages one after another.

        The loop is ending. If nobody told it to, the service is dead, and the exception that
        ended it is the one being handled.
        """
        exc = sys.exception()
        if not self._health.supervisor.closing and not isinstance(exc, asyncio.CancelledError):
            self._health.machine.orchestrator_ended(self._orchestrator_fault(exc))
        await super()._shutdown_extensions()  # type: ignore[misc]
        self._health.supervisor.all_closing()
        await self._close_stages()
        # Upstream's serial, blocking closing has nothing left to do.
        self._stages_shutdown = True

    # ---- the task that follows the machine ---------------------------------------------------

    async def _follow_health(self) -> None:
        shutdown = asyncio.ensure_future(self._shutdown_event.wait())
        try:
            while not shutdown.done():
                self._health.orchestrator_beat()
                self._wake.clear()
                self._liveness.tick()
                await self._align()
                woken = asyncio.ensure_future(self._wake.wait())
                try:
                    await asyncio.wait(
                        {shutdown, woken},
                        timeout=min(_BEAT_S, self._liveness.tick_s),
                        return_when=asyncio.FIRST_COMPLETED,
                    )
                finally:
                    woken.cancel()
        finally:
            shutdown.cancel()
            self._liveness.close()

    async def _align(self) -> None:
        """Bring pools and requests in line with the machine; does nothing twice."""
        snapshot = self._health.machine.snapshot
        for stage in snapshot.stages:
            for replica in stage.replicas:
                key = (stage.stage_id, replica.replica_id)
                if replica.state is ReplicaState.LOST and key not in self._evicted:
                    self._evicted.add(key)
                    await self._evict(*key)
        if snapshot.state is State.DEAD and not self._failed_all:
            self._failed_all = True
            await self._fail_requests(list(self.request_states), None)
            self._health.supervisor.all_closing()
            await self._close_stages()

    def _is_lost(self, stage_id: int, replica_id: int) -> bool:
        return self._health.machine.replica_state(stage_id, replica_id) is ReplicaState.LOST

    async def _until_lost(self, stage_id: int, replica_id: int) -> None:
        """Give the cause of a loss, which is under way, up to ``settle_s`` to arrive."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(self._health.settings.settle_s):
                while not self._is_lost(stage_id, replica_id):
                    self._wake.clear()
                    await self._wake.wait()

    async def _evict(self, stage_id: int, replica_id: int) -> None:
        """Take a lost replica out of its pool and fail the requests bound to it."""
        pool = self.stage_pools[stage_id]
        if replica_id >= len(pool.clients) or pool.clients[replica_id] is None:
            return
        bound = [
            request_id
            for request_id in self.request_states
            if pool.get_bound_replica_id(request_id) == replica_id
        ]
        client = pool.clients[replica_id]
        # Upstream's evict_replica() closes the client on this loop, which blocks for seconds.
        pool.clients[replica_id] = None
        self._remove_stage_replica_waiting(stage_id, replica_id)
        self._own(self._close_client(client, stage_id, replica_id, lost=True))
        await self._fail_requests(bound, stage_id)

    async def _fail_requests(self, request_ids: list[str], stage_id: int | None) -> None:
        """Answer these requests with the fault, all before any of them is cleaned up."""
        if not request_ids:
            return
        fault = self._health.fault_of_stage(stage_id)
        for request_id in request_ids:
            await self._send_failure(request_id, stage_id, fault)
        logger.error("[health] failed %d pending request(s)", len(request_ids))
        cleanup = [
            related
            for request_id in request_ids
            for related in (request_id, *self._cfg_tracker.cleanup_parent(request_id))
        ]
        await self._cleanup_request_ids(cleanup, abort=True, release_owners=True)

    async def _send_failure(
        self, request_id: str, stage_id: int | None, fault: Fault | None
    ) -> None:
        kind = fault.kind if fault is not None else FaultKind.ENGINE
        await self.output_async_queue.put(
            ErrorMessage(
                error=kind.sentence,
                fatal=True,
                request_id=request_id,
                stage_id=stage_id if fault is None else fault.stage_id,
            )
        )

    # ---- closing -----------------------------------------------------------------------------

    def _own(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.create_task(work, name="health-close-client")
        self._closers.add(task)
        task.add_done_callback(self._closers.discard)

    async def _close_stages(self) -> None:
        """Close every stage client that is left, all at once, and wait for all of them."""
        for stage_id, pool in enumerate(self.stage_pools):
            for replica_id in pool.live_replica_ids():
                client = pool.clients[replica_id]
                pool.clients[replica_id] = None
                self._own(self._close_client(client, stage_id, replica_id, lost=False))
        if self._closers:
            await asyncio.wait(set(self._closers))

    async def _close_client(
        self, client: Any, stage_id: int, replica_id: int, *, lost: bool
    ) -> None:
        """Shut one stage client down off the loop, bounded; end its processes if it cannot.

        ``lost``: the replica is not trusted any more, and its process group is killed.
        """
        supervisor = self._health.supervisor
        supervisor.replica_closing(stage_id, replica_id)
        self._liveness.forget(stage_id, replica_id)
        # Tells upstream's own monitor threads that what they see now is wanted.
        if hasattr(client, "_shutting_down"):
            client._shutting_down = True
        if lost:
            # Not before the reason has settled: its processes may be stating it right now.
            await asyncio.sleep(self._health.settings.settle_s)
            supervisor.kill_replica(stage_id, replica_id)
        done = _in_thread(client.shutdown, f"close-stage{stage_id}-replica{replica_id}")
        try:
            async with asyncio.timeout(_CLIENT_CLOSE_S):
                await done
        except TimeoutError:
            logger.error(
                "[health] stage %d replica %d did not close within %.0f s; killing it",
                stage_id,
                replica_id,
                _CLIENT_CLOSE_S,
            )
        except Exception:
            logger.exception("[health] closing stage %d replica %d failed", stage_id, replica_id)
        finally:
            supervisor.kill_replica(stage_id, replica_id)


def _call_soon(loop: asyncio.AbstractEventLoop, callback: Callable[[], Any]) -> None:
    with contextlib.suppress(RuntimeError):
        loop.call_soon_threadsafe(callback)


def _in_thread(work: Callable[[], None], name: str) -> asyncio.Future[None]:
    """Run blocking work on a daemon thread of its own.

    Not on the loop's executor: its threads are joined when the loop and the interpreter end,
    and work that never returns would then hold both up.
    """
    loop = asyncio.get_running_loop()
    future: asyncio.Future[None] = loop.create_future()

    def finish(exc: BaseException | None) -> None:
        if future.done():
            return
        if exc is None:
            future.set_result(None)
        else:
            future.set_exception(exc)

    def run() -> None:
        try:
            work()
        except Exception as exc:
            _call_soon(loop, functools.partial(finish, exc))
        else:
            _call_soon(loop, functools.partial(finish, None))

    threading.Thread(target=run, name=name, daemon=True).start()
    return future


class HealthOrchestrator(HealthOrchestratorMixin, Orchestrator):
    """The turn-based orchestrator with a health state."""


class HealthDuplexOrchestrator(HealthOrchestratorMixin, DuplexOrchestrator):
    """The duplex orchestrator with a health state."""
