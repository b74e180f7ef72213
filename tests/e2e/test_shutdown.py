# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-omni-health project
"""A server that is told to stop answers everyone, leaves nothing, and says how it ended."""

from __future__ import annotations

import asyncio
import json
import os
import random
import signal
import subprocess
import time
from pathlib import Path

import pytest

from vllm_omni_health.drills.chat import ChatCall, Request
from vllm_omni_health.drills.drill import Drill
from vllm_omni_health.drills.images import ImageRequest
from vllm_omni_health.drills.server import Ending, Server
from vllm_omni_health.drills.tree import Member

END_S = 60
"""A hang guard."""


async def end(server: Server) -> tuple[Ending | None, list[Member]]:
    ending = await server.wait_end(END_S)
    return ending, await server.wait_processes_gone(5)


def clean(server: Server, ending: Ending | None, left: list[Member], log: Path) -> list[str]:
    """What is wrong with a stop that was to be clean."""
    broken = [f"left: {member.describe()}" for member in left]
    if ending is None or ending.status != 0:
        broken.append(f"exit status {ending and ending.status}, not 0")
    if json.loads(log.read_text())["exit_status"] != 0:
        broken.append(f"the termination log says {log.read_text()}")
    if "destroy_process_group() was not called" in server.stdout + server.stderr:
        broken.append("the log warns about destroy_process_group()")
    return broken


@pytest.mark.parametrize(
    ("deployment", "stages", "signum"),
    [
        pytest.param("ar-2", (1, 1), signal.SIGTERM, id="two stages"),
        pytest.param("ar-1", (1,), signal.SIGINT, id="one stage", marks=pytest.mark.slow),
        pytest.param("ar-1", (1,), signal.SIGHUP, id="terminal closed", marks=pytest.mark.slow),
    ],
)
def test_under_load(
    serve, termination_log: Path, notifications, deployment, stages, signum
) -> None:
    async def scenario() -> tuple[Server, list[ChatCall], Ending | None, list[Member]]:
        async with serve(deployment) as server, Drill(server, stages) as drill:
            load = await drill.put_under_load(drill.one_of_each())
            struck = load.in_flight()
            server.send(signum)
            await load.settled(END_S)
            return server, struck, *await end(server)

    server, struck, ending, left = asyncio.run(scenario())
    broken = clean(server, ending, left, termination_log)
    assert struck
    for call in struck:
        told = call.error or {}
        if told.get("code") != 503 or not told.get("message") or told.get("fault") is not None:
            broken.append(f"request {call.number} {call.label}: {call.describe()}")
    assert broken == [], server.tail()
    assert notifications.news() == [
        "STATUS=STARTING",
        "STATUS=HEALTHY",
        "READY=1",
        "STATUS=HEALTHY: draining",
        "STOPPING=1",
    ]
    assert notifications.watchdog_fed()


@pytest.mark.slow
def test_requests_may_end_while_it_drains(serve, termination_log: Path) -> None:
    async def scenario() -> tuple[Server, list[ChatCall], Ending | None, list[Member]]:
        async with (
            serve("ar-1", drain_timeout_s=60, shutdown_timeout_s=90) as server,
            Drill(server, (1,)) as drill,
        ):
            load = await drill.put_under_load(drill.one_of_each())
            struck = load.in_flight()
            server.send(signal.SIGTERM)
            await load.settled(END_S)
            return server, struck, *await end(server)

    server, struck, ending, left = asyncio.run(scenario())
    assert clean(server, ending, left, termination_log) == [], server.tail()
    assert {str(call.outcome) for call in struck} == {"answered"}


def signal_all(server: Server, signum: int) -> None:
    """Signal every process of the server's, in any order, as a service manager does."""
    members = server.tree.refresh()
    random.shuffle(members)
    for member in members:
        member.id.send(signum)


def image_requests(stages: tuple[int, ...]) -> list[Request]:
    return [ImageRequest.slow(len(stages) - 1, steps=6) for _ in range(2)]


TIMES = int(os.environ.get("DRILL_TIMES", "10"))
"""How often a drill whose order is left to chance is repeated."""

EVERYBODY = [
    pytest.param("ar-2", (1, 1), signal.SIGTERM, 1, id="two stages"),
    pytest.param("ar-2", (1, 1), signal.SIGTERM, TIMES, id="often", marks=pytest.mark.slow),
    pytest.param("diffusion-mp", (1,), signal.SIGTERM, TIMES, id="worker", marks=pytest.mark.slow),
    pytest.param(
        "diffusion-replicas", (2,), signal.SIGTERM, 1, id="replicas", marks=pytest.mark.slow
    ),
    pytest.param("ar-1", (1,), signal.SIGINT, 1, id="Ctrl-C", marks=pytest.mark.slow),
    pytest.param("ar-1", (1,), signal.SIGHUP, 1, id="terminal closed", marks=pytest.mark.slow),
]


