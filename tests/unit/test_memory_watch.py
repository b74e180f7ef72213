# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-omni-health project
"""Figures become judgements: pressure without flapping, growth that nobody accounts for."""

from __future__ import annotations

import itertools
import os
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from fake_nvml import GIB, FakeNvml, Gpu
from prometheus_client import CollectorRegistry
from vllm_omni.health.faults.fault import process_lost
from vllm_omni.health.memory import metrics
from vllm_omni.health.memory.ownership import owned
from vllm_omni.health.memory.watch import MemoryWatch
from vllm_omni.health.state.machine import HealthMachine, State

from vllm_omni_health.devices import nvml
from vllm_omni_health.devices.simulated import SimulatedDevice
from vllm_omni_health.devices.survey import Devices
from vllm_omni_health.settings.floor import Floor
from vllm_omni_health.settings.sources import load

CORE, WORKER, STRANGER = 1001, 1002, 2001


class Rig:
    """A watch on a fake driver and a simulated device, with a clock that the test moves."""

    def __init__(self, *gpus: Gpu, simulated: Path | None = None, **settings: Any) -> None:
        self.now = 0.0
        self.owners: dict[int, Any] = {os.getpid(): None, CORE: (0, 0), WORKER: (0, 0)}
        self.machine = HealthMachine()
        self.machine.expect_stage(0, 1)
        self.machine.replica_ready(0, 0, CORE)
        self.machine.started()
        self.nvml = FakeNvml(*gpus)
        self.devices = Devices(
            simulated=simulated, discover=lambda: nvml.devices(self.nvml, {}), query_s=30.0
        )
        self.watch = MemoryWatch(
            load(settings, {}),
            self.machine,
            self.devices,
            clock=lambda: self.now,
            processes=lambda _snapshot: self.owners,
        )

    def tick(self, seconds: float = 1.0) -> dict[str, Any]:
        """Time passes, then one sample; the device rows by name."""
        self.now += seconds
        return {row.device: row for row in self.watch.sample().devices}

    def report(self, reserved: int, gpu: int = 0, pid: int = WORKER) -> None:
        rank = {"pid": pid, "device": f"cuda:{gpu}", "uuid": f"GPU-{gpu}"}
        rank |= {"allocated": reserved - GIB, "reserved": reserved}
        self.watch.receive((0, 0), {"ranks": [rank], "kv_total": 4 * GIB, "kv_used": GIB})

    def events(self, cause: str) -> list[dict[str, Any]]:
        return [e.detail for e in self.machine.history() if e.cause == cause and e.detail]

    @property
    def moves(self) -> list[str]:
        return [e.to_state.value for e in self.machine.history() if e.moved]


@pytest.fixture
def rigs() -> Iterator[Any]:
    made: list[Rig] = []

    def make(*gpus: Gpu, **settings: Any) -> Rig:
        made.append(Rig(*gpus, **settings))
        return made[-1]

    yield make
    for rig in made:
        rig.watch.stop()


# ---- the floor -------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "device", "floor"),
    [
        ("0", "gpu:0", 0),
        ("2GiB", "gpu:0", 2 * GIB),
        ("5%", "host", 5 * GIB),
        ("gpu=2GiB,host=5%", "gpu:3", 2 * GIB),
        ("gpu=2GiB,host=5%", "host", 5 * GIB),
        ("gpu=2GiB", "host", 0),
        ("1GiB,gpu=2GiB,gpu:1=3GiB", "gpu:1", 3 * GIB),
        ("1GiB,gpu=2GiB,gpu:1=3GiB", "host", GIB),
    ],
)
def test_the_floor_of_a_device(text: str, device: str, floor: int) -> None:
    assert Floor.parse(text).of(device, 100 * GIB) == floor


@pytest.mark.parametrize("text", ["", "much", "-1GiB", "100%", "-5%", "disk=1GiB", "1,2", "gpu="])
def test_a_floor_that_makes_no_sense_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="must be an amount such as 2GiB"):
        Floor.parse(text)


