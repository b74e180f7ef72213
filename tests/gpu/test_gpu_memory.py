# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-omni-health project
"""Memory of a real device: each figure against a known allocation, and a real hog."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from vllm_omni.engine.health import stage_memory
from vllm_omni.health.memory.watch import MemoryWatch
from vllm_omni.health.state.machine import HealthMachine, State

from vllm_omni_health.devices import nvml
from vllm_omni_health.drills.hog import hogging
from vllm_omni_health.settings.sources import load

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device on this machine"),
]

GIB = 1 << 30
_GUARD_S = 60.0


@pytest.fixture
def gpu() -> nvml.NvmlDevice:
    return nvml.devices()[0]


@pytest.fixture
def block() -> Iterator[torch.Tensor]:
    """One gigabyte of the first device, held by this process."""
    yield torch.empty(GIB, dtype=torch.uint8, device="cuda:0")
    torch.cuda.empty_cache()


def until(condition: Callable[[], Any]) -> Any:
    deadline = time.monotonic() + _GUARD_S
    while not (found := condition()):
        assert time.monotonic() < deadline
        time.sleep(0.1)
    return found


def test_a_known_allocation_is_in_every_figure(gpu: nvml.NvmlDevice) -> None:
    torch.empty(1, device="cuda:0")
    before = gpu.sample()
    block = torch.empty(GIB, dtype=torch.uint8, device="cuda:0")
    after = gpu.sample()
    reported = stage_memory.of_device(torch.device("cuda:0"))
    assert after.used is not None
    assert before.used is not None
    assert abs(after.used - before.used - GIB) < GIB // 8
    assert reported["allocated"] >= block.nbytes
    assert reported["reserved"] >= reported["allocated"]
    assert reported["uuid"] == after.uuid
    assert abs(reported["total"] - after.total) < GIB
    if after.processes and os.getpid() in after.processes:
        assert after.processes[os.getpid()] > GIB


def test_the_watch_compares_what_torch_reports_with_what_the_driver_measures(
    block: torch.Tensor,
) -> None:
    machine = HealthMachine()
    machine.expect_stage(0, 1)
    machine.replica_ready(0, 0, os.getpid())
    machine.started()
    watch = MemoryWatch(load({}, {}), machine)
    rank = {"pid": os.getpid(), **stage_memory.of_device(torch.device("cuda:0"))}
    watch.receive((0, 0), {"ranks": [rank]})
    row = until(
        lambda: next((r for r in watch.sample().devices if r.device.startswith("gpu:0")), None)
    )
    assert row.discrepancy is not None
    assert row.discrepancy.reported == rank["reserved"] >= block.nbytes
    # The context, which torch knows nothing of.
    assert row.discrepancy.overhead > 0
    watch.stop()


def test_a_real_hog_closes_admission_and_its_end_opens_it(gpu: nvml.NvmlDevice) -> None:
    free = gpu.sample().free
    assert free is not None
    floor = free - 3 * GIB
    machine = HealthMachine()
    machine.expect_stage(0, 1)
    machine.replica_ready(0, 0, os.getpid())
    machine.started()
    settings = load(
        {"min_free_memory": f"gpu={floor}", "memory_interval_s": 0.1, "memory_recover_s": 0.5}, {}
    )
    watch = MemoryWatch(settings, machine)
    watch.start()
    try:
        until(lambda: watch.view.time)
        assert machine.snapshot.state is State.HEALTHY
        with hogging("4GiB", "--device", "cuda:0"):
            until(lambda: not machine.snapshot.accepting)
            assert machine.snapshot.fault is not None
            assert machine.snapshot.fault.kind.value == "oom"
        until(lambda: machine.snapshot.accepting)
    finally:
        watch.stop()
