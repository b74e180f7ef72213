# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-omni-health project
"""Whether a device is short of memory: at once when it is, and only after a while not any more."""

from __future__ import annotations

_CALM = 10
"""Pressure that returns within this many times the wait since it ended makes the wait longer."""

_LONGEST = 12
"""How many times ``recover_s`` the wait can become."""

STALE_S = 60.0
"""How long pressure is upheld while nothing is known of the device. After that nothing speaks
for it any more, and a driver that never answers again must not refuse requests for ever."""


class PressureGate:
    """One device. All times are monotonic seconds; not for several threads.

    Under pressure from the first sample below the floor, until free memory has been at or above
    it, in every sample, for ``recover_s``. A user of memory that comes and goes more slowly than
    that would open and close admission with every turn, so the wait doubles each time pressure
    comes back soon, and is as at first again after a quiet time. A margin above the floor would
    do less: a device whose normal state is just above it would never recover.
    """

    def __init__(self, recover_s: float) -> None:
        self._recover_s = recover_s
        self._wait_s = recover_s
        self._fine_since: float | None = None
        self._ended_at: float | None = None
        self._known_at: float | None = None
        self.on = False

    @property
    def wait_s(self) -> float:
        """How long free memory has to be above the floor at present."""
        return self._wait_s

    def feed(self, now: float, free: int | None, floor: int) -> bool:
        """One more sample (None: unknown); whether the device is under pressure."""
        if free is None:
            self._fine_since = None
            if self.on and self._known_at is not None and now - self._known_at >= STALE_S:
                self._end(now)
            return self.on
        self._known_at = now
        if free < floor:
            if not self.on:
                self._begin(now)
            self._fine_since = None
        elif self.on:
            if self._fine_since is None:
                self._fine_since = now
            if now - self._fine_since >= self._wait_s:
                self._end(now)
        return self.on

    def _begin(self, now: float) -> None:
        self.on = True
        soon = self._ended_at is not None and now - self._ended_at < _CALM * self._wait_s
        self._wait_s = (
            min(2 * self._wait_s, _LONGEST * self._recover_s) if soon else self._recover_s
        )

    def _end(self, now: float) -> None:
        self.on = False
        self._ended_at = now
        self._fine_since = None
