"""Where upstream turns an engine's death into the last event of a stream, with the fault put in.

Plain answers are corrected where all of them pass: see held_errors.py.
"""

from __future__ import annotations

import json
from http import HTTPStatus
from typing import Any

from vllm.v1.engine.exceptions import EngineDeadError
from vllm_omni.entrypoints.health_bodies import fault_body
from vllm_omni.entrypoints.request_guard import current_request_id
from vllm_omni.health import seams
from vllm_omni.health.runtime import require

_STREAM = (
    "vllm.entrypoints.generate.base.serving:GenerateBaseServing.create_streaming_error_response"
)


def create_streaming_error_response(
    self: Any,
    message: str | Exception,
    err_type: str = "BadRequestError",
    status_code: HTTPStatus = HTTPStatus.BAD_REQUEST,
    param: str | None = None,
) -> str:
    """Replaces upstream's: the JSON text of the error event that ends a stream.

    Every error that is not an engine's death is left to the original.
    """
    if isinstance(message, EngineDeadError):
        fault = require().fault_of_stage(getattr(message, "error_stage_id", None))
        return json.dumps(fault_body(fault, request_id=current_request_id()))
    text: str = seams.original(_STREAM)(self, message, err_type, status_code, param)
    return text
