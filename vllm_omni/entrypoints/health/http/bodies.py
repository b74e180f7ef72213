# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-omni-health project
"""What clients read when something failed: probe bodies and OpenAI error bodies.

Everything here is made from fixed sentences and numbers. Exception texts, which can hold
prompts or paths, stay in the log.
"""

from __future__ import annotations

import json
from http import HTTPStatus
from typing import Any

from vllm_omni.health import __version__
from vllm_omni.health.faults.fault import Fault, FaultKind, iso_time
from vllm_omni.health.faults.refusals import Refusal
from vllm_omni.health.state.machine import Snapshot, State

SHUTTING_DOWN = "The server is shutting down. Please retry the request elsewhere or later."
TOO_MANY = "The server has as many requests as it takes at a time. Please retry later."
NOT_ACCEPTING = "The server is not accepting requests at the moment. Please retry later."


def health_body(
    snapshot: Snapshot, *, healthy: bool, memory: dict[str, Any] | None = None
) -> dict[str, Any]:
    """The body of ``/health`` and ``/readyz``. ``memory``: the figures of the latest sample."""
    return {
        "status": "healthy" if healthy else "unhealthy",
        "state": snapshot.state.value,
        "accepting": snapshot.accepting,
        "draining": snapshot.draining,
        "since": iso_time(snapshot.since),
        "stages": [
            {
                "stage_id": stage.stage_id,
                "replicas": [
                    {
                        "replica_id": replica.replica_id,
                        "state": replica.state.value,
                        "pid": replica.pid,
                    }
                    for replica in stage.replicas
                ],
            }
            for stage in snapshot.stages
        ],
        "fault": None if snapshot.fault is None else snapshot.fault.public(),
        "memory": memory,
        "health_layer": __version__,
    }


def history_body(history: tuple[Any, ...]) -> dict[str, Any]:
    """The body of ``/health/history``: every move of the machine and every fault noted."""
    return {
        "transitions": [
            {
                "seq": move.seq,
                "from": move.from_state.value,
                "to": move.to_state.value,
                "time": iso_time(move.wall),
                "monotonic": round(move.monotonic, 6),
                "cause": move.cause,
                "fault": move.fault,
                **({} if move.detail is None else {"detail": move.detail}),
            }
            for move in history
        ]
    }


def error_body(
    status: HTTPStatus,
    message: str,
    *,
    fault: Fault | None = None,
    request_id: str | None = None,
) -> dict[str, Any]:
    """An OpenAI error body that also says which fault it was and which request."""
    return {
        "error": {
            "message": message,
            "type": (
                "ServiceUnavailableError"
                if status is HTTPStatus.SERVICE_UNAVAILABLE
                else "InternalServerError"
            ),
            "param": None,
            "code": status.value,
            "fault": fault_summary(fault),
            "request_id": request_id,
        }
    }


def fault_summary(fault: Fault | None) -> dict[str, Any] | None:
    """The part of a fault that an error body shows: kind, stage and replica."""
    if fault is None:
        return None
    return {
        "kind": fault.kind.value,
        "stage_id": fault.stage_id,
        "replica_id": fault.replica_id,
    }


def fault_body(fault: Fault | None, *, request_id: str | None = None) -> dict[str, Any]:
    """The error body of a request that a fault ended."""
    sentence = fault.sentence if fault is not None else FaultKind.ENGINE.sentence
    return error_body(
        HTTPStatus.INTERNAL_SERVER_ERROR, sentence, fault=fault, request_id=request_id
    )


def refusal_body(
    snapshot: Snapshot, *, request_id: str | None = None, full: bool = False
) -> dict[str, Any]:
    """The error body of a request that is not admitted; ``full``: there are too many already."""
    if full:
        return error_body(HTTPStatus.SERVICE_UNAVAILABLE, TOO_MANY, request_id=request_id)
    if snapshot.draining and snapshot.state is not State.DEAD:
        message = SHUTTING_DOWN
    elif snapshot.fault is not None:
        message = snapshot.fault.sentence
    else:
        message = NOT_ACCEPTING
    return error_body(
        HTTPStatus.SERVICE_UNAVAILABLE, message, fault=snapshot.fault, request_id=request_id
    )


def refused_body(refusal: Refusal) -> dict[str, Any]:
    """The error body of a request that the client has to put right, as upstream's routes say it."""
    return {
        "error": {
            # A part of a character cannot be sent.
            "message": refusal.message.encode(errors="backslashreplace").decode(),
            "type": refusal.type,
            "param": refusal.param,
            "code": refusal.status,
        }
    }


def event(body: dict[str, Any]) -> bytes:
    """A server-sent event with this body."""
    return b"data: " + json.dumps(body).encode() + b"\n\n"


DONE_EVENT = b"data: [DONE]\n\n"
