# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-omni-health project
"""What runs in a diffusion replica's own process: upstream's loop, and the truth about its end.

As an engine core does, it leads a process group of its own and states a fatal fault twice: as
last words on its pipe, at once, and as a message on its response queue, ahead of upstream's
``DIFFUSION_PROC_DEAD``.
"""

from __future__ import annotations

import asyncio
import os
from functools import partial
from typing import Any, NoReturn

import zmq
from vllm_omni.diffusion.stage_diffusion_proc import StageDiffusionProc
from vllm_omni.distributed.omni_connectors.utils.serialization import OmniMsgpackEncoder
from vllm_omni.engine.health import target
from vllm_omni.engine.health.diffusion.channel import fault_message
from vllm_omni.engine.health.diffusion.engine import set_process_outlet
from vllm_omni.engine.health.diffusion.faults import fault_of
from vllm_omni.health import seams
from vllm_omni.health.faults.fault import Fault
from vllm_omni.health.liveness.pings import PING
from vllm_omni.health.processes import stop_signals
from vllm_omni.health.processes.last_words import say

from vllm_omni_health.bootstrap import set_death_signal

_LINGER_MS = 1000
"""How long the message of the fault may wait for its reader, which may be gone."""


def run_diffusion_stage(
    *args: Any, last_words: Any = None, order: Any = None, **kwargs: Any
) -> NoReturn:
    """Process target: run upstream's diffusion process with the health layer around it, by
    :func:`vllm_omni.engine.health.target.run`."""

    def entry() -> None:
        seams.install_diffusion_process()
        HealthStageDiffusionProc.run_diffusion_proc(*args, **kwargs)

    target.run(
        entry,
        partial(fault_of, role="diffusion engine", pid=os.getpid()),
        last_words=last_words,
        order=order,
        leads=True,
    )


class HealthStageDiffusionProc(StageDiffusionProc):
    """Upstream's diffusion process, which ends with its engine and says why."""

    def initialize(self) -> None:
        """Make the engine; its faults come here."""
        # Upstream has just weakened the signal to SIGTERM, which a busy process answers late.
        set_death_signal()
        # And has put signal handlers of its own in place.
        stop_signals.take_again()
        set_process_outlet(self._engine_failed)
        self._running: asyncio.AbstractEventLoop | None = None
        super().initialize()

    async def run_loop(self, request_address: str, response_address: str) -> None:
        """Upstream's loop, with a socket of our own for the one message it does not know."""
        context = zmq.Context()
        # Connected from the start, so that the message is not behind the sentinel that
        # upstream sends through its own socket.
        self._fault_socket = context.socket(zmq.PUSH)
        self._fault_socket.setsockopt(zmq.LINGER, _LINGER_MS)
        self._fault_socket.connect(response_address)
        self._running = asyncio.get_running_loop()
        try:
            await super().run_loop(request_address, response_address)
        finally:
            self._running = None
            self._fault_socket.close()
            context.term()

    async def _handle_collective_rpc(self, method: str, *args: Any, **kwargs: Any) -> Any:
        """Upstream's, which knows no pings. Answered here, on the process's event loop."""
        if method != PING:
            return await super()._handle_collective_rpc(method, *args, **kwargs)
        return {"silent_s": self._engine.silent_s()}

    def _engine_failed(self, fault: Fault) -> None:
        """The engine states its fault; on any thread."""
        say(fault)
        loop = self._running
        if loop is not None:
            loop.call_soon_threadsafe(self._end, fault)

    def _end(self, fault: Fault) -> None:
        try:
            message = OmniMsgpackEncoder().encode(fault_message(fault))
            self._fault_socket.send(message, zmq.NOBLOCK)
        except zmq.ZMQError:
            # Nobody is there to take it. The last words are said.
            pass
        self._signal_fatal_engine_failure(fault.kind.value)
