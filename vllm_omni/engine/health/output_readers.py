# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-omni-health project
"""Outputs of all stages: one reader a replica, which sleeps until there is something to read.

Upstream has readers like these for AR stages alone, looks at diffusion stages every millisecond,
and makes a task for every single output. What happens to an output afterwards is upstream's.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Callable, Coroutine, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

import zmq
from vllm.v1.engine.exceptions import EngineDeadError
from vllm_omni.diffusion.data import is_diffusion_request_started_output
from vllm_omni.engine.health.told_queue import ToldQueue
from vllm_omni.health import seams
from vllm_omni.health.state.values import ReplicaKey

logger = logging.getLogger(__name__)

READY_LIMIT = 1024
"""Batches of output that wait to be routed. A reader that finds no room stops reading, and what
its replica sends then waits in the socket, and at last in the replica."""

_EMPTY_PAUSE_S = 0.001
"""Pause after an empty batch. A client that waits returns none; one that only looks does, and
would otherwise keep its loop busy. Upstream's cadence."""


@dataclass(frozen=True)
class Output:
    """What a reader hands on."""

    kind: Literal["llm", "diffusion", "error", "end"]
    key: ReplicaKey = (-1, -1)
    payload: Any = None


class OutputReaders:
    """The reading tasks, one for each replica that is available. On the orchestrator's loop."""

    def __init__(
        self, pools: list[Any], ready: asyncio.Queue[Output], group: asyncio.TaskGroup
    ) -> None:
        self._pools = pools
        self._ready = ready
        self._group = group
        self._readers: dict[ReplicaKey, tuple[asyncio.Task[None], Any]] = {}

    def reconcile(self) -> None:
        """Have a reader for each available replica and for no other.

        A reader that has ended has handed on why; it is replaced when its replica is.
        """
        wanted = {
            (stage_id, replica_id): pool.clients[replica_id]
            for stage_id, pool in enumerate(self._pools)
            for replica_id in pool.available_replica_ids()
        }
        for key, (task, client) in list(self._readers.items()):
            if wanted.get(key) is not client:
                del self._readers[key]
                task.cancel()
        for key, client in wanted.items():
            if key not in self._readers:
                name = f"health-reader-stage{key[0]}-replica{key[1]}"
                self._readers[key] = (
                    self._group.create_task(self._read(key, client), name=name),
                    client,
                )

    def close(self) -> None:
        """End all readers."""
        for task, _ in self._readers.values():
            task.cancel()
        self._readers.clear()

    async def _read(self, key: ReplicaKey, client: Any) -> None:
        diffusion = client.stage_type == "diffusion"
        try:
            await (self._read_diffusion if diffusion else self._read_llm)(key, client)
        except Exception as exc:
            await self._ready.put(Output("error", key, exc))

    async def _read_llm(self, key: ReplicaKey, client: Any) -> None:
        while True:
            batch = await client.get_output_async()
            if batch.outputs or batch.scheduler_stats is not None or batch.finished_requests:
                await self._ready.put(Output("llm", key, batch))
            else:
                await asyncio.sleep(_EMPTY_PAUSE_S)

    async def _read_diffusion(self, key: ReplicaKey, client: Any) -> None:
        stage_id, replica_id = key
        with _told_of_output(client) as told:
            while True:
                told.clear()
                output = self._pools[stage_id].poll_diffusion_output(replica_id)
                if output is not None:
                    await self._ready.put(Output("diffusion", key, output))
                else:
                    await told.wait()


@contextlib.contextmanager
def _told_of_output(client: Any) -> Iterator[asyncio.Event]:
    """An event that is set whenever a diffusion client may have something new.

    Output of a replica in a process of its own comes by a socket, which other calls read from
    as well, and ends in a queue; that of an inline one is put into the queue on this loop. ZMQ's
    descriptor tells of changes only, so that whoever is told must read until nothing is left.
    """
    told = asyncio.Event()
    queue = client._output_queue
    socket = getattr(client, "_response_socket", None)
    with contextlib.ExitStack() as stack:
        seams.assign(client, _output_queue=ToldQueue(queue, after=told.set))
        stack.callback(seams.assign, client, _output_queue=queue)
        if socket is not None:
            loop = asyncio.get_running_loop()
            descriptor = socket.getsockopt(zmq.FD)
            loop.add_reader(descriptor, told.set)
            stack.callback(loop.remove_reader, descriptor)
        yield told


