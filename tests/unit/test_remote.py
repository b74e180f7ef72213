# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-omni-health project
"""Stages on other hosts, over TCP: upstream's own coordinator, hub and heartbeats, in processes
that are stopped and killed."""

import os
import signal
import subprocess
import sys
import time
from types import SimpleNamespace

import pytest
from vllm_omni.distributed.omni_coordinator.omni_coord_client_for_hub import OmniCoordClientForHub
from vllm_omni.distributed.omni_coordinator.omni_coordinator import OmniCoordinator
from vllm_omni.engine.health.remote import RemoteWatch
from vllm_omni.health.faults.fault import FaultKind

pytestmark = [pytest.mark.slow, pytest.mark.timeout(120)]

WAIT_S = 60
INPUT = "tcp://10.0.0.7:5555"

STAGE = f"""
import sys, time
from vllm_omni.distributed.omni_coordinator import OmniCoordClientForStage


class Client(OmniCoordClientForStage):
    _heartbeat_interval = property(lambda self: 0.2, lambda self, seconds: None)


client = Client(sys.argv[1], {INPUT!r}, "tcp://10.0.0.7:5556", 1)
print(flush=True)
time.sleep(600)
"""


class Head:
    """The coordinator, its hub, two stage pools, and the watch over them."""

    def __init__(self, timeout_s):
        self.coordinator = OmniCoordinator("tcp://127.0.0.1:0", "tcp://127.0.0.1:0")
        published = self.coordinator._pub.getsockopt_string(32)  # ZMQ_LAST_ENDPOINT
        self.hub = OmniCoordClientForHub(published)
        pools = [
            SimpleNamespace(_hub=self.hub, _addr_to_replica_id={}),
            SimpleNamespace(_hub=self.hub, _addr_to_replica_id={INPUT: 2}),
        ]
        self.local = set()
        self.faults = []
        self.watch = RemoteWatch(
            pools, timeout_s, lambda *key: key in self.local, self.faults.append
        )
        self.stage = subprocess.Popen(
            [sys.executable, "-c", STAGE, self.coordinator.router_zmq_addr],
            stdout=subprocess.PIPE,
            text=True,
        )
        self.stage.stdout.readline()
        self.until(lambda: self.hub.get_replicas_for_stage(1).replicas)

    def until(self, condition):
        deadline = time.monotonic() + WAIT_S
        while not condition():
            assert time.monotonic() < deadline
            self.watch.look()
            time.sleep(0.05)

    def close(self):
        self.stage.kill()
        self.stage.wait()
        self.stage.stdout.close()
        self.hub.close()
        self.coordinator.close()


@pytest.fixture
def head():
    head = Head(timeout_s=8)
    yield head
    head.close()


def look_for(head, seconds):
    until = time.monotonic() + seconds
    while time.monotonic() < until:
        head.watch.look()
        time.sleep(0.05)


def test_a_host_that_falls_silent_is_lost_and_one_that_beats_is_not(head):
    # Longer than the timeout: its heartbeats are what keeps it.
    look_for(head, 10)
    assert head.faults == []
    os.kill(head.stage.pid, signal.SIGSTOP)
    head.until(lambda: head.faults)
    (fault,) = head.faults
    assert (fault.kind, fault.stage_id, fault.replica_id) == (FaultKind.PROCESS_LOST, 1, 2)
    assert fault.pid is None
    look_for(head, 1)
    assert len(head.faults) == 1


def test_a_replica_with_a_process_here_is_left_to_those_who_see_it(head):
    head.local.add((1, 2))
    os.kill(head.stage.pid, signal.SIGKILL)
    look_for(head, 10)
    assert head.faults == []
