# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-omni-health project
"""What servers that were killed have left is removed by the next start, and nothing else is."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import uuid
from multiprocessing import shared_memory
from pathlib import Path

import pytest
from vllm_omni.health.processes import left_behind

VARIABLE = "VLLM_RPC_BASE_PATH"

SERVER = """
import multiprocessing, os, sys, time
from multiprocessing import shared_memory
from pathlib import Path
from vllm_omni.health.processes import left_behind
from vllm_omni.health.processes.shared_memory import remove_names

folder = Path(sys.argv[1])
folder.mkdir()
left_behind.hold(folder)
os.environ["VLLM_RPC_BASE_PATH"] = str(folder)
segment = shared_memory.SharedMemory(create=True, size=4096)
semaphore = multiprocessing.get_context("spawn").Lock()
store = Path(sys.argv[2])
left_behind.note([str(store)])
store.touch()
remove_names(os.getpid())
print("made", "/dev/shm/" + segment.name, "/dev/shm/sem." + semaphore._semlock.name[1:], flush=True)
time.sleep(600)
"""


@pytest.fixture
def server(tmp_path: Path):
    """A process that makes what a server makes; its folder, its process, its files."""
    store = tmp_path / f"vllm_dist_{uuid.uuid4().hex}"
    folder = tmp_path / "vllm-omni-dead"
    process = subprocess.Popen(
        [sys.executable, "-c", SERVER, str(folder), str(store)],
        stdout=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    assert process.stdout is not None
    # vLLM may have something to say first.
    line = next(line for line in process.stdout if line.startswith("made "))
    files = [Path(name) for name in line.split()[1:]]
    yield folder, process, [*files, store]
    kill(process)
    for path in files:
        path.unlink(missing_ok=True)


def kill(process: subprocess.Popen[str]) -> None:
    """All of its session at once, the resource tracker too, as a control group is killed."""
    try:
        os.killpg(process.pid, signal.SIGKILL)
    except ProcessLookupError:
        return
    process.wait()
    assert process.stdout is not None
    # The last of them has the other end of the pipe.
    process.stdout.read()


def test_a_dead_servers_own_goes_and_nothing_else(tmp_path: Path, server) -> None:
    folder, process, files = server
    foreign = shared_memory.SharedMemory(create=True, size=16)
    others = [tmp_path / f"vllm_dist_{uuid.uuid4().hex}", tmp_path / "vllm-omni-another"]
    others[0].touch()
    others[1].mkdir()  # no lock in it: whose it is cannot be told
    try:
        assert left_behind.sweep(tmp_path) == []
        assert all(path.exists() for path in [folder, *files])
        kill(process)
        assert all(path.exists() for path in files), "else there is nothing to remove"
        assert set(left_behind.sweep(tmp_path)) == {str(path) for path in [folder, *files]}
        assert not any(path.exists() for path in [folder, *files])
        assert all(path.exists() for path in others)
        assert Path("/dev/shm", foreign.name).exists()
    finally:
        foreign.close()
        foreign.unlink()


def test_what_somebody_uses_or_what_is_another_file_by_now_stays(tmp_path: Path, server) -> None:
    folder, process, (segment, semaphore, store) = server
    kill(process)
    with open(segment, "rb"):
        semaphore.rename(semaphore.with_name("sem.mp-test-old"))
        semaphore.touch()
        try:
            assert set(left_behind.sweep(tmp_path)) == {str(folder), str(store)}
            assert segment.exists()
            assert semaphore.exists()
        finally:
            semaphore.with_name("sem.mp-test-old").unlink()


def test_a_list_cannot_name_just_any_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path / "vllm-omni-odd"
    folder.mkdir()
    (folder / "owner").touch()
    precious = tmp_path / "precious"
    precious.touch()
    link = tmp_path / "vllm_dist_link"
    link.symlink_to(precious)
    monkeypatch.setenv(VARIABLE, str(folder))
    left_behind.note([str(precious), str(link)])
    assert left_behind.sweep(tmp_path) == [str(folder)]
    assert precious.exists()
    assert link.is_symlink()


def test_an_orderly_end_removes_the_file_stores_of_killed_stages(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "vllm-omni-mine"
    folder.mkdir()
    left_behind.hold(folder)
    monkeypatch.setenv(VARIABLE, str(folder))
    store = tmp_path / f"vllm_dist_{uuid.uuid4().hex}"
    left_behind.note([str(store)])
    store.touch()
    left_behind.remove_folder(folder)
    assert list(tmp_path.iterdir()) == []
