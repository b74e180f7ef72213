# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-omni-health project
"""What a thread has to do at certain times, in between waiting for something else."""

from __future__ import annotations

import logging
import sched
import time
from collections.abc import Callable

logger = logging.getLogger(__name__)


class Timers:
    """Calls that are due at a time. Used on one thread only; ``clock`` returns seconds."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._calls = sched.scheduler(clock)

    def after(self, seconds: float, call: Callable[[], object]) -> None:
        """Call once, in so many seconds. What it raises is logged."""
        self._calls.enter(seconds, 0, _logged, (call,))

    def every(self, period_s: float, call: Callable[[], object]) -> None:
        """Call again and again. What it raises is logged, and it is called no more."""

        def again() -> None:
            call()
            self.after(period_s, again)

        self.after(period_s, again)

    def run(self) -> float | None:
        """Make the calls that are due; seconds until the next one is, None when there is none."""
        return self._calls.run(blocking=False)


def _logged(call: Callable[[], object]) -> None:
    try:
        call()
    except Exception:
        logger.exception("[health] a timed call failed")
