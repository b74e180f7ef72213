"""The typed envelope in which a worker process hands its exception to its engine core.

vLLM's workers answer a failed call with ``str(exception)``, and the engine core raises a
RuntimeError around that text: the class is gone one process away from where it arose. Here the
text still is what it was, for whoever reads it, and carries the fault; on the other side the
fault is what is raised.
"""

from __future__ import annotations

from typing import Any

from vllm_omni.health import seams
from vllm_omni.health.faults.fault import Fault, FaultError


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


class WorkerError(Exception):
    """Stands in for a worker's exception: ``str()`` of it is an envelope, and stays one.

    Upstream's workers answer with ``str(exception)``. CPython keeps the subclass.
    """

    def __init__(self, text: str) -> None:
        super().__init__(text)
        self.text = text

    def __str__(self) -> str:
        return self.text


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


def _typed(executor: Any, queues: list[Any]) -> _ResponseQueues:
    del executor
    typed = _ResponseQueues()
    for queue in queues:
        typed.append(queue)
    return typed


response_mqs = seams.Slot("response_mqs", _typed)
"""What the seam puts on the multiprocessing executor's class, which assigns a list there."""
