# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-omni-health project
"""The server's side of a diffusion replica in a process of its own: a client that never blocks.

Upstream's client runs on the orchestrator's loop and sends with a blocking call. When the other
end is gone there is nobody to take what is sent, and the loop, with every other replica's
requests, stands still for ever.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Awaitable, Callable
from typing import Any

import zmq
from vllm.v1.engine.exceptions import EngineDeadError
from vllm_omni.diffusion.inline_stage_diffusion_client import InlineStageDiffusionClient
from vllm_omni.diffusion.stage_diffusion_client import StageDiffusionClient
from vllm_omni.engine.health.diffusion.engine import replica_being_started
from vllm_omni.engine.health.envelope import report_text, to_text
from vllm_omni.health import seams
from vllm_omni.health.faults.fault import Fault
from vllm_omni.health.liveness.pings import PING, Ping, Pulse

logger = logging.getLogger(__name__)

_FATAL = "fatal"
"""Type of our message on the response queue. Upstream's client ignores types it does not know."""

_CONNECT_MS = 5000
"""How long a replica that has said it is ready may take to connect. It takes milliseconds."""


def fault_message(fault: Fault) -> dict[str, Any]:
    """The message that carries ``fault`` on a diffusion process's response queue."""
    return {"type": _FATAL, "fault": to_text(fault)}


def initialize_replica(self: Any, plan: Any, stage_init_timeout: int) -> Any:
    """Replaces upstream's start of one diffusion replica: whose start it is can be asked for."""
    original = seams.original(
        "vllm_omni.engine.stage_runtime:StageRuntime._initialize_local_diffusion_replica"
    )
    token = replica_being_started.set((plan.metadata.stage_id, plan.replica_id))
    try:
        client = original(self, plan, stage_init_timeout)
    finally:
        replica_being_started.reset(token)
    if isinstance(client, StageDiffusionClient):
        never_block(client)
    return client


def never_block(client: Any) -> None:
    """Give upstream's client, just made and unused, what it lacks.

    Its sends raise where they would wait, aborts for a replica that is gone are dropped, and
    the fatal-error message of the replica has a receiver.
    """
    # The replica has said that it is ready and connects right now. A send that cannot be taken
    # later on means that it is gone.
    client._request_socket.poll(_CONNECT_MS, zmq.POLLOUT)
    seams.assign(
        client,
        _decoder=_FaultDecoder(client._decoder, client),
        _request_socket=_NeverBlocking(client._request_socket),
        abort_requests_async=functools.partial(
            _abort, client.stage_id, client.abort_requests_async
        ),
    )


def ping_of(client: Any) -> Ping | None:
    """How the replica behind a client, of whatever kind, is asked whether it is alive."""
    call_utility = getattr(client, "call_utility_async", None)
    if call_utility is not None:
        return functools.partial(call_utility, PING)
    if isinstance(client, InlineStageDiffusionClient):
        return functools.partial(_ask_inline, client)
    if isinstance(client, StageDiffusionClient):
        return functools.partial(_ask_process, client)
    return None


async def _ask_inline(client: Any) -> Pulse:
    return Pulse(client._engine.silent_s())


async def _ask_process(client: Any) -> Pulse:
    answer = await client.collective_rpc_async(PING)
    return Pulse(float(answer["silent_s"]))


class _FaultDecoder:
    """The client's decoder, which takes our messages out of the stream."""

    def __init__(self, decoder: Any, client: Any) -> None:
        self._decoder = decoder
        self._stage_id = client.stage_id
        self._replica_id = client.replica_id

    def __getattr__(self, name: str) -> Any:
        return getattr(self._decoder, name)

    def decode(self, raw: Any) -> Any:
        """A message as upstream decodes it; ours are handed to the supervisor on the way."""
        message = self._decoder.decode(raw)
        if isinstance(message, dict) and message.get("type") == _FATAL:
            report_text(message.get("fault") or "", self._stage_id, self._replica_id)
        return message


class _NeverBlocking:
    """A socket whose ``send`` raises EngineDeadError where it would have waited."""

    def __init__(self, socket: Any) -> None:
        self._socket = socket

    def __getattr__(self, name: str) -> Any:
        return getattr(self._socket, name)

    def send(self, data: Any) -> None:
        """Hand ``data`` to the replica, now or not at all."""
        try:
            self._socket.send(data, zmq.NOBLOCK)
        except zmq.Again:
            raise EngineDeadError("the diffusion replica does not take requests") from None


async def _abort(
    stage_id: int, abort: Callable[[list[str]], Awaitable[None]], request_ids: list[str]
) -> None:
    try:
        await abort(request_ids)
    except EngineDeadError:
        logger.debug("[health] stage %s is gone, and its requests with it", stage_id)
