"""Where upstream turns an engine's death into a response, with the fault put in.

Both functions take an upstream name (see seams.py) and leave every error that is not an
engine's death to the original.
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

_PAYLOAD = "vllm_omni.entrypoints.serve.utils.errors:_build_engine_error_payload"
_STREAM = (
    "vllm.entrypoints.generate.base.serving:GenerateBaseServing.create_streaming_error_response"
)


def _body(exc: EngineDeadError, request_id: str | None) -> dict[str, Any]:
    fault = require().fault_of_stage(getattr(exc, "error_stage_id", None))
    return fault_body(fault, request_id=request_id)


def build_engine_error_payload(
    exc: Exception, *, request_id: str | None
) -> tuple[dict[str, Any], int]:
    """The JSON body and status of a plain response that an engine error ended."""
    if isinstance(exc, EngineDeadError):
        return _body(exc, request_id), HTTPStatus.INTERNAL_SERVER_ERROR.value
    payload: tuple[dict[str, Any], int] = seams.original(_PAYLOAD)(exc, request_id=request_id)
    return payload


def create_streaming_error_response(
    self: Any,
    message: str | Exception,
    err_type: str = "BadRequestError",
    status_code: HTTPStatus = HTTPStatus.BAD_REQUEST,
    param: str | None = None,
) -> str:
    """The JSON text of the error event that ends a stream."""
    if isinstance(message, EngineDeadError):
        return json.dumps(_body(message, current_request_id()))
    text: str = seams.original(_STREAM)(self, message, err_type, status_code, param)
    return text
