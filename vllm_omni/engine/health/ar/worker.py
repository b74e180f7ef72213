# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-omni-health project
"""What runs in a worker process of an AR stage: upstream's worker, with typed exceptions.

Of most calls one rank's answer alone is read. What the others raise goes to the last-words pipe
of their replica, which the server's supervisor reads, and so does whatever ends a worker: while
it loads the model, in its busy loop or in its output thread.
"""

from __future__ import annotations

import os
import threading
from typing import Any, NoReturn

from vllm.v1.executor.multiproc_executor import WorkerProc
from vllm_omni.engine.health import target
from vllm_omni.engine.health.device_memory import memory_figures
from vllm_omni.engine.health.envelope import FaultText, WorkerError
from vllm_omni.engine.health.process_exit import leaving_in_time
from vllm_omni.health import seams
from vllm_omni.health.faults.classify import fault_from_exception
from vllm_omni.health.faults.fault import Fault
from vllm_omni.health.processes import left_behind, stop_signals
from vllm_omni.health.processes.last_words import say


def run_worker(*args: Any, last_words: Any = None, order: Any = None, **kwargs: Any) -> NoReturn:
    """Process target: run upstream's worker with the health layer around it, by
    :func:`vllm_omni.engine.health.target.run`."""

    def entry() -> None:
        seams.install_worker()
        WorkerProc.worker_main(*args, **kwargs)

    def fault_of(exc: BaseException) -> Fault:
        rank = int(kwargs.get("rank", 0))
        return fault_from_exception(exc, role="worker", rank=rank, pid=os.getpid())

    target.run(entry, fault_of, last_words=last_words, order=order)


def _note_file_store(init_method: Any) -> None:
    """Process groups meet by way of a file, which their destruction alone removes."""
    if isinstance(init_method, str) and init_method.startswith("file://"):
        left_behind.note([init_method.removeprefix("file://")])


class HealthWorkerProc(WorkerProc):
    """Upstream's worker process, whose exceptions keep their class and always reach someone."""

    _reply_rank: int | None = None
    """The rank whose answer to the present call is read; None for all."""
    _told_to_end: threading.Event | None = None
    _failed = False
    """Whether this worker had a fatal fault, after which its peers cannot be counted on."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        self.rank = int(kwargs.get("rank", 0))
        _note_file_store(kwargs.get("distributed_init_method"))
        # Upstream has put signal handlers of its own in place.
        stop_signals.take_again()
        try:
            super().__init__(*args, **kwargs)
        except Exception as exc:
            # Upstream tells the engine core no more than that a worker failed.
            self._say(self._fault(exc))
            raise

    def monitor_death_pipe(self, death_pipe: Any, shutdown_requested: threading.Event) -> None:
        """Upstream's. The event is set before the queues of a worker that is to end are."""
        self._told_to_end = shutdown_requested
        super().monitor_death_pipe(death_pipe, shutdown_requested)

    def worker_busy_loop(self) -> None:
        """Upstream's, on the main thread. What ends it is stated."""
        try:
            super().worker_busy_loop()
        except Exception as exc:
            self._say(self._fault(exc))
            raise

    def async_output_busy_loop(self) -> None:
        """Upstream's, on a thread of its own, without which no call is ever answered."""
        try:
            super().async_output_busy_loop()
        except Exception as exc:
            self._say(self._fault(exc))
            raise

    def shutdown(self) -> None:
        """Upstream's, which destroys the process groups: never blocked by a peer that is gone."""
        with leaving_in_time(failed=self._failed):
            super().shutdown()

    def _execute_worker_rpc(self, rpc_request: tuple[Any, ...]) -> None:
        *call, self._reply_rank = rpc_request
        # Upstream keeps quiet about an exception where no reply is wanted. Asked to reply, it
        # hands it to handle_output().
        super()._execute_worker_rpc((*call, None))

    def handle_output(self, output: Any) -> None:
        """An answer to a call, or the exception that it ended in; on the main thread."""
        if self._reply_rank is None or self._reply_rank == self.rank:
            super().handle_output(output)
        elif isinstance(output, Exception):
            self._say(self._fault(output))

    def enqueue_output(self, output: Any) -> None:
        """Send an answer: an exception goes out in an envelope.

        On the main thread or on the output thread.
        """
        get_output = getattr(output, "get_output", None)
        if callable(get_output):
            # What an asynchronous output fails with is raised here, where it still has its class.
            try:
                output = get_output()
            except Exception as exc:
                output = exc
        if isinstance(output, Exception):
            fault = self._fault(output)
            output = WorkerError(FaultText(fault.message, fault))
        super().enqueue_output(output)

    def _fault(self, exc: BaseException) -> Fault:
        worker = getattr(self, "worker", None)
        device = getattr(getattr(worker, "worker", worker), "device", None)
        fault = fault_from_exception(
            exc,
            role="worker",
            rank=self.rank,
            pid=os.getpid(),
            device=None if device is None else str(device),
            memory=memory_figures(),
        )
        self._failed = self._failed or (fault.fatal and not self._is_told_to_end())
        return fault

    def _say(self, fault: Fault) -> None:
        if fault.fatal and not self._is_told_to_end():
            say(fault)

    def _is_told_to_end(self) -> bool:
        return self._told_to_end is not None and self._told_to_end.is_set()
