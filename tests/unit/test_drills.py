# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-omni-health project
"""A drill sees what happens, and a broken promise does not escape it.

The server is a fake: it keeps the contract, or breaks one promise of it on purpose.
"""

import asyncio
import contextlib
import os
import subprocess
import sys
import time
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from vllm_omni_health.drills import contract
from vllm_omni_health.drills.chat import ChatRequest, Outcome
from vllm_omni_health.drills.contract import ExpectedFault
from vllm_omni_health.drills.drill import (
    Drill,
    Findings,
    InvalidDrill,
    NoTarget,
    fatal_drill,
    told,
)
from vllm_omni_health.drills.faults import Signal
from vllm_omni_health.drills.load import Load
from vllm_omni_health.drills.ports import reserved_port
from vllm_omni_health.drills.precedence import precedence
from vllm_omni_health.drills.server import Server, ServerNotReady, running
from vllm_omni_health.drills.traces import Traces
from vllm_omni_health.drills.tree import ProcessId, ProcessTree, Role

FAKE = str(Path(__file__).with_name("fake_server.py"))
FAULT = ExpectedFault("process_lost", 0)
STAGES = (1,)


@contextlib.asynccontextmanager
async def fake(folder: Path, *flaw: str) -> AsyncIterator[Server]:
    env = {"VLLM_OMNI_HEALTH_TERMINATION_LOG": str(folder / "termination.log")}
    with reserved_port() as port:
        command = [sys.executable, FAKE, str(port), *flaw]
        url = f"http://127.0.0.1:{port}"
        async with running(command, url=url, folder=folder, env=env) as server:
            yield server


def broken_promises(folder: Path, *flaw: str) -> list[str]:
    """Everything that a whole drill finds wrong."""

    async def drill() -> tuple[Server, Findings]:
        async with fake(folder, *flaw) as server:
            await server.wait_ready(20)
            findings = await fatal_drill(server, STAGES, Signal(0), notice_s=3, end_s=8)
            return server, findings

    server, findings = asyncio.run(drill())
    assert not server.tree.left(), "running() leaves something"
    log = folder / "termination.log"
    broken = contract.healthy(findings.before, STAGES)
    broken += ["/health never changed"] if findings.after is None else []
    broken += contract.dead(findings.after, STAGES, FAULT) if findings.after else []
    broken += [what for call in findings.struck for what in contract.failed_call(call, FAULT)]
    broken += contract.reason(log.read_text() if log.exists() else None, server.stderr, FAULT)
    if findings.ending is None or findings.ending.status != 85:
        broken.append(f"ended: {findings.ending}")
    broken += [f"left: {member.describe()}" for member in findings.processes_left]
    assert len(findings.struck) == 2, told(findings)
    return broken


def test_a_server_that_keeps_its_promises(tmp_path):
    assert broken_promises(tmp_path) == []


@pytest.mark.parametrize(
    ("flaw", "found"),
    [
        ("silent", "was to fail with an answer"),
        ("empty", "error.message is ''"),
        ("deaf", "GET /health is ConnectError, not 503"),
        ("status", "ended: Ending(status=1"),
        ("orphan", "left: worker of stage 0"),
        ("no-log", "there is no termination log"),
    ],
)
def test_a_broken_promise_is_found(tmp_path, flaw, found):
    broken = broken_promises(tmp_path, flaw)
    assert any(found in what for what in broken), broken


def test_findings_are_plain_data_and_text(tmp_path):
    async def drill() -> Findings:
        async with fake(tmp_path) as server:
            await server.wait_ready(20)
            return await fatal_drill(server, STAGES, Signal(0))

    findings = asyncio.run(drill())
    data = findings.as_data()
    assert data["exit_status"] == 85
    assert data["probe_interval_s"] > 0
    assert 0 < data["to_health_change"] < data["to_exit"]
    assert [call["outcome"] for call in data["calls"]] == ["failed", "failed"]
    assert "SIGKILL to the engine core of stage 0" in told(findings)


def test_load_that_ends_before_the_fault_makes_the_drill_invalid(tmp_path):
    async def drill() -> None:
        async with fake(tmp_path) as server:
            await server.wait_ready(20)
            async with Drill(server, STAGES) as one:
                load = Load(server.url, [ChatRequest()])
                one.load = load
                with pytest.raises(InvalidDrill):
                    await one.inject(Signal(0))

    asyncio.run(drill())


