# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-omni-health project
"""Each figure against a known allocation; drivers absent, wrong, slow; a device lost."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
from pathlib import Path

import psutil
import pytest
from fake_nvml import GIB, FakeNvml, Gpu, LibraryNotFound, NVMLError

from vllm_omni_health.devices import nvml
from vllm_omni_health.devices.figures import DeviceSample, Nonsense, in_words
from vllm_omni_health.devices.host import Host, anonymous_bytes
from vllm_omni_health.devices.simulated import SimulatedDevice, SimulatedError
from vllm_omni_health.devices.survey import Devices

MIB = 1 << 20


def survey(fake: FakeNvml, query_s: float = 30.0, **kwargs: object) -> Devices:
    return Devices(discover=lambda: nvml.devices(fake, {}), query_s=query_s, **kwargs)


def by_name(samples: list[DeviceSample]) -> dict[str, DeviceSample]:
    return {sample.device: sample for sample in samples}


# ---- NVIDIA ----------------------------------------------------------------------------------


def test_figures_and_processes_of_each_gpu() -> None:
    fake = FakeNvml(Gpu(used=30 * GIB, processes={11: 20 * GIB, 12: 9 * GIB}), Gpu())
    first, second = (device.sample() for device in nvml.devices(fake, {}))
    assert (first.device, first.total, first.used, first.free) == (
        "gpu:0",
        80 * GIB,
        30 * GIB,
        50 * GIB,
    )
    assert first.processes == {11: 20 * GIB, 12: 9 * GIB}
    assert (first.name, first.uuid) == ("Fake GPU", "GPU-0")
    assert second.processes == {}


@pytest.mark.parametrize(
    ("visible", "names"),
    [
        ("1", ["gpu:1"]),
        ("1,0", ["gpu:1", "gpu:0"]),
        ("GPU-1", ["gpu:GPU-1"]),
        ("", []),
        ("0,-1,1", ["gpu:0"]),
        ("0,7", ["gpu:0"]),
    ],
)
def test_only_visible_devices_are_watched(visible: str, names: list[str]) -> None:
    found = nvml.devices(FakeNvml(Gpu(), Gpu()), {"CUDA_VISIBLE_DEVICES": visible})
    assert [device.device for device in found] == names


def test_without_a_driver_there_are_no_devices_and_no_error() -> None:
    fake = FakeNvml(init_error=LibraryNotFound("NVML Shared Library Not Found"))
    assert nvml.devices(fake, {}) == []
    assert [sample.device for sample in survey(fake).sample()] == ["host"]


def test_a_driver_that_fails_is_an_unknown_device_until_it_works() -> None:
    fake = FakeNvml(Gpu(), init_error=NVMLError("Driver/library version mismatch"))
    devices = survey(fake)
    found = by_name(devices.sample())
    assert found["gpu"].unknown == "Driver/library version mismatch"
    assert found["host"].unknown is None
    fake._init_error = None
    assert by_name(devices.sample())["gpu:0"].used == 10 * GIB
    devices.close()


def test_a_lost_device_is_unknown_and_the_other_is_not() -> None:
    lost, fine = Gpu(), Gpu(used=5 * GIB)
    devices = survey(FakeNvml(lost, fine))
    assert by_name(devices.sample())["gpu:0"].used == 10 * GIB
    lost.lost = True
    found = by_name(devices.sample())
    assert (found["gpu:0"].unknown, found["gpu:0"].used) == ("GPU is lost", None)
    assert found["gpu:1"].used == 5 * GIB
    devices.close()


@pytest.mark.parametrize(
    "gpu",
    [Gpu(used=None, free=1), Gpu(used=81 * GIB, free=0), Gpu(free=-1), Gpu(total=0, free=0)],
)
def test_figures_that_cannot_be_true_are_unknown(gpu: Gpu) -> None:
    devices = survey(FakeNvml(gpu))
    found = by_name(devices.sample())["gpu:0"]
    assert found.unknown
    assert (found.total, found.used, found.free) == (None, None, None)
    devices.close()


def test_processes_are_unknown_where_the_driver_does_not_tell() -> None:
    (device,) = nvml.devices(FakeNvml(Gpu(processes={1: GIB, 2: None})), {})
    assert device.sample().processes is None


def test_a_query_that_hangs_makes_its_device_unknown_and_no_further_threads() -> None:
    hung, fine = Gpu(), Gpu()
    devices = survey(FakeNvml(hung, fine), query_s=0.2)
    devices.sample()
    hung.hangs = True
    before = threading.active_count()
    for _ in range(4):
        found = by_name(devices.sample())
        assert found["gpu:0"].unknown == "the query does not answer"
        assert found["gpu:1"].used == 10 * GIB
    assert threading.active_count() == before
    assert hung.asked == 2
    hung.hangs = False
    hung.release.set()
    devices._query_s = 30.0
    devices.sample()
    assert by_name(devices.sample())["gpu:0"].used == 10 * GIB
    devices.close()


# ---- the host --------------------------------------------------------------------------------


def tree(root: Path, files: dict[str, str]) -> Host:
    for name, text in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return Host(cgroups=root / "cgroup", proc=root / "proc")


def test_a_limit_of_cgroup_v2_counts_without_the_file_cache(tmp_path: Path) -> None:
    host = tree(
        tmp_path,
        {
            "proc": "0::/a/b\n",
            "cgroup/a/b/memory.max": "max\n",
            "cgroup/a/b/memory.current": "9",
            "cgroup/a/memory.max": f"{100 * MIB}\n",
            "cgroup/a/memory.current": f"{70 * MIB}\n",
            "cgroup/a/memory.stat": f"anon 1\ninactive_file {20 * MIB}\n",
        },
    )
    sample = host.sample()
    assert (sample.total, sample.used, sample.free) == (100 * MIB, 50 * MIB, 50 * MIB)


def test_a_limit_of_cgroup_v1_counts(tmp_path: Path) -> None:
    host = tree(
        tmp_path,
        {
            "proc": "5:cpu:/\n4:memory:/docker/abc\n0::/\n",
            # As in a container: the path is the host's, the mount is the container's group.
            "cgroup/memory/memory.limit_in_bytes": f"{64 * MIB}\n",
            "cgroup/memory/memory.usage_in_bytes": f"{60 * MIB}\n",
            "cgroup/memory/memory.stat": f"total_inactive_file {10 * MIB}\n",
        },
    )
    sample = host.sample()
    assert (sample.total, sample.free, sample.name) == (64 * MIB, 14 * MIB, "control group")


@pytest.mark.parametrize("proc", ["0::/\n", "garbage::\n", ""])
def test_without_a_limit_it_is_the_machines_memory(tmp_path: Path, proc: str) -> None:
    sample = tree(tmp_path, {"proc": proc, "cgroup/memory.max": "max\n"}).sample()
    assert sample.total == psutil.virtual_memory().total
    assert sample.name == "machine"


HOLDER = """
import sys
block = bytearray(64 << 20)
for place in range(0, len(block), 4096):
    block[place] = 1
