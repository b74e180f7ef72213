# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-omni-health project
"""A queue of upstream's that tells of every message that is put into it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any


class ToldQueue:
    """Wraps ``queue``, which is anything with ``put_nowait`` or an async ``put``.

    ``before`` is called with each message, ``after`` once it is in, on the thread or loop that
    puts it. All else is the queue's own.
    """

    def __init__(
        self,
        queue: Any,
        *,
        before: Callable[[Any], object] = lambda _message: None,
        after: Callable[[], object] = lambda: None,
    ) -> None:
        self._queue = queue
        self._before = before
        self._after = after

    def __getattr__(self, name: str) -> Any:
        return getattr(self._queue, name)

    async def put(self, message: Any) -> None:
        """Put a message, when there is room."""
        self._before(message)
        await self._queue.put(message)
        self._after()

    def put_nowait(self, message: Any) -> None:
        """Put a message, or raise what the queue raises when it is full."""
        self._before(message)
        self._queue.put_nowait(message)
        self._after()
