# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-omni-health project
"""Which HTTP request or websocket each of the engine's requests was made for.

Upstream's engine client keeps a dict of its requests in flight. An entry is made in the task of
the route that asks for it, or in one that this started, so the context says which call it is.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from vllm_omni.entrypoints.health.http.call import GuardedCall, current_call
from vllm_omni.health import seams


class RequestBook:
    """Belongs to the API server's loop, as the engine client's own dict does.

    ``on_close`` is called whenever a request of the engine's has ended, with its call.
    """

    def __init__(self, on_close: Callable[[GuardedCall | None], None] = lambda _call: None) -> None:
        self._open: dict[str, GuardedCall | None] = {}
        self._sessions: set[str] = set()
        self._on_close = on_close

    def keep(self, engine_client: Any) -> None:
        """Follow this client's requests. Before there are any."""
        # Upstream puts an adapter around the client of a pure diffusion model.
        client = getattr(engine_client, "_wrapped", engine_client)
        seams.assign(client, request_states=_Table(client.request_states, self))
        sessions = getattr(client, "_handles", None)
        if isinstance(sessions, dict):
            # A duplex client's; its requests are the engine's own affair.
            seams.assign(client, _handles=_Table(sessions, self, sessions=True))

    def __len__(self) -> int:
        return len(self._open)

    @property
    def requests(self) -> int:
        """How many of what is open are requests: a duplex session may have nothing to do."""
        return len(self._open) - len(self._sessions)

    def call_of(self, request_id: str) -> GuardedCall | None:
        """The call that a request in flight was made for, if it was one."""
        return self._open.get(request_id)

    def at_work(self, call: GuardedCall) -> bool:
        """Whether the engine still has a request in flight for this call."""
        return any(
            self._open.get(request_id) is call and request_id not in self._sessions
            for request_id in call.engine_ids
        )

    def opened(self, request_id: str, *, session: bool = False) -> None:
        """A request, or a duplex session, begins, for whoever's context this is."""
        call = self._open[request_id] = current_call()
        if call is not None:
            call.engine_ids.append(request_id)
        if session:
            self._sessions.add(request_id)

    def closed(self, request_id: str) -> None:
        """A request has ended."""
        if request_id not in self._open:
            return
        call = self._open.pop(request_id)
        self._sessions.discard(request_id)
        if call is not None and call.is_websocket:
            # It may go on for days, and an answer to look up a failure for never comes.
            call.engine_ids.remove(request_id)
        self._on_close(call)


class _Table(dict[str, Any]):
    """The engine client's dict, which tells the book."""

    def __init__(
        self, entries: dict[str, Any], book: RequestBook, *, sessions: bool = False
    ) -> None:
        super().__init__(entries)
        self._book = book
        self._sessions = sessions

    def __setitem__(self, request_id: str, state: Any) -> None:
        if request_id not in self:
            self._book.opened(request_id, session=self._sessions)
        super().__setitem__(request_id, state)

    def __delitem__(self, request_id: str) -> None:
        super().__delitem__(request_id)
        self._book.closed(request_id)

    def pop(self, request_id: str, *default: Any) -> Any:
        """As a dict's."""
        self._book.closed(request_id)
        return super().pop(request_id, *default)

    def clear(self) -> None:
        """As a dict's."""
        for request_id in list(self):
            del self[request_id]