print("holding", flush=True)
sys.stdin.read()
"""


def test_a_processs_own_memory_is_what_it_took() -> None:
    def measure(code: str) -> int:
        with subprocess.Popen(
            [sys.executable, "-c", code],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        ) as process:
            assert process.stdout is not None
            process.stdout.readline()
            size = anonymous_bytes([process.pid])[process.pid]
            process.communicate("", timeout=60)
        return size

    taken = measure(HOLDER) - measure(HOLDER.replace("64 << 20", "4096"))
    assert abs(taken - 64 * MIB) < 2 * MIB
    assert anonymous_bytes([2**22 + 1]) == {}


# ---- simulated -------------------------------------------------------------------------------


def test_a_simulated_device_is_what_its_file_says(tmp_path: Path) -> None:
    device = SimulatedDevice(tmp_path / "device")
    device.set(total=1000, service=600, others=100, reported={"0": 590})
    assert device.hold(7, 200)
    sample = device.sample()
    assert (sample.total, sample.used, sample.free) == (1000, 900, 100)
    assert (sample.processes, sample.reported, sample.service) == ({7: 200}, {0: 590}, 600)
    assert not device.hold(8, 101)
    assert device.hold(7, 0)
    assert device.sample().free == 300


def test_a_simulated_device_can_fail_and_be_wrong(tmp_path: Path) -> None:
    device = SimulatedDevice(tmp_path / "device")
    device.set(total=1000, error="GPU is lost")
    with pytest.raises(SimulatedError, match="GPU is lost"):
        device.sample()
    device.path.write_text(json.dumps({"total": "much"}))
    with pytest.raises(Nonsense):
        device.sample()


def test_a_file_that_hangs_or_is_missing_leaves_the_host_alone(tmp_path: Path) -> None:
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    devices = survey(FakeNvml(), query_s=0.2, simulated=pipe)
    found = by_name(devices.sample())
    assert found["sim:0"].unknown == "the query does not answer"
    assert found["host"].unknown is None
    # Lets the thread go that waits for a writer.
    os.close(os.open(pipe, os.O_WRONLY))
    devices.close()
    missing = survey(FakeNvml(), simulated=tmp_path / "missing")
    assert by_name(missing.sample())["sim:0"].unknown == "No such file or directory"
    missing.close()


def test_sizes_in_words() -> None:
    assert [in_words(size) for size in (2 * GIB, None, -3 * MIB)] == [
        "2.0GiB",
        "unknown",
        "-3.0MiB",
    ]
