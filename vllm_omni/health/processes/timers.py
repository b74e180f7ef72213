"""What a thread has to do at certain times, in between waiting for something else."""

from __future__ import annotations

import heapq
import itertools
import logging
import time
from collections.abc import Callable

logger = logging.getLogger(__name__)


class Timers:
    """Calls that are due at a time. Used on one thread only; ``clock`` returns seconds."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._numbers = itertools.count()
        # The number keeps calls that are due at the same time in order.
        self._due: list[tuple[float, int, Callable[[], object]]] = []

    def after(self, seconds: float, call: Callable[[], object]) -> None:
        """Call once, in so many seconds."""
        heapq.heappush(self._due, (self._clock() + seconds, next(self._numbers), call))

    def every(self, period_s: float, call: Callable[[], object]) -> None:
        """Call again and again. What it raises is logged, and it is called no more."""

        def again() -> None:
            call()
            self.after(period_s, again)

        self.after(period_s, again)

    def next_in(self) -> float | None:
        """Seconds until a call is due; None when there is none to wait for."""
        return max(0.0, self._due[0][0] - self._clock()) if self._due else None

    def run(self) -> None:
        """Make the calls that are due."""
        now = self._clock()
        while self._due and self._due[0][0] <= now:
            _, _, call = heapq.heappop(self._due)
            try:
                call()
            except Exception:
                logger.exception("[health] a timed call failed")