def test_pressure_closes_admission_and_opens_it_again_without_a_restart(rigs: Any) -> None:
    gpu = Gpu(total=80 * GIB, used=70 * GIB, processes={WORKER: 60 * GIB, STRANGER: 10 * GIB})
    rig = rigs(gpu, min_free_memory="gpu=2GiB", memory_recover_s=5)
    rig.tick()
    assert rig.machine.snapshot.state is State.HEALTHY
    gpu.used = 79 * GIB
    row = rig.tick()["gpu:0"]
    snapshot = rig.machine.snapshot
    assert (snapshot.state, snapshot.accepting) == (State.DEGRADED, False)
    assert (row.free, row.floor, row.pressure) == (GIB, 2 * GIB, True)
    assert (row.service, row.others) == (60 * GIB, 19 * GIB)
    assert snapshot.fault is not None
    assert snapshot.fault.public()["kind"] == "oom"
    assert "short of accelerator memory" in snapshot.fault.public()["message"]
    gpu.used = 70 * GIB
    states = [(rig.tick(), rig.machine.snapshot.accepting)[1] for _ in range(6)]
    assert states == [False] * 5 + [True]
    assert rig.moves == ["HEALTHY", "DEGRADED", "HEALTHY"]
    assert rig.machine.snapshot.fault is None


def test_the_host_running_short_is_named_as_the_host(rigs: Any) -> None:
    rig = rigs(min_free_memory="host=99%")
    rig.tick()
    fault = rig.machine.snapshot.fault
    assert fault is not None
    assert (fault.kind.value, fault.device) == ("host_oom", "host")
    assert not rig.machine.snapshot.accepting


