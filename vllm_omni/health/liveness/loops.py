# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-omni-health project
"""Event loops of the server that may stop turning, watched from the supervisor's thread.

A loop says that it turns by a beat about once a second. One that a blocking call holds up says
nothing: first the server is DEGRADED and takes no requests, because nobody would handle them;
when the loop turns again all is well. When it does not for much longer, nothing but the end of
the process can help.
"""

from __future__ import annotations

import logging
import os
import sys
import threading
import time
import traceback
from collections.abc import Callable
from typing import Any

from vllm_omni.health.faults.fault import Fault, FaultKind
from vllm_omni.health.state.causes import ORCHESTRATOR_ENDED, loop_stalled
from vllm_omni.health.state.machine import HealthMachine

logger = logging.getLogger(__name__)

BEAT_S = 1.0
"""How often a loop that turns says so; the shortest stall that can be asked for is as long."""


class LoopBeat:
    """The beat of one loop. ``name`` is for people: ``orchestrator``, ``API server``."""

    def __init__(self, name: str, clock: Callable[[], float] = time.monotonic) -> None:
        self.name = name
        self._clock = clock
        self._at: float | None = None
        self._loop: Any = None
        self._thread_id: int | None = None
        self._on_beat: Callable[[], object] | None = None

    def start(self, loop: Any, on_beat: Callable[[], object] | None = None) -> None:
        """Beat on ``loop`` from now on, with a call of ``on_beat``.

        Called on its thread, where it is running.
        """
        self._loop = loop
        self._on_beat = on_beat
        self._thread_id = threading.get_ident()
        self._beat()

    def stop(self) -> None:
        """The loop is to end, so nobody need expect it to turn. On the loop's thread."""
        self._loop = self._at = None

    def _beat(self) -> None:
        if self._loop is not None:
            self._at = self._clock()
            self._loop.call_later(BEAT_S, self._beat)
            if self._on_beat is not None:
                self._on_beat()

    @property
    def at(self) -> float | None:
        """When it last beat; None when it is not to. Any thread."""
        return self._at

    def age(self) -> float:
        """Seconds since the last beat; 0 when it is not to beat. Any thread."""
        at = self._at
        return 0.0 if at is None else self._clock() - at

    def where(self) -> str | None:
        """The stack of the loop's thread: what holds it up. Any thread."""
        frame = sys._current_frames().get(self._thread_id or 0)
        return None if frame is None else "".join(traceback.format_stack(frame))


class LoopWatch:
    """Judges one loop by its beat. :meth:`check` is called on one thread, every ``period_s``.

    ``stall_s``: seconds without a beat after which the loop has stalled. ``end_s``: after which
    it is given up, and ``on_end`` is called once; never when it is 0.
    """

    def __init__(
        self,
        beat: LoopBeat,
        machine: HealthMachine,
        *,
        stall_s: float,
        end_s: float,
        on_end: Callable[[], object],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.period_s = min(BEAT_S, stall_s / 4)
        self._beat = beat
        self._machine = machine
        self._stall_s = stall_s
        self._end_s = max(end_s, stall_s) if end_s > 0 else float("inf")
        self._on_end = on_end
        self._clock = clock
        self._last_beat: float | None = None
        self._last_check = clock()
        self._silent_s = 0.0
        self._stalled = False
        self._ended = False

    def check(self) -> None:
        """Look whether there was a beat, and draw the conclusions."""
        now, beat = self._clock(), self._beat.at
        # A process that was stopped for a while, with all its loops, has not stalled: a time in
        # which this was not called does not count.
        passed = min(now - self._last_check, 2 * self.period_s)
        self._last_check = now
        if beat is None or beat != self._last_beat:
            self._last_beat = beat
            self._silent_s = 0.0
            if self._stalled:
                self._stalled = False
                logger.warning("[health] the loop of the %s turns again", self._beat.name)
                self._machine.end(loop_stalled(self._beat.name))
            return
        self._silent_s += passed
        if self._silent_s > self._end_s and not self._ended:
            self._ended = True
            self._machine.arise(ORCHESTRATOR_ENDED, self._fault())
            self._on_end()
        elif self._silent_s > self._stall_s and not self._stalled:
            self._stalled = True
            self._machine.arise(loop_stalled(self._beat.name), self._fault())

    def _fault(self) -> Fault:
        fault = Fault(
            kind=FaultKind.ORCHESTRATOR,
            role=self._beat.name,
            pid=os.getpid(),
            message=f"the loop of the {self._beat.name} has not turned for {self._silent_s:.1f} s",
            traceback=self._beat.where(),
        )
        logger.error("[health] %s; it stands at:\n%s", fault.log_line(), fault.traceback)
        return fault
