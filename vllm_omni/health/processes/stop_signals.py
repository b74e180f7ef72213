# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-omni-health project
"""A signal to stop that reaches a stage's process: its server's order, or everybody's signal.

A service manager may signal every process at once, in any order. The server then drains, and
needs its stages for as long as that takes. So a process of a stage ends by such a signal only
when its server has given the order to; else it tells the server about it and goes on, and the
server, which knows whether it is told to stop itself, judges.

The order goes ahead of the signal, through a pipe from the process that spawned this one, which
nothing is ever read from: once there is something in it, or its other end is gone, that stays so.
Used on the main thread, where Python handles signals.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from multiprocessing.connection import Connection
from types import FrameType
from typing import Any

SIGNALS = (signal.SIGTERM, signal.SIGINT)
"""What is judged. SIGHUP is a terminal's word to its session, of which the server makes
something, and its stages nothing."""


class StopSignals:
    """The handler of these signals in a stage's process.

    ``ordered``: whether the process is to end. ``tell``: passes a signal's number on.
    """

    def __init__(self, ordered: Callable[[], bool], tell: Callable[[int], object]) -> None:
        self._ordered = ordered
        self._tell = tell
        self._ends: dict[int, Any] = {}

    def take(self) -> None:
        """Handle the signals from now on. What has handled them so far ends the process."""
        signal.signal(signal.SIGHUP, signal.SIG_IGN)
        for signum in SIGNALS:
            handler = signal.getsignal(signum)
            if handler != self._handle:
                self._ends[signum] = handler
                signal.signal(signum, self._handle)

    def _handle(self, signum: int, frame: FrameType | None) -> None:
        if not self._ordered():
            self._tell(signum)
            return
        end = self._ends.get(signum)
        if callable(end):
            end(signum, frame)
        elif end is not signal.SIG_IGN:
            signal.signal(signum, signal.SIG_DFL)
            os.kill(os.getpid(), signum)


def given(order: Connection) -> bool:
    """Whether the order to end has been given through this pipe, or nobody can any more."""
    try:
        return order.poll()
    except OSError:
        return True


_own: StopSignals | None = None


def listen(ordered: Callable[[], bool], tell: Callable[[int], object]) -> None:
    """Have this process, from now on, end by a signal only when ordered to."""
    global _own
    _own = StopSignals(ordered, tell)
    _own.take()


def take_again() -> None:
    """Handle the signals in the place of a handler that was installed since; it will be used
    when the order is given. Does nothing where nobody listens."""
    if _own is not None:
        _own.take()
