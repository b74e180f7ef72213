# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-omni-health project
"""What a service manager is told, on a real datagram socket."""

import os
import socket
import time

import pytest
from vllm_omni.entrypoints.health.server.systemd import ServiceManager
from vllm_omni.health.faults.fault import Fault, FaultKind
from vllm_omni.health.runtime import HealthRuntime
from vllm_omni.health.state.causes import memory_pressure
from vllm_omni.health.state.machine import HealthMachine

from vllm_omni_health.settings.model import HealthSettings

WAIT_S = 20


class Systemd:
    """The other end."""

    def __init__(self, address):
        self.socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        self.socket.bind(address)
        self.socket.setblocking(False)

    def told(self):
        """What has come so far."""
        found = []
        while True:
            try:
                found.append(self.socket.recv(4096).decode())
            except BlockingIOError:
                return found


@pytest.fixture(params=["a file", "an abstract name"])
def address(request, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    if request.param == "a file":
        yield str(tmp_path / "notify"), "notify"
    else:
        name = f"health-test-{os.getpid()}-{time.monotonic_ns()}"
        yield f"@{name}", f"\0{name}"


@pytest.fixture
def systemd(address):
    systemd = Systemd(address[1])
    yield systemd
    systemd.socket.close()


def never(_period_s, _call):
    pass


def machine():
    machine = HealthMachine(settle_s=0)
    machine.expect_stage(0, 1)
    machine.replica_ready(0, 0)
    return machine


def test_it_is_told_of_readiness_of_every_state_and_of_the_end(address, systemd):
    manager = ServiceManager.of_this_process({"NOTIFY_SOCKET": address[0]})
    server = machine()
    manager.follow(server, never, well=lambda: True)
    assert systemd.told() == ["STATUS=STARTING"]
    server.started()
    manager.ready()
    manager.ready()
    assert systemd.told() == ["STATUS=HEALTHY", "READY=1"]
    server.arise(memory_pressure("cuda:0"), Fault(kind=FaultKind.OOM, message="SECRET\nREADY=1"))
    server.end(memory_pressure("cuda:0"))
    assert systemd.told() == [f"STATUS=DEGRADED: {FaultKind.OOM.sentence}", "STATUS=HEALTHY"]
    server.drain()
    server.drain()
    assert systemd.told() == ["STATUS=HEALTHY: draining", "STOPPING=1"]
    server.replica_lost(0, 0, Fault(kind=FaultKind.HANG))
    dead = f"DEAD: draining: stage 0: {FaultKind.HANG.sentence}"
    assert systemd.told() == [f"STATUS={dead}"]


def test_its_variables_are_not_for_children(address, systemd):
    environ = {"NOTIFY_SOCKET": address[0], "WATCHDOG_USEC": "10", "WATCHDOG_PID": "1", "X": "y"}
    assert ServiceManager.of_this_process(environ).watchdog_s is None
    assert environ == {"X": "y"}


@pytest.mark.parametrize(
    "environ",
    [{}, {"NOTIFY_SOCKET": ""}, {"NOTIFY_SOCKET": "vsock:2:1234"}, {"WATCHDOG_USEC": "5"}],
)
def test_without_one_nobody_is_told(environ):
    assert ServiceManager.of_this_process(environ) is None


def test_one_that_does_not_read_and_one_that_is_gone_hold_nobody_up(tmp_path):
    systemd = Systemd(str(tmp_path / "notify"))
    manager = ServiceManager(str(tmp_path / "notify"))
    for _ in range(2000):
        manager._send("STATUS=" + "x" * 1000)
    systemd.socket.close()
    manager.ready()


def test_what_does_not_fit_is_said_later(tmp_path):
    systemd = Systemd(str(tmp_path / "notify"))
    manager = ServiceManager(str(tmp_path / "notify"), watchdog_s=0.02)
    periodic = []
    server = machine()
    manager.follow(server, lambda _period_s, call: periodic.append(call), well=lambda: True)
    told = []
    for _ in range(1000):
        periodic[-1]()
    server.started()
    manager.ready()
    server.drain()
    while news := systemd.told():
        told += news
        periodic[0]()
    systemd.socket.close()
    assert told.count("WATCHDOG=1") < 1000
    assert [line for line in told if line != "WATCHDOG=1"] == [
        "STATUS=STARTING",
        "STATUS=HEALTHY",
        "READY=1",
        "STATUS=HEALTHY: draining",
        "STOPPING=1",
    ]


@pytest.fixture
def runtime(address, systemd, monkeypatch):
    monkeypatch.setenv("NOTIFY_SOCKET", address[0])
    monkeypatch.setenv("WATCHDOG_USEC", "200000")
    monkeypatch.setenv("WATCHDOG_PID", str(os.getpid()))
    settings = HealthSettings(loop_stall_s=1, hang_timeout_s=0)
    runtime = HealthRuntime(settings, ServiceManager.of_this_process())
    runtime.machine.expect_stage(0, 1)
    runtime.machine.replica_ready(0, 0)
    runtime.start()
    yield runtime
    runtime.stop()


class Loop:
    def call_later(self, seconds, call):
        pass


@pytest.mark.parametrize("trouble", ["dead", "orchestrator stands still", "API stands still"])
def test_the_watchdog_is_kept_quiet_until_only_a_restart_helps(runtime, systemd, trouble):
    runtime.listening()
    runtime.machine.started()
    runtime.listening()
    told = []
    deadline = time.monotonic() + WAIT_S
    while told.count("WATCHDOG=1") < 3:
        told += systemd.told()
        time.sleep(0.01)
        assert time.monotonic() < deadline
    assert told.count("READY=1") == 1
    if trouble == "dead":
        runtime.machine.replica_lost(0, 0, Fault(kind=FaultKind.HANG))
    else:
        beat = runtime.api_beat if "API" in trouble else runtime.orchestrator_beat
        # One beat, and no more.
        beat.start(Loop())
        time.sleep(1.1)
    time.sleep(0.2)
    systemd.told()
    time.sleep(0.6)
    assert "WATCHDOG=1" not in systemd.told()
