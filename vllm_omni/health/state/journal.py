# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-omni-health project
"""The history of a machine, and those who are told of every entry as it is made."""

from __future__ import annotations

import logging
import threading
from collections import deque
from collections.abc import Callable
from typing import Any

from vllm_omni.health.faults.fault import Fault
from vllm_omni.health.state.values import State, Transition

logger = logging.getLogger(__name__)

Observer = Callable[[Transition], object]
"""Called with one entry; what it returns is ignored."""


class Journal:
    """Bounded history with observers. ``lock`` is the machine's, held by who records.

    Moves and events are kept apart, up to ``size`` of each, so that a flood of events cannot
    push the moves out.
    """

    def __init__(self, lock: threading.Lock, size: int) -> None:
        self._lock = lock
        self._moves: deque[Transition] = deque(maxlen=size)
        self._events: deque[Transition] = deque(maxlen=size)
        self._seq = 0
        # Each with the number of the first entry it is to see.
        self._observers: tuple[tuple[int, Observer], ...] = ()
        self._undelivered: deque[Transition] = deque()
        self._delivering = False

    def record(
        self,
        from_state: State,
        to_state: State,
        *,
        wall: float,
        monotonic: float,
        cause: str,
        fault: Fault | None,
        detail: dict[str, Any] | None = None,
    ) -> None:
        """Add an entry. The lock is held; :meth:`deliver` follows when it is released."""
        entry = Transition(
            seq=self._seq,
            from_state=from_state,
            to_state=to_state,
            wall=wall,
            monotonic=monotonic,
            cause=cause,
            fault=fault.public() if fault is not None else None,
            detail=detail,
        )
        self._seq += 1
        (self._moves if entry.moved else self._events).append(entry)
        if self._observers:
            self._undelivered.append(entry)

    def entries(self) -> tuple[Transition, ...]:
        """Moves and events, oldest first."""
        with self._lock:
            entries = (*self._moves, *self._events)
        return tuple(sorted(entries, key=lambda entry: entry.seq))

    def observe(self, callback: Observer) -> Callable[[], None]:
        """See :meth:`HealthMachine.observe`."""
        with self._lock:
            subscription = (self._seq, callback)
            self._observers = (*self._observers, subscription)

        def unsubscribe() -> None:
            with self._lock:
                self._observers = tuple(one for one in self._observers if one is not subscription)

        return unsubscribe

    def deliver(self) -> None:
        """Call the observers with what they have not seen. The lock is not held.

        If a delivery is under way, on another thread or further up this one's stack, it takes
        over what there is: that keeps the order, and nobody waits for an observer.
        """
        with self._lock:
            if self._delivering:
                return
            self._delivering = True
        idle = False
        try:
            while not idle:
                with self._lock:
                    if not self._undelivered:
                        self._delivering, idle = False, True
                        continue
                    entry = self._undelivered.popleft()
                    observers = self._observers
                self._call(entry, observers)
        finally:
            # Only if an observer ended the thread, by SystemExit or a keyboard interrupt.
            if not idle:
                with self._lock:
                    self._delivering = False

    def _call(self, entry: Transition, observers: tuple[tuple[int, Observer], ...]) -> None:
        for subscription in observers:
            first, callback = subscription
            if first > entry.seq or subscription not in self._observers:
                continue
            try:
                callback(entry)
            except Exception:
                logger.exception("an observer of the health state failed")
