# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-omni-health project
"""Whether the end of a stage's process is a fault, and which: judged when enough is known.

Used on the supervisor's thread only.
"""

from __future__ import annotations

import logging
import signal
from collections.abc import Callable
from functools import partial

from vllm_omni.health.faults.fault import Fault
from vllm_omni.health.processes.pidfd import kill_process
from vllm_omni.health.processes.process import ExitStatus, exit_under_way
from vllm_omni.health.processes.timers import Timers
from vllm_omni.health.processes.watched import Replica, WatchedProcess, lost_fault

logger = logging.getLogger(__name__)

_MESSAGE_GRACE_S = 0.05
"""How long an engine core that exited by itself may still have a message under way: it was handed
to the socket before the exit, so only our own reading is awaited."""

_TOLD_S = 1.0
"""How long after a stage's process the server itself may get a signal to stop that everybody gets.
A service manager sends them all within milliseconds; the server's loop may be busy for a while."""


class Judge:
    """Judges ends. ``report`` takes the fault of one that nobody wanted.

    ``stopping``: whether the server is told to stop. ``closing``: whether the ends of a replica's
    processes are wanted. ``listen``: reads what the replica's processes, of which one is ending,
    have said so far.
    """

    def __init__(
        self,
        timers: Timers,
        report: Callable[[Fault], None],
        *,
        stopping: Callable[[], bool],
        closing: Callable[[Replica], bool],
        listen: Callable[[Replica, WatchedProcess], None],
    ) -> None:
        self._timers = timers
        self._report = report
        self._stopping = stopping
        self._closing = closing
        self._listen = listen

    def told_to_stop(self, replica: Replica, watched: WatchedProcess, signum: int) -> None:
        """A process got a signal to stop, and goes on for now."""
        if not self._stopping():
            self._timers.after(_TOLD_S, partial(self._stop, replica, watched, signum))

    def _stop(self, replica: Replica, watched: WatchedProcess, signum: int) -> None:
        # Unless the server was told as well, or ends it anyway, somebody wants this one gone.
        if watched.judged or self._stopping() or self._closing(replica):
            return
        watched.judged = True
        self._report(_lost(watched, ExitStatus(signal_number=signum)))
        kill_process(watched.identity)

    def ending(self, replica: Replica, watched: WatchedProcess, status: ExitStatus) -> None:
        """A process has ended, or is about to; what is said of it twice is judged once."""
        if watched.judged:
            return
        if watched.role == "worker" and status.signal_number == signal.SIGKILL:
            # Workers end with their engine core, and may be seen to before it.
            for core in list(replica.processes):
                core_status = None if core.role == "worker" else exit_under_way(core.identity)
                if core_status is not None:
                    self.ending(replica, core, core_status)
        watched.judged = True
        self._listen(replica, watched)
        judge = partial(self._judge, replica, watched, status)
        if status.stop_signal is not None:
            # Before it could leave that to the server, such as while it was being imported.
            self._timers.after(_TOLD_S, judge)
        elif watched.role == "engine core" and status.signal_number is None:
            # It ended by itself, so it may have said why, on a queue that is still being read.
            self._timers.after(_MESSAGE_GRACE_S, judge)
        else:
            judge()

    def _judge(self, replica: Replica, watched: WatchedProcess, status: ExitStatus) -> None:
        wanted = self._closing(replica)
        host_oom = not wanted and watched.killed_for_memory(status)
        # A lost replica's processes end one after another. One that the kernel killed for its
        # memory tells more than whoever missed it first.
        if wanted or (replica.lost and not host_oom):
            logger.debug("[health] %s %s", watched.role, status.describe())
            return
        self._report(_lost(watched, status, host_oom=host_oom))


def _lost(watched: WatchedProcess, status: ExitStatus, *, host_oom: bool = False) -> Fault:
    pid, rank = watched.identity.pid, watched.rank
    return lost_fault(watched.key, pid, watched.role, rank, status, host_oom=host_oom)
