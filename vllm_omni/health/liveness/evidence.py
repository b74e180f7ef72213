# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-omni-health project
"""What the kernel shows of a replica that does not answer: is it stopped, does it compute?

Read from ``/proc``, which takes microseconds a process, so on any thread.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from vllm_omni.health.faults.fault import Fault
from vllm_omni.health.processes.process import CLOCK_TICKS_PER_S, Activity, ProcessIdentity
from vllm_omni.health.processes.watched import Replica, WatchedProcess

Replicas = Callable[[int, int], Replica | None]
"""What the supervisor knows of a replica, by stage and replica; None for one elsewhere."""

_STATES = {
    "R": "runs",
    "S": "sleeps",
    "D": "waits for a device",
    "T": "is stopped",
    "t": "is stopped by a debugger",
    "Z": "has ended",
}


class Evidence:
    """The processes of one replica over time, as far as it takes to tell what they are doing."""

    def __init__(self, stage_id: int, replica_id: int, replicas: Replicas) -> None:
        self._key = (stage_id, replica_id)
        self._replicas = replicas
        self._before: dict[ProcessIdentity, int] = {}

    def progressed_at(self) -> float | None:
        """When the replica last said, not as an answer, that it gets on; monotonic seconds."""
        replica = self._replicas(*self._key)
        return None if replica is None else replica.progressed_at

    def begin(self) -> None:
        """From now on CPU time counts."""
        self._before = {
            one.identity: activity.cpu_ticks
            for one in self._processes()
            if (activity := Activity.of(one.identity)) is not None
        }

    def stopped(self) -> list[WatchedProcess]:
        """Those that a signal has stopped: they cannot work, whether there is work or not."""
        return [
            one
            for one in self._processes()
            if (activity := Activity.of(one.identity)) is not None and activity.stopped
        ]

    def describe(self) -> str:
        """Every process with its state, and its CPU time since :meth:`begin`."""
        return "; ".join(self._line(one) for one in self._processes())

    def add_to(self, fault: Fault) -> Fault:
        """``fault`` with the process it is about: the one that is stopped, else the first.

        An inline replica without workers is this process; one on another host has none here.
        """
        replica = self._replicas(*self._key)
        if replica is None:
            return fault.with_context(role="stage on another host")
        found = self.stopped() or self._processes()
        if not found:
            role = "diffusion engine" if replica.inline else "engine core"
            return fault.with_context(role=role, pid=replica.core.pid)
        culprit = found[0]
        return fault.with_context(role=culprit.role, rank=culprit.rank, pid=culprit.identity.pid)

    def _processes(self) -> Sequence[WatchedProcess]:
        replica = self._replicas(*self._key)
        return [] if replica is None else list(replica.processes)

    def _line(self, one: WatchedProcess) -> str:
        name = f"{one.role}{'' if one.rank is None else f' rank {one.rank}'}"
        name += f" (pid {one.identity.pid})"
        activity = Activity.of(one.identity)
        if activity is None:
            return f"{name} is gone"
        state = _STATES.get(activity.state, f"is in state {activity.state}")
        before = self._before.get(one.identity)
        if before is None:
            return f"{name} {state}"
        seconds = (activity.cpu_ticks - before) / CLOCK_TICKS_PER_S
        return f"{name} {state}, {seconds:.2f} s of CPU time"
