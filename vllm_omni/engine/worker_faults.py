"""The typed envelope in which a worker process hands its exception to its engine core.

vLLM's workers answer a failed call with ``str(exception)``, and the engine core raises a
RuntimeError around that text: the class is gone one process away from where it arose. Here the
text still is what it was, for whoever reads it, and carries the fault; on the other side the
fault is what is raised.
"""

from __future__ import annotations

import os
from typing import Any

from vllm_omni.health import seams
from vllm_omni.health.classify import fault_from_exception
from vllm_omni.health.faults import Fault, FaultError

_ENQUEUE = "vllm.v1.executor.multiproc_executor:WorkerProc.enqueue_output"


class FaultText(str):
    """An exception's text with the fault that was made of the exception."""

    fault: Fault

    def __new__(cls, text: str, fault: Fault) -> FaultText:
        self = super().__new__(cls, text)
        self.fault = fault
        return self

    def __reduce__(self) -> tuple[Any, ...]:
        return _unpack, (str(self), self.fault.encode())


def _unpack(text: str, payload: bytes) -> FaultText:
    return FaultText(text, Fault.decode(payload))


class _WorkerException(Exception):
    """What stands in for a worker's exception: its text is an envelope."""

    def __init__(self, text: FaultText) -> None:
        super().__init__(text)
        self.text = text

    def __str__(self) -> str:
        # vLLM puts str() of the exception into its answer. CPython keeps the subclass.
        return self.text


def enqueue_output(self: Any, output: Any) -> None:
    """Replaces the worker's answer: an exception goes out in an envelope.

    Runs in the worker process, on its busy loop or its output thread.
    """
    original = seams.original(_ENQUEUE)
    get_output = getattr(output, "get_output", None)
    if callable(get_output):
        # What an asynchronous output fails with is raised here, where it still has its class.
        try:
            output = get_output()
        except Exception as exc:
            output = exc
    if isinstance(output, Exception):
        fault = fault_from_exception(
            output,
            role="worker",
            rank=getattr(self, "rank", None),
            pid=os.getpid(),
            device=_device(self),
        )
        output = _WorkerException(FaultText(fault.message, fault))
    original(self, output)


def _device(worker_proc: Any) -> str | None:
    worker = getattr(worker_proc, "worker", None)
    device = getattr(getattr(worker, "worker", worker), "device", None)
    return None if device is None else str(device)


class _TypedResponses:
    """A worker's response queue, as its engine core reads it."""

    def __init__(self, queue: Any) -> None:
        self._queue = queue

    def __getattr__(self, name: str) -> Any:
        return getattr(self._queue, name)

    def dequeue(self, *args: Any, **kwargs: Any) -> Any:
        """The worker's answer; raises FaultError when that is an envelope."""
        answer = self._queue.dequeue(*args, **kwargs)
        _, result = answer
        if isinstance(result, FaultText):
            raise FaultError(result.fault)
        return answer


class _ResponseQueues(list[Any]):
    """The list that upstream appends an executor's response queues to."""

    def append(self, queue: Any) -> None:
        super().append(_TypedResponses(queue))


class _ResponseQueuesSlot:
    """Data descriptor for the executor's ``response_mqs``, which upstream assigns a list to."""

    def __get__(self, executor: Any, owner: type | None = None) -> Any:
        if executor is None:
            return self
        try:
            return executor.__dict__["response_mqs"]
        except KeyError:
            raise AttributeError("response_mqs") from None

    def __set__(self, executor: Any, queues: list[Any]) -> None:
        typed = _ResponseQueues()
        for queue in queues:
            typed.append(queue)
        executor.__dict__["response_mqs"] = typed


response_mqs = _ResponseQueuesSlot()
"""What the seam puts on the multiprocessing executor's class."""
