"""What a request asks for, read from its body as cheaply as can be, before anything is done.

Only a few well-known fields are looked at, and nothing is judged: a body that is not understood
has no cost, and is for the application to answer.
"""

from __future__ import annotations

import re
from typing import Any

import msgspec
from vllm_omni.health.memory.cost import Cost

BODY_LIMIT = 4 << 20
"""Bytes up to which a body is read for its cost. Larger ones hold images or audio, and to parse
them would keep the loop from everyone else for tens of milliseconds."""

_CHARACTERS_A_TOKEN = 4
"""A rule of thumb for English text; for others too few tokens are counted, and the bytes that a
token takes are learnt from the same count."""

_IMAGE_TOKENS = 1024
"""About what one image in a prompt becomes in common vision models."""

_DEFAULT_TOKENS = 256
_DEFAULT_SIDE = 1024
"""What is counted where a request leaves it to the model."""

_SIZE = re.compile(r"(\d{1,5})x(\d{1,5})")
_DECODER = msgspec.json.Decoder(dict[str, Any])


def cost_of(path: str, body: bytes) -> Cost | None:
    """The cost of a POST to ``path``; None when it has none that can be told."""
    try:
        fields = _DECODER.decode(body)
    except msgspec.DecodeError:
        return None
    if path.startswith(("/v1/images", "/v1/videos")):
        return Cost("pixels", _pixels(fields))
    if path.startswith(("/v1/chat/completions", "/v1/completions", "/v1/responses")):
        images = fields.get("extra_body")
        nested = images if isinstance(images, dict) else {}
        if any(name in fields or name in nested for name in ("height", "num_inference_steps")):
            return Cost("pixels", _pixels(nested | fields))
        return Cost("tokens", _tokens(fields))
    if path.startswith("/v1/audio/speech"):
        return Cost("tokens", _tokens(fields))
    return None


def _pixels(fields: dict[str, Any]) -> float:
    """Of all images and frames."""
    width, height = _number(fields, "width"), _number(fields, "height")
    size = fields.get("size")
    match = _SIZE.fullmatch(size) if isinstance(size, str) else None
    if match is not None:
        width, height = float(match[1]), float(match[2])
    count = (_number(fields, "n") or 1) * (_number(fields, "num_outputs_per_prompt") or 1)
    frames = _number(fields, "num_frames") or 1
    if frames == 1 and (seconds := _number(fields, "seconds")) is not None:
        frames = max(1.0, seconds * (_number(fields, "fps") or 24))
    return (width or _DEFAULT_SIDE) * (height or _DEFAULT_SIDE) * frames * count


def _tokens(fields: dict[str, Any]) -> float:
    """Of the prompt, and of the answers as far as they are bounded."""
    prompt = 0.0
    for name in ("messages", "prompt", "input", "text"):
        prompt += _text(fields.get(name))
    answer = None
    for name in ("max_completion_tokens", "max_output_tokens", "max_tokens"):
        answer = answer or _number(fields, name)
    return prompt + (answer or _DEFAULT_TOKENS) * (_number(fields, "n") or 1)


def _text(value: Any, depth: int = 0) -> float:
    """Tokens in a prompt of any shape; what is linked or embedded counts as an image each."""
    if isinstance(value, str):
        return len(value) / _CHARACTERS_A_TOKEN
    if depth > 8:
        return 0.0
    if isinstance(value, list):
        if value and all(isinstance(item, int) for item in value):
            return float(len(value))
        return sum(_text(item, depth + 1) for item in value)
    if isinstance(value, dict):
        kind = value.get("type")
        if isinstance(kind, str) and kind not in ("text", "input_text", "message"):
            return float(_IMAGE_TOKENS)
        return sum(_text(value.get(name), depth + 1) for name in ("content", "text"))
    return 0.0


def _number(fields: dict[str, Any], name: str) -> float | None:
    """A positive number, also as text (videos' ``seconds``); None for anything else."""
    value = fields.get(name)
    if isinstance(value, str) and value.isdigit():
        value = int(value)
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < 1e9:
        return None
    return float(value)
