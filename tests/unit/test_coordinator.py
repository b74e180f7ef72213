# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-omni-health project
"""The coordinator of remote stages is its server's alone to end."""

import multiprocessing
import os
import select
import signal
import time

import pytest
from vllm_omni.engine.health import coordinator

WAIT_S = 20


@pytest.fixture
def process(monkeypatch):
    def upstream(_router, _pub, _timeout, ready_pipe):
        ready_pipe.send("ready")
        time.sleep(600)

    monkeypatch.setattr(coordinator.seams, "original", lambda _target: upstream)
    context = multiprocessing.get_context("fork")
    receiver, sender = context.Pipe(duplex=False)
    process = context.Process(
        target=coordinator.run_coordinator, args=("router", "pub", 1.0, sender), daemon=True
    )
    process.start()
    assert receiver.poll(WAIT_S)
    yield process
    process.kill()
    process.join(WAIT_S)


def test_its_servers_sigterm_ends_it(process):
    process.terminate()
    process.join(WAIT_S)
    assert process.exitcode == 0


@pytest.mark.parametrize("signum", [signal.SIGTERM, signal.SIGINT, signal.SIGHUP])
def test_nobody_elses_signal_does(process, signum):
    stranger = os.fork()
    if stranger == 0:
        os.kill(process.pid, signum)
        os._exit(0)
    os.waitpid(stranger, 0)
    assert not select.select([process.sentinel], [], [], 0.5)[0]


def test_it_ends_with_its_server():
    reader, writer = os.pipe()
    server = os.fork()
    if server == 0:
        child = os.fork()
        if child == 0:
            coordinator.seams.original = lambda _target: (
                lambda *_: (
                    os.write(writer, b"!"),
                    time.sleep(600),
                )
            )
            coordinator.run_coordinator("router", "pub", 1.0, None)
        time.sleep(600)
    os.close(writer)
    assert os.read(reader, 1) == b"!"
    os.kill(server, signal.SIGKILL)
    os.waitpid(server, 0)
    # The pipe closes with its last holder.
    assert select.select([reader], [], [], WAIT_S)[0]
    assert os.read(reader, 1) == b""
    os.close(reader)
