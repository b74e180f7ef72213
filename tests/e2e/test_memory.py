# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-omni-health project
"""Memory that runs short: told, refused for, survived, and over without a restart."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from deployments import MEMORY_TOOL

from vllm_omni_health.devices.host import Host
from vllm_omni_health.devices.simulated import SimulatedDevice
from vllm_omni_health.drills.chat import ChatRequest, Outcome
from vllm_omni_health.drills.hog import hogging
from vllm_omni_health.drills.load import Load
from vllm_omni_health.drills.probe import HealthProbe, View
from vllm_omni_health.drills.server import Server
from vllm_omni_health.drills.survey import survey

GIB = 1 << 30
_GUARD_S = 60.0


@pytest.fixture
def device(tmp_path: Path) -> SimulatedDevice:
    """Eighty gigabytes, of which the service uses and reports seventy."""
    device = SimulatedDevice(tmp_path / "device")
    device.set(total=80 * GIB, service=70 * GIB, reported={"0": 69 * GIB})
    return device


def not_accepting(view: View) -> bool:
    return view.status == 503


async def get(server: Server, path: str) -> Any:
    return (await server.client.get(path)).json()


async def until(server: Server, cause: str) -> list[dict[str, Any]]:
    """Wait for such an entry in the history; all of them."""
    deadline = time.monotonic() + _GUARD_S
    while time.monotonic() < deadline:
        history = (await get(server, "/health/history"))["transitions"]
        found = [entry for entry in history if entry["cause"] == cause]
        if found:
            return found
        await asyncio.sleep(0.1)
    raise AssertionError(f"no {cause} in the history: {history}")


async def gate(server: Server, *, threshold: float) -> int:
    process = await asyncio.create_subprocess_exec(
        str(MEMORY_TOOL),
        *("check", "--url", server.url, "--threshold", str(threshold)),
        *("--requests", "4", "--max-tokens", "4", "--for", "1"),
    )
    return await process.wait()


def thread_count(server: Server) -> int:
    return len(os.listdir(f"/proc/{server.pid}/task"))


def moves(entries: list[dict[str, Any]]) -> list[str]:
    return [entry["to"] for entry in entries if entry["from"] != entry["to"]]


def test_pressure_refuses_and_passes_without_a_restart(serve, device: SimulatedDevice) -> None:
    """The out-of-memory row of the fault matrix, with a hog on a simulated device.

    First growth that nobody accounts for raises the alarm; then a hog takes what is left.
    """

    async def drill() -> None:
        settings = {
            "simulated_device": device.path,
            "min_free_memory": "sim=2GiB",
            "memory_interval_s": 0.1,
            "memory_recover_s": 1,
            "memory_window_s": 1,
            "retry_after_s": 7,
        }
        simulated = str(device.path)
        async with serve("ar-1", **settings) as server:
            with HealthProbe(server.url) as probe:
                healthy = await get(server, "/health/memory")
                rows = {row["device"]: row for row in healthy["devices"]}
                assert rows["sim:0"]["free"] == 10 * GIB
                assert rows["sim:0"]["floor"] == 2 * GIB
                assert rows["host"]["service"] > GIB // 2
                metrics = (await server.client.get("/metrics")).text
                assert 'vllm_omni_health_memory_device_bytes{device="sim:0",what="free"}' in metrics

                # 70 GiB are expected, so 3 GiB more are 4.3 % and 5 GiB more are 7.1 %.
                device.set(service=73 * GIB)
                await asyncio.sleep(2)
                history = (await get(server, "/health/history"))["transitions"]
                assert [e for e in history if e["cause"] == "memory discrepancy"] == []
                device.set(service=75 * GIB)
                (alarm,) = await until(server, "memory discrepancy")
                assert alarm["detail"]["device"] == "sim:0"
                assert alarm["detail"]["unaccounted"] == 5 * GIB
                assert alarm["detail"]["percent"] == round(500 / 70, 2)
                # The gate for pipelines, on a real server with real load.
                assert await gate(server, threshold=50) == 0
                assert await gate(server, threshold=5) == 1
                assert probe.first(not_accepting) is None

                stream = ChatRequest(stream=True, max_tokens=400, label="in flight")
                load = Load(server.url, [stream])
                async with load:
                    assert await load.under_way(_GUARD_S)
                    with hogging(4 * GIB, "--simulated", simulated):
                        assert await asyncio.to_thread(
                            probe.wait_for, not_accepting, timeout_s=_GUARD_S
                        )
                        short = await survey(server.client, newcomers=True)
                        assert short.health["state"] == "DEGRADED"
                        assert short.health["fault"]["kind"] == "oom"
                        figures = short.health["memory"]["devices"]
                        assert {
                            "device": "sim:0",
                            "total": 80 * GIB,
                            "used": 79 * GIB,
                            "free": GIB,
                            "floor": 2 * GIB,
                            "pressure": True,
                            "discrepancy_pct": alarm["detail"]["percent"],
                        } in figures
                        assert str(device.path) not in json.dumps(short.health)
                        for call in short.newcomers:
                            assert call.outcome is Outcome.REFUSED
                            assert call.headers["retry-after"] == "7"
                            assert "short of accelerator memory" in call.error["message"]
                        assert (await server.client.get("/livez")).status_code == 200
                        # What was in flight is not touched.
                        assert await load.settled(_GUARD_S)
                        assert [call.outcome for call in load.calls] == [Outcome.ANSWERED]
                    over = await asyncio.to_thread(
                        probe.wait_for,
                        lambda view: view.status == 200,
                        since=probe.first(not_accepting).at,
                        timeout_s=_GUARD_S,
                    )
                    assert over is not None

                # A hog that comes and goes more quickly than the wait: one move each way.
                before = len((await get(server, "/health/history"))["transitions"])
                seen_from = time.monotonic()
                square = ["--simulated", simulated, "--square", "0.3", "0.3"]
                with hogging(4 * GIB, *square):
                    await asyncio.sleep(3)
                assert await asyncio.to_thread(
                    probe.wait_for,
                    lambda view: view.status == 200,
                    since=seen_from + 3,
                    timeout_s=_GUARD_S,
                )
                history = (await get(server, "/health/history"))["transitions"]
                assert moves(history[before:]) == ["DEGRADED", "HEALTHY"]
                device.set(service=70 * GIB)
                await until(server, "memory discrepancy over")
                health = await server.client.get("/health")
                assert (health.status_code, health.json()["fault"]) == (200, None)
            assert server.ending is None

    asyncio.run(drill())


@pytest.mark.slow
def test_a_device_that_hangs_or_is_lost_is_unknown_and_nothing_else(serve, tmp_path: Path) -> None:
    """The simulated device's file is a pipe that nobody writes to: every query of it hangs."""
    pipe = tmp_path / "device"
    os.mkfifo(pipe)

    async def drill() -> None:
        settings = {"simulated_device": pipe, "min_free_memory": "2GiB", "memory_interval_s": 0.1}
        async with serve("ar-1", **settings) as server:
            body = await get(server, "/health/memory")
            rows = {row["device"]: row for row in body["devices"]}
            assert rows["sim:0"]["unknown"] == "the query does not answer"
            assert rows["sim:0"]["free"] is None
            assert rows["host"]["free"] > 0
            threads = thread_count(server)
            asked = time.monotonic()
            assert (await server.client.get("/health")).status_code == 200
            assert time.monotonic() - asked < 10
            await asyncio.sleep(6)
            assert thread_count(server) <= threads + 2
            call = await server.client.post("/v1/chat/completions", json=ChatRequest().body())
            assert call.status_code == 200
            server.send(15)
            ending = await server.wait_end(_GUARD_S)
            assert ending is not None
            assert ending.status == 0

    asyncio.run(drill())


