# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-omni-health project
"""What runs in an AR stage's engine-core process: upstream's busy loop, and the truth about
its end.

The process leads a process group of its own. When it fails, it states the fault twice: as last
words on its pipe, at once, and as a message on its output queue, behind the outputs that were
already produced.
"""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Iterator
from typing import Any, NoReturn

from vllm.v1.engine.core import EngineCoreProc
from vllm_omni.engine.health import stage_memory, target
from vllm_omni.engine.health.ar.channel import fault_outputs
from vllm_omni.engine.health.device_memory import memory_figures
from vllm_omni.engine.stage_engine_core_proc import StageEngineCoreProc
from vllm_omni.health import seams
from vllm_omni.health.faults.classify import fault_from_exception
from vllm_omni.health.faults.fault import Fault, FaultKind
from vllm_omni.health.processes import stop_signals
from vllm_omni.health.processes.last_words import say
from vllm_omni.health.processes.watched import worker_lost


def run_stage_core(
    *args: Any, last_words: Any = None, order: Any = None, **kwargs: Any
) -> NoReturn:
    """Process target: run upstream's stage core with the health layer around it, by
    :func:`vllm_omni.engine.health.target.run`."""

    def entry() -> None:
        seams.install_stage_process()
        StageEngineCoreProc.run_stage_core(*args, **kwargs)

    target.run(entry, _fault_of, last_words=last_words, order=order, leads=True)


def _fault_of(exc: BaseException) -> Fault:
    return fault_from_exception(exc, role="engine core", pid=os.getpid())


class HealthStageEngineCoreProc(StageEngineCoreProc):
    """Upstream's engine core, with typed last messages."""

    _steps = 0
    _memory: tuple[int, dict[str, Any]] | None = None
    """What was answered to the last ping that found something new, and after how many steps."""

    def run_busy_loop(self) -> None:
        """Upstream's, which it has just put its own signal handlers in place for."""
        stop_signals.take_again()
        super().run_busy_loop()

    def health_ping(self) -> dict[str, Any]:
        """A utility method: the busy loop answers it between steps, so it turns.

        The answer says what memory this stage holds, as far as it knows. Workers are asked only
        if there was a step since they last were: what they hold does not change without one, and
        vLLM's workers wait for a second at full speed for the call that may follow any call.
        """
        if self._memory is None or self._memory[0] != self._steps:
            self._memory = (self._steps, stage_memory.figures(self))
        return self._memory[1]

    def _process_engine_step(self) -> Any:
        """Upstream's: one turn of the busy loop that may run a step."""
        if self.scheduler.has_requests():
            self._steps += 1
        return super()._process_engine_step()

    def process_input_sockets(self, *args: Any, **kwargs: Any) -> None:
        """Upstream's, on a thread of its own."""
        with _stating_the_end():
            super().process_input_sockets(*args, **kwargs)

    def process_output_sockets(self, *args: Any, **kwargs: Any) -> None:
        """Upstream's, on a thread of its own."""
        with _stating_the_end():
            super().process_output_sockets(*args, **kwargs)

    def _send_engine_dead(self) -> None:
        """Called by upstream while it handles the exception that ended the busy loop."""
        fault = self._fault(sys.exception())
        say(fault)
        for client_index in range(len(self.addresses.outputs)):
            self.output_queue.put_nowait((client_index, fault_outputs(fault)))
        super()._send_engine_dead()

    def _fault(self, exc: BaseException | None) -> Fault:
        fault = Fault(kind=FaultKind.ENGINE, role="engine core", pid=os.getpid())
        if exc is not None:
            fault = _fault_of(exc)
        workers = _worker_handles(self)
        if not workers:
            # The worker is in here.
            fault = fault.with_context(memory=memory_figures())
        # "Executor failed" is all that an exception says of a dead worker. We are its parent.
        return worker_lost(fault, workers)


@contextlib.contextmanager
def _stating_the_end() -> Iterator[None]:
    """Around a thread without which this engine core does nothing any more.

    Upstream lets it end unseen. There is no queue to say so on, and the loop that would end the
    process does not know: the server, which reads the last words, ends both.
    """
    try:
        yield
    except Exception as exc:
        say(_fault_of(exc))
        raise


def _worker_handles(engine_core: EngineCoreProc) -> list[tuple[int, Any]]:
    """(rank, process) of each worker that this engine core has as a child process."""
    handles = getattr(engine_core.model_executor, "workers", None) or ()
    return [
        (int(handle.rank), handle.proc)
        for handle in handles
        if getattr(getattr(handle, "proc", None), "pid", None) is not None
    ]
