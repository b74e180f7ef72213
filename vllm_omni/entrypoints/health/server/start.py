# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-omni-health project
"""From the first process to the first request: a start that fails, or is stopped, ends.

The main thread is blocked in upstream's start-up then, which can wait for minutes for a process
that is gone, and has no event loop that would handle a signal. A thread watches in its place.
"""

from __future__ import annotations

import logging
import os
import select
import signal
import threading
from types import FrameType
from typing import Any

from vllm_omni.entrypoints.health.server import signals
from vllm_omni.entrypoints.health.server.exit import end_process, leave, wait_leaving
from vllm_omni.health.faults.fault import Fault
from vllm_omni.health.runtime import HealthRuntime
from vllm_omni.health.state.machine import State

from vllm_omni_health.console import complain

logger = logging.getLogger(__name__)

START_FAILED = 1
"""Exit status of a server that could not start."""

_UPSTREAM_UNWIND_S = 5.0
"""How long upstream may take to give up after a stage was lost during start-up and the others
were killed. Measured: 0.2 s."""


def describe(fault: Fault) -> str:
    """A fault in half a line, for the person who started the server."""
    where = "" if fault.stage_id is None else f"stage {fault.stage_id} "
    where += "" if fault.replica_id is None else f"replica {fault.replica_id}: "
    return f"{where}{fault.kind.value}: {fault.message.splitlines()[0] if fault.message else ''}"


class StartGuard:
    """Watches a start; a context manager around all of the server's life.

    Once the HTTP server has its own signal handlers, signals no longer come here; a stage that
    is lost after the start is not this guard's either.
    """

    def __init__(self, runtime: HealthRuntime) -> None:
        self._runtime = runtime
        self._wake_fd = os.eventfd(0, os.EFD_CLOEXEC)
        self._signals: list[int] = []
        self._over = False
        self._previous: dict[int, Any] = {}
        self._thread = threading.Thread(target=self._watch, name="health-start-watch", daemon=True)

    def __enter__(self) -> StartGuard:
        for signum in signals.to_stop():
            self._previous[signum] = signal.signal(signum, self._on_signal)
        self._unsubscribe = self._runtime.machine.observe(lambda _move: self._wake())
        self._thread.start()
        return self

    def __exit__(self, *exc: object) -> None:
        self._over = True
        self._unsubscribe()
        self._wake()

    def _wake(self) -> None:
        os.eventfd_write(self._wake_fd, 1)

    def _on_signal(self, signum: int, frame: FrameType | None) -> None:
        # Recorded here, handled by the thread.
        del frame
        self._signals.append(signum)
        self._wake()

    def _watch(self) -> None:
        while not self._over:
            select.select([self._wake_fd], [], [])
            os.eventfd_read(self._wake_fd)
            snapshot = self._runtime.machine.snapshot
            if self._signals:
                self._stop(self._signals[0])
            elif snapshot.state is State.DEAD and not snapshot.started:
                self._end_failed_start()
                return
            elif snapshot.started:
                return

    def _stop(self, signum: int) -> None:
        complain(f"told to stop by {signal.Signals(signum).name} while starting")
        leave(self._runtime, 128 + signum)
        end_process(128 + signum)

    def _end_failed_start(self) -> None:
        # What upstream waits for while it unwinds is gone then, and so is what would be left.
        self._runtime.supervisor.kill_all()
        if wait_leaving(_UPSTREAM_UNWIND_S):
            return
        fault = self._runtime.machine.reason
        complain(f"start-up failed: {describe(fault) if fault else 'a stage is gone'}")
        leave(self._runtime, START_FAILED)
        end_process(START_FAILED)
