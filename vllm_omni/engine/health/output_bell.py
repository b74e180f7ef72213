# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-omni-health project
"""How the API server's loop learns that the orchestrator has put a message on the output queue.

The queue crosses threads. Upstream waits for it by looking every millisecond, or in a thread that
costs two switches for each message. Here the producer rings a bell on the consumer's loop, once
however many messages it puts before the consumer has woken up.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import queue
from typing import Any

import janus
from vllm_omni.health.faults.fault import Fault, FaultKind
from vllm_omni.health.runtime import HealthRuntime, require
from vllm_omni.health.state.causes import ORCHESTRATOR_ENDED
from vllm_omni.health.state.machine import State

_CLOSED = (janus.SyncQueueShutDown, RuntimeError)
"""What a closed queue raises, by version of janus."""

_TURN = 64
"""Messages taken in one go before the loop's other tasks get their turn."""


class OutputBell:
    """Rung on the orchestrator's thread, heard on the API server's loop; one per server."""

    def __init__(self) -> None:
        self._loop: asyncio.AbstractEventLoop | None = None
        self._heard: asyncio.Event | None = None
        self._rung = False
        self.taken = 0

    def ring(self) -> None:
        """Say that there is a message. Any thread; costs a comparison when already said."""
        if self._rung or self._loop is None or self._heard is None:
            return
        self._rung = True
        with contextlib.suppress(RuntimeError):
            self._loop.call_soon_threadsafe(self._heard.set)

    async def listen(self, timeout_s: float) -> None:
        """Wait for the bell, up to ``timeout_s``. Look at the queue first, and after."""
        assert self._heard is not None
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(timeout_s):
                await self._heard.wait()

    def expect(self) -> None:
        """Called before a look at the queue: what is put after that look rings."""
        if self._heard is None:
            self._loop = asyncio.get_running_loop()
            self._heard = asyncio.Event()
        self._heard.clear()
        self._rung = False


def _note_end(runtime: HealthRuntime) -> None:
    """The thread is gone. As a rule its loop has said so; this is for when it could not."""
    if not runtime.supervisor.closing and runtime.machine.snapshot.state is not State.DEAD:
        fault = Fault(kind=FaultKind.ORCHESTRATOR, role="orchestrator", pid=os.getpid())
        runtime.machine.arise(ORCHESTRATOR_ENDED, fault)


async def get_output_blocking_async(engine: Any, timeout: float = 1.0) -> Any:
    """Replaces the engine's wait for the next message; None when there was none in time.

    Raises RuntimeError when the orchestrator's thread has ended and nothing is left to read.
    """
    bell = require().output_bell
    messages = engine.output_queue.sync_q
    bell.taken += 1
    if bell.taken % _TURN == 0:
        await asyncio.sleep(0)
    try:
        with contextlib.suppress(queue.Empty):
            return messages.get_nowait()
        # What is put after this rings; what was put before it is seen by the next look.
        bell.expect()
        with contextlib.suppress(queue.Empty):
            return messages.get_nowait()
        if engine.is_alive():
            await bell.listen(timeout)
        with contextlib.suppress(queue.Empty):
            return messages.get_nowait()
    except _CLOSED:
        # The server is shutting down. Not a busy loop meanwhile.
        await asyncio.sleep(timeout)
        return None
    if not engine.is_alive():
        _note_end(require())
        raise RuntimeError("the orchestrator's thread has ended")
    return None
