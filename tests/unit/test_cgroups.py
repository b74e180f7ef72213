# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-omni-health project
"""Out-of-memory kills: the counters of both cgroup versions, and a real kill by the kernel."""

import os
import signal
import subprocess
import sys
import threading
import uuid
from pathlib import Path

import pytest
from vllm_omni.health.faults.fault import FaultKind
from vllm_omni.health.processes.cgroups import OomKills
from vllm_omni.health.processes.process import ExitStatus
from vllm_omni.health.processes.supervisor import Supervisor
from vllm_omni.health.state.machine import HealthMachine, State

WAIT_S = 20

V1_MOUNT = "34 25 0:30 {root} {mount} rw,relatime - cgroup cgroup rw,memory"
V2_MOUNT = "35 25 0:31 {root} {mount} rw,relatime shared:9 - cgroup2 cgroup rw"


class FakeSystem:
    """A ``/proc`` and a cgroup hierarchy in ordinary files."""

    def __init__(self, folder, mounts, cgroup):
        self.proc = folder / "proc"
        for name, text in (("self/mountinfo", mounts), ("7/cgroup", cgroup)):
            file = self.proc / name
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_text(text + "\n")

    def counter(self):
        return OomKills.around(7, self.proc)


def write(file, text):
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(text)


@pytest.mark.parametrize(
    ("mount", "root", "line", "inside", "name"),
    [
        (V2_MOUNT, "/", "0::/pod/app", "pod/app", "memory.events"),
        (V2_MOUNT, "/", "0::/", "", "memory.events"),
        # A container that sees its own part of the hierarchy, and names from outside it.
        (V2_MOUNT, "/docker/ab", "0::/docker/ab/x", "x", "memory.events"),
        (V1_MOUNT, "/", "4:memory:/pod/app", "pod/app", "memory.oom_control"),
        (V1_MOUNT, "/docker/ab", "9:cpu,memory:/docker/ab", "", "memory.oom_control"),
    ],
)
def test_each_kill_in_the_processs_own_cgroup_is_claimed_once(
    tmp_path, mount, root, line, inside, name
):
    hierarchy = tmp_path / "cgroup"
    file = hierarchy / inside / name
    write(file, "low 0\noom 5\noom_kill 5\noom_group_kill 0\n")
    system = FakeSystem(tmp_path, mount.format(root=root, mount=hierarchy), line)
    counter = system.counter()
    assert not counter.claim()
    write(file, "low 0\noom 8\noom_kill 7\noom_group_kill 0\n")
    assert [counter.claim() for _ in range(3)] == [True, True, False]
    # A process that was started after a kill cannot have ended by it.
    write(file, "oom_kill 8\n")
    assert not counter.claim(since=8)
    assert counter.claim(since=7)
    file.unlink()
    assert not counter.claim()


def test_a_kill_in_another_cgroup_is_not_ours(tmp_path):
    hierarchy = tmp_path / "cgroup"
    write(hierarchy / "ours" / "memory.events", "oom_kill 0\n")
    write(hierarchy / "memory.events", "oom_kill 0\n")
    mount = V2_MOUNT.format(root="/", mount=hierarchy)
    counter = FakeSystem(tmp_path, mount, "0::/ours").counter()
    write(hierarchy / "memory.events", "oom_kill 1\n")
    write(hierarchy / "ourselves" / "memory.events", "oom_kill 1\n")
    assert not counter.claim()


@pytest.mark.parametrize(
    ("mounts", "cgroup"),
    [
        ("", ""),
        ("nonsense", "nonsense"),
        (V2_MOUNT.format(root="/other", mount="/x"), "0::/ours"),
        (V2_MOUNT.format(root="/", mount="/nowhere"), "0::/ours"),
    ],
)
def test_where_the_kernel_shows_none_there_is_none(tmp_path, mounts, cgroup):
    assert FakeSystem(tmp_path, mounts, cgroup).counter() is None
    assert OomKills.around(8, tmp_path / "proc") is None


# ---- real kills ----------------------------------------------------------------------------

EATER = """
import sys
print(flush=True)
sys.stdin.readline()
eaten = []
while True:
    eaten.append(b"x" * 1_000_000)
"""
LIMIT_BYTES = 64 << 20


@pytest.fixture
def limited_cgroup():
    """The file of a new memory cgroup with a low limit, by which a process joins it."""
    for parent, limit in (
        (Path("/sys/fs/cgroup/memory"), "memory.limit_in_bytes"),
        (Path("/sys/fs/cgroup"), "memory.max"),
    ):
        folder = parent / f"health-test-{uuid.uuid4().hex[:8]}"
        try:
            folder.mkdir()
            (folder / limit).write_text(str(LIMIT_BYTES))
            break
        except OSError:
            if folder.is_dir():
                folder.rmdir()
    else:
        pytest.skip("no memory cgroup can be made on this machine")
    yield folder / "cgroup.procs"
    folder.rmdir()


class Watch:
    """A supervisor over one process that is the root of a replica of two."""

    def __init__(self, cgroup):
        self.machine = HealthMachine()
        self.supervisor = Supervisor(self.machine)
        self.moved = threading.Condition()
        self.machine.observe(self._on_move)
        self.supervisor.start()
        self.process = subprocess.Popen(
            [sys.executable, "-c", EATER],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            process_group=0,
        )
        self.process.stdout.readline()
        cgroup.write_text(str(self.process.pid))
        self.machine.expect_stage(0, 1)
        self.supervisor.watch_engine_core(
            0, 0, self.process.pid, exit_status=lambda: ExitStatus.from_exit_code(-9)
        )
        self.supervisor.replica_ready(0, 0)
        self.machine.started()

    def _on_move(self, _move):
        with self.moved:
            self.moved.notify_all()

    def fault(self):
        with self.moved:
            assert self.moved.wait_for(lambda: self.machine.snapshot.state is State.DEAD, WAIT_S)
        return self.machine.reason

    def close(self):
        self.supervisor.stop()
        self.process.kill()
        self.process.wait(WAIT_S)
        self.process.stdin.close()
        self.process.stdout.close()


@pytest.fixture
def watch(limited_cgroup):
    watch = Watch(limited_cgroup)
    yield watch
    watch.close()


def test_a_process_that_the_kernel_killed_for_its_memory_is_a_host_oom(watch):
    watch.process.stdin.write("\n")
    watch.process.stdin.flush()
    fault = watch.fault()
    assert (fault.kind, fault.signal, fault.pid) == (
        FaultKind.HOST_OOM,
        "SIGKILL",
        watch.process.pid,
    )
    assert "out-of-memory killer" in fault.message


def test_a_process_that_somebody_killed_is_a_lost_process(watch):
    os.kill(watch.process.pid, signal.SIGKILL)
    fault = watch.fault()
    assert (fault.kind, fault.signal) == (FaultKind.PROCESS_LOST, "SIGKILL")
    assert fault.core_dumped is False
