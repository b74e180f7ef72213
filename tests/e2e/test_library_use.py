# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-omni-health project
"""Without the HTTP server: typed faults, the state machine, and nothing left, in any program."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from deployments import MODEL, ROOT

PROGRAM = Path(__file__).with_name("library_program.py")
RUN_S = 600

LIKE_SERVE = {
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "OMP_NUM_THREADS": "1",
    "PYTHONSAFEPATH": "1",
    "HF_HUB_OFFLINE": "1",
    "VLLM_NO_USAGE_STATS": "1",
    "OMNI_TINY_FAST_IMPORT": "1",
}


@pytest.mark.slow
def test_a_program_that_uses_the_engine_itself(short_folder: Path) -> None:
    deploy = ROOT / "examples" / "cpu" / "deploy" / "ar-1.yaml"
    environment = {**os.environ, **LIKE_SERVE, "TMPDIR": str(short_folder)}
    environment.pop("PYTHONDONTWRITEBYTECODE", None)
    done = subprocess.run(
        [sys.executable, str(PROGRAM), str(MODEL), str(deploy)],
        env=environment,
        capture_output=True,
        text=True,
        timeout=RUN_S,
        check=False,
    )
    line = next((x for x in done.stdout.splitlines() if x.startswith("FOUND ")), None)
    assert line is not None, done.stdout[-2000:] + done.stderr[-4000:]
    found = json.loads(line.removeprefix("FOUND "))
    lost = "process_lost: A process of the server ended unexpectedly."
    assert found["first"] == "answered"
    assert found["in flight"] == [False, False]
    assert (found["pending"], found["after"]) == ([lost, lost], lost)
    assert found["states"] == ["STARTING", "HEALTHY", "DEGRADED", "DEAD"]
    assert found["environment kept"]
    assert "no_such_setting" in found["refused"]
    left = [command for command in found["children"] if "resource_tracker" not in command]
    assert left == []
    assert list(short_folder.glob("vllm-omni-*")) == []
    assert done.returncode == 0, done.stderr[-4000:]
    assert "destroy_process_group() was not called" not in done.stdout + done.stderr
