# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-omni-health project
"""The servers under measurement: the same deployment twice, with the layer and without."""

from __future__ import annotations

import asyncio
import contextlib
import json
import sys
from collections.abc import AsyncIterator, Callable
from enum import StrEnum
from pathlib import Path
from typing import Any

from vllm_omni_health.drills.ports import reserved_port
from vllm_omni_health.drills.server import Server, running

ROOT = Path(__file__).parents[1]
SERVE = ROOT / "examples" / "cpu" / "serve"

START_S = 600.0
"""A hang guard: two servers start at the same time on a busy machine."""


class Variant(StrEnum):
    """What is compared."""

    UPSTREAM = "upstream"
    LAYER = "layer"


ENVIRONMENT = {Variant.UPSTREAM: {"VLLM_OMNI_HEALTH": "off"}, Variant.LAYER: {}}
"""What is put on top of the environment."""

Pair = dict[Variant, Server]
Progress = Callable[[str], None]


@contextlib.asynccontextmanager
async def pair(deployment: str, folder: Path, progress: Progress) -> AsyncIterator[Pair]:
    """Both variants of a deployment, ready, for as long as the block runs.

    They run at the same time so that they can be measured in turn, a few seconds each: what the
    machine does besides then hits both alike. While one is measured the other one idles, and
    what that costs is measured too.
    """
    async with contextlib.AsyncExitStack() as stack:
        servers: Pair = {}
        for variant in Variant:
            port = stack.enter_context(reserved_port())
            servers[variant] = await stack.enter_async_context(
                running(
                    [str(SERVE), deployment, "--port", str(port)],
                    url=f"http://127.0.0.1:{port}",
                    folder=folder / f"{deployment}-{variant}-{port}",
                    env=ENVIRONMENT[variant],
                )
            )
            # One after the other: together they would fight for the cores, and for the port.
            await servers[variant].wait_ready(START_S, _telling(progress, deployment, variant))
        yield servers


def _telling(progress: Progress, deployment: str, variant: Variant) -> Callable[[float], None]:
    return lambda seconds: progress(f"{deployment}: starting {variant}, {seconds:.0f} s")


class LoadClient:
    """The load client's process, as its parent sees it. Give it orders one at a time."""

    def __init__(self, process: asyncio.subprocess.Process) -> None:
        self._process = process

    @classmethod
    @contextlib.asynccontextmanager
    async def started(cls) -> AsyncIterator[LoadClient]:
        """A load client for as long as the block runs."""
        process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", "bench.client"),
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            cwd=ROOT,
            # A line holds the latencies of every request of a round.
            limit=2**26,
        )
        try:
            yield cls(process)
        finally:
            if process.returncode is None:
                process.kill()
            await process.wait()

    async def carry_out(self, order: str, **details: Any) -> dict[str, Any]:
        """Have an order carried out; RuntimeError when the client ends instead."""
        stdin, stdout = self._process.stdin, self._process.stdout
        assert stdin is not None
        assert stdout is not None
        stdin.write(json.dumps({"order": order, **details}).encode() + b"\n")
        await stdin.drain()
        line = await stdout.readline()
        if not line:
            raise RuntimeError("the load client has ended; its traceback is above")
        result: dict[str, Any] = json.loads(line)
        return result


def port_of(server: Server) -> int:
    """The port that a server listens on."""
    return int(server.url.rsplit(":", 1)[1])
