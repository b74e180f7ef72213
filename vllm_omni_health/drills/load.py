# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-omni-health project
"""Load: a number of clients that send chat requests, and the record of every one."""

from __future__ import annotations

import asyncio
import itertools
import time
import uuid
from collections import Counter
from collections.abc import Callable, Sequence

import httpx

from vllm_omni_health.drills.chat import ChatCall, Outcome, Request, carry_out, new_client

_PAUSE_S = 0.25
"""A client's pause after anything but an answer: a dead server answers very quickly."""

_LOOK_S = 0.02


class Load:
    """One client per request in ``requests``; each sends its own over and over, or once.

    As a context manager it starts on entering; on leaving, clients hang up.
    """

    def __init__(
        self,
        url: str,
        requests: Sequence[Request],
        *,
        repeat: bool = False,
        on_end: Callable[[ChatCall], None] | None = None,
    ) -> None:
        self.calls: list[ChatCall] = []
        self._client: httpx.AsyncClient = new_client(url)
        self._requests = requests
        self._repeat = repeat
        self._on_end = on_end
        self._numbers = itertools.count(1)
        self._tasks: list[asyncio.Task[None]] = []
        self._stopped = False

    async def __aenter__(self) -> Load:
        self.start()
        return self

    async def __aexit__(self, *_exc: object) -> None:
        await self.hang_up()

    def start(self) -> None:
        """Let every client send its first request."""
        for request in self._requests:
            self._begin(request, self._repeat)

    def add(self, request: Request) -> None:
        """One more client, which sends this once."""
        self._begin(request, repeat=False)

    def stop(self) -> None:
        """No more requests; those that are pending go on."""
        self._stopped = True

    async def hang_up(self) -> None:
        """End every client, its pending request unanswered."""
        self.stop()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await self._client.aclose()

    def in_flight(self, moment: float | None = None) -> list[ChatCall]:
        """Calls in flight at ``moment`` (default: now)."""
        moment = time.monotonic() if moment is None else moment
        return [call for call in self.calls if call.in_flight_at(moment)]

    async def settled(self, timeout_s: float) -> bool:
        """Wait until no call is pending; False when some still are after ``timeout_s``."""

        def ended() -> bool:
            all_sent = self._stopped or len(self.calls) >= len(self._tasks)
            return all_sent and not any(call.pending for call in self.calls)

        return await _until(ended, timeout_s)

    async def under_way(self, timeout_s: float, *, for_s: float = 0.5) -> bool:
        """Wait until every client's request has been in flight for ``for_s``.

        False when that cannot be had in time: the requests end too quickly.
        """

        def ready() -> bool:
            sent_by = time.monotonic() - for_s
            settled = [call for call in self.calls if call.pending and call.sent <= sent_by]
            return len(settled) >= len(self._tasks)

        def too_late() -> bool:
            return not self._repeat and any(not call.pending for call in self.calls)

        await _until(lambda: ready() or too_late(), timeout_s)
        return ready()

    def counts(self) -> Counter[Outcome]:
        """How many calls had which outcome."""
        return Counter(call.outcome for call in self.calls)

    def _begin(self, request: Request, repeat: bool) -> None:
        task = asyncio.create_task(self._be_client(request, repeat), name="drill-client")
        self._tasks.append(task)

    async def _be_client(self, request: Request, repeat: bool) -> None:
        while not self._stopped:
            call = ChatCall(
                number=next(self._numbers),
                stream=request.stream,
                label=request.label,
                request_id=uuid.uuid4().hex,
                sent=time.monotonic(),
            )
            self.calls.append(call)
            await carry_out(self._client, request, call)
            if self._on_end is not None:
                self._on_end(call)
            if not repeat:
                return
            if call.outcome is not Outcome.ANSWERED:
                await asyncio.sleep(_PAUSE_S)


async def _until(condition: Callable[[], bool], timeout_s: float) -> bool:
    deadline = time.monotonic() + timeout_s
    while not condition():
        if time.monotonic() >= deadline:
            return False
        await asyncio.sleep(_LOOK_S)
    return True