def test_a_target_that_is_not_there_is_named(tmp_path):
    async def drill() -> None:
        async with fake(tmp_path) as server:
            await server.wait_ready(20)
            async with Drill(server, STAGES) as one:
                with pytest.raises(NoTarget, match="stage 7"):
                    await one.inject(Signal(7))

    asyncio.run(drill())


def test_a_server_that_ends_while_it_starts_is_told_with_its_log(tmp_path):
    async def start() -> None:
        command = [sys.executable, "-c", "import sys; sys.exit('no such thing')"]
        async with running(command, url="http://127.0.0.1:1", folder=tmp_path) as server:
            with pytest.raises(ServerNotReady, match="no such thing"):
                await server.wait_ready(20)

    asyncio.run(start())


def test_a_server_that_never_answers_is_given_up(tmp_path):
    async def start() -> Server:
        command = [sys.executable, "-c", "import time; time.sleep(60)"]
        async with running(command, url="http://127.0.0.1:1", folder=tmp_path) as server:
            with pytest.raises(ServerNotReady, match="not ready"):
                await server.wait_ready(0.5)
            return server

    server = asyncio.run(start())
    assert not server.tree.root.alive()


def test_cancelling_leaves_no_process(tmp_path):
    servers = []

    async def start() -> None:
        async with fake(tmp_path) as server:
            servers.append(server)
            await server.wait_ready(20)
            await asyncio.sleep(60)

    async def interrupted() -> None:
        task = asyncio.create_task(start())
        while not (servers and servers[0].ready_at):
            await asyncio.sleep(0.05)
        members = servers[0].tree.refresh()
        assert [m.role for m in members] == [Role.SERVER, Role.ENGINE_CORE, Role.WORKER]
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert not any(member.id.alive() for member in members)

    asyncio.run(interrupted())


def test_nobody_listening_is_unreachable():
    async def load() -> Load:
        with reserved_port() as port:
            async with Load(f"http://127.0.0.1:{port}", [ChatRequest()]) as one:
                await one.settled(10)
                return one

    (call,) = asyncio.run(load()).calls
    assert call.outcome is Outcome.UNREACHABLE


def test_a_process_that_is_not_there_gets_no_signal():
    process = subprocess.Popen([sys.executable, "-c", ""])
    identity = ProcessId.of(process.pid)
    assert identity is not None
    process.wait()
    assert not identity.alive()
    assert not identity.send(9)


def test_another_process_with_the_same_pid_gets_no_signal():
    process = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
    try:
        other = ProcessId(process.pid, 1)
        assert not other.send(9)
        time.sleep(0.1)
        assert process.poll() is None
    finally:
        process.kill()
        process.wait()


def test_a_grandchild_stays_a_member_after_its_parent_has_ended():
    child = (
        "import subprocess, sys, time\n"
        "subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(60)'])\n"
        "print('ready', flush=True); time.sleep(60)"
    )
    process = subprocess.Popen([sys.executable, "-c", child], stdout=subprocess.PIPE)
    assert process.stdout is not None
    process.stdout.readline()
    this = ProcessId.of(os.getpid())
    root = ProcessId.of(process.pid)
    assert this is not None
    assert root is not None
    tree = ProcessTree(root, own_session=False)
    assert len(tree.refresh()) == 2
    process.kill()
    process.wait()
    (left,) = tree.left()
    assert left.id.send(9)


def test_traces_are_found_through_the_process_that_has_them_open(tmp_path):
    path = tmp_path / "socket"
    script = (
        "import socket, sys, time\n"
        "from multiprocessing.shared_memory import SharedMemory\n"
        "memory = SharedMemory(create=True, size=4096)\n"
        f"sock = socket.socket(socket.AF_UNIX); sock.bind({str(path)!r})\n"
        "print(memory.name, flush=True); time.sleep(60)"
    )
    process = subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    name = process.stdout.readline().strip()
    root = ProcessId.of(process.pid)
    assert root is not None
    tree = ProcessTree(root, own_session=False)
    traces = Traces.of(tree.refresh())
    tree.kill()
    process.wait()
    assert traces.sockets == {str(path)}
    assert traces.shared_memory == {f"/dev/shm/{name}"}
    assert traces.left()
    for left in traces.left():
        os.unlink(left)
    assert traces.left() == []


def test_a_port_is_reserved_for_one_at_a_time():
    with reserved_port() as one, reserved_port() as other:
        assert one != other


def test_precedence_is_given_back():
    before = os.sched_getscheduler(0)
    with precedence() as given:
        assert (os.sched_getscheduler(0) != before) is given
    assert os.sched_getscheduler(0) == before
