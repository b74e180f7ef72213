# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-omni-health project
"""Everything of a server killed at once: the next start leaves no trace of it."""

from __future__ import annotations

import asyncio
import os
from pathlib import Path

import pytest
from vllm_omni.health.processes import left_behind

from vllm_omni_health.drills.traces import Traces


def test_the_next_start_removes_what_a_killed_server_left(
    serve, short_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TMPDIR", str(short_folder))

    async def drill() -> Traces:
        async with serve("ar-1") as server:
            traces = Traces.of(server.tree.refresh())
            # Python's resource trackers first, which would clean up after the others.
            for member in server.tree.refresh():
                member.id.send(19)
            server.tree.kill()
            await server.wait_end(30)
            await server.wait_processes_gone(30)
            return traces

    before = set(os.listdir("/dev/shm"))
    traces = asyncio.run(drill())
    stores = list(short_folder.glob("vllm_dist_*"))
    assert traces.left(), "else there is nothing to remove"
    assert stores
    removed = left_behind.sweep(short_folder)
    assert {str(path) for path in stores} <= set(removed)
    assert traces.left() == []
    assert list(short_folder.glob("vllm*")) == []
    # Of what was there before, nothing was touched.
    assert not before & {Path(name).name for name in removed}
