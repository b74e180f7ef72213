# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-omni-health project
"""Memory that nobody accounts for: what is measured beyond what stages report, and its growth.

Each process holds some memory that torch's allocator never sees: the interpreter, a device
context, communicators. What there is of it when the comparison begins (the service has started)
is the *overhead*. Growth beyond that is *unaccounted*, in percent of what was expected, which is
report and overhead together. It is what ended in an outage when nobody looked.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Hashable
from dataclasses import dataclass


@dataclass(frozen=True)
class Gap:
    """One comparison. All in bytes but ``percent`` and ``trend`` (bytes per second)."""

    actual: int
    reported: int
    overhead: int
    unaccounted: int
    percent: float
    trend: float
    alarm: bool


class GapTracker:
    """Compares for one device, or one stage on it. Times are monotonic seconds.

    The alarm is on when growth has been above ``limit_pct`` for ``window_s`` without a break,
    and off when it has been at or below for as long. ``limit_pct`` 0 switches it off.
    """

    def __init__(self, limit_pct: float, window_s: float) -> None:
        self._limit_pct = limit_pct
        self._window_s = window_s
        self._overhead: int | None = None
        self._population: Hashable = None
        self._turning_since: float | None = None
        self._recent: deque[tuple[float, int]] = deque()
        self.alarm = False

    def feed(
        self, now: float, actual: int | None, reported: int | None, population: Hashable = None
    ) -> Gap | None:
        """One more comparison; None while something is unknown, which changes nothing.

        ``population`` names those that take part. When it changes, comparing begins anew.
        """
        if actual is None or reported is None:
            return None
        # Host memory that is reported need not be backed by pages yet.
        beyond = max(0, actual - reported)
        if self._overhead is None or population != self._population:
            self._overhead, self._population = beyond, population
            self._recent.clear()
            self._turning_since = None
            self.alarm = False
        unaccounted = beyond - self._overhead
        percent = 100.0 * unaccounted / max(1, reported + self._overhead)
        self._recent.append((now, unaccounted))
        while self._recent[0][0] < now - self._window_s and len(self._recent) > 2:
            self._recent.popleft()
        self._turn(now, percent)
        return Gap(
            actual, reported, self._overhead, unaccounted, percent, _slope(self._recent), self.alarm
        )

    def _turn(self, now: float, percent: float) -> None:
        above = self._limit_pct > 0 and percent > self._limit_pct
        if above is self.alarm:
            self._turning_since = None
            return
        if self._turning_since is None:
            self._turning_since = now
        if now - self._turning_since >= self._window_s:
            self.alarm = above
            self._turning_since = None


def _slope(points: deque[tuple[float, int]]) -> float:
    """Least squares through the points: bytes per second."""
    if len(points) < 2:
        return 0.0
    mean_t = sum(t for t, _ in points) / len(points)
    mean_y = sum(y for _, y in points) / len(points)
    spread = sum((t - mean_t) ** 2 for t, _ in points)
    if spread == 0:
        return 0.0
    return sum((t - mean_t) * (y - mean_y) for t, y in points) / spread