@pytest.mark.slow
def test_preflight_stops_a_start_whose_stages_leave_too_little(
    serve, device: SimulatedDevice
) -> None:
    """Enough before the stages, too little with them: nothing is ever served."""

    async def drill() -> None:
        settings = {
            "simulated_device": device.path,
            "min_free_memory": "sim=2GiB",
            "preflight": "fail",
        }
        async with serve("ar-1", ready=False, **settings) as server:
            deadline = time.monotonic() + _GUARD_S
            while not server.tree.refresh()[1:] and time.monotonic() < deadline:
                await asyncio.sleep(0.1)
            device.set(service=79 * GIB)
            ending = await server.wait_end(2 * _GUARD_S)
            assert ending is not None, server.tail()
            assert ending.status == 1, server.tail()
            (line,) = [x for x in server.stderr.splitlines() if x.startswith("vllm serve --omni:")]
            assert "memory is not as it should be with all stages ready: sim:0: 1.0GiB free" in line
            assert await server.wait_processes_gone(5) == []

    asyncio.run(drill())


@pytest.fixture
def limited() -> Iterator[Path]:
    """A real control group, inside the one that the tests run in."""
    groups = Host().groups()
    if not groups:
        pytest.skip("this process is in no control group for memory that can be seen")
    folder = groups[0]._folder / "health-test-server"
    try:
        folder.mkdir()
    except OSError as exc:
        pytest.skip(f"no control group can be made here: {exc.strerror}")
    if not any(folder.glob("memory.*")):
        folder.rmdir()
        pytest.skip("control groups made here have no memory controller")
    yield folder
    for _ in range(100):
        try:
            folder.rmdir()
            break
        except OSError:
            time.sleep(0.1)


@pytest.mark.slow
def test_a_real_hog_in_the_servers_control_group(serve, limited: Path) -> None:
    """Real memory, a real limit: no simulation. The server refuses before the kernel kills."""
    v1 = (limited / "memory.limit_in_bytes").exists()

    async def drill() -> None:
        settings = {"min_free_memory": "host=1GiB", "memory_interval_s": 0.2, "memory_recover_s": 1}
        async with serve("ar-1", ready=False, **settings) as server:
            for member in server.tree.refresh():
                # What a script starts before it becomes the server is over at once.
                with contextlib.suppress(ProcessLookupError):
                    (limited / "cgroup.procs").write_text(str(member.pid))
            name = "memory.limit_in_bytes" if v1 else "memory.max"
            (limited / name).write_text(str(6 * GIB))
            await server.wait_ready(5 * _GUARD_S)
            rows = {row["device"]: row for row in (await get(server, "/health/memory"))["devices"]}
            assert (rows["host"]["total"], rows["host"]["name"]) == (6 * GIB, "control group")
            free = rows["host"]["free"]
            assert free > GIB
            with HealthProbe(server.url) as probe:
                with hogging(free - GIB // 2, "--cgroup", str(limited)):
                    assert await asyncio.to_thread(
                        probe.wait_for, not_accepting, timeout_s=_GUARD_S
                    )
                    health = await get(server, "/health")
                    assert health["fault"]["kind"] == "host_oom"
                    with pytest.raises(httpx.HTTPStatusError, match="503"):
                        (
                            await server.client.post(
                                "/v1/chat/completions", json=ChatRequest().body()
                            )
                        ).raise_for_status()
                assert await asyncio.to_thread(
                    probe.wait_for,
                    lambda view: view.status == 200,
                    since=probe.first(not_accepting).at,
                    timeout_s=_GUARD_S,
                )
            assert server.ending is None

    asyncio.run(drill())
