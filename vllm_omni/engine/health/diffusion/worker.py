"""Worker processes of a diffusion engine: watched from their start on, with typed failures."""

from __future__ import annotations

import multiprocessing
import multiprocessing.connection
import multiprocessing.context
import os
import sys
import traceback
from functools import partial
from typing import Any, NoReturn

from vllm_omni.diffusion.data import AsyncDiffusionOutput
from vllm_omni.diffusion.worker.diffusion_worker import WorkerProc
from vllm_omni.engine.health.device_memory import memory_figures
from vllm_omni.engine.health.diffusion.engine import replica_being_started
from vllm_omni.engine.health.diffusion.faults import as_fatal, envelope, fault_of
from vllm_omni.engine.health.diffusion.progress import watch_steps
from vllm_omni.engine.health.diffusion.steps import type_failures
from vllm_omni.engine.health.process_exit import end_process_groups, leave, leaving_in_time
from vllm_omni.engine.health.spawn import WatchedProcessMixin
from vllm_omni.engine.health.stage_memory import report_regularly
from vllm_omni.health import seams
from vllm_omni.health.faults.fault import Fault
from vllm_omni.health.liveness import stacks
from vllm_omni.health.processes import stop_signals
from vllm_omni.health.processes.last_words import (
    LastWordsReader,
    LastWordsWriter,
    WorkerRef,
    own_words,
    speak_through,
)
from vllm_omni.health.processes.supervisor import Supervisor

from vllm_omni_health.bootstrap import set_death_signal


class DiffusionWorkerProcess(WatchedProcessMixin, multiprocessing.context.SpawnProcess):
    """A diffusion worker. Its parent is the server (inline) or a replica's own process."""

    def __init__(self, *, target: Any, args: tuple[Any, ...], **process: Any) -> None:
        del target
        self._rank = int(args[0])
        self._key = replica_being_started.get()
        super().__init__(entry=run_diffusion_worker, args=args, **process)

    def _open_pipe(self) -> tuple[Any, Any]:
        words = own_words()
        if words is None:
            return super()._open_pipe()
        # One pipe for a replica's own process and its workers; the server reads it.
        return None, multiprocessing.connection.Connection(os.dup(words.fd), readable=False)

    def start(self) -> None:
        """Spawn the process and put it under watch."""
        super().start()
        words = own_words()
        if words is not None and self.pid is not None:
            words.workers([WorkerRef(rank=self._rank, pid=self.pid)])

    def _watch(self, supervisor: Supervisor, pid: int, words: LastWordsReader) -> None:
        if self._key is None:
            words.close()
            return
        supervisor.watch_worker(
            *self._key, self._rank, pid, words=words, exit_status=self._exit_status
        )


class _WorkerContext:
    """The multiprocessing module as upstream's executor uses it, with processes of ours."""

    Process = DiffusionWorkerProcess

    def __getattr__(self, name: str) -> Any:
        return getattr(multiprocessing, name)


worker_context = _WorkerContext()
"""What the seam puts in the place of the module."""


def run_diffusion_worker(
    *args: Any, last_words: Any = None, order: Any = None, **kwargs: Any
) -> NoReturn:
    """Process target: upstream's worker with the health layer around it."""
    stacks.offer()
    if last_words is not None:
        words = LastWordsWriter(last_words.fileno(), shared=True)
        speak_through(words)
        stop_signals.listen(partial(stop_signals.given, order), words.told_to_stop)
    status = 1
    try:
        seams.install_diffusion_worker()
        WorkerProc.worker_main(*args, **kwargs)
        status = 0
    except SystemExit as exc:
        status = exc.code if isinstance(exc.code, int) else 0 if exc.code is None else 1
    except BaseException as exc:
        _say(as_fatal(fault_of(exc, role="worker", rank=int(args[0]), pid=os.getpid())))
        traceback.print_exc()
    end_process_groups(failed=status != 0)
    leave(status)


def _say(fault: Fault) -> None:
    words = own_words()
    if words is not None and fault.fatal:
        words.fault(fault)


class HealthDiffusionWorkerProc(WorkerProc):
    """Upstream's worker process, whose exceptions keep their class.

    A fatal fault is also stated as last words: of most ranks nobody reads the answers.
    """

    _failed = False
    """Whether this worker had a fatal fault, after which its peers cannot be counted on."""

    def shutdown(self) -> None:
        """Upstream's, which destroys the process groups: never blocked by a peer that is gone."""
        with leaving_in_time(failed=self._failed):
            super().shutdown()

    def _create_worker(self, *args: Any, **kwargs: Any) -> Any:
        # Upstream has just weakened the signal to SIGTERM, which a busy process answers late.
        set_death_signal()
        # And has put signal handlers of its own in place.
        stop_signals.take_again()
        wrapper = super()._create_worker(*args, **kwargs)
        watch_steps(wrapper)
        report_regularly(wrapper)
        execute = wrapper.execute_method

        def execute_method(method: Any, *args: Any, **kwargs: Any) -> Any:
            type_failures(wrapper, self._typed)
            try:
                return execute(method, *args, **kwargs)
            except Exception as exc:
                raise self._typed(exc) from exc

        # Every call of a method comes through here, before upstream makes text of what is raised.
        seams.assign(wrapper, execute_method=execute_method)
        return wrapper

    def _enqueue_result(self, msg: Any) -> None:
        exc = sys.exception()
        if isinstance(msg, AsyncDiffusionOutput) and type(msg.error) is str and exc is not None:
            # Not an envelope yet: of the output thread, which says no more than that it failed.
            seams.assign(msg, error=self._typed(exc).text)
        super()._enqueue_result(msg)

    def _typed(self, exc: BaseException) -> Any:
        device = getattr(getattr(self, "worker", None), "device", None)
        fault = fault_of(
            exc,
            role="worker",
            rank=self.gpu_id,
            pid=os.getpid(),
            device=None if device is None else str(device),
            memory=memory_figures(),
        )
        self._failed = self._failed or fault.fatal
        _say(fault)
        return envelope(exc, fault)
