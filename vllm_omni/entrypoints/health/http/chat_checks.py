# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-omni-health project
"""What upstream's chat route takes unchecked, and then fails on or works on for ever."""

from __future__ import annotations

from typing import Any

from vllm import envs
from vllm.exceptions import VLLMValidationError
from vllm.sampling_params import SamplingParams
from vllm_omni.health import seams

_ALL = -1
"""vLLM's number of logprobs for those of the whole vocabulary."""


async def create_chat_completion(self: Any, request: Any, raw_request: Any = None) -> Any:
    """Replaces ``OmniOpenAIServingChat._create_chat_completion``: upstream's, after a look."""
    try:
        _check_count(request.n)
        _check_extra_body(getattr(request, "extra_body", None))
        if request.logprobs and request.top_logprobs is not None:
            _check_logprobs(request, self.engine_client)
    except VLLMValidationError as exc:
        return self.create_error_response(exc)
    create = seams.original(
        "vllm_omni.entrypoints.openai.serving_chat:OmniOpenAIServingChat._create_chat_completion"
    )
    return await create(self, request, raw_request)


def _check_count(n: int | None) -> None:
    # It makes a list of as many parts for a stream, on the event loop.
    most = envs.VLLM_MAX_N_SEQUENCES
    if n is not None and not 1 <= n <= most:
        raise VLLMValidationError(f"n must be from 1 to {most}.", parameter="n", value=n)


def _check_extra_body(extra_body: object) -> None:
    if extra_body is not None and not isinstance(extra_body, dict):
        raise VLLMValidationError("extra_body must be an object.", parameter="extra_body")


def _check_logprobs(request: Any, engine_client: Any) -> None:
    """Upstream puts out as many as the deployment's parameters say, and no request changes that."""
    given = getattr(request, "sampling_params_list", None)
    stages = [
        *(engine_client.default_sampling_params_list or ()),
        *(given if isinstance(given, list) else ()),
    ]
    texts = [one for one in stages if isinstance(one, SamplingParams | dict)]
    offered = [count for one in texts if (count := _logprobs_of(one)) is not None]
    # An image model has no such stage, and says nothing of them.
    if texts and not any(count == _ALL or request.top_logprobs <= count for count in offered):
        most = max(offered, default=None)
        what = "no logprobs" if most is None else f"at most {most} logprobs a token"
        raise VLLMValidationError(
            f"This deployment puts out {what}.",
            parameter="top_logprobs",
            value=request.top_logprobs,
        )


def _logprobs_of(params: SamplingParams | dict[str, Any]) -> int | None:
    count = params.get("logprobs") if isinstance(params, dict) else params.logprobs
    return count if isinstance(count, int) else None
