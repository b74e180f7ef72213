# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-omni-health project
"""A stage on another host: a network namespace with a link to this one, which can be cut."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
from checks import ended_with_the_reason, everyone_was_told, run_until_valid

from vllm_omni_health.drills.contract import ExpectedFault
from vllm_omni_health.drills.drill import Drill, Findings, told
from vllm_omni_health.drills.faults import Signal
from vllm_omni_health.drills.ports import reserved_port
from vllm_omni_health.drills.server import Server
from vllm_omni_health.drills.tree import Role

pytestmark = pytest.mark.slow

REMOTE_TIMEOUT_S = 12
NOTICED_S = REMOTE_TIMEOUT_S + 10
"""Heartbeats come every five seconds and are passed on every five."""

START_S = 400


def ip(*words: str) -> None:
    subprocess.run(["ip", *words], check=True, capture_output=True, timeout=30)


@dataclass
class OtherHost:
    """The namespace ``name``, in which ``here`` is this host's address."""

    name: str
    link: str
    here: str

    @property
    def enter(self) -> list[str]:
        return ["ip", "netns", "exec", self.name]

    def cut(self) -> None:
        ip("link", "set", self.link, "down")


@pytest.fixture
def other_host() -> Iterator[OtherHost]:
    if os.geteuid() != 0 or shutil.which("ip") is None:
        pytest.skip("needs root and ip(8)")
    number = os.getpid() % 250
    host = OtherHost(f"drill-{number}", f"drill{number}", f"10.213.{number}.1")
    try:
        ip("netns", "add", host.name)
    except subprocess.CalledProcessError:
        pytest.skip("no network namespace can be made on this machine")
    try:
        peer = f"{host.link}p"
        ip("link", "add", host.link, "type", "veth", "peer", "name", peer, "netns", host.name)
        ip("addr", "add", f"{host.here}/24", "dev", host.link)
        ip("link", "set", host.link, "up")
        ip("-n", host.name, "addr", "add", f"10.213.{number}.2/24", "dev", peer)
        ip("-n", host.name, "link", "set", peer, "up")
        ip("-n", host.name, "link", "set", "lo", "up")
        yield host
    finally:
        with contextlib.suppress(subprocess.CalledProcessError):
            ip("link", "delete", host.link)
        ip("netns", "delete", host.name)


@pytest.mark.parametrize("how", ["link cut", "host killed"])
def test_a_stage_whose_host_is_gone_is_lost(
    serve, other_host: OtherHost, termination_log: Path, how: str
) -> None:
    fault = ExpectedFault("process_lost", 1)

    async def drill() -> tuple[Server, Findings, float | None]:
        with reserved_port() as master:
            where = ["--omni-master-address", other_host.here, "--omni-master-port", str(master)]
            async with (
                serve(
                    "ar-2",
                    *("--stage-id", "0"),
                    *where,
                    ready=False,
                    remote_timeout_s=REMOTE_TIMEOUT_S,
                    exit_grace_s=2,
                ) as server,
                serve(
                    "ar-2",
                    *("--stage-id", "1", "--headless"),
                    *where,
                    ready=False,
                    wrapper=other_host.enter,
                ) as remote,
            ):
                await server.wait_ready(START_S)
                async with Drill(server, (1, 1)) as drill:
                    await drill.put_under_load(drill.one_of_each())
                    nothing = Signal(0, Role.ENGINE_CORE, signum=signal.SIGCONT)
                    findings = await drill.inject(nothing)
                    if how == "link cut":
                        other_host.cut()
                    else:
                        remote.kill()
                    view = await drill.until(lambda view: view.status != 200, findings, 90)
                    noticed_s = None if view is None else view.at - findings.zero
                    await drill.watch_to_the_end(findings, 90)
                    return server, findings, noticed_s

    server, findings, noticed_s = run_until_valid(drill)
    promises = everyone_was_told(findings, fault, plain=2, streams=2)
    promises += ended_with_the_reason(server, findings, fault, termination_log)
    if noticed_s is None or noticed_s > NOTICED_S:
        promises.append(f"noticed after {noticed_s} s")
    print(f"{how}: noticed after {noticed_s} s")
    assert promises == [], told(findings) + server.tail()
