# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-omni-health project
"""A query that may hang or raise, asked so that nobody waits for it longer than meant."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Generic, TypeVar

T = TypeVar("T")


class NoAnswer(Exception):
    """The query has not answered in time. It may still be running; it is not asked again then."""


class BoundedQuery(Generic[T]):
    """Runs ``query`` on one thread of its own, which is a daemon and the only one there ever is.

    While an earlier call hangs, no further one is made: :meth:`result` raises NoAnswer at once.
    Calls of :meth:`begin` and :meth:`result` must not overlap.
    """

    def __init__(self, query: Callable[[], T], name: str) -> None:
        self._query = query
        self._name = name
        self._condition = threading.Condition()
        self._thread: threading.Thread | None = None
        self._asked = 0
        self._answered = 0
        self._asked_at = 0.0
        self._closed = False
        self._outcome: T | None = None
        self._error: Exception | None = None

    def begin(self) -> None:
        """Ask, unless an earlier call is still running."""
        with self._condition:
            if self._closed or self._asked != self._answered:
                return
            self._asked += 1
            self._asked_at = time.monotonic()
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, name=self._name, daemon=True)
                self._thread.start()
            self._condition.notify_all()

    def result(self, deadline: float) -> T:
        """The answer, waited for until ``deadline`` (monotonic seconds).

        Raises what the query raised, or NoAnswer.
        """
        with self._condition:
            left = deadline - time.monotonic()
            if not self._condition.wait_for(lambda: self._asked == self._answered, max(0.0, left)):
                raise NoAnswer(f"no answer for {time.monotonic() - self._asked_at:.1f} s")
            if self._error is not None:
                raise self._error
            return self._outcome  # type: ignore[return-value]

    def close(self) -> None:
        """Let the thread end; one that hangs is left behind, as a daemon."""
        with self._condition:
            self._closed = True
            self._condition.notify_all()

    def _run(self) -> None:
        while True:
            with self._condition:
                self._condition.wait_for(lambda: self._closed or self._asked != self._answered)
                if self._closed:
                    return
            outcome, error = None, None
            try:
                outcome = self._query()
            except Exception as exc:
                error = exc
            with self._condition:
                self._outcome, self._error = outcome, error
                self._answered = self._asked
                self._condition.notify_all()
