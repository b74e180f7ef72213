# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-omni-health project
"""The server's end of a diffusion replica: nothing blocks when the other end is gone."""

import asyncio
import time

import pytest
import zmq
from vllm.v1.engine.exceptions import EngineDeadError
from vllm_omni.distributed.omni_connectors.utils.serialization import (
    OmniMsgpackDecoder,
    OmniMsgpackEncoder,
)
from vllm_omni.engine.health.diffusion import channel as diffusion_client
from vllm_omni.engine.health.diffusion.channel import fault_message, never_block
from vllm_omni.health.faults.fault import Fault, FaultKind
from vllm_omni.health.runtime import HealthRuntime, set_current

from vllm_omni_health.settings.model import HealthSettings

pytestmark = pytest.mark.timeout(30)


class Client:
    """The parts of upstream's client that matter here."""

    stage_id, replica_id = 1, 0

    def __init__(self, socket):
        self._request_socket = socket
        self._decoder = OmniMsgpackDecoder()

    async def abort_requests_async(self, request_ids):
        self._request_socket.send(b"abort")


@pytest.fixture
def socket(tmp_path, monkeypatch):
    monkeypatch.setattr(diffusion_client, "_CONNECT_MS", 500)
    with zmq.Context() as context:
        socket = context.socket(zmq.PUSH)
        socket.setsockopt(zmq.LINGER, 0)
        socket.bind(f"ipc://{tmp_path}/requests")
        yield socket
        socket.close()


def test_a_replica_that_is_gone_is_not_waited_for(socket, tmp_path):
    with zmq.Context() as context:
        replica = context.socket(zmq.PULL)
        replica.connect(f"ipc://{tmp_path}/requests")
        client = Client(socket)
        never_block(client)
        client._request_socket.send(b"request")
        assert replica.recv() == b"request"
        replica.close(linger=0)
    time.sleep(0.2)
    began = time.monotonic()
    with pytest.raises(EngineDeadError):
        client._request_socket.send(b"request")
    asyncio.run(client.abort_requests_async(["one"]))
    assert time.monotonic() - began < 0.5


def test_a_replicas_fault_is_reported_on_the_way(socket):
    runtime = HealthRuntime(HealthSettings())
    runtime.machine.expect_stage(1, 1)
    runtime.machine.replica_ready(1, 0, pid=1)
    runtime.machine.started()
    set_current(runtime)
    try:
        client = Client(socket)
        never_block(client)
        raw = OmniMsgpackEncoder().encode(fault_message(Fault(kind=FaultKind.OOM, pid=9)))
        message = client._decoder.decode(raw)
    finally:
        set_current(None)
    assert message["type"] not in ("result", "error", "rpc_result", "metrics")
    fault = runtime.machine.reason
    assert (fault.kind, fault.stage_id, fault.replica_id, fault.pid) == (FaultKind.OOM, 1, 0, 9)


def test_other_messages_pass(socket):
    client = Client(socket)
    never_block(client)
    raw = OmniMsgpackEncoder().encode({"type": "rpc_result", "rpc_id": "1", "result": True})
    assert client._decoder.decode(raw) == {"type": "rpc_result", "rpc_id": "1", "result": True}
