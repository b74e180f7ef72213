# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-omni-health project
"""Step-wise execution: what upstream makes texts of keeps its class, and ends the engine."""

from __future__ import annotations

import pickle
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from vllm_omni.diffusion.data import DiffusionOutput
from vllm_omni.diffusion.worker.utils import BatchRunnerOutput, RunnerOutput
from vllm_omni.engine.health.diffusion.faults import envelope, fault_of
from vllm_omni.engine.health.diffusion.steps import open_envelopes, type_failures
from vllm_omni.engine.health.envelope import WorkerError
from vllm_omni.errors import OmniClientError
from vllm_omni.health.faults.fault import FaultKind


class Pipeline(torch.nn.Module):
    def __init__(self, exc: Exception | None) -> None:
        super().__init__()
        self.exc = exc

    def prepare_encode(self, state: str) -> str:
        if self.exc is not None:
            raise self.exc
        return state.upper()


def worker_with(pipeline: Pipeline, *, stepwise: bool = True) -> Any:
    config = SimpleNamespace(step_execution=stepwise)
    runner = SimpleNamespace(pipeline=pipeline, od_config=config)
    return SimpleNamespace(worker=SimpleNamespace(model_runner=runner))


def as_envelope(exc: Exception) -> WorkerError:
    return envelope(exc, fault_of(exc, rank=1))


def answer(exc: Exception, *, stepwise: bool = True) -> BatchRunnerOutput:
    """As upstream's model runner answers, by way of a queue between two processes."""
    pipeline = Pipeline(exc)
    worker = worker_with(pipeline, stepwise=stepwise)
    type_failures(worker, as_envelope)
    type_failures(worker, as_envelope)
    try:
        pipeline.prepare_encode("state")
    except Exception as raised:
        result = DiffusionOutput.from_exception(raised)
    output = BatchRunnerOutput.from_list([RunnerOutput("request", finished=True, result=result)])
    return pickle.loads(pickle.dumps(output))


def test_an_out_of_memory_is_found_in_the_answer() -> None:
    fault = open_envelopes(answer(torch.OutOfMemoryError("20 GiB")))
    assert fault is not None
    assert (fault.kind, fault.rank) == (FaultKind.OOM, 1)


@pytest.mark.parametrize(
    ("exc", "status"),
    [
        (ValueError("sides must be multiples of 16"), 400),
        (OmniClientError("not this one", status_code=422, error_type="Unprocessable"), 422),
    ],
)
def test_a_refusal_keeps_its_status(exc: Exception, status: int) -> None:
    output = answer(exc)
    assert open_envelopes(output) is None
    result = output.runner_outputs[0].result
    assert result is not None
    assert (result.error, result.error_status_code) == (str(exc), status)


def test_a_failure_of_one_request_ends_nothing() -> None:
    output = answer(KeyError("image"))
    assert open_envelopes(output) is None
    result = output.runner_outputs[0].result
    assert result is not None
    assert result.error_status_code is None


def test_results_pass_as_they_are() -> None:
    pipeline = Pipeline(None)
    type_failures(worker_with(pipeline), as_envelope)
    assert pipeline.prepare_encode("state") == "STATE"
    assert open_envelopes(RunnerOutput("request", result=DiffusionOutput(output=None))) is None
    assert open_envelopes(BatchRunnerOutput.from_list([])) is None
    assert open_envelopes(None) is None


def test_whole_requests_raise_what_they_always_did() -> None:
    """Without step-wise execution the exception itself is seen by whoever called."""
    pipeline = Pipeline(ValueError("as it is"))
    type_failures(worker_with(pipeline, stepwise=False), as_envelope)
    with pytest.raises(ValueError, match="as it is"):
        pipeline.prepare_encode("state")
