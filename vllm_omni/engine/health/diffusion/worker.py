# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-omni-health project
"""What runs in a worker process of a diffusion engine: upstream's worker, with typed failures."""

from __future__ import annotations

import os
import sys
from functools import partial
from typing import Any, NoReturn

from vllm_omni.diffusion.data import AsyncDiffusionOutput
from vllm_omni.diffusion.worker.diffusion_worker import WorkerProc
from vllm_omni.engine.health import target
from vllm_omni.engine.health.device_memory import memory_figures
from vllm_omni.engine.health.diffusion.faults import envelope, fault_of
from vllm_omni.engine.health.diffusion.progress import watch_steps
from vllm_omni.engine.health.diffusion.steps import type_failures
from vllm_omni.engine.health.process_exit import leaving_in_time
from vllm_omni.engine.health.stage_memory import report_regularly
from vllm_omni.health import seams
from vllm_omni.health.processes import stop_signals
from vllm_omni.health.processes.last_words import say

from vllm_omni_health.bootstrap import set_death_signal


def run_diffusion_worker(
    rank: int, *args: Any, last_words: Any = None, order: Any = None, **kwargs: Any
) -> NoReturn:
    """Process target: run upstream's worker with the health layer around it, by
    :func:`vllm_omni.engine.health.target.run`."""

    def entry() -> None:
        seams.install_diffusion_worker()
        WorkerProc.worker_main(rank, *args, **kwargs)

    target.run(
        entry,
        partial(fault_of, role="worker", rank=rank, pid=os.getpid()),
        last_words=last_words,
        order=order,
    )


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
        if fault.fatal:
            say(fault)
        return envelope(exc, fault)
