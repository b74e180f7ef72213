# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-omni-health project
"""``/health`` over time, as a prober sees it.

The probe has a thread and a connection of its own, so that neither a busy event loop nor a
slow client delays it.
"""

from __future__ import annotations

import http.client
import json
import threading
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any
from urllib.parse import urlsplit

from vllm_omni_health.drills.precedence import precedence

DEFAULT_INTERVAL_S = 0.02
_TIMEOUT_S = 5.0


@dataclass(frozen=True)
class View:
    """One answer of ``/health``; ``status`` is None and ``error`` set when there was none.

    ``asked`` and ``at``: when it was asked for, and when the answer was there (monotonic).
    ``state`` and ``accepting`` are None where the body does not tell them.
    """

    asked: float
    at: float
    status: int | None
    state: str | None = None
    accepting: bool | None = None
    error: str | None = None

    def same_as(self, other: View) -> bool:
        """Whether nothing but the time is different."""
        mine = (self.status, self.state, self.accepting, self.error)
        return mine == (other.status, other.state, other.accepting, other.error)

    def describe(self) -> str:
        """For people: ``503 DEAD``."""
        if self.status is None:
            return self.error or "no answer"
        return f"{self.status} {self.state}" if self.state else str(self.status)


class HealthProbe:
    """Asks for ``/health`` every ``interval_s`` and keeps each change of the answer.

    ``on_change`` is called with each change, on the probe's own thread. Use it as a context
    manager, or call :meth:`start` and :meth:`stop`.
    """

    def __init__(
        self,
        url: str,
        *,
        interval_s: float = DEFAULT_INTERVAL_S,
        path: str = "/health",
        on_change: Callable[[View], None] | None = None,
    ) -> None:
        parts = urlsplit(url)
        self._host, self._port = parts.hostname or "127.0.0.1", parts.port or 80
        self._path = path
        self.interval_s = interval_s
        self.changes: list[View] = []
        self.asked = 0
        self.slowest_s = 0.0
        """The longest that an answer took."""
        self._on_change = on_change
        self._stop = threading.Event()
        self._changed = threading.Condition()
        self._connection: http.client.HTTPConnection | None = None
        self._thread = threading.Thread(target=self._run, name="health-probe", daemon=True)

    def __enter__(self) -> HealthProbe:
        self.start()
        return self

    def __exit__(self, *_exc: object) -> None:
        self.stop()

    def start(self) -> None:
        """Begin to ask."""
        self._thread.start()

    def stop(self) -> None:
        """Stop asking, and wait for the last answer."""
        self._stop.set()
        self._thread.join()

    @property
    def last(self) -> View | None:
        """The latest change."""
        return self.changes[-1] if self.changes else None

    def first(self, wanted: Callable[[View], bool], since: float = 0.0) -> View | None:
        """The first change from ``since`` on that is as wanted."""
        return next((v for v in list(self.changes) if v.at >= since and wanted(v)), None)

    def wait_for(
        self, wanted: Callable[[View], bool], *, since: float = 0.0, timeout_s: float
    ) -> View | None:
        """Block until there is such a change; None when there was none in time."""
        with self._changed:
            self._changed.wait_for(lambda: self.first(wanted, since) is not None, timeout_s)
        return self.first(wanted, since)

    def _run(self) -> None:
        with precedence():
            self._ask_over_and_over()
        self._hang_up()

    def _ask_over_and_over(self) -> None:
        due = time.monotonic()
        while not self._stop.is_set():
            view = self._ask()
            self.asked += 1
            self.slowest_s = max(self.slowest_s, view.at - view.asked)
            if self.last is None or not view.same_as(self.last):
                with self._changed:
                    self.changes.append(view)
                    self._changed.notify_all()
                if self._on_change is not None:
                    self._on_change(view)
            # A late answer does not make for a burst of questions after it.
            due = max(due + self.interval_s, time.monotonic())
            self._stop.wait(due - time.monotonic())

    def _ask(self) -> View:
        asked = time.monotonic()
        fresh = self._connection is None
        try:
            status, payload = self._get()
        except (OSError, http.client.HTTPException) as exc:
            self._hang_up()
            if not fresh and not isinstance(exc, TimeoutError):
                # The server closed a connection that it kept open; that alone is no answer.
                return self._ask()
            return View(asked, time.monotonic(), None, error=_name_of(exc))
        at = time.monotonic()
        body = _json_object(payload)
        return View(asked, at, status, body.get("state"), body.get("accepting"))

    def _get(self) -> tuple[int, bytes]:
        if self._connection is None:
            self._connection = http.client.HTTPConnection(
                self._host, self._port, timeout=_TIMEOUT_S
            )
        self._connection.request("GET", self._path)
        response = self._connection.getresponse()
        payload = response.read()
        if response.will_close:
            self._hang_up()
        return response.status, payload

    def _hang_up(self) -> None:
        if self._connection is not None:
            self._connection.close()
            self._connection = None


def as_data(view: View, zero: float) -> dict[str, Any]:
    """A view as plain data, its times counted from ``zero``."""
    data = asdict(view)
    data["asked"], data["at"] = round(view.asked - zero, 4), round(view.at - zero, 4)
    return data


def _name_of(exc: Exception) -> str:
    if isinstance(exc, ConnectionRefusedError):
        return "refused"
    if isinstance(exc, TimeoutError):
        return f"no answer in {_TIMEOUT_S:g} s"
    return type(exc).__name__


def _json_object(payload: bytes) -> dict[str, Any]:
    try:
        body = json.loads(payload)
    except ValueError:
        return {}
    return body if isinstance(body, dict) else {}
