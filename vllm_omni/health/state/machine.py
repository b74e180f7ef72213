# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-omni-health project
"""The health of one server as a state machine that only facts can move.

States and moves: STARTING → HEALTHY, STARTING → DEAD, HEALTHY → DEGRADED,
DEGRADED → HEALTHY, DEGRADED → DEAD. DEAD is terminal. A fault that leaves no
way to serve passes through DEGRADED, so that both moves are in the history.

The state is never set, it follows from the facts that hold: which replicas are
live, which devices are short of memory, whether the orchestrator runs and its loop turns.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import msgspec
from vllm_omni.health.faults.fault import Fault
from vllm_omni.health.state.causes import FAILED_START, Cause, Causes, replica_out
from vllm_omni.health.state.journal import Journal, Observer
from vllm_omni.health.state.values import (
    InvalidTransition,
    ReplicaState,
    ReplicaView,
    Snapshot,
    StageView,
    State,
    Transition,
)

__all__ = [
    "HealthMachine",
    "InvalidTransition",
    "Observer",
    "ReplicaState",
    "ReplicaView",
    "Snapshot",
    "StageView",
    "State",
    "Transition",
]

# Each state with those that may follow it directly.
_MOVES = {
    State.STARTING: (State.HEALTHY, State.DEAD),
    State.HEALTHY: (State.DEGRADED,),
    State.DEGRADED: (State.HEALTHY, State.DEAD),
    State.DEAD: (),
}


@dataclass
class _Replica:
    state: ReplicaState = ReplicaState.STARTING
    pid: int | None = None


class HealthMachine:
    """One per server. Facts may be told from any thread; reading takes no lock.

    :attr:`snapshot` is a plain attribute, replaced as a whole by every change.

    A fact that a race can make late (a recovery of a replica that is lost by now, anything after
    DEAD) is no error: it goes to the history, if it has something to say. A fact that no order
    of events allows raises InvalidTransition. Never call from a signal handler: the thread it
    interrupts may hold the lock.

    ``settle_s``: for how long a more telling fault may replace the first one as the reason.
    ``history``: moves kept, and as many events. ``clock`` and ``monotonic`` return seconds.
    """

    snapshot: Snapshot

    def __init__(
        self,
        settle_s: float = 0.1,
        history: int = 256,
        clock: Callable[[], float] = time.time,
        monotonic: Callable[[], float] = time.monotonic,
    ) -> None:
        self._clock = clock
        self._monotonic = monotonic
        self._lock = threading.Lock()
        self._journal = Journal(self._lock, history)
        self._stages: dict[int, dict[int, _Replica]] = {}
        self._causes = Causes(settle_s)
        self._draining = False
        self._wall = clock()
        self._now = monotonic()
        self.snapshot = Snapshot(
            state=State.STARTING,
            accepting=False,
            draining=False,
            since=self._wall,
            fault=None,
            stages=(),
            started=False,
            version=0,
        )

    # ---- reading -----------------------------------------------------------------------------

    @property
    def reason(self) -> Fault | None:
        """The fault behind the present state, as far as it has settled."""
        return self.snapshot.fault

    def settles_in(self) -> float:
        """Seconds until :attr:`reason` is final; 0 when it is, or there is none."""
        with self._lock:
            return self._causes.settles_in(self._monotonic())

    def history(self) -> tuple[Transition, ...]:
        """Moves and events, oldest first."""
        return self._journal.entries()

    def replica_state(self, stage_id: int, replica_id: int) -> ReplicaState | None:
        """State of one replica; None if it was never heard of."""
        for stage in self.snapshot.stages:
            if stage.stage_id == stage_id:
                for replica in stage.replicas:
                    if replica.replica_id == replica_id:
                        return replica.state
        return None

    def stage_fault(self, stage_id: int) -> Fault | None:
        """Why the latest replica of this stage to be lost or suspect is so, if any is."""
        with self._lock:
            return self._causes.of_stage(stage_id)

    def observe(self, callback: Observer) -> Callable[[], None]:
        """Call ``callback`` with every entry of the history made from now on.

        Calls are made one at a time and in order, without the lock held, by a thread that tells
        a fact: the one whose fact it was, or one that is still delivering earlier entries (so a
        slow or re-entrant observer never blocks another thread's fact). An observer that raises
        is logged and called again next time. The result, when called, ends the subscription.
        """
        return self._journal.observe(callback)

    # ---- facts -------------------------------------------------------------------------------

    def expect_stage(self, stage_id: int, replicas: int) -> None:
        """The server will have this stage with replicas 0 to ``replicas`` - 1.

        Raises ValueError for less than one, InvalidTransition once the server has started.
        """
        if replicas < 1:
            raise ValueError(f"stage {stage_id} must have at least one replica, not {replicas}")
        with self._fact():
            if self.snapshot.state in (State.HEALTHY, State.DEGRADED):
                raise InvalidTransition(f"stage {stage_id} is announced after the start")
            for replica_id in range(replicas):
                self._replica(stage_id, replica_id)
            self._update("stage expected", event=False)

    def expect_replica(self, stage_id: int, replica_id: int, pid: int | None = None) -> None:
        """A process for this replica has been spawned. A lost one stays lost until ready."""
        with self._fact():
            replica = self._replica(stage_id, replica_id)
            replica.pid = pid if pid is not None else replica.pid
            self._update("replica expected", event=False)

    def replica_ready(self, stage_id: int, replica_id: int, pid: int | None = None) -> None:
        """A replica can serve, for the first time or again."""
        with self._fact():
            replica = self._replica(stage_id, replica_id)
            changed = replica.state is not ReplicaState.LIVE
            replica.state = ReplicaState.LIVE
            replica.pid = pid if pid is not None else replica.pid
            self._gone(replica_out(stage_id, replica_id))
            self._update("replica ready", event=changed)

    def started(self) -> None:
        """Start-up is complete: STARTING → HEALTHY, and on to DEGRADED if something is wrong.

        Raises InvalidTransition if it was told before, or a stage has no live replica.
        """
        with self._fact():
            state = self.snapshot.state
            if state in (State.HEALTHY, State.DEGRADED):
                raise InvalidTransition(f"the server is {state} and cannot start again")
            if state is State.STARTING:
                unready = [stage for stage in self._stages if not self._can_serve(stage)]
                if unready or not self._stages:
                    which = ", ".join(map(str, unready)) or "any"
                    raise InvalidTransition(
                        f"no live replica of stage {which}: cannot have started"
                    )
            self._update("started", start=True)

    def replica_lost(self, stage_id: int, replica_id: int, fault: Fault) -> None:
        """A replica is gone; only :meth:`replica_ready` brings it back."""
        fault = fault.as_fatal().with_context(stage_id=stage_id, replica_id=replica_id)
        with self._fact():
            replica = self._replica(stage_id, replica_id)
            cause = replica_out(stage_id, replica_id)
            if replica.state is ReplicaState.SUSPECT:
                self._gone(cause)  # now it is known, so the suspicion is not the reason
            replica.state = ReplicaState.LOST
            self._wrong(cause, fault)
            self._update("replica lost", fault)

    def replica_suspect(self, stage_id: int, replica_id: int, fault: Fault | None = None) -> None:
        """A live replica may hang. No effect on one that is not live."""
        if fault is not None:
            fault = fault.with_context(stage_id=stage_id, replica_id=replica_id)
        with self._fact():
            replica = self._replica(stage_id, replica_id)
            changed = replica.state is ReplicaState.LIVE
            if changed:
                replica.state = ReplicaState.SUSPECT
                self._wrong(replica_out(stage_id, replica_id), fault)
            self._update("replica suspect", fault, event=changed)

    def replica_recovered(self, stage_id: int, replica_id: int) -> None:
        """A suspect replica makes progress again. No effect on one that is not suspect."""
        with self._fact():
            replica = self._replica(stage_id, replica_id)
            changed = replica.state is ReplicaState.SUSPECT
            if changed:
                replica.state = ReplicaState.LIVE
                self._gone(replica_out(stage_id, replica_id))
            self._update("replica recovered", event=changed)

    def arise(self, cause: Cause, fault: Fault) -> None:
        """Something is wrong from now on; repeating what is known changes nothing.

        A cause that nothing ends makes the server DEAD. Raises InvalidTransition for FAILED_START
        once the server has started.
        """
        with self._fact():
            state = self.snapshot.state
            if cause == FAILED_START and state in (State.HEALTHY, State.DEGRADED):
                raise InvalidTransition(f"the server is {state}, its start cannot fail any more")
            # Of what ends the server a second fault may be the more telling one.
            news = cause not in self._causes or cause.ends is None
            if news:
                self._wrong(cause, fault)
            self._update(cause.begins, fault, event=news)

    def end(self, cause: Cause) -> None:
        """Something is not wrong any more; no effect if it was not.

        Raises ValueError for a cause that nothing ends.
        """
        if cause.ends is None:
            raise ValueError(f"nothing ends this: {cause.begins}")
        with self._fact():
            news = cause in self._causes
            self._gone(cause)
            self._update(cause.ends, event=news)

    def noted(self, cause: str, detail: dict[str, Any]) -> None:
        """Something worth a line in the history that is no fault: it moves nothing.

        ``detail`` is shown to everyone, and holds JSON values.
        """
        with self._fact():
            state = self.snapshot.state
            self._record(state, state, cause, None, detail)

    def fault_noted(self, fault: Fault) -> None:
        """A late or secondary fault: it may become the reason, and moves nothing."""
        with self._fact():
            if fault.fatal:
                self._causes.note(fault, self._now)
            self._update("fault noted", fault)

    def drain(self) -> None:
        """The server was told to stop: no new requests. No fault, so no move; idempotent."""
        with self._fact():
            changed = not self._draining
            self._draining = True
            self._update("draining", event=changed)

    # ---- what follows from the facts (the lock is held) --------------------------------------

    @contextmanager
    def _fact(self) -> Iterator[None]:
        """One fact: at one time, under the lock, and told to the observers afterwards."""
        with self._lock:
            self._wall, self._now = self._clock(), self._monotonic()
            yield
        self._journal.deliver()

    def _replica(self, stage_id: int, replica_id: int) -> _Replica:
        if stage_id not in self._stages and self.snapshot.state in (State.HEALTHY, State.DEGRADED):
            raise InvalidTransition(f"the server has started without a stage {stage_id}")
        return self._stages.setdefault(stage_id, {}).setdefault(replica_id, _Replica())

    def _wrong(self, cause: Cause, fault: Fault | None) -> None:
        self._causes.arise(cause, fault, self._now)

    def _gone(self, cause: Cause) -> None:
        # The reason for being dead stays, whatever comes back.
        self._causes.end(cause, keep_reason=self.snapshot.state is State.DEAD)

    def _can_serve(self, stage_id: int) -> bool:
        states = [replica.state for replica in self._stages[stage_id].values()]
        return ReplicaState.LIVE in states

    def _target(self, start: bool) -> State:
        """The state that the facts call for."""
        if self.snapshot.state is State.DEAD or self._causes.fatal:
            return State.DEAD
        for replicas in self._stages.values():
            if all(replica.state is ReplicaState.LOST for replica in replicas.values()):
                return State.DEAD
        if self.snapshot.state is State.STARTING and not start:
            return State.STARTING
        return State.DEGRADED if self._causes else State.HEALTHY

    def _update(
        self, cause: str, fault: Fault | None = None, event: bool = True, start: bool = False
    ) -> None:
        """Move to where the facts call for, write the history, publish the snapshot."""
        before, target = self.snapshot, self._target(start)
        state = before.state
        if target is State.DEAD and state is not State.DEAD:
            self._causes.turn_fatal()
        path = _path(state, target)
        shown = fault
        for following in path:
            if following is not State.HEALTHY and shown is None:
                shown = self._causes.reason
            self._record(state, following, cause, shown)
            state = following
        if not path and event:
            self._record(state, state, cause, fault)
        self._publish(before, state)

    def _record(
        self,
        old: State,
        new: State,
        cause: str,
        fault: Fault | None,
        detail: dict[str, Any] | None = None,
    ) -> None:
        wall, now = self._wall, self._now
        self._journal.record(
            old, new, wall=wall, monotonic=now, cause=cause, fault=fault, detail=detail
        )

    def _publish(self, before: Snapshot, state: State) -> None:
        serving = state in (State.HEALTHY, State.DEGRADED)
        after = Snapshot(
            state=state,
            accepting=serving
            and not self._draining
            and not self._causes.stop_admission
            and all(self._can_serve(stage_id) for stage_id in self._stages),
            draining=self._draining,
            since=before.since if state is before.state else self._wall,
            fault=self._causes.reason,
            stages=tuple(
                StageView(
                    stage_id,
                    tuple(
                        ReplicaView(replica_id, replica.state, replica.pid)
                        for replica_id, replica in sorted(replicas.items())
                    ),
                )
                for stage_id, replicas in sorted(self._stages.items())
            ),
            started=before.started or serving,
            version=before.version,
        )
        if after != before:
            self.snapshot = msgspec.structs.replace(after, version=before.version + 1)


def _path(state: State, target: State) -> tuple[State, ...]:
    """The moves from one state to another, by way of those in between."""
    if state is target:
        return ()
    if target in _MOVES[state]:
        return (target,)
    between = State.DEGRADED if target is State.DEAD else State.HEALTHY
    return (between, target)
