# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-omni-health project
"""Errors of the application that hide a fault, or blame the wrong side, put right.

Upstream has some sixty routes, and each makes text of what is raised in its own way: some give
the engine's failure as a client's mistake, some a client's mistake as the server's failure, some
give no cause, some status 200. Here every plain answer passes, so here it is put right, whatever
route it comes from.
"""

from __future__ import annotations

from http import HTTPStatus
from typing import Any

from vllm_omni.entrypoints.health.http.bodies import error_body, fault_body, refused_body
from vllm_omni.entrypoints.health.http.held_answers import HeldAnswer
from vllm_omni.health.faults.fault import REQUEST_SENTENCE, Fault
from vllm_omni.health.faults.refusals import Refusal
from vllm_omni.health.runtime import HealthRuntime
from vllm_omni.health.state.machine import State

LONGEST = 1 << 20
"""Bytes of a body beyond which it is passed on as it is. Errors are shorter."""


def in_place_of(
    held: HeldAnswer,
    runtime: HealthRuntime,
    request_id: str | None,
    fault: Fault | None,
    refusal: Refusal | None,
) -> dict[str, Any] | None:
    """The error body that is due instead of ``held``; None if that is as it should be.

    ``fault``: why a request that the engine had for this answer failed, if one did; ``refusal``:
    why one was refused.
    """
    if not held.whole:
        return None
    answer = held.content() or {}
    error = answer.get("error")
    if isinstance(error, dict) and error.get("fault") is not None:
        return None
    if held.status < HTTPStatus.BAD_REQUEST:
        # An answer that is whole in spite of a failure: of one item in a batch, perhaps.
        return fault_body(fault, request_id=request_id) if fault and _hides_error(answer) else None
    if fault is None and error is None and isinstance(answer.get("detail"), str):
        # The web framework's own words, where upstream has none.
        status = HTTPStatus(held.status)
        return refused_body(Refusal(answer["detail"], status, status.phrase))
    if fault is None and held.status >= HTTPStatus.INTERNAL_SERVER_ERROR:
        if runtime.machine.snapshot.state is State.DEAD:
            # There is no other reason for an error of the server's then.
            fault = runtime.machine.reason
        elif refusal is not None:
            return refused_body(refusal)
        elif held.status == HTTPStatus.INTERNAL_SERVER_ERROR and not _message(error):
            return error_body(
                HTTPStatus.INTERNAL_SERVER_ERROR, REQUEST_SENTENCE, request_id=request_id
            )
    return None if fault is None else fault_body(fault, request_id=request_id)


def _message(error: object) -> str:
    return str(error.get("message") or "").strip() if isinstance(error, dict) else ""


def _hides_error(answer: dict[str, Any]) -> bool:
    """Whether an answer with status 200 is no answer: it holds an error, or ended in one."""
    if answer.get("error"):
        return True
    choices = answer.get("choices")
    return isinstance(choices, list) and any(
        isinstance(choice, dict) and choice.get("finish_reason") == "error" for choice in choices
    )
