# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-omni-health project
"""How a fault gets from a worker to its engine core, and from there to the server.

Out of a worker's response queue comes the fault that its envelope carries, as an exception. The
engine core's fatal-error message goes on its existing output queue.

vLLM's decoder knows one message shape, and one slot in it is free for control traffic:
``utility_output``, the answer to a utility call, found by its call id. A stage process that is
failing sends, ahead of ``ENGINE_CORE_DEAD``, the answer to a call nobody made, under a reserved
id, with the encoded fault as its failure text. On the client's side that id leads to a sink.

Both travel in the same ordered queue as request outputs: what was produced before the fault is
delivered before it.
"""

from __future__ import annotations

import logging
import weakref
from collections.abc import Callable
from typing import Any

from vllm.v1.engine import EngineCoreOutputs, UtilityOutput
from vllm_omni.engine.health.envelope import FaultText, report_text, to_text
from vllm_omni.health import seams
from vllm_omni.health.faults.fault import Fault, FaultError

logger = logging.getLogger(__name__)

FAULT_CALL_ID = -81
"""Reserved call id. Real ones are the positive upper half of a UUID; upstream uses -1 and -2."""


def fault_outputs(fault: Fault) -> EngineCoreOutputs:
    """The message that carries ``fault``, ready for an engine core's output queue."""
    answer = UtilityOutput(call_id=FAULT_CALL_ID, failure_message=to_text(fault))
    return EngineCoreOutputs(utility_output=answer)


class _FaultSink:
    """Takes the place of a future: what is "answered" here is a fault."""

    def __init__(self, receive: Callable[[str], None]) -> None:
        self._receive = receive

    def set_exception(self, exc: BaseException) -> None:
        self._receive(str(exc))

    def set_result(self, result: Any) -> None:
        del result


class _Nobody:
    """Answers to calls that nobody waits for end here; upstream would end its reader."""

    def set_exception(self, exc: BaseException) -> None:
        logger.warning("[health] dropped the failure of an unknown utility call: %s", exc)

    def set_result(self, result: Any) -> None:
        del result


class UtilityResults(dict[int, Any]):
    """A client's table of pending utility calls, with the fault sink in it.

    Lookups of unknown ids do not raise: upstream's reader, and with it the orchestrator, would
    end over a late or doubled answer.
    """

    def __init__(self, receive: Callable[[str], None]) -> None:
        super().__init__()
        self._sink = _FaultSink(receive)

    def pop(self, call_id: int, *default: Any) -> Any:
        """The waiting future; the sink for the reserved id; a harmless stand-in otherwise."""
        if call_id == FAULT_CALL_ID:
            return self._sink
        return super().pop(call_id, *(default or (_Nobody(),)))


def _receiver(client: Any) -> Callable[[str], None]:
    client_ref = weakref.ref(client)

    def receive(text: str) -> None:
        client = client_ref()
        if client is not None:
            report_text(text, client.stage_id, client.replica_id)

    return receive


def _table(client: Any, calls: dict[int, Any]) -> UtilityResults:
    table = UtilityResults(_receiver(client))
    table.update(calls)
    return table


utility_results = seams.Slot("utility_results", _table)
"""What the seam puts on the stage client's class, where vLLM's base class assigns a plain dict."""


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
