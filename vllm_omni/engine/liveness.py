"""Hung or busy: a ping that an engine core's busy loop answers between steps.

The answer proves the process, its loop, its workers' last step and the channel in one go. No
answer for ``hang_timeout_s`` makes the replica suspect; when a second ping stays unanswered as
well, it hangs. Lives on the orchestrator's loop; nothing here blocks or polls by itself: the
orchestrator's beat calls :meth:`LivenessMonitor.tick`.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field

from vllm_omni.health.faults import Fault, FaultKind
from vllm_omni.health.machine import HealthMachine

PING = "health_ping"
"""Name of the utility method that our engine core answers."""

SECOND_PING_S = 0.5
"""How long the second ping may take. A loop that turns answers within one step, and the first
ping has already waited for ``hang_timeout_s``."""

_IDLE_PERIOD_S = 5.0
"""Time between pings of a replica that answers: rare enough to cost nothing."""

ReplicaKey = tuple[int, int]
Ping = Callable[[], Awaitable[object]]


@dataclass
class _Watched:
    ping: Ping
    answered_at: float
    asked_at: float | None = None
    suspect_since: float | None = None
    pings: set[asyncio.Task[None]] = field(default_factory=set)


class LivenessMonitor:
    """Pings replicas and tells the machine which of them are suspect or hang.

    ``timeout_s``: seconds without an answer; 0 switches the monitor off. ``on_hang`` is called
    once for a replica that hangs, with the fault; the replica is then no longer watched.
    ``on_answer`` is called with each answer.
    """

    def __init__(
        self,
        machine: HealthMachine,
        timeout_s: float,
        on_hang: Callable[[Fault], None],
        clock: Callable[[], float] = time.monotonic,
        on_answer: Callable[[ReplicaKey, object], None] = lambda _key, _answer: None,
    ) -> None:
        self._machine = machine
        self._timeout_s = timeout_s
        self._on_hang = on_hang
        self._clock = clock
        self._on_answer = on_answer
        self._period_s = min(_IDLE_PERIOD_S, timeout_s / 4)
        self._replicas: dict[ReplicaKey, _Watched] = {}

    @property
    def tick_s(self) -> float:
        """How often :meth:`tick` wants to be called, in seconds."""
        if self._timeout_s <= 0 or not self._replicas:
            return float("inf")
        suspects = any(watched.suspect_since is not None for watched in self._replicas.values())
        return SECOND_PING_S / 2 if suspects else min(1.0, self._timeout_s / 10)

    def watch(self, stage_id: int, replica_id: int, ping: Ping) -> None:
        """Watch a replica that has just become ready."""
        if self._timeout_s > 0:
            self._replicas[(stage_id, replica_id)] = _Watched(ping, self._clock())

    def forget(self, stage_id: int, replica_id: int) -> None:
        """Watch a replica no longer: it is lost, or closing."""
        watched = self._replicas.pop((stage_id, replica_id), None)
        for task in watched.pings if watched is not None else ():
            task.cancel()

    def close(self) -> None:
        """Forget every replica."""
        for key in list(self._replicas):
            self.forget(*key)

    def tick(self) -> None:
        """Send the pings that are due, and judge those that are overdue."""
        now = self._clock()
        for key, watched in list(self._replicas.items()):
            silent_s = now - watched.answered_at
            if watched.suspect_since is not None:
                if now - watched.suspect_since >= SECOND_PING_S:
                    self._hangs(key, silent_s)
            elif silent_s >= self._timeout_s:
                watched.suspect_since = now
                self._machine.replica_suspect(*key, self._fault(key, silent_s))
                self._ask(key, watched, now)
            elif watched.asked_at is None and silent_s >= self._period_s:
                self._ask(key, watched, now)

    def _ask(self, key: ReplicaKey, watched: _Watched, now: float) -> None:
        watched.asked_at = now
        task = asyncio.create_task(
            self._await_answer(key, watched), name=f"health-ping-stage{key[0]}-replica{key[1]}"
        )
        watched.pings.add(task)
        task.add_done_callback(watched.pings.discard)

    async def _await_answer(self, key: ReplicaKey, watched: _Watched) -> None:
        try:
            answer = await watched.ping()
        except Exception:
            # A client that cannot ask any more: its replica's end is seen elsewhere.
            return
        watched.answered_at = self._clock()
        watched.asked_at = None
        if watched.suspect_since is not None:
            watched.suspect_since = None
            self._machine.replica_recovered(*key)
        self._on_answer(key, answer)

    def _hangs(self, key: ReplicaKey, silent_s: float) -> None:
        self.forget(*key)
        self._on_hang(self._fault(key, silent_s))

    def _fault(self, key: ReplicaKey, silent_s: float) -> Fault:
        return Fault(
            kind=FaultKind.HANG,
            role="engine core",
            message=f"no answer for {silent_s:.1f} s (hang_timeout_s={self._timeout_s:g})",
            stage_id=key[0],
            replica_id=key[1],
        )
