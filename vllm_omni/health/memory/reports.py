# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-omni-health project
"""What stages say of their own memory: with the answers to pings, or in files of theirs."""

from __future__ import annotations

import logging
import os
import tempfile
import time
from collections.abc import Callable, Mapping
from pathlib import Path

import msgspec
from vllm_omni.health.state.values import ReplicaKey

logger = logging.getLogger(__name__)

PERIOD_S = 5.0
"""Time between two reports in a file; pings come as often, or more often."""

FRESH_S = 15.0
"""How long a report counts: three times the longest period of pings. A stage in the middle of a
long step answers none, and may take memory all the same."""

_FILE = "memory-"


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

    def receive(self, key: ReplicaKey, answer: object, age_s: float = 0.0) -> None:
        """Take the answer to a ping. One without figures, or with unreadable ones, says nothing.

        ``age_s``: how many seconds ago it was given.
        """
        if not isinstance(answer, dict):
            return
        try:
            report = msgspec.convert(answer, StageReport)
        except msgspec.ValidationError as exc:
            if not self._unreadable:
                self._unreadable = True
                logger.warning("[health] unreadable memory report of stage %s: %s", key, exc)
            return
        self._latest[key] = (self._clock() - age_s, report)

    def collect(self, folder: Path | None, owners: Mapping[int, ReplicaKey | None]) -> None:
        """Take the reports that processes of this service have left in ``folder``."""
        found: dict[ReplicaKey, list[object]] = {}
        oldest: dict[ReplicaKey, float] = {}
        for name in _names(folder):
            pid = name.removeprefix(_FILE)
            key = owners.get(int(pid)) if pid.isdigit() else None
            if folder is None or key is None:
                continue
            try:
                content = msgspec.json.decode((folder / name).read_bytes())
                age = time.time() - (folder / name).stat().st_mtime
            except (OSError, msgspec.DecodeError):
                continue
            found.setdefault(key, []).extend(content if isinstance(content, list) else [])
            oldest[key] = max(oldest.get(key, 0.0), age)
        for key, ranks in found.items():
            self.receive(key, {"ranks": ranks}, age_s=oldest[key])

    def forget(self, key: ReplicaKey) -> None:
        """The replica is gone."""
        self._latest.pop(key, None)

    def latest(self) -> dict[ReplicaKey, tuple[float, StageReport]]:
        """(age in seconds, report) of each replica, also of those that are too old to count."""
        now = self._clock()
        return {key: (now - at, report) for key, (at, report) in dict(self._latest).items()}


def leave_report(folder: Path, ranks: list[dict[str, object]]) -> None:
    """Leave this process's figures in ``folder``, in place of those before. Raises OSError."""
    descriptor, scratch = tempfile.mkstemp(dir=folder, prefix=".")
    with open(descriptor, "wb") as file:
        file.write(msgspec.json.encode(ranks))
    os.replace(scratch, folder / f"{_FILE}{os.getpid()}")


def _names(folder: Path | None) -> list[str]:
    try:
        return [] if folder is None else [n for n in os.listdir(folder) if n.startswith(_FILE)]
    except OSError:
        return []
