# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-omni-health project
"""The hog takes what it is told to, of the place it is told to, and gives it back."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from vllm_omni_health.devices.host import Host, anonymous_bytes
from vllm_omni_health.devices.simulated import SimulatedDevice
from vllm_omni_health.drills.hog import hogging

MIB = 1 << 20


def test_it_holds_what_it_says_and_gives_it_back() -> None:
    with hogging("64MiB") as large, hogging(4096) as small:
        held = anonymous_bytes([large.pid, small.pid])
        assert abs(held[large.pid] - held[small.pid] - 64 * MIB) < 2 * MIB
    assert (large.returncode, small.returncode) == (0, 0)
    assert anonymous_bytes([large.pid]) == {}


def test_it_takes_memory_of_a_simulated_device(tmp_path: Path) -> None:
    device = SimulatedDevice(tmp_path / "device")
    device.set(total=1000)
    with hogging(600, "--simulated", str(device.path)) as hog:
        assert device.sample().processes == {hog.pid: 600}
        with (
            pytest.raises(RuntimeError, match="did not get 401"),
            hogging(401, "--simulated", str(device.path)),
        ):
            pass
    assert device.sample().used == 0


@pytest.fixture
def cgroup() -> Iterator[Path]:
    """A control group of the test's own, inside the one that it runs in."""
    groups = Host().groups()
    if not groups:
        pytest.skip("this process is in no control group for memory that can be seen")
    folder = groups[0]._folder / "health-test-hog"
    try:
        folder.mkdir()
    except OSError as exc:
        pytest.skip(f"no control group can be made here: {exc.strerror}")
    if not (folder / "cgroup.procs").exists() or not any(folder.glob("memory.*")):
        folder.rmdir()
        pytest.skip("control groups made here have no memory controller")
    yield folder
    folder.rmdir()


def test_a_real_control_group_shows_what_the_hog_took(cgroup: Path, tmp_path: Path) -> None:
    v1 = (cgroup / "memory.limit_in_bytes").exists()
    limit = cgroup / ("memory.limit_in_bytes" if v1 else "memory.max")
    limit.write_text(str(256 * MIB))
    proc = tmp_path / "proc"
    proc.write_text("1:memory:/\n" if v1 else "0::/\n")
    mount = tmp_path / "mount"
    mount.mkdir()
    (mount / "memory").symlink_to(cgroup) if v1 else mount.rmdir()
    host = Host(cgroups=mount if v1 else cgroup, proc=proc)
    with hogging(4096, "--cgroup", str(cgroup)):
        before = host.sample()
        assert before.total == 256 * MIB
        with hogging("64MiB", "--cgroup", str(cgroup)):
            during = host.sample()
    assert before.free is not None
    assert during.free is not None
    # The second interpreter takes some megabytes as well.
    assert 64 * MIB <= before.free - during.free < 128 * MIB


def test_a_square_wave_holds_and_lets_go(tmp_path: Path) -> None:
    device = SimulatedDevice(tmp_path / "device")
    device.set(total=1000)
    seen = set()
    options = ["--simulated", str(device.path), "--square", "0.05", "0.05"]
    with hogging(600, *options) as hog:
        while len(seen) < 2:
            seen.add(device.sample().used)
        hog.send_signal(signal.SIGINT)
        hog.wait(30)
    assert seen == {0, 600}
    assert device.sample().used == 0
