# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-omni-health project
"""Hung or busy: a ping that a replica answers between steps.

An engine core's busy loop answers itself, which proves the process, its loop, its workers' last
step and the channel in one go. A diffusion replica, one of whose calls is a whole image or film,
answers with the time for which it has had work and got nowhere, and says when a step is done.

A replica is heard by an answer to a ping, and by word of a step that is done. One that is not
heard for ``hang_timeout_s`` is suspect; if nothing is heard for another ``SECOND_PING_S``, after a
second ping, it hangs. While a signal has stopped one of its processes, nothing counts as heard.
Lives on the orchestrator's loop; nothing here blocks or polls by itself: the orchestrator's beat
calls :meth:`LivenessMonitor.tick`.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from typing import NamedTuple

from vllm.v1.engine.exceptions import EngineDeadError
from vllm_omni.health.faults.fault import Fault, FaultKind
from vllm_omni.health.liveness.evidence import Evidence, Replicas
from vllm_omni.health.state.machine import HealthMachine
from vllm_omni.health.state.values import ReplicaKey

logger = logging.getLogger(__name__)

PING = "health_ping"
"""Name of the utility method that our engine core answers, and our diffusion process."""

SECOND_PING_S = 0.5
"""How long the second ping may take. A loop that turns answers within one step, and the first
ping has already waited for ``hang_timeout_s``."""

_IDLE_PERIOD_S = 5.0
"""Time between pings of a replica that answers: rare enough to cost nothing."""

_LOOK_S = 1.0
"""Longest time between two ticks, for processes that are stopped while nothing is asked."""

_SHORTEST_S = 0.02
"""Shortest time between two ticks."""

_SLACK_S = 0.25
"""How much later than it should a tick may come, on a busy machine, without an excuse."""


Ping = Callable[[], Awaitable[object]]


class Pulse(NamedTuple):
    """An answer of a replica that knows more than that it is there.

    ``silent_s``: for how long it has had work and made no progress, in seconds. ``value``: what
    else it says.
    """

    silent_s: float
    value: object = None


@dataclass
class _Watched:
    ping: Ping
    on_answer: Callable[[object], object] | None
    evidence: Evidence
    alive_at: float
    asked_at: float
    pending: int = 0
    stopped_since: float | None = None
    suspect_since: float | None = None
    pings: set[asyncio.Task[None]] = field(default_factory=set)

    def silent_s(self, now: float) -> float:
        since = self.alive_at
        return now - (since if self.stopped_since is None else min(since, self.stopped_since))


class LivenessMonitor:
    """Pings replicas and tells the machine which of them are suspect or hang.

    ``timeout_s``: for how many seconds a replica may go unheard; 0 switches the monitor off.
    ``on_hang`` is called once for a replica that hangs, with the fault; the replica is then no
    longer watched.
    ``replicas``: what the supervisor knows of one; its times are on the same clock.
    """

    def __init__(
        self,
        machine: HealthMachine,
        timeout_s: float,
        on_hang: Callable[[Fault], None],
        clock: Callable[[], float] = time.monotonic,
        *,
        replicas: Replicas = lambda _stage_id, _replica_id: None,
    ) -> None:
        self._machine = machine
        self._timeout_s = timeout_s
        self._on_hang = on_hang
        self._clock = clock
        self._known = replicas
        self._period_s = min(_IDLE_PERIOD_S, timeout_s / 4)
        self._replicas: dict[ReplicaKey, _Watched] = {}
        self._ticked_at: float | None = None

    @property
    def tick_s(self) -> float:
        """In how many seconds :meth:`tick` wants to be called."""
        if self._timeout_s <= 0 or not self._replicas:
            return float("inf")
        now = self._clock()
        wait_s = min(self._due_in(watched, now) for watched in self._replicas.values())
        return max(_SHORTEST_S, min(wait_s, _LOOK_S, self._timeout_s / 10))

    def _due_in(self, watched: _Watched, now: float) -> float:
        if watched.suspect_since is not None:
            return watched.suspect_since + SECOND_PING_S - now
        wait_s = self._timeout_s - watched.silent_s(now)
        if not watched.pending:
            wait_s = min(wait_s, self._next_ping_in(watched, now))
        return wait_s

    def _next_ping_in(self, watched: _Watched, now: float) -> float:
        return max(watched.alive_at, watched.asked_at) + self._period_s - now

    def watch(
        self,
        stage_id: int,
        replica_id: int,
        ping: Ping,
        on_answer: Callable[[object], object] | None = None,
    ) -> None:
        """Watch a replica that has just become ready.

        ``on_answer`` is called on the loop with the value of every answer to a ping.
        """
        if self._timeout_s > 0:
            now = self._clock()
            evidence = Evidence(stage_id, replica_id, self._known)
            self._replicas[(stage_id, replica_id)] = _Watched(ping, on_answer, evidence, now, now)

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
        self._excuse_late_tick(now)
        for key, watched in list(self._replicas.items()):
            self._look(key, watched)
            silent_s = watched.silent_s(now)
            if watched.suspect_since is not None:
                if now - watched.suspect_since >= SECOND_PING_S:
                    self._hangs(key, watched, silent_s)
            elif silent_s >= self._timeout_s:
                watched.suspect_since = now
                self._machine.replica_suspect(*key, self._fault(key, watched, silent_s))
                self._ask(key, watched, now)
            elif not watched.pending and self._next_ping_in(watched, now) <= 0:
                watched.evidence.begin()
                self._ask(key, watched, now)
        self._ticked_at = now

    def _excuse_late_tick(self, now: float) -> None:
        """Time in which this loop did not turn says nothing about replicas.

        Their answers may be there and unread, as after a server was stopped for a while.
        """
        passed = 0.0 if self._ticked_at is None else now - self._ticked_at
        for watched in self._replicas.values():
            if passed > _LOOK_S + _SLACK_S:
                watched.alive_at += passed - _LOOK_S
                if watched.stopped_since is not None:
                    watched.stopped_since += passed - _LOOK_S
            if watched.suspect_since is not None and passed > SECOND_PING_S + _SLACK_S:
                watched.suspect_since += passed - SECOND_PING_S + _SLACK_S

    def _look(self, key: ReplicaKey, watched: _Watched) -> None:
        """Signs of life, or of none, that are no answers."""
        if not watched.evidence.stopped():
            watched.stopped_since = None
        elif watched.stopped_since is None:
            # Some time after the last look, at which it was not.
            watched.stopped_since = self._clock() if self._ticked_at is None else self._ticked_at
        progressed_at = watched.evidence.progressed_at()
        if progressed_at is not None and progressed_at > watched.alive_at:
            self._alive(key, watched, progressed_at)
        elif watched.suspect_since is not None:
            self._alive(key, watched, watched.alive_at)

    def _alive(self, key: ReplicaKey, watched: _Watched, at: float) -> None:
        """Note that the replica was heard then, in monotonic seconds; may end a suspicion."""
        watched.alive_at = max(watched.alive_at, at)
        if watched.suspect_since is None or self._replicas.get(key) is not watched:
            return
        if watched.silent_s(self._clock()) < self._timeout_s:
            watched.suspect_since = None
            self._machine.replica_recovered(*key)

    def _ask(self, key: ReplicaKey, watched: _Watched, now: float) -> None:
        watched.asked_at = now
        watched.pending += 1
        task = asyncio.create_task(
            self._await_answer(key, watched), name=f"health-ping-stage{key[0]}-replica{key[1]}"
        )
        watched.pings.add(task)
        task.add_done_callback(watched.pings.discard)

    async def _await_answer(self, key: ReplicaKey, watched: _Watched) -> None:
        try:
            answer = await watched.ping()
        except EngineDeadError:
            # A client that cannot ask any more: its replica's end is seen elsewhere.
            return
        except Exception as exc:
            # An answer all the same, as of a stage on another host without this layer.
            logger.debug("[health] stage %d replica %d cannot answer a ping: %r", *key, exc)
            answer = None
        watched.pending -= 1
        pulse = answer if isinstance(answer, Pulse) else Pulse(0.0, answer)
        self._alive(key, watched, self._clock() - max(0.0, pulse.silent_s))
        if watched.on_answer is not None:
            watched.on_answer(pulse.value)

    def _hangs(self, key: ReplicaKey, watched: _Watched, silent_s: float) -> None:
        self.forget(*key)
        self._on_hang(self._fault(key, watched, silent_s))

    def _fault(self, key: ReplicaKey, watched: _Watched, silent_s: float) -> Fault:
        message = f"no sign of life for {silent_s:.1f} s (hang_timeout_s={self._timeout_s:g})"
        shown = watched.evidence.describe()
        return watched.evidence.add_to(
            Fault(
                kind=FaultKind.HANG,
                message=f"{message}: {shown}" if shown else message,
                stage_id=key[0],
                replica_id=key[1],
            )
        )
