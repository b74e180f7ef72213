# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-omni-health project
"""The orchestrator with a health state: it moves the machine, and does what a move demands.

Data flows one way. Facts reach the machine (from the fault sink and from upstream's own
detection on this loop, from the supervisor on its thread); a move of the machine wakes one task
here, which brings the orchestrator in line with the snapshot: lost replicas leave their pools,
their requests are failed, and when the service is dead everything pending is.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import sys
from collections.abc import Callable, Coroutine
from functools import partial
from typing import Any

from vllm_omni.engine.duplex_orchestrator import DuplexOrchestrator
from vllm_omni.engine.health.closing import ReplicaCloser
from vllm_omni.engine.health.diffusion.channel import ping_of
from vllm_omni.engine.health.failed_messages import failure_of_one, note
from vllm_omni.engine.health.off_loop import call_soon
from vllm_omni.engine.health.output_bell import OutputBell
from vllm_omni.engine.health.output_readers import OutputReadersMixin
from vllm_omni.engine.health.remote import RemoteWatch
from vllm_omni.engine.health.told_queue import ToldQueue
from vllm_omni.engine.messages import EngineQueueMessage, ErrorMessage
from vllm_omni.engine.orchestrator import Orchestrator
from vllm_omni.health.faults.classify import fault_from_exception
from vllm_omni.health.faults.fault import Fault, FaultKind, process_lost
from vllm_omni.health.liveness.loops import BEAT_S
from vllm_omni.health.liveness.pings import LivenessMonitor
from vllm_omni.health.memory.preflight import when_ready
from vllm_omni.health.runtime import HealthRuntime, require
from vllm_omni.health.state.causes import ORCHESTRATOR_ENDED
from vllm_omni.health.state.machine import ReplicaState, State

logger = logging.getLogger(__name__)

_ENTERING = ("add_request", "streaming_update", "add_companion_request")
"""The messages that bring a request to its first stage."""


class HealthOrchestratorMixin(OutputReadersMixin):
    """What both orchestrators get. Lives on the orchestrator's loop, in its thread."""

    # Upstream's, used here.
    request_states: dict[str, Any]
    output_async_queue: Any
    _cfg_tracker: Any
    _membership: Any
    _remove_stage_replica_waiting: Callable[[int, int], None]
    _cleanup_request_ids: Callable[..., Coroutine[Any, Any, Any]]

    def __init__(
        self, request_async_queue: Any, output_async_queue: Any, *args: Any, **kwargs: Any
    ) -> None:
        self._health: HealthRuntime = require()
        bell = self._health.output_bell = OutputBell()
        noted = partial(note, runtime=self._health)
        output = ToldQueue(output_async_queue, before=noted, after=bell.ring)
        super().__init__(request_async_queue, output, *args, **kwargs)  # type: ignore[call-arg]
        self._wake = asyncio.Event()
        self._evicted: set[tuple[int, int]] = set()
        self._failed_all = False
        self._liveness = LivenessMonitor(
            self._health.machine,
            self._health.settings.hang_timeout_s,
            on_hang=self._hangs,
            replicas=self._health.supervisor.replica,
        )
        self._closer = ReplicaCloser(self._health)
        self._remote = RemoteWatch(
            self.stage_pools,
            self._health.settings.remote_timeout_s,
            is_local=lambda *key: self._health.supervisor.replica(*key) is not None,
            report=self._health.supervisor.report,
        )
        self._announced: dict[tuple[int, int], Any] = {}
        self._announce_replicas()
        if self._health.machine.snapshot.state is State.STARTING:
            # Raises, and with it the start fails, where that is wanted.
            when_ready(self._health.memory, self._health.settings.preflight)
            self._health.machine.started()

    def _announce_replicas(self) -> None:
        """Replicas that serve: those of the start, and any that registered since."""
        for stage_id, pool in enumerate(self.stage_pools):
            for replica_id in pool.live_replica_ids():
                key, client = (stage_id, replica_id), pool.clients[replica_id]
                if self._announced.get(key) is client:
                    continue
                self._announced[key] = client
                self._evicted.discard(key)
                self._health.supervisor.replica_ready(stage_id, replica_id)
                ping = ping_of(client)
                if ping is not None:
                    receive = partial(self._health.memory.receive, key)
                    self._liveness.watch(stage_id, replica_id, ping, on_answer=receive)

    # ---- hooks of upstream's run() ---------------------------------------------------------

    async def run(self) -> None:
        """Upstream's loop, woken by every move of the machine. Owns the tasks that close stages."""
        loop = asyncio.get_running_loop()
        # The machine calls from any thread; this loop may be closed by then.
        unsubscribe = self._health.machine.observe(lambda _move: call_soon(loop, self._wake.set))
        self._health.orchestrator_beat.start(loop)
        failure: Exception | None = None
        async with asyncio.TaskGroup() as self._tasks:
            self._closer.tasks = self._tasks
            try:
                await super().run()  # type: ignore[misc]
            except Exception as exc:
                # Raised in here it would come out wrapped in a group.
                failure = exc
            finally:
                self._health.orchestrator_beat.stop()
                unsubscribe()
        if failure is not None:
            raise failure

    def _orchestrator_fault(self, exc: BaseException | None) -> Fault:
        if exc is None or isinstance(exc, asyncio.CancelledError):
            # Something else has stopped the loop, such as an exception that is no Exception.
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
        try:
            return bool(await super()._dispatch_message(msg))  # type: ignore[misc]
        except Exception as exc:
            request_id = getattr(msg, "parent_id", None) or getattr(msg, "request_id", None)
            if not await self._fails_alone(request_id, 0, exc, entering=msg.type in _ENTERING):
                raise
            return True

    async def _handle_processed_outputs(
        self, stage_id: int, replica_id: int, outputs: list[Any]
    ) -> None:
        """Upstream's, one output at a time: what it raises for one is not the others'."""
        for output in outputs:
            try:
                await super()._handle_processed_outputs(stage_id, replica_id, [output])
            except Exception as exc:
                if not await self._fails_alone(output.request_id, stage_id, exc):
                    raise

    async def _forward_to_next_stage(
        self, req_id: str, src_stage_id: int, *args: Any, **kwargs: Any
    ) -> None:
        """Upstream's, which runs the next stage's input processor."""
        try:
            await super()._forward_to_next_stage(  # type: ignore[misc]
                req_id, src_stage_id, *args, **kwargs
            )
        except Exception as exc:
            if not await self._fails_alone(req_id, src_stage_id + 1, exc):
                raise

    async def _fails_alone(
        self, request_id: str | None, stage_id: int, exc: BaseException, *, entering: bool = False
    ) -> bool:
        """Fail the one request that ``exc`` was raised for; False if it says more than that.

        ``entering``: it was on its way into its first stage.
        """
        if request_id is None:
            return False
        request_id = self._cfg_tracker.get_parent_id(request_id) or request_id
        message = failure_of_one(exc, request_id, stage_id, self._health, entering=entering)
        if message is None:
            return False
        await self.output_async_queue.put(message)
        await self._cleanup_request_ids(
            [request_id, *self._cfg_tracker.cleanup_parent(request_id)],
            abort=True,
            release_owners=True,
        )
        return True

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
        if not self._health.supervisor.closing:
            self._health.machine.arise(ORCHESTRATOR_ENDED, self._orchestrator_fault(exc))
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
                self._health.error_budget.tick()
                self._wake.clear()
                self._announce_replicas()
                self._liveness.tick()
                self._remote.look()
                await self._align()
                self._reconcile_readers()
                woken = asyncio.ensure_future(self._wake.wait())
                try:
                    await asyncio.wait(
                        {shutdown, woken},
                        timeout=min(BEAT_S, self._liveness.tick_s),
                        return_when=asyncio.FIRST_COMPLETED,
                    )
                finally:
                    woken.cancel()
        finally:
            shutdown.cancel()
            self._liveness.close()
            if self._membership is not None:
                # Upstream tells its watch on other hosts to end once all tasks have ended, of
                # which that is one.
                self._membership._shutdown_event.set()

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

    def _hangs(self, fault: Fault) -> None:
        self._health.supervisor.report(fault)
        self._closer.ask_for_stacks(fault)

    async def _close_stages(self) -> None:
        """Close every stage client that is left, all at once, and wait for all of them."""
        for stage_id, pool in enumerate(self.stage_pools):
            for replica_id in pool.live_replica_ids():
                client = pool.clients[replica_id]
                pool.clients[replica_id] = None
                self._close(client, stage_id, replica_id, lost=False)
        await self._closer.all_closed()

    def _close(self, client: Any, stage_id: int, replica_id: int, *, lost: bool) -> None:
        self._liveness.forget(stage_id, replica_id)
        self._closer.close(client, stage_id, replica_id, lost=lost)

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
        client = pool.clients[replica_id]
        # Upstream's evict_replica() closes the client on this loop, which blocks for seconds.
        pool.clients[replica_id] = None
        self._remove_stage_replica_waiting(stage_id, replica_id)
        released = pool.release_replica_bindings(replica_id)
        bound = [request_id for request_id in released if request_id in self.request_states]
        self._close(client, stage_id, replica_id, lost=True)
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
        fault = fault or Fault(kind=FaultKind.ENGINE)
        state = self.request_states.get(request_id)
        # What the client's side knows a request by; a duplex session's by the session alone.
        for known_as in (request_id, getattr(state, "session_id", None)):
            if known_as is not None:
                self._health.request_failed(known_as, fault)
        await self.output_async_queue.put(
            ErrorMessage(
                error=fault.sentence,
                fatal=True,
                request_id=request_id,
                stage_id=fault.stage_id if fault.stage_id is not None else stage_id,
            )
        )


class HealthOrchestrator(HealthOrchestratorMixin, Orchestrator):
    """The turn-based orchestrator with a health state."""


class HealthDuplexOrchestrator(HealthOrchestratorMixin, DuplexOrchestrator):
    """The duplex orchestrator with a health state."""
