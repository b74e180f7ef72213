# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-omni-health project
"""Failures in step-wise execution, which upstream makes texts of, one request at a time.

Where a diffusion stage executes step by step, the worker's model runner catches what a pipeline
raises outside of its forward step (preparing a request, advancing it, decoding it) and answers
with ``str(exception)`` for that request. Here the text is an envelope, which the engine opens.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from typing import Any

from vllm_omni.engine.health.diffusion.faults import RefusalText
from vllm_omni.engine.health.envelope import FaultText, WorkerError
from vllm_omni.health import seams
from vllm_omni.health.faults.fault import Fault

_SWALLOWED = ("prepare_encode", "step_scheduler", "post_decode", "forward")
"""Methods of a pipeline whose exceptions the model runner makes texts of. ``forward`` is for
requests that cannot be executed step by step."""


def type_failures(worker: Any, as_envelope: Callable[[Exception], WorkerError]) -> None:
    """Have the pipeline of a worker's wrapper raise envelopes; does nothing twice.

    Called before each execution, as a pipeline can be loaded again. Methods are shadowed on the
    instance: its class is the model's.
    """
    runner = getattr(getattr(worker, "worker", worker), "model_runner", None)
    pipeline = getattr(runner, "pipeline", None)
    stepwise = getattr(getattr(runner, "od_config", None), "step_execution", False)
    if pipeline is None or not stepwise:
        return
    for name in _SWALLOWED:
        method = getattr(pipeline, name, None)
        if method is not None and not isinstance(method, _Typed):
            seams.assign(pipeline, **{name: _Typed(method, as_envelope)})


class _Typed:
    """A method of a pipeline that raises its exceptions in envelopes."""

    def __init__(
        self, method: Callable[..., Any], as_envelope: Callable[[Exception], WorkerError]
    ) -> None:
        functools.update_wrapper(self, method)
        self._method = method
        self._as_envelope = as_envelope

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        try:
            return self._method(*args, **kwargs)
        except WorkerError:
            raise
        except Exception as exc:
            raise self._as_envelope(exc) from exc


def open_envelopes(output: Any) -> Fault | None:
    """Look into the answer to an execution: the fatal fault in it, if there is one.

    A refused request's answer gets the status and type that its client is to see.
    """
    fatal: Fault | None = None
    for result in _results(output):
        text = result.error
        if isinstance(text, RefusalText):
            seams.assign(result, error_status_code=text.status_code, error_type=text.error_type)
        elif isinstance(text, FaultText) and text.fault.fatal:
            fatal = fatal or text.fault
    return fatal


def _results(output: Any) -> Iterator[Any]:
    for one in getattr(output, "runner_outputs", None) or [output]:
        result = getattr(one, "result", None)
        if result is not None and hasattr(result, "error"):
            yield result
