# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-omni-health project
"""Which messages to the API server say that a request failed, and whose doing that was.

All ways in which upstream fails a request end in a message on the orchestrator's output queue:
an error output of a stage, a finish for the reason "error", a dead stage, a companion that is
lost. So this is where failures are known, whatever upstream's code they come from.
"""

from __future__ import annotations

import logging
import os
from typing import Any

import msgspec
from vllm.v1.engine.exceptions import EngineDeadError
from vllm_omni.engine.health.admission import UNFIT, refusal_of, unfit
from vllm_omni.engine.messages import ErrorMessage, OutputMessage
from vllm_omni.errors import DEFAULT_CLIENT_ERROR_TYPE, is_client_error_status
from vllm_omni.health.faults.classify import fault_from_exception
from vllm_omni.health.faults.fault import Fault, FaultKind, Severity, process_lost
from vllm_omni.health.faults.refusals import Refusal
from vllm_omni.health.runtime import HealthRuntime

logger = logging.getLogger(__name__)

_ERROR = "error"
"""vLLM's finish reason for a request that the engine gave up, such as for a KV transfer."""


def note(message: Any, runtime: HealthRuntime) -> None:
    """Write down the failure that ``message`` tells of, if it tells of one of the server's.

    Errors with a status of 4xx are the client's, and written down as such; aborts are not told by
    messages at all.
    """
    request_id = getattr(message, "request_id", None)
    if request_id is None or runtime.request_faults.of(request_id) is not None:
        return
    fault = None
    if isinstance(message, ErrorMessage):
        # With an event id it answers an interaction, and the request goes on.
        if message.event_id is not None:
            return
        if is_client_error_status(message.status_code):
            _refused(request_id, message.error, message.status_code, message.error_type, runtime)
        else:
            fault = _of_error(message, runtime)
    elif isinstance(message, OutputMessage):
        fault = _of_output(message, runtime)
    if fault is not None:
        fault = fault.with_context(request_id=request_id, role="orchestrator")
        logger.error("[health] %s", fault.log_line())
        runtime.request_failed(request_id, fault)


def _of_error(message: ErrorMessage, runtime: HealthRuntime) -> Fault:
    if not message.fatal:
        return _of_request(message.error, message.stage_id)
    # A stage without replicas. What ended the last one may not be known yet.
    known = runtime.fault_of_stage(message.stage_id)
    return known or process_lost(None, message=message.error, stage_id=message.stage_id)


def _refused(
    request_id: str, text: str, status: int | None, kind: str | None, runtime: HealthRuntime
) -> None:
    refusal = Refusal(text, int(status or 400), kind or DEFAULT_CLIENT_ERROR_TYPE)
    runtime.refusals.note(request_id, refusal)


def _of_output(message: OutputMessage, runtime: HealthRuntime) -> Fault | None:
    output = message.engine_outputs
    error = getattr(output, "error", None)
    if error is not None:
        status = getattr(output, "error_status_code", None)
        if not is_client_error_status(status):
            return _of_request(str(error), message.stage_id, message.replica_id)
        kind = getattr(output, "error_type", None)
        _refused(message.request_id, str(error), status, kind, runtime)
        return None
    if message.finished and any(
        getattr(completion, "finish_reason", None) == _ERROR
        for completion in getattr(output, "outputs", None) or ()
    ):
        return _of_request("the engine gave it up", message.stage_id, message.replica_id)
    return None


def _of_request(text: str, stage_id: int | None, replica_id: int | None = None) -> Fault:
    return Fault(
        kind=FaultKind.ENGINE,
        severity=Severity.REQUEST,
        message=text,
        stage_id=stage_id,
        replica_id=replica_id,
    )


def failure_of_one(
    exc: BaseException,
    request_id: str,
    stage_id: int,
    runtime: HealthRuntime,
    *,
    entering: bool = False,
) -> ErrorMessage | None:
    """What to tell the client of a request for which the orchestrator's code raised ``exc``.

    Such code is a stage input processor, or upstream's routing; with ``entering``, what sends the
    request to its first stage, and finds values there that cannot be sent. None if the exception
    says more than that one request has failed: that an engine is dead, or memory used up.
    """
    refusal = refusal_of(exc)
    if refusal is None and entering and isinstance(exc, UNFIT):
        refusal = unfit(exc)
    if refusal is not None:
        return ErrorMessage(
            error=refusal.message,
            status_code=refusal.status,
            error_type=refusal.type,
            request_id=request_id,
            stage_id=stage_id,
        )
    fault = fault_from_exception(exc, role="orchestrator", pid=os.getpid())
    if fault.kind is not FaultKind.ENGINE or isinstance(exc, EngineDeadError):
        return None
    fault = msgspec.structs.replace(
        fault,
        kind=FaultKind.ORCHESTRATOR,
        severity=Severity.REQUEST,
        stage_id=stage_id,
        request_id=request_id,
    )
    logger.error("[health] %s\n%s", fault.log_line(), fault.traceback)
    runtime.request_failed(request_id, fault)
    return ErrorMessage(error=fault.sentence, request_id=request_id, stage_id=stage_id)
