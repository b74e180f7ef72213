# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-omni-health project
"""Between an event loop and other threads."""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import Callable
from functools import partial
from typing import Any


def call_soon(loop: asyncio.AbstractEventLoop, callback: Callable[[], Any]) -> None:
    """Have a loop call this, from any thread; nothing happens when the loop is closed by now."""
    with contextlib.suppress(RuntimeError):
        loop.call_soon_threadsafe(callback)


def in_thread(work: Callable[[], None], name: str) -> asyncio.Future[None]:
    """Run blocking work on a daemon thread of its own.

    Not on the loop's executor: its threads are joined when the loop and the interpreter end,
    and work that never returns would then hold both up.
    """
    loop = asyncio.get_running_loop()
    future: asyncio.Future[None] = loop.create_future()

    def finish(exc: BaseException | None) -> None:
        if future.done():
            return
        if exc is None:
            future.set_result(None)
        else:
            future.set_exception(exc)

    def run() -> None:
        try:
            work()
        except Exception as exc:
            call_soon(loop, partial(finish, exc))
        else:
            call_soon(loop, partial(finish, None))

    threading.Thread(target=run, name=name, daemon=True).start()
    return future