class OutputReadersMixin:
    """Takes the place of upstream's event-driven loop. On the orchestrator's loop."""

    # Upstream's, used here.
    stage_pools: list[Any]
    _shutdown_event: asyncio.Event
    _orch_monitor: Any
    _process_llm_stage_outputs: Callable[..., Coroutine[Any, Any, list[Any]]]
    _absorb_diffusion_metrics: Callable[[int, int, Any], bool]
    _finish_raw_terminal_requests: Callable[[int, int, set[str]], Coroutine[Any, Any, None]]

    _readers: OutputReaders | None = None

    if TYPE_CHECKING:

        async def _handle_dead_replica(
            self, stage_id: int, replica_id: int, error: BaseException
        ) -> None: ...

        async def _handle_processed_outputs(
            self, stage_id: int, replica_id: int, outputs: list[Any]
        ) -> None: ...

    async def _orchestration_loop_event_driven(self) -> None:
        """Read from every replica and route what comes, in order, until the shutdown.

        Raises what routing raises: the orchestrator ends with it.
        """
        ready: asyncio.Queue[Output] = asyncio.Queue(READY_LIMIT)
        failure: Exception | None = None
        async with asyncio.TaskGroup() as group:
            self._readers = OutputReaders(self.stage_pools, ready, group)
            end = group.create_task(self._announce_end(ready), name="health-readers-end")
            try:
                self._readers.reconcile()
                await self._route_all(ready)
            except Exception as exc:
                # Raised in here it would come out wrapped in a group.
                failure = exc
            finally:
                end.cancel()
                self._readers.close()
                self._readers = None
        if failure is not None:
            raise failure

    def _reconcile_readers(self) -> None:
        """Replicas may have come or gone."""
        if self._readers is not None:
            self._readers.reconcile()

    async def _announce_end(self, ready: asyncio.Queue[Output]) -> None:
        await self._shutdown_event.wait()
        await ready.put(Output("end"))

    async def _route_all(self, ready: asyncio.Queue[Output]) -> None:
        while True:
            output = await ready.get()
            if self._shutdown_event.is_set():
                return
            self._orch_monitor.set_dispatch_queue_size(ready.qsize())
            stage_id, replica_id = output.key
            finished: set[str] = set()
            try:
                processed = await self._processed(output, finished)
            except EngineDeadError as exc:
                if replica_id in self.stage_pools[stage_id].live_replica_ids():
                    await self._handle_dead_replica(stage_id, replica_id, exc)
                self._reconcile_readers()
                continue
            except Exception:
                if self._shutdown_event.is_set():
                    return
                logger.exception("[health] output of stage %d replica %d", stage_id, replica_id)
                raise
            if processed is None:
                continue
            await self._handle_processed_outputs(stage_id, replica_id, processed)
            await self._finish_raw_terminal_requests(stage_id, replica_id, finished)
            self._orch_monitor.note_loop(idle=False)

    async def _processed(self, output: Output, finished: set[str]) -> list[Any] | None:
        """What upstream makes of one output; None when there is nothing in it to route.

        ``finished`` gets the ids of requests that end with it. Raises what the reader met.
        """
        stage_id, replica_id = output.key
        if output.kind == "error":
            raise output.payload
        if output.kind == "llm":
            return await self._process_llm_stage_outputs(
                stage_id, replica_id, output.payload, finished
            )
        if self._absorb_diffusion_metrics(stage_id, replica_id, output.payload):
            return None
        if not is_diffusion_request_started_output(output.payload):
            self.stage_pools[stage_id].record_output_timestamps([output.payload])
        return [output.payload]
