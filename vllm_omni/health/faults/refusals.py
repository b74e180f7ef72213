# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-omni-health project
"""Which requests the client is to blame for, and what it is told: a lookup by request id.

The counterpart of :mod:`vllm_omni.health.faults.by_request`. What is noted here is no fault: it
counts against nothing and moves nothing.
"""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass

_KEPT = 1024
"""Requests remembered. They are looked up within moments, by the answer under way."""


@dataclass(frozen=True)
class Refusal:
    """Why a request was refused, as an OpenAI error body says it. ``status`` is 4xx."""

    message: str
    status: int = 400
    type: str = "BadRequestError"
    param: str | None = None


class Refusals:
    """One per server. Any thread may write; each method is one operation or two on a dict."""

    def __init__(self) -> None:
        self._refusals: OrderedDict[str, Refusal] = OrderedDict()

    def note(self, request_id: str, refusal: Refusal) -> None:
        """Remember why the engine's request of this id was refused."""
        self._refusals[request_id] = refusal
        while len(self._refusals) > _KEPT:
            self._refusals.popitem(last=False)

    def of(self, request_id: str) -> Refusal | None:
        """Why the engine's request of this id was refused, if it was."""
        return self._refusals.get(request_id)
