# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-omni-health project
"""What the health of a server looks like to whoever reads it: plain immutable values."""

from __future__ import annotations

from enum import StrEnum
from typing import Any

import msgspec
from vllm_omni.health.faults.fault import Fault

ReplicaKey = tuple[int, int]
"""(stage_id, replica_id)"""


class State(StrEnum):
    """Health of the whole server."""

    STARTING = "STARTING"
    HEALTHY = "HEALTHY"
    DEGRADED = "DEGRADED"
    DEAD = "DEAD"


class ReplicaState(StrEnum):
    """Health of one replica of a stage."""

    STARTING = "starting"
    LIVE = "live"
    SUSPECT = "suspect"
    LOST = "lost"


class InvalidTransition(RuntimeError):
    """A fact that cannot be true in the present state: a bug of the caller's."""


class ReplicaView(msgspec.Struct, frozen=True):
    """One replica in a :class:`Snapshot`; ``pid`` is that of its engine core, if known."""

    replica_id: int
    state: ReplicaState
    pid: int | None = None


class StageView(msgspec.Struct, frozen=True):
    """One stage in a :class:`Snapshot`, its replicas in order of their ids."""

    stage_id: int
    replicas: tuple[ReplicaView, ...] = ()


class Snapshot(msgspec.Struct, frozen=True, kw_only=True):
    """The machine at one moment. Immutable, so any thread may keep and read it.

    ``since``: wall time, in seconds since the epoch, at which ``state`` was entered.
    ``fault``: the reason for the state as far as it has settled; None in HEALTHY.
    ``started``: whether the server has been HEALTHY before.
    ``version``: grows by one with every new snapshot.
    """

    state: State
    accepting: bool
    draining: bool
    since: float
    fault: Fault | None
    stages: tuple[StageView, ...]
    started: bool
    version: int


class Transition(msgspec.Struct, frozen=True, kw_only=True):
    """One entry of the history: a move, or an event that moved nothing.

    ``seq`` counts all entries from 0. ``wall`` is in seconds since the epoch, ``monotonic`` in
    seconds of the machine's monotonic clock. ``fault`` is a fault's public form. ``detail`` holds
    the figures of an event that is no fault, as plain JSON values.
    """

    seq: int
    from_state: State
    to_state: State
    wall: float
    monotonic: float
    cause: str
    fault: dict[str, Any] | None = None
    detail: dict[str, Any] | None = None

    @property
    def moved(self) -> bool:
        """Whether the state changed."""
        return self.from_state is not self.to_state
