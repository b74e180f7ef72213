"""The kernel kills a worker for its memory: the server says that it was that, and ends with 82."""

from __future__ import annotations

import errno
import os
import signal
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

STEP_BYTES = 16 << 20
GUARD_S = 60


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

    def squeeze(self) -> None:
        """Lower the limit until nothing is left to give back, and so nothing to be had."""
        limit = int(self._usage.read_text())
        while limit > 0:
            try:
                self._limit.write_text(str(limit))
            except OSError as exc:
                if exc.errno != errno.EBUSY:
                    raise
                return
            limit -= STEP_BYTES

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
    """The largest process is the one that the kernel chooses, and that is the worker."""
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
            cgroup.squeeze()
            await drill.until(lambda view: view.status != 200, findings, GUARD_S)
            await drill.watch_to_the_end(findings, GUARD_S)
            return server, findings

    server, findings = run_until_valid(drill)
    promises = everyone_was_told(findings, fault, plain=1, streams=1)
    promises += ended_with_the_reason(server, findings, fault, termination_log)
    assert promises == [], told(findings)
    assert "by the out-of-memory killer" in server.stdout + server.stderr
