# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-omni-health project
"""Processes are known by pid and start time, and ended as groups, on real processes."""

import os
import select
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from vllm_omni.health.processes.pidfd import open_pidfd
from vllm_omni.health.processes.process import (
    Activity,
    ExitStatus,
    ProcessIdentity,
    group_members,
    kill_group,
    parent_pid,
    peek_exit_status,
)

SLEEP = [sys.executable, "-c", "import time; time.sleep(60)"]
FAMILY = [
    sys.executable,
    "-c",
    "import os, subprocess, sys, time\n"
    "os.setpgid(0, 0)\n"
    f"child = subprocess.Popen({SLEEP!r})\n"
    "print(child.pid, flush=True)\n"
    "time.sleep(60)",
]


@pytest.fixture
def spawn():
    started = []

    def start(command):
        process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
        started.append(process)
        return process

    yield start
    for process in started:
        process.kill()
        process.wait()
        process.stdout.close()


def wait_readable(fd):
    ready, _, _ = select.select([fd], [], [], 20)
    assert ready, "the process did not end"


def test_an_identity_does_not_fit_another_process_with_the_same_pid(spawn):
    identity = ProcessIdentity.of(spawn(SLEEP).pid)
    impostor = ProcessIdentity(identity.pid, identity.start_ticks + 1)
    assert identity.exists()
    assert not impostor.exists()
    assert open_pidfd(impostor) is None


def test_a_process_that_is_gone_has_no_identity():
    process = subprocess.Popen([sys.executable, "-c", ""])
    process.wait()
    assert ProcessIdentity.of(process.pid) is None
    assert parent_pid(process.pid) is None


@pytest.mark.parametrize(
    ("code", "expected"),
    [
        ("import os; os._exit(3)", ExitStatus(code=3)),
        (
            "import os; os.kill(os.getpid(), 9)",
            ExitStatus(signal_number=9, core_dumped=False),
        ),
    ],
)
def test_how_a_process_ended_is_read_without_reaping_it(code, expected):
    process = subprocess.Popen([sys.executable, "-c", code])
    fd = open_pidfd(ProcessIdentity.of(process.pid))
    wait_readable(fd)
    os.close(fd)
    assert peek_exit_status(process.pid) == expected
    assert process.wait() == expected.exit_code


def test_how_a_grandchild_ended_is_read_while_it_is_a_zombie(spawn):
    process = spawn(FAMILY)
    grandchild = int(process.stdout.readline())
    fd = open_pidfd(ProcessIdentity.of(grandchild))
    os.kill(grandchild, signal.SIGKILL)
    wait_readable(fd)
    os.close(fd)
    assert peek_exit_status(grandchild) == ExitStatus(
        signal_number=signal.SIGKILL, core_dumped=False
    )


DUMPING = (
    "import os, resource, signal, sys, threading, time\n"
    "resource.setrlimit(resource.RLIMIT_CORE, (int(sys.argv[1]),) * 2)\n"
    "os.chdir(sys.argv[2])\n"
    "os.kill(os.getpid(), signal.SIGABRT)"
)


def test_a_core_dump_is_told_from_a_death_without_one(tmp_path):
    process = subprocess.Popen([sys.executable, "-c", DUMPING, "0", str(tmp_path)])
    fd = open_pidfd(ProcessIdentity.of(process.pid))
    wait_readable(fd)
    os.close(fd)
    status = peek_exit_status(process.pid)
    process.wait()
    assert (status.core_dumped, status.describe()) == (False, "was killed by SIGABRT")


def test_a_core_dump_is_named(tmp_path):
    if Path("/proc/sys/kernel/core_pattern").read_text().startswith("|"):
        pytest.skip("core dumps go to a program on this machine")
    process = subprocess.Popen([sys.executable, "-c", DUMPING, str(1 << 30), str(tmp_path)])
    fd = open_pidfd(ProcessIdentity.of(process.pid))
    wait_readable(fd)
    os.close(fd)
    status = peek_exit_status(process.pid)
    process.wait()
    if not list(tmp_path.iterdir()):
        pytest.skip("this machine writes no core dumps")
    assert (status.core_dumped, status.describe()) == (True, "was killed by SIGABRT (core dumped)")


def test_a_stopped_process_is_told_from_one_that_waits(spawn):
    identity = ProcessIdentity.of(spawn(SLEEP).pid)
    assert not Activity.of(identity).stopped
    os.kill(identity.pid, signal.SIGSTOP)
    os.waitid(os.P_PID, identity.pid, os.WSTOPPED | os.WNOWAIT)
    assert Activity.of(identity).stopped
    assert Activity.of(ProcessIdentity(identity.pid, identity.start_ticks + 1)) is None


def test_a_group_is_killed_whole_even_when_its_leader_is_gone(spawn):
    process = spawn(FAMILY)
    grandchild = int(process.stdout.readline())
    leader = ProcessIdentity.of(process.pid)
    fd = open_pidfd(ProcessIdentity.of(grandchild))
    process.kill()
    process.wait()
    assert group_members(leader.pid) == [grandchild]
    assert kill_group(leader)
    wait_readable(fd)
    os.close(fd)
    assert group_members(leader.pid) == []


def test_a_process_that_leads_no_group_is_killed_alone(spawn):
    bystander, target = spawn(SLEEP), spawn(SLEEP)
    assert kill_group(ProcessIdentity.of(target.pid))
    assert target.wait(20) == -signal.SIGKILL
    assert bystander.poll() is None


def test_a_reused_pid_is_left_alone(spawn):
    process = spawn(SLEEP)
    identity = ProcessIdentity.of(process.pid)
    assert not kill_group(ProcessIdentity(identity.pid, identity.start_ticks - 1))
    assert process.poll() is None


def test_exit_codes_survive_both_conventions():
    for code in (0, 3, 255, -9, -15):
        assert ExitStatus.from_exit_code(code).exit_code == code
    assert ExitStatus.from_exit_code(None) == ExitStatus()
    assert ExitStatus.from_exit_code(-9).describe() == "was killed by SIGKILL"
    assert ExitStatus.from_wait_status(0x0300).describe() == "exited with status 3"