@pytest.mark.parametrize("period", [1, 2, 4])
def test_a_square_wave_quicker_than_the_wait_is_one_move(rigs: Any, period: int) -> None:
    gpu = Gpu(total=80 * GIB, used=79 * GIB, processes={WORKER: GIB})
    rig = rigs(gpu, min_free_memory="2GiB,host=0", memory_recover_s=5)
    for second in range(120):
        gpu.used = 79 * GIB if (second // period) % 2 == 0 else 10 * GIB
        rig.tick()
    assert rig.moves == ["HEALTHY", "DEGRADED"]


def test_a_slow_square_wave_opens_admission_less_and_less_often(rigs: Any) -> None:
    gpu = Gpu(total=80 * GIB, used=79 * GIB, processes={WORKER: GIB})
    rig = rigs(gpu, min_free_memory="2GiB,host=0", memory_recover_s=5)
    for second in range(600):
        gpu.used = 79 * GIB if (second // 8) % 2 == 0 else 10 * GIB
        rig.tick()
    # The wave turns 37 times, and one calm phase of eight seconds is enough for the first wait.
    assert rig.moves.count("DEGRADED") == 2
    gpu.used = 10 * GIB
    for _ in range(12):
        rig.tick()
    assert rig.machine.snapshot.accepting


def test_a_figure_that_becomes_unknown_changes_nothing_at_first(rigs: Any) -> None:
    gpu = Gpu(total=80 * GIB, used=10 * GIB, processes={WORKER: GIB})
    rig = rigs(gpu, min_free_memory="2GiB,host=0")
    rig.tick()
    gpu.lost = True
    assert rig.tick()["gpu:0"].unknown == "GPU is lost"
    assert rig.machine.snapshot.accepting
    gpu.lost, gpu.used = False, 79 * GIB
    rig.tick()
    gpu.lost = True
    rig.tick(30)
    assert not rig.machine.snapshot.accepting
    # For ever would be too long: nothing is known that speaks against serving.
    rig.tick(31)
    assert rig.machine.snapshot.accepting


def test_a_device_that_is_not_used_has_no_floor(rigs: Any) -> None:
    ours, idle = Gpu(processes={WORKER: GIB}), Gpu(used=80 * GIB, processes={STRANGER: 80 * GIB})
    rig = rigs(ours, idle, min_free_memory="2GiB,host=0")
    rows = rig.tick()
    assert (rows["gpu:0"].floor, rows["gpu:1"].floor) == (2 * GIB, 0)
    assert rig.machine.snapshot.accepting


def test_a_fatal_fault_under_pressure_is_the_reason_for_the_end(rigs: Any) -> None:
    rig = rigs(min_free_memory="host=99%")
    rig.tick()
    rig.machine.replica_lost(0, 0, process_lost(-9))
    assert rig.machine.reason is not None
    assert rig.machine.reason.kind.value == "process_lost"
    assert rig.machine.snapshot.state is State.DEAD


# ---- the discrepancy -------------------------------------------------------------------------


def test_what_is_measured_and_what_is_reported(rigs: Any) -> None:
    gpu = Gpu(used=52 * GIB, processes={WORKER: 51 * GIB, STRANGER: GIB})
    rig = rigs(gpu)
    rig.report(50 * GIB)
    row = rig.tick()["gpu:0"]
    assert (row.discrepancy.overhead, row.discrepancy.percent) == (GIB, 0)
    gpu.used, gpu.processes[WORKER] = 56 * GIB, 55 * GIB
    row = rig.tick()["gpu:0"]
    (stage,) = rig.watch.view.stages
    assert (stage.device, stage.used, stage.reserved) == ("gpu:0", 55 * GIB, 50 * GIB)
    assert (stage.kv_total, stage.kv_used) == (4 * GIB, GIB)
    for shown in (row.discrepancy, stage.discrepancy):
        assert (shown.actual, shown.reported) == (55 * GIB, 50 * GIB)
        assert (shown.overhead, shown.unaccounted) == (GIB, 4 * GIB)
        assert shown.percent == round(400 / 51, 2)
        assert shown.trend_bytes_per_s == 4 * GIB
    # What the allocator takes for itself is accounted for.
    rig.report(54 * GIB)
    assert rig.tick()["gpu:0"].discrepancy.percent == 0


def test_where_shares_cannot_be_told_all_that_is_used_is_compared(rigs: Any) -> None:
    gpu = Gpu(used=50 * GIB, processes={STRANGER: 50 * GIB})
    rig = rigs(gpu)
    rig.report(49 * GIB)
    row = rig.tick()["gpu:0"]
    assert (row.service, row.others) == (None, None)
    gpu.used = 55 * GIB
    assert rig.tick()["gpu:0"].discrepancy.unaccounted == 5 * GIB


def test_nothing_is_compared_while_a_stage_says_nothing(rigs: Any) -> None:
    gpu = Gpu(used=50 * GIB, processes={WORKER: 40 * GIB})
    rig = rigs(gpu)
    assert rig.tick()["gpu:0"].discrepancy is None
    rig.report(39 * GIB)
    assert rig.tick()["gpu:0"].discrepancy is not None
    # A long step: no answers, and the stage may well take memory.
    gpu.processes[WORKER] = 49 * GIB
    assert rig.tick(16)["gpu:0"].discrepancy is None
    rig.owners[3001] = (1, 0)
    gpu.processes[3001] = GIB
    rig.machine.expect_replica(0, 1, 3001)
    rig.owners[3001] = (0, 1)
    rig.report(39 * GIB)
    assert rig.tick()["gpu:0"].discrepancy is None


@pytest.mark.parametrize("answer", [True, None, {"ranks": 3}, {"ranks": [{"pid": "x"}]}, [1]])
def test_an_answer_without_figures_says_nothing(rigs: Any, answer: object) -> None:
    rig = rigs(Gpu(processes={WORKER: GIB}))
    rig.watch.receive((0, 0), answer)
    assert rig.tick()["gpu:0"].discrepancy is None


def test_devices_without_a_driver_of_ours_are_seen_through_torch(rigs: Any) -> None:
    rig = rigs()
    rank = {"pid": WORKER, "device": "xpu:0", "allocated": GIB, "reserved": 2 * GIB}
    rig.watch.receive((0, 0), {"ranks": [rank | {"free": 6 * GIB, "total": 16 * GIB}]})
    row = rig.tick()["xpu:0"]
    assert (row.total, row.used, row.free) == (16 * GIB, 10 * GIB, 6 * GIB)
    assert row.discrepancy.reported == 2 * GIB


def test_short_growth_is_no_warning_and_lasting_growth_is_one_until_it_is_over(rigs: Any) -> None:
    gpu = Gpu(processes={WORKER: 51 * GIB}, used=51 * GIB)
    rig = rigs(gpu, memory_discrepancy_pct=5, memory_window_s=30)

    def run(seconds: int, used: int) -> None:
        gpu.used = gpu.processes[WORKER] = used
        for _ in range(seconds):
            rig.report(50 * GIB)
            rig.tick()

    run(5, 51 * GIB)
    run(29, 56 * GIB)
    run(5, 51 * GIB)
    assert rig.events("memory discrepancy") == []
    run(40, 56 * GIB)
    device, stage = rig.events("memory discrepancy")
    assert (device["device"], device["unaccounted"]) == ("gpu:0", 5 * GIB)
    assert (stage["stage_id"], stage["replica_id"], stage["limit_pct"]) == (0, 0, 5)
    run(40, 51 * GIB)
    assert len(rig.events("memory discrepancy over")) == 2
    assert rig.machine.snapshot.state is State.HEALTHY


def test_a_new_worker_is_compared_anew(rigs: Any) -> None:
    gpu = Gpu(processes={WORKER: 51 * GIB}, used=51 * GIB)
    rig = rigs(gpu)
    rig.report(50 * GIB)
    rig.tick()
    rig.owners[1003] = (0, 0)
    gpu.used, gpu.processes = 53 * GIB, {1003: 53 * GIB}
    rig.report(50 * GIB, pid=1003)
    assert rig.tick()["gpu:0"].discrepancy.overhead == 3 * GIB


# ---- the war story ---------------------------------------------------------------------------


@pytest.mark.parametrize("growth_pct", [3, 5, 8])
def test_war_story_the_alarm_comes_before_the_first_failure(
    rigs: Any, tmp_path: Path, growth_pct: int
) -> None:
    """Every ten minutes as many percent more than is reported, until nothing is left.

    Each request takes a hundredth of the device while it runs. With the floor at two of them the
    server refuses before any fails; the warning comes before that.
    """
    device = SimulatedDevice(tmp_path / "device")
    device.set(total=100_000, service=86_000, reported={"0": 86_000})
    rig = rigs(simulated=device.path, min_free_memory="sim=2%")
    alarm = refusal = failure = None
    used = 86_000.0
    rig.tick()
    for second in itertools.count(0, 5):
        used += 5 * 86_000 * growth_pct / 100 / 600
        device.set(service=min(100_000, round(used)))
        rig.tick(5)
        if alarm is None and rig.events("memory discrepancy"):
            alarm = second
        if refusal is None and not rig.machine.snapshot.accepting:
            refusal = second
        if not device.hold(STRANGER, 1_000):
            failure = second
            break
        device.hold(STRANGER, 0)
    assert alarm is not None
    assert refusal is not None
    assert alarm < refusal < failure
    # It recovers by itself.
    device.set(service=86_000)
    for _ in range(10):
        rig.tick()
    assert rig.machine.snapshot.accepting


# ---- the rest --------------------------------------------------------------------------------


def test_the_thread_samples_by_itself_and_ends(rigs: Any) -> None:
    rig = rigs(Gpu(processes={WORKER: GIB}), memory_interval_s=0.01)
    rig.watch.start()
    waited = threading.Event()
    while rig.watch.view.time is None:
        assert not waited.wait(0.01)
    rig.watch.stop(10)
    names = {thread.name for thread in threading.enumerate()}
    assert "health-memory" not in names


def test_metrics_show_what_is_known(rigs: Any) -> None:
    gpu = Gpu(used=52 * GIB, processes={WORKER: 51 * GIB})
    rig = rigs(gpu)
    registry = CollectorRegistry()
    unregister = metrics.register(lambda: rig.watch.view, registry)
    rig.report(50 * GIB)
    rig.tick()
    gpu.processes[WORKER] = 52 * GIB
    rig.tick()

    def value(name: str, **labels: str) -> float | None:
        return registry.get_sample_value(f"vllm_omni_health_memory_{name}", labels)

    assert value("device_bytes", device="gpu:0", what="free") == 28 * GIB
    assert value("unaccounted_bytes", device="gpu:0", stage="", replica="") == GIB
    stage = {"stage": "0", "replica": "0", "device": "gpu:0"}
    assert value("stage_bytes", what="reserved", **stage) == 50 * GIB
    assert value("discrepancy_percent", **stage) == round(100 / 51, 2)
    gpu.lost = True
    rig.tick()
    assert value("device_bytes", device="gpu:0", what="free") is None
    unregister()


def test_processes_are_found_by_ancestry() -> None:
    machine = HealthMachine()
    machine.expect_stage(0, 1)
    machine.replica_ready(0, 0, os.getpid())
    found = owned(machine.snapshot, os.getppid())
    assert found[os.getpid()] == (0, 0)
    assert found[os.getppid()] is None
