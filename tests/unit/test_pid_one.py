# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-omni-health project
"""As pid 1 of a container without an init: whoever is orphaned there is the server's to reap."""

import json
import subprocess
import sys

import pytest

IN_A_CONTAINER = ["unshare", "--pid", "--fork", "--mount-proc", "--kill-child"]
WAIT_S = 60

STAGE = """
import os, subprocess, sys, time
os.setpgid(0, 0)
worker = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
print(worker.pid, flush=True)
time.sleep(600)
"""

SERVER = f"""
import json, os, signal, subprocess, sys, time
from vllm_omni.health.state.machine import HealthMachine
from vllm_omni.health.processes.process import ProcessIdentity
from vllm_omni.health.processes.supervisor import Supervisor

supervisor = Supervisor(HealthMachine())
supervisor.start()
stage = subprocess.Popen(
    [sys.executable, "-c", {STAGE!r}], stdout=subprocess.PIPE, stdin=subprocess.DEVNULL
)
worker = int(stage.stdout.readline())
identity = ProcessIdentity.of(worker)
own_child = subprocess.Popen([sys.executable, "-c", "raise SystemExit(7)"])
supervisor.watch_engine_core(0, 0, stage.pid)
os.kill(stage.pid, signal.SIGKILL)
os.kill(worker, signal.SIGKILL)
deadline = time.monotonic() + 20
while identity.exists() and time.monotonic() < deadline:
    time.sleep(0.05)
print(json.dumps({{
    "pid": os.getpid(),
    "worker left": identity.exists(),
    "stage": stage.wait(),
    "own child": own_child.wait(),
}}))
supervisor.stop()
"""


def test_orphans_are_reaped_and_nobody_elses_children():
    try:
        subprocess.run([*IN_A_CONTAINER, "true"], check=True, capture_output=True, timeout=WAIT_S)
    except (OSError, subprocess.CalledProcessError):
        pytest.skip("no pid namespace can be made on this machine")
    done = subprocess.run(
        [*IN_A_CONTAINER, sys.executable, "-c", SERVER],
        capture_output=True,
        text=True,
        timeout=WAIT_S,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout.splitlines()[-1]) == {
        "pid": 1,
        "worker left": False,
        "stage": -9,
        "own child": 7,
    }
