# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-omni-health project
"""How many requests may fail of late before the server counts as degraded.

One request that fails and leaves its replica intact says little. Many in a short time say that
something is wrong which no single one of them shows.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable

from vllm_omni.health.faults.fault import Fault
from vllm_omni.health.state.causes import ERROR_BUDGET_SPENT
from vllm_omni.health.state.machine import HealthMachine


class ErrorBudget:
    """A sliding window over failures of the server's that ended one request each.

    More than ``count`` of them within ``window_s`` seconds: the machine is told so, and told
    again when that has passed. ``count`` 0 switches it off. Any thread may call; the machine is
    told outside of the lock, so that its observers may call as well.
    """

    def __init__(
        self,
        machine: HealthMachine,
        count: int,
        window_s: float,
        monotonic: Callable[[], float] = time.monotonic,
    ) -> None:
        self._machine = machine
        self._count = count
        self._window_s = window_s
        self._monotonic = monotonic
        self._lock = threading.Lock()
        # Beyond count + 1 nothing changes, so no more are kept.
        self._times: deque[float] = deque(maxlen=count + 1)
        self._last: Fault | None = None

    def spend(self, fault: Fault) -> None:
        """A request failed; the client was not to blame, and its replica serves on."""
        if self._count == 0:
            return
        with self._lock:
            self._times.append(self._monotonic())
            self._last = fault
        self.tick()

    def tick(self) -> None:
        """Look at the time. Called every second or so while the server lives."""
        if self._count == 0:
            return
        with self._lock:
            horizon = self._monotonic() - self._window_s
            while self._times and self._times[0] <= horizon:
                self._times.popleft()
            fault = self._last if len(self._times) > self._count else None
        if fault is not None:
            self._machine.arise(ERROR_BUDGET_SPENT, fault)
        else:
            self._machine.end(ERROR_BUDGET_SPENT)
