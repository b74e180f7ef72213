"""A fatal-error message on an engine core's existing output queue.

vLLM's decoder knows one message shape, and one slot in it is free for control traffic:
``utility_output``, the answer to a utility call, found by its call id. A stage process that is
failing sends, ahead of ``ENGINE_CORE_DEAD``, the answer to a call nobody made, under a reserved
id, with the encoded fault as its failure text. On the client's side that id leads to a sink.

Both travel in the same ordered queue as request outputs: what was produced before the fault is
delivered before it.
"""

from __future__ import annotations

import base64
import logging
import weakref
from collections.abc import Callable
from typing import Any

from vllm.v1.engine import EngineCoreOutputs, UtilityOutput
from vllm_omni.health import seams
from vllm_omni.health.faults.fault import Fault, FaultDecodeError
from vllm_omni.health.runtime import current

logger = logging.getLogger(__name__)

FAULT_CALL_ID = -81
"""Reserved call id. Real ones are the positive upper half of a UUID; upstream uses -1 and -2."""


def fault_outputs(fault: Fault) -> EngineCoreOutputs:
    """The message that carries ``fault``, ready for an engine core's output queue."""
    text = base64.b64encode(fault.encode()).decode("ascii")
    return EngineCoreOutputs(
        utility_output=UtilityOutput(call_id=FAULT_CALL_ID, failure_message=text)
    )


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
        runtime = current()
        if client is None or runtime is None:
            return
        try:
            fault = Fault.decode(base64.b64decode(text))
        except (FaultDecodeError, ValueError) as exc:
            logger.error("[health] unreadable fault from stage %s: %s", client.stage_id, exc)
            return
        runtime.supervisor.report(
            fault.with_context(stage_id=client.stage_id, replica_id=client.replica_id)
        )

    return receive


def _table(client: Any, calls: dict[int, Any]) -> UtilityResults:
    table = UtilityResults(_receiver(client))
    table.update(calls)
    return table


utility_results = seams.Slot("utility_results", _table)
"""What the seam puts on the stage client's class, where vLLM's base class assigns a plain dict."""
