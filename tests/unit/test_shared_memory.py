# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-omni-health project
"""Shared memory that a stage's processes would leave behind loses its name, and no other."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
import uuid
from collections.abc import Iterator
from pathlib import Path

import pytest
from vllm_omni.health.processes.shared_memory import remove_names

SHM = Path("/dev/shm")
if not os.access(SHM, os.W_OK):
    pytest.skip("needs POSIX shared memory", allow_module_level=True)

MAPPER = """
import mmap, sys
kept = []
for path in sys.argv[1:]:
    with open(path, "r+b") as file:
        kept.append(mmap.mmap(file.fileno(), 4096))
print("mapped", flush=True)
for line in sys.stdin:
    kept[0][0] = 7
    print(kept[0][0], flush=True)
"""


@pytest.fixture
def names() -> Iterator[dict[str, Path]]:
    ident = uuid.uuid4().hex
    paths = {
        "rank": SHM / f"vllm_dist_{ident}-tp:0-[0-1]-cpushm_0",
        "peer": SHM / f"vllm_dist_{ident}-tp:0-[0-1]-cpushm_1",
        "other": SHM / f"somebody_{ident}",
    }
    for path in paths.values():
        path.write_bytes(bytes(4096))
    yield paths
    for path in paths.values():
        path.unlink(missing_ok=True)


@contextlib.contextmanager
def mapped_by_a_process(*paths: Path) -> Iterator[subprocess.Popen[bytes]]:
    command = [sys.executable, "-c", MAPPER, *map(str, paths)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == b"mapped\n"
        yield process
        process.kill()


def test_what_a_stage_has_mapped_loses_its_name_and_can_be_used_on(names: dict[str, Path]) -> None:
    with mapped_by_a_process(names["rank"], names["other"]) as process:
        remove_names(process.pid)
        assert not names["rank"].exists()
        assert names["other"].exists()
        assert names["peer"].exists(), "this process does not have it"
        assert process.stdin is not None
        assert process.stdout is not None
        process.stdin.write(b"\n")
        process.stdin.flush()
        assert process.stdout.readline() == b"7\n"
        remove_names(process.pid)


def test_a_process_that_is_gone_has_none() -> None:
    with mapped_by_a_process() as process:
        pass
    remove_names(process.pid)
