# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-omni-health project
"""Standard streams that a process was started without."""

from __future__ import annotations

import subprocess
import sys

import pytest

PROGRAM = """
import multiprocessing, sys
from vllm_omni_health.console import complain, open_standard_streams

def child():
    print("said", file=sys.stderr, flush=True)
    print("said", flush=True)
    sys.stdin.read()

if __name__ == "__main__":
    open_standard_streams()
    held = open(__file__)
    print("said", flush=True)
    print("said", file=sys.stderr, flush=True)
    complain("said")
    process = multiprocessing.get_context("spawn").Process(target=child)
    process.start()
    process.join()
    sys.exit(process.exitcode + 40 if held.fileno() > 2 else 1)
"""


@pytest.mark.parametrize(
    "streams",
    [
        "<&-",
        ">&-",
        "2>&-",
        "<&- >&- 2>&-",
        # What a shell leaves there: the script that it reads.
        "2</dev/null",
        "0>/dev/null 1</dev/null",
    ],
)
def test_a_process_has_them_and_so_have_its_children(streams: str, tmp_path) -> None:
    program = tmp_path / "program.py"
    program.write_text(PROGRAM)
    command = ("bash", "-c", f'exec "$@" {streams}', "-", sys.executable, str(program))
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=60)
    assert done.returncode == 40, done.stdout + done.stderr
    assert "Traceback" not in done.stderr


def test_what_is_there_stays(tmp_path) -> None:
    program = tmp_path / "program.py"
    program.write_text(PROGRAM)
    done = subprocess.run(
        (sys.executable, str(program)), capture_output=True, text=True, check=False, timeout=60
    )
    assert done.stdout.split() == ["said"] * 2
    assert done.stderr.splitlines() == ["said", "vllm serve --omni: said", "said"]
