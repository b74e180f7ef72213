# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-omni-health project
"""What is wrong with memory before a start is said in one line that names it."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from fake_nvml import GIB, FakeNvml, Gpu, NVMLError
from vllm_omni.health.memory.preflight import PreflightError, before_start, when_ready
from vllm_omni.health.memory.preflight import _orphans as orphans
from vllm_omni.health.memory.watch import MemoryWatch
from vllm_omni.health.processes.process import parent_pid
from vllm_omni.health.state.machine import HealthMachine

from vllm_omni_health.devices import nvml
from vllm_omni_health.devices.figures import DeviceSample
from vllm_omni_health.devices.survey import Devices
from vllm_omni_health.settings.sources import load


def host(free: int = 100 * GIB) -> Any:
    sample = DeviceSample("host", total=128 * GIB, used=128 * GIB - free, free=free, name="machine")
    return SimpleNamespace(device="host", sample=lambda: sample)


@pytest.fixture
def look(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    made: list[MemoryWatch] = []
    # Whatever runs beside the tests is none of their business.
    monkeypatch.setattr("vllm_omni.health.memory.preflight._orphans", lambda _owners: [])

    def make(fake: FakeNvml, *, of: Any = None, **settings: Any) -> MemoryWatch:
        devices = Devices(host=of or host(), discover=lambda: nvml.devices(fake, {}), query_s=10)
        made.append(MemoryWatch(load(settings, {}), HealthMachine(), devices))
        return made[-1]

    yield make
    for watch in made:
        watch.stop()


def test_all_is_well(look: Any) -> None:
    watch = look(FakeNvml(Gpu(used=GIB // 2)), min_free_memory="2GiB")
    assert before_start(watch, "fail") == []
    assert when_ready(watch, "fail") == []


def test_others_that_hold_a_device_are_named_by_pid(look: Any) -> None:
    own_child = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    try:
        held = {os.getppid(): 30 * GIB, own_child.pid: 10 * GIB}
        watch = look(FakeNvml(Gpu(used=40 * GIB, processes=held)))
        for check in (before_start, when_ready):
            with pytest.raises(PreflightError) as caught:
                check(watch, "fail")
            line = str(caught.value)
            assert f"gpu:0: held by other processes: pid {os.getppid()} (" in line
            assert "30.0GiB" in line
            assert str(own_child.pid) not in line
            assert "\n" not in line
    finally:
        own_child.communicate(b"")


def test_memory_that_nobody_here_can_be_seen_to_hold_is_told(look: Any) -> None:
    (problem,) = before_start(look(FakeNvml(Gpu(used=40 * GIB))), "warn")
    assert problem.startswith("gpu:0: 40.0GiB in use by processes that cannot be seen from here")


def test_too_little_free_is_told_for_each_device(look: Any) -> None:
    gpus = [Gpu(used=79 * GIB, processes={os.getpid(): 79 * GIB}), Gpu(used=0)]
    problems = before_start(look(FakeNvml(*gpus), min_free_memory="2GiB"), "warn")
    assert problems == ["gpu:0: 1.0GiB free of 80.0GiB, less than min_free_memory, 2.0GiB"]


def test_a_host_too_small_for_a_server_is_told(look: Any) -> None:
    (problem,) = before_start(look(FakeNvml(), of=host(GIB)), "warn")
    assert problem.startswith("host: 1.0GiB free of 128.0GiB (machine)")


def test_a_driver_that_fails_is_told(look: Any) -> None:
    fake = FakeNvml(init_error=NVMLError("Driver/library version mismatch"))
    assert before_start(look(fake), "warn") == ["gpu: unknown: Driver/library version mismatch"]


def test_shared_memory_of_a_plain_container_is_told(
    look: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    small = SimpleNamespace(f_bavail=64 << 8, f_frsize=4096)
    monkeypatch.setattr(os, "statvfs", lambda _path: small)
    (problem,) = before_start(look(FakeNvml()), "warn", tmp_path)
    assert "64.0MiB free, and 256.0MiB are needed" in problem
    assert "--shm-size=1g" in problem


def test_off_looks_at_nothing(look: Any) -> None:
    watch = look(FakeNvml(Gpu(used=80 * GIB)), of=host(0))
    assert before_start(watch, "off") == when_ready(watch, "off") == []
    assert watch.view.time is None


STAGE = "import os, sys; print(os.getpid(), flush=True); sys.stdin.read()"
SERVER = """
import subprocess, sys
subprocess.Popen(["VLLM::Worker", "-c", sys.argv[1]], executable=sys.executable)
"""


def test_stage_processes_whose_server_is_gone_are_named() -> None:
    """An orphan of vLLM's: its title says what it is, its parent that its server is gone."""
    with subprocess.Popen(
        [sys.executable, "-c", SERVER, STAGE],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    ) as server:
        assert server.stdout is not None
        pid = int(server.stdout.readline())
        server.wait(60)
        try:
            if parent_pid(pid) != 1:
                pytest.skip("a subreaper adopts orphans here")
            (problem,) = orphans({})
            assert problem.startswith("host: left of an earlier run: ")
            assert f"pid {pid} (" in problem
            assert orphans({pid: None}) == []
        finally:
            server.communicate("", timeout=60)
