"""What stages say of their own memory, as it arrives with the answers to pings."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable

import msgspec
from vllm_omni.health.watched import ReplicaKey

logger = logging.getLogger(__name__)

FRESH_S = 15.0
"""How long a report counts: three times the longest period of pings. A stage in the middle of a
long step answers none, and may take memory all the same."""


class RankReport(msgspec.Struct, frozen=True, kw_only=True):
    """One worker's figures, in bytes; None is unknown.

    ``device`` is torch's name; ``uuid`` the driver's, where there is one. ``reserved`` is what
    torch's allocator holds, of which ``allocated`` is in use. ``free`` and ``total`` are the
    device's, as torch sees them.
    """

    pid: int
    device: str
    uuid: str | None = None
    allocated: int | None = None
    reserved: int | None = None
    free: int | None = None
    total: int | None = None


class StageReport(msgspec.Struct, frozen=True, kw_only=True):
    """One replica's figures. ``kv_total`` and ``kv_used``: its KV cache, in bytes, of one rank."""

    ranks: tuple[RankReport, ...] = ()
    kv_total: int | None = None
    kv_used: int | None = None


class Reports:
    """The latest report of each replica, with its time.

    Written on the orchestrator's loop, read on the watch's thread: a dict's single operations
    are atomic, and a report is immutable.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._latest: dict[ReplicaKey, tuple[float, StageReport]] = {}
        self._unreadable = False

    def receive(self, key: ReplicaKey, answer: object) -> None:
        """Take the answer to a ping. One without figures, or with unreadable ones, says nothing."""
        if not isinstance(answer, dict):
            return
        try:
            report = msgspec.convert(answer, StageReport)
        except msgspec.ValidationError as exc:
            if not self._unreadable:
                self._unreadable = True
                logger.warning("[health] unreadable memory report of stage %s: %s", key, exc)
            return
        self._latest[key] = (self._clock(), report)

    def forget(self, key: ReplicaKey) -> None:
        """The replica is gone."""
        self._latest.pop(key, None)

    def latest(self) -> dict[ReplicaKey, tuple[float, StageReport]]:
        """(age in seconds, report) of each replica, also of those that are too old to count."""
        now = self._clock()
        return {key: (now - at, report) for key, (at, report) in dict(self._latest).items()}
