# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-omni-health project
"""Under a real systemd: it signals every process of a unit unless told otherwise."""

from __future__ import annotations

import asyncio
import os
import time
from pathlib import Path

import httpx
import pytest
from deployments import SERVE
from private_systemd import booted

from vllm_omni_health.drills.chat import ChatRequest
from vllm_omni_health.drills.load import Load
from vllm_omni_health.drills.ports import reserved_port

pytestmark = pytest.mark.slow

START_S = 300
END_S = 60

UNIT = """
[Unit]
DefaultDependencies=no
[Service]
Type=notify
Environment=PATH={path} HOME={home} VLLM_OMNI_HEALTH_DRAIN_TIMEOUT_S=60
Environment=VLLM_OMNI_HEALTH_SHUTDOWN_TIMEOUT_S=90
Environment=VLLM_OMNI_HEALTH_TERMINATION_LOG={log}
ExecStart={serve} ar-2 --port {port}
StandardOutput=append:{out}
StandardError=append:{out}
KillMode={kill_mode}
SendSIGHUP={hang_up}
TimeoutStartSec=300
TimeoutStopSec=120
"""


@pytest.mark.parametrize(
    ("kill_mode", "hang_up"), [("control-group", "yes"), ("mixed", "no"), ("control-group", "no")]
)
def test_stopped_by_systemd_it_drains(tmp_path: Path, kill_mode: str, hang_up: str) -> None:
    with booted() as systemd, reserved_port() as port:
        if systemd is None:
            pytest.skip("no systemd can be run on this machine")
        out, log = tmp_path / "out.log", tmp_path / "termination.log"
        unit = UNIT.format(
            path=os.environ["PATH"],
            home=os.environ["HOME"],
            serve=SERVE,
            port=port,
            out=out,
            log=log,
            kill_mode=kill_mode,
            hang_up=hang_up,
        )
        systemd.write_unit("omni.service", unit)
        systemd.inside("systemctl", "start", "--no-block", "omni.service")
        deadline = time.monotonic() + START_S
        while (shown := systemd.show("omni.service"))["ActiveState"] != "active":
            assert shown["ActiveState"] == "activating", out.read_text()[-3000:]
            assert time.monotonic() < deadline
            time.sleep(0.5)

        async def drain() -> tuple[list[str], int]:
            url = f"http://127.0.0.1:{port}"
            requests = [
                ChatRequest.staying_in(stage, 2, stream=stream)
                for stage in range(2)
                for stream in (False, True)
            ]
            async with Load(url, requests) as load, httpx.AsyncClient(base_url=url) as client:
                assert await load.under_way(END_S, for_s=1.0)
                systemd.inside("systemctl", "stop", "--no-block", "omni.service")
                while (status := (await client.get("/health")).status_code) == 200:
                    await asyncio.sleep(0.02)
                assert await load.settled(END_S)
                return [str(call.outcome) for call in load.calls], status

        outcomes, status = asyncio.run(drain())
        deadline = time.monotonic() + END_S
        while (shown := systemd.show("omni.service"))["ActiveState"] == "deactivating":
            assert time.monotonic() < deadline
            time.sleep(0.2)
        assert (outcomes, status) == (["answered"] * 4, 503), out.read_text()[-3000:]
        assert (shown["ActiveState"], shown["Result"]) == ("inactive", "success")
        assert (shown["ExecMainStatus"], shown["TasksCurrent"]) == ("0", "[not set]")
        assert '"exit_status": 0' in log.read_text()
