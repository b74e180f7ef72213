# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-omni-health project
"""A refused diffusion request and a replica that cannot be trusted any more, told apart by type."""

import errno
import pickle

import pytest
import torch
from vllm_omni.diffusion.data import DiffusionRequestAbortedError
from vllm_omni.engine.health.diffusion.faults import (
    WorkerError,
    envelope,
    fault_of,
    host_fault_of,
    raise_envelope,
    refusal,
)
from vllm_omni.errors import GuardrailViolationError, OmniClientError
from vllm_omni.health.faults.fault import Fault, FaultError, FaultKind, Severity
from vllm_omni.health.processes.watched import worker_lost


def raised(exc, cause=None):
    try:
        raise exc from cause
    except BaseException as caught:
        return caught


class PipelineError(ValueError):
    """A pipeline's own class for input that it does not take."""


@pytest.mark.parametrize(
    ("exc", "kind"),
    [
        (torch.OutOfMemoryError("20 GiB"), FaultKind.OOM),
        (torch.AcceleratorError("illegal memory access"), FaultKind.ACCELERATOR),
        (torch.distributed.DistBackendError("timed out"), FaultKind.COLLECTIVE),
        (MemoryError(), FaultKind.HOST_OOM),
        (OSError(errno.ENOMEM, "no memory"), FaultKind.HOST_OOM),
        (TimeoutError("RPC call to execute_model timed out."), FaultKind.HANG),
        (RuntimeError("cuBLAS error, whatever it says"), FaultKind.ENGINE),
        # What looks like a mistake of the client's and has a device's failure behind it.
        (raised(ValueError("bad size"), torch.OutOfMemoryError("20 GiB")), FaultKind.OOM),
    ],
)
def test_after_these_the_replica_cannot_be_trusted(exc, kind):
    fault = fault_of(exc)
    assert (fault.kind, fault.severity) == (kind, Severity.FATAL)


@pytest.mark.parametrize(
    ("exc", "told"),
    [
        (ValueError("height and width must be multiples of 16"), 400),
        (PipelineError("too many reference images"), 400),
        (NotImplementedError("true CFG is not supported"), 400),
        (OmniClientError("at most one image", status_code=422), 422),
        (GuardrailViolationError("blocked"), 400),
        (raised(RuntimeError("wrapped"), OmniClientError("no prompt")), 400),
        # What fails in our code because of one request's input: not the client's word for it.
        (KeyError("image"), None),
        (TypeError("'NoneType' object is not subscriptable"), None),
        (AttributeError("'NoneType' object has no attribute 'shape'"), None),
        (AssertionError(), None),
        (ZeroDivisionError(), None),
        (DiffusionRequestAbortedError("the client left"), None),
    ],
)
def test_these_are_the_requests_own(exc, told):
    assert fault_of(exc).severity is Severity.REQUEST
    client_error = refusal(exc)
    assert (None if client_error is None else client_error.status_code) == told


def test_the_text_decides_nothing():
    assert fault_of(ValueError("CUDA out of memory")).severity is Severity.REQUEST
    assert fault_of(RuntimeError("invalid size")).severity is Severity.FATAL


def test_before_admission_only_what_the_table_names_is_fatal():
    assert not host_fault_of(RuntimeError("cannot decode the image")).fatal
    assert not host_fault_of(OSError("cannot identify image file")).fatal
    assert host_fault_of(torch.OutOfMemoryError()).kind is FaultKind.OOM
    assert host_fault_of(torch.OutOfMemoryError()).fatal


def test_in_the_engine_itself_everything_is_fatal():
    fault = fault_of(ValueError("the scheduler lost a request")).as_fatal()
    assert (fault.kind, fault.fatal) == (FaultKind.ENGINE, True)


def through_a_worker(exc):
    """An exception as the engine sees it: text in an answer, through pickle, raised again."""
    text = str(envelope(exc, fault_of(exc, rank=1, pid=77)))
    return RuntimeError(pickle.loads(pickle.dumps(text)))


def test_a_workers_fault_arrives_with_its_class():
    fault = fault_of(through_a_worker(torch.OutOfMemoryError("20 GiB")), pid=1)
    assert (fault.kind, fault.exception) == (FaultKind.OOM, "torch.OutOfMemoryError")
    assert (fault.rank, fault.pid) == (1, 77)
    assert "20 GiB" in fault.message
    assert host_fault_of(through_a_worker(RuntimeError("packing failed"))).fatal


def test_a_workers_refusal_arrives_with_its_status():
    exc = through_a_worker(OmniClientError("too long", status_code=413, error_type="TooLarge"))
    assert not fault_of(exc).fatal
    client_error = refusal(exc)
    assert (client_error.message, client_error.status_code) == ("too long", 413)
    assert client_error.error_type == "TooLarge"


def test_a_workers_request_failure_stays_the_requests_own():
    exc = through_a_worker(KeyError("image"))
    assert not fault_of(exc).fatal
    assert refusal(exc) is None


def test_the_envelope_reads_as_the_exceptions_text():
    exc = RuntimeError("no room left")
    assert str(WorkerError(str(envelope(exc, fault_of(exc))))) == "no room left"


@pytest.mark.parametrize("place", ["error", "rank_statuses"])
def test_an_answer_with_an_envelope_raises_what_it_carries(place):
    text = str(envelope(torch.AcceleratorError("gone"), fault_of(torch.AcceleratorError("gone"))))
    answer = {"error": text} if place == "error" else {"rank_statuses": [{"error": text}]}
    with pytest.raises(FaultError) as caught:
        raise_envelope(answer)
    assert caught.value.fault.kind is FaultKind.ACCELERATOR


@pytest.mark.parametrize("answer", [None, object(), {}, {"error": "plain text"}, {"error": None}])
def test_other_answers_pass(answer):
    raise_envelope(answer)


class Process:
    pid = 42

    def __init__(self, exitcode):
        self.exitcode = exitcode


def test_a_dead_worker_explains_a_closed_executor():
    closed = fault_of(RuntimeError("DiffusionExecutor is closed."))
    fault = worker_lost(closed, enumerate([Process(None), Process(-9)]))
    assert (fault.kind, fault.signal) == (FaultKind.PROCESS_LOST, "SIGKILL")
    assert (fault.rank, fault.pid) == (1, 42)
    assert worker_lost(closed, enumerate([Process(None)])) is closed
    oom = Fault(kind=FaultKind.OOM)
    assert worker_lost(oom, enumerate([Process(-9)])) is oom