@pytest.mark.parametrize(("deployment", "stages", "signum", "times"), EVERYBODY)
def test_a_signal_to_every_process_does_not_break_a_drain(
    serve, termination_log: Path, deployment, stages, signum, times
) -> None:
    """Stages and workers get the signal as well, before the server or after it."""

    async def scenario() -> tuple[Server, list[ChatCall], Ending | None, list[Member]]:
        async with (
            serve(deployment, drain_timeout_s=60, shutdown_timeout_s=90) as server,
            Drill(server, stages) as drill,
        ):
            images = deployment.startswith("diffusion")
            load = await drill.put_under_load(
                image_requests(stages) if images else drill.one_of_each()
            )
            struck = load.in_flight()
            signal_all(server, signum)
            await load.settled(END_S)
            return server, struck, *await end(server)

    for _ in range(times):
        server, struck, ending, left = asyncio.run(scenario())
        assert clean(server, ending, left, termination_log) == [], server.tail()
        assert {str(call.outcome) for call in struck} == {"answered"}


@pytest.mark.slow
def test_a_second_signal_ends_it_at_once(serve, termination_log: Path) -> None:
    async def scenario() -> tuple[Ending | None, list[Member]]:
        async with (
            serve("ar-1", drain_timeout_s=600, shutdown_timeout_s=700) as server,
            Drill(server, (1,)) as drill,
        ):
            await drill.put_under_load(drill.one_of_each(), repeat=True)
            since = time.monotonic()
            server.send(signal.SIGTERM)
            assert await asyncio.to_thread(
                drill.probe.wait_for, lambda view: view.status != 200, since=since, timeout_s=END_S
            )
            server.send(signal.SIGTERM)
            return await end(server)

    ending, left = asyncio.run(scenario())
    assert ending is not None
    assert (ending.status, left) == (128 + signal.SIGTERM, [])
    assert json.loads(termination_log.read_text())["exit_status"] == 128 + signal.SIGTERM


@pytest.mark.parametrize(
    "moment",
    [
        pytest.param("ready", id="under load"),
        pytest.param("starting", id="while it loads", marks=pytest.mark.slow),
    ],
)
def test_a_killed_server_takes_every_process_with_it(serve, moment) -> None:
    async def scenario() -> list[Member]:
        async with serve("ar-2", ready=moment == "ready") as server:
            if moment == "ready":
                async with Drill(server, (1, 1)) as drill:
                    await drill.put_under_load(drill.one_of_each())
                    server.tree.refresh()
                    server.send(signal.SIGKILL)
                    return (await end(server))[1]
            async with asyncio.timeout(120):
                while len(server.tree.refresh()) < 4:
                    await asyncio.sleep(0.05)
            server.send(signal.SIGKILL)
            return (await end(server))[1]

    assert asyncio.run(scenario()) == []


@pytest.mark.parametrize(
    ("signum", "everybody"),
    [
        pytest.param(signal.SIGTERM, False, id="SIGTERM"),
        pytest.param(signal.SIGTERM, True, id="SIGTERM to all", marks=pytest.mark.slow),
        pytest.param(signal.SIGHUP, True, id="terminal closed", marks=pytest.mark.slow),
    ],
)
def test_told_to_stop_while_it_starts(
    serve,
    termination_log: Path,
    short_folder: Path,
    monkeypatch: pytest.MonkeyPatch,
    signum: signal.Signals,
    everybody: bool,
) -> None:
    sockets = short_folder

    async def scenario() -> tuple[Server, Ending | None, list[Member]]:
        async with serve("ar-1", ready=False) as server:
            async with asyncio.timeout(120):
                # Before that it is still being imported, and a signal ends it as any program.
                while "vllm-omni-health" not in server.stdout + server.stderr:
                    await asyncio.sleep(0.05)
                while len(server.tree.refresh()) < 2:
                    await asyncio.sleep(0.05)
            if everybody:
                signal_all(server, signum)
            else:
                server.send(signum)
            return server, *await end(server)

    monkeypatch.setenv("VLLM_RPC_BASE_PATH", str(sockets))
    server, ending, left = asyncio.run(scenario())
    assert ending is not None
    assert (ending.status, left) == (128 + signum, []), server.tail()
    assert json.loads(termination_log.read_text())["exit_status"] == 128 + signum
    assert list(sockets.iterdir()) == []
    assert f"told to stop by {signum.name} while starting" in server.stderr


def children_of(pid: int) -> list[int]:
    return [int(pid) for pid in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


@pytest.mark.slow
def test_as_pid_1_of_a_container_it_obeys_and_leaves_nothing(serve, termination_log: Path) -> None:
    """Without an init: the kernel ignores signals there that pid 1 has no handler for."""
    container = ["unshare", "--pid", "--fork", "--mount-proc", "--kill-child"]
    try:
        subprocess.run([*container, "true"], check=True, capture_output=True, timeout=END_S)
    except (OSError, subprocess.CalledProcessError):
        pytest.skip("no pid namespace can be made on this machine")

    async def scenario() -> tuple[Server, Ending | None, list[Member]]:
        async with serve("ar-1", wrapper=container) as server:
            health = (await server.client.get("/health")).json()
            # Pids are the container's; here the server has another one.
            assert health["stages"][0]["replicas"][0]["pid"] != 1
            (pid,) = children_of(server.pid)
            server.tree.refresh()
            os.kill(pid, signal.SIGTERM)
            return server, *await end(server)

    server, ending, left = asyncio.run(scenario())
    assert clean(server, ending, left, termination_log) == [], server.tail()
