# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-omni-health project
"""What a route has to do with the stages, by its method and path.

docs/routes.md lists every route of upstream's and how it answers at a fault; a test holds that
list against the real application. What is not named here generates, which is the safe guess: it
is refused while the server does not accept, and answered when the server fails.
"""

from __future__ import annotations

import re
from enum import StrEnum


class RouteKind(StrEnum):
    """How the request guard treats a route."""

    WORK = "work"
    """Needs stages: admitted only while accepting, and answered by the guard at a fault."""
    JOB = "job"
    """Tells of a job that an earlier request began: always admitted, and a job that the server
    failed is told as failed."""
    FREE = "free"
    """Needs no stage: passed on, whatever the state."""


_FREE_POSTS = frozenset(
    {
        "/tokenize",
        "/detokenize",
        "/ping",
        "/v1/audio/voices",
        "/v1/load_lora_adapter",
        "/v1/unload_lora_adapter",
        "/v1/messages/count_tokens",
        "/v1/chat/completions/render",
        "/v1/chat/completions/derender",
        "/v1/completions/render",
        "/v1/completions/derender",
        "/v1/messages/render",
        "/v1/responses/render",
        "/is_scaling_elastic_ep",
    }
)

_WORKING_GETS = frozenset({"/is_sleeping", "/get_world_size", "/weight_info"})
"""They ask the stages, and would wait for ever for one that is gone."""

_CONTROL = re.compile(
    r"/(?:v1/omni/)?(?:sleep|wake_?up|is_sleeping)"
    r"|/(?:pause|resume|abort_requests|adapters|collective_rpc|get_world_size|weight_info)"
    r"|/(?:start|stop)_profile|/scale_elastic_ep|/reset_[a-z]+_cache"
    r"|/(?:init|start|update|finish)_[a-z_]*(?:weight|weights)[a-z_]*"
    r"|/v1/responses/[^/]+/cancel|/v1/realtime/sessions/[^/]+/(?:reset|close)"
)
"""Routes that need stages and ask them for no work: what operators do, and what ends a request."""

_JOB = re.compile(r"/v1/(?:videos|responses)/(?P<id>[^/]+)(?:/content)?|/v1/videos")


def kind_of(method: str, path: str) -> RouteKind:
    """The kind of an HTTP route; websockets are all WORK."""
    if method == "POST":
        return RouteKind.FREE if path in _FREE_POSTS else RouteKind.WORK
    if path in _WORKING_GETS:
        return RouteKind.WORK
    if method == "GET" and _JOB.fullmatch(path):
        return RouteKind.JOB
    return RouteKind.FREE


def asks_for_work(path: str) -> bool:
    """Whether a WORK route makes requests of the engine's, which there may be too many of."""
    return _CONTROL.fullmatch(path) is None


def job_id_of(path: str) -> str | None:
    """The id of the job that a JOB route tells of; None for a list of jobs."""
    found = _JOB.fullmatch(path)
    return found["id"] if found else None
