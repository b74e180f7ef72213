# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-omni-health project
"""Requests that no stage could carry out are refused before any stage gets them.

vLLM checks what a request asks of the first stage. What it asks of a later one is checked by
nobody, and there an impossible value ends the engine core, and with it the service.
"""

from __future__ import annotations

import contextlib
import functools
import json
import weakref
from collections.abc import Iterator, Sequence
from typing import Any

import msgspec
from vllm.entrypoints.serve import create_error_response
from vllm.exceptions import VLLMClientError, VLLMValidationError
from vllm.sampling_params import SamplingParams
from vllm.v1.serial_utils import MsgpackDecoder, MsgpackEncoder
from vllm_omni.errors import OmniClientError
from vllm_omni.health import seams
from vllm_omni.health.faults.refusals import Refusal
from vllm_omni.health.runtime import require

UNFIT = (ValueError, TypeError, OverflowError, RecursionError, msgspec.MsgspecError)
"""What code that turns a request into the engine's raises for values it cannot take. They say
nothing of the kind anywhere else."""

_MOST_ITEMS = 10_000
"""Items that a schema may ask of one array. llguidance makes a rule of each, at seven microseconds
and a kilobyte, on the server's loop."""

_sound_defaults: weakref.WeakKeyDictionary[Any, dict[int, bool]] = weakref.WeakKeyDictionary()


def refusal_of(exc: BaseException) -> Refusal | None:
    """What the client is told, for an exception whose class says that it is to blame."""
    if isinstance(exc, OmniClientError):
        return Refusal(exc.message, exc.status_code, exc.error_type)
    if isinstance(exc, VLLMClientError):
        error = create_error_response(exc).error
        return Refusal(error.message, error.code, error.type, error.param)
    return None


def unfit(exc: BaseException) -> Refusal:
    """What the client is told for one of ``UNFIT``, raised where its request was prepared."""
    error = create_error_response(exc if isinstance(exc, Exception) else str(exc)).error
    return Refusal(error.message or type(exc).__name__)


def build_add_request_message(
    self: Any,
    request_id: str,
    prompt: Any,
    prompt_text: Any = None,
    sampling_params_list: Sequence[Any] | None = None,
    *args: Any,
    **kwargs: Any,
) -> Any:
    """Replaces ``AsyncOmniEngine._build_add_request_message``: upstream's, and more checks.

    Raises OmniClientError or VLLMClientError for a request that cannot be one of the engine's,
    having noted it for the request's answer. On the caller's thread.
    """
    build = seams.original(
        "vllm_omni.engine.async_omni_engine:AsyncOmniEngine._build_add_request_message"
    )
    with refusing(request_id):
        if sampling_params_list is not None:
            try:
                _check_params(self, sampling_params_list)
            except AttributeError as exc:
                # vLLM's checks look into values of the client's, of whatever class.
                raise TypeError(str(exc)) from exc
        return build(self, request_id, prompt, prompt_text, sampling_params_list, *args, **kwargs)


@contextlib.contextmanager
def refusing(request_id: str) -> Iterator[None]:
    """Make what is raised for values that the engine cannot take an error of the client's."""
    note = require().refusals.note
    try:
        yield
    except (OmniClientError, VLLMClientError) as exc:
        refusal = refusal_of(exc)
        assert refusal is not None, "both classes are known there"
        note(request_id, refusal)
        raise
    except UNFIT as exc:
        refusal = unfit(exc)
        note(request_id, refusal)
        raise OmniClientError(refusal.message) from exc


def _check_params(engine: Any, sampling_params_list: Sequence[Any]) -> None:
    """Raise for parameters that the stage they are meant for could not take."""
    for stage_id, params in enumerate(sampling_params_list):
        if not isinstance(params, SamplingParams):
            continue
        encoder, decoder = _codec()
        # As the engine core reads it: a value of another type would end its input thread.
        decoder.decode(encoder.encode(params))
        _check_schema(params.structured_outputs)
        # Of the first stage vLLM does it, with the prompt at hand.
        if stage_id > 0 and _default_is_sound(engine, stage_id):
            _verify(engine, stage_id, params)


@functools.cache
def _codec() -> tuple[MsgpackEncoder, MsgpackDecoder]:
    return MsgpackEncoder(), MsgpackDecoder(SamplingParams)


def _check_schema(constraint: Any) -> None:
    """Raise for a schema whose compilation would take the server's loop for long, or for ever."""
    schema = getattr(constraint, "json", None)
    waiting = [json.loads(schema) if isinstance(schema, str) else schema]
    while waiting:
        part = waiting.pop()
        if isinstance(part, dict):
            for key in ("minItems", "maxItems"):
                if isinstance(count := part.get(key), int | float) and count > _MOST_ITEMS:
                    raise VLLMValidationError(
                        f"{key} must be at most {_MOST_ITEMS}.",
                        parameter="structured_outputs",
                        value=count,
                    )
            waiting += part.values()
        elif isinstance(part, list):
            waiting += part


def _default_is_sound(engine: Any, stage_id: int) -> bool:
    """Whether the deployment's own parameters for this stage pass, so that others should.

    Where they do not, what vLLM checks is not what this stage is about.
    """
    known = _sound_defaults.setdefault(engine, {})
    if stage_id not in known:
        defaults = engine.default_sampling_params_list
        default = defaults[stage_id] if stage_id < len(defaults) else None
        try:
            known[stage_id] = isinstance(default, SamplingParams)
            if known[stage_id]:
                _verify(engine, stage_id, default)
        except (VLLMClientError, *UNFIT):
            known[stage_id] = False
    return known[stage_id]


def _verify(engine: Any, stage_id: int, params: Any) -> None:
    configs = engine.stage_vllm_configs
    config = configs[stage_id] if stage_id < len(configs) else None
    if config is not None:
        params.verify(
            config.model_config,
            config.speculative_config,
            config.structured_outputs_config,
            getattr(engine.output_processors[stage_id], "tokenizer", None),
        )
