# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-omni-health project
"""The end of a stream of server-sent events, as the contract has it: an error event, ``[DONE]``.

Routes end their streams in ways of their own when their engine request fails: with an error
event of another shape, with ``[DONE]`` alone, or not at all.
"""

from __future__ import annotations

import json

_GAP = b"\n\n"


def before_the_end(chunk: bytes) -> bytes | None:
    """What of ``chunk`` stands before an error event or ``[DONE]``; None if neither is in it.

    Upstream's routes send whole events.
    """
    kept = b""
    for event in chunk.split(_GAP):
        if _ends_stream(event):
            return kept
        kept += event + _GAP
    return None


def _ends_stream(event: bytes) -> bool:
    for line in event.splitlines():
        name, _, data = line.partition(b":")
        if name == b"data" and (data.strip() == b"[DONE]" or _is_error(data)):
            return True
    return False


def _is_error(data: bytes) -> bool:
    # Nearly every event is none: the look is cheap, and only at a failure is there one at all.
    if b"error" not in data and b"failed" not in data:
        return False
    try:
        event = json.loads(data)
    except ValueError:
        return False
    if not isinstance(event, dict):
        return False
    return bool(event.get("error")) or str(event.get("type")).endswith(("error", ".failed"))
