# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-omni-health project
"""The kinds of faults, how far one reaches, and the exit status that each stands for."""

from __future__ import annotations

from enum import StrEnum
from typing import NamedTuple


class _KindFacts(NamedTuple):
    exit_status: int
    sentence: str


class FaultKind(StrEnum):
    """The kind of a fault. The order of definition is the order of precedence."""

    OOM = "oom"
    HOST_OOM = "host_oom"
    ACCELERATOR = "accelerator"
    PROCESS_LOST = "process_lost"
    HANG = "hang"
    COLLECTIVE = "collective"
    ENGINE = "engine"
    ORCHESTRATOR = "orchestrator"

    @property
    def exit_status(self) -> int:
        """Exit status of a server that ends because of this kind of fault."""
        return _KIND_FACTS[self].exit_status

    @property
    def sentence(self) -> str:
        """The one sentence a client or a pod's termination message may show."""
        return _KIND_FACTS[self].sentence

    @property
    def precedence(self) -> int:
        """Rank in which the reason is settled; the lowest is the most telling.

        The first message is often not the first cause: the peers of a rank
        that ran out of memory report a collective error.
        """
        return _PRECEDENCE[self]


_KIND_FACTS = {
    FaultKind.OOM: _KindFacts(81, "The server ran out of accelerator memory."),
    FaultKind.HOST_OOM: _KindFacts(82, "The server ran out of host memory."),
    FaultKind.ACCELERATOR: _KindFacts(
        83, "An accelerator of the server failed and cannot be used any more."
    ),
    FaultKind.PROCESS_LOST: _KindFacts(85, "A process of the server ended unexpectedly."),
    FaultKind.HANG: _KindFacts(86, "The server stopped making progress."),
    FaultKind.COLLECTIVE: _KindFacts(
        84, "Communication between accelerators of the server failed."
    ),
    FaultKind.ENGINE: _KindFacts(80, "The model engine met an error that it cannot recover from."),
    FaultKind.ORCHESTRATOR: _KindFacts(
        87, "The server's coordination of requests does not work any more."
    ),
}

_PRECEDENCE = {kind: rank for rank, kind in enumerate(FaultKind)}


class Severity(StrEnum):
    """How far a fault reaches.

    ``request``: this request fails, the replica is as good as before.
    ``fatal``: the replica cannot be trusted any more.
    """

    REQUEST = "request"
    FATAL = "fatal"
