# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-omni-health project
"""The kernel kills a worker for its memory: the server says that it was that, and ends with 82."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import uuid
from collections.abc import Iterator
from pathlib import Path

import pytest
from checks import ended_with_the_reason, everyone_was_told, run_until_valid

from vllm_omni_health.drills.contract import ExpectedFault
from vllm_omni_health.drills.drill import Drill, Findings, told
from vllm_omni_health.drills.faults import Signal
from vllm_omni_health.drills.server import Server
from vllm_omni_health.drills.tree import Role

pytestmark = pytest.mark.slow

GUARD_S = 40

HOG = """
import time
open("/proc/self/oom_score_adj", "w").write("-1000")
eaten = []
while True:
    eaten.append(b"x" * (4 << 20))
    time.sleep(0.02)
"""


class MemoryCgroup:
    """A memory cgroup of its own for a server, of either version."""

    def __init__(self, folder: Path, limit: str, usage: str) -> None:
        self.folder = folder
        self._limit = folder / limit
        self._usage = folder / usage

    @property
    def wrapper(self) -> list[str]:
        """A command that runs another one in here."""
        return ["sh", "-c", f'echo $$ > {self.folder}/cgroup.procs; exec "$@"', "sh"]

    @contextlib.contextmanager
    def exhausted(self, victim: int) -> Iterator[None]:
        """No more room than there is, and a process that wants more and is not killed for it.

        ``victim`` is: what it then gives back takes the other one seconds to use up.
        """
        self._limit.write_text(self._usage.read_text().strip())
        Path(f"/proc/{victim}/oom_score_adj").write_text("1000")
        hog = subprocess.Popen([*self.wrapper, sys.executable, "-c", HOG])
        try:
            yield
        finally:
            hog.kill()
            hog.wait()

    def close(self) -> None:
        """Its processes must be gone."""
        self.folder.rmdir()


@pytest.fixture
def cgroup() -> Iterator[MemoryCgroup]:
    name = f"health-test-{uuid.uuid4().hex[:8]}"
    for parent, limit, usage in (
        ("/sys/fs/cgroup/memory", "memory.limit_in_bytes", "memory.usage_in_bytes"),
        ("/sys/fs/cgroup", "memory.max", "memory.current"),
    ):
        cgroup = MemoryCgroup(Path(parent) / name, limit, usage)
        try:
            cgroup.folder.mkdir()
        except OSError:
            continue
        if os.access(cgroup.folder / limit, os.W_OK):
            yield cgroup
            cgroup.close()
            return
        cgroup.close()
    pytest.skip("no memory cgroup can be made on this machine")


def test_a_worker_killed_for_its_memory(serve, termination_log: Path, cgroup) -> None:
    fault = ExpectedFault("host_oom", 0)

    async def drill() -> tuple[Server, Findings]:
        async with (
            serve("ar-1", wrapper=cgroup.wrapper, exit_grace_s=2) as server,
            Drill(server, (1,)) as drill,
        ):
            await drill.put_under_load(drill.one_of_each())
            # A signal that changes nothing: what is broken is the memory.
            cont = Signal(0, Role.WORKER, signum=signal.SIGCONT, kind="host_oom")
            findings = await drill.inject(cont)
            assert findings.target is not None
            with cgroup.exhausted(findings.target.pid):
                view = await drill.until(lambda view: view.status != 200, findings, GUARD_S)
            assert view is not None, "the kernel killed nobody"
            await drill.watch_to_the_end(findings, GUARD_S)
            return server, findings

    server, findings = run_until_valid(drill)
    promises = everyone_was_told(findings, fault, plain=1, streams=1)
    promises += ended_with_the_reason(server, findings, fault, termination_log)
    assert promises == [], told(findings)
    assert "by the out-of-memory killer" in server.stdout + server.stderr
