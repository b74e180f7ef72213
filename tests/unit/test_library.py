# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-omni-health project
"""The layer around an engine in any program: starts that fail, and what is left behind."""

import asyncio
import os
import threading

import pytest
from vllm_omni.entrypoints.health import library
from vllm_omni.health.faults.fault import Fault, FaultKind
from vllm_omni.health.runtime import current, set_current

WAIT_S = 20


class Engine:
    """Takes the place of AsyncOmni: its start ends when it is told to."""

    def __init__(self, **arguments):
        self.arguments = arguments
        self.closed = False
        started = arguments.get("started")
        if started is not None and not started.wait(WAIT_S):
            raise TimeoutError
        if arguments.get("fails"):
            raise ValueError("no such model")
        self.folder = os.environ["VLLM_RPC_BASE_PATH"]
        self.folder_is_there = os.path.isdir(self.folder)
        self.seen = os.environ["VLLM_OMNI_HEALTH_HANG_TIMEOUT_S"]

    def shutdown(self):
        self.closed = True


@pytest.fixture(autouse=True)
def _without_upstream(monkeypatch, tmp_path):
    monkeypatch.setattr(library, "_Engine", Engine)
    monkeypatch.setattr(library, "_UNWIND_S", 0.2)
    monkeypatch.setattr(library.seams, "install_library", lambda: None)
    yield
    set_current(None)


def test_an_engine_is_closed_and_the_environment_is_the_callers_again():
    before = dict(os.environ)

    async def program():
        async with library.install(hang_timeout_s=7).engine(model="m") as omni:
            assert current() is not None
            return omni

    omni = asyncio.run(program())
    assert (omni.closed, omni.seen, omni.arguments) == (True, "7", {"model": "m"})
    assert omni.folder_is_there
    assert not os.path.exists(omni.folder)
    assert (dict(os.environ), current()) == (before, None)
    assert not [t for t in threading.enumerate() if t.name.startswith("health-")]


def test_what_the_block_raises_comes_out_and_the_engine_is_closed():
    made = []

    async def program():
        async with library.install().engine() as omni:
            made.append(omni)
            raise LookupError

    with pytest.raises(LookupError):
        asyncio.run(program())
    assert made[0].closed
    assert current() is None


def test_a_stage_lost_while_it_starts_ends_the_start():
    never = threading.Event()

    async def program():
        health = library.install()
        fault = Fault(kind=FaultKind.OOM, stage_id=0, replica_id=0)
        health.runtime.machine.expect_replica(0, 0, 1)
        asyncio.get_running_loop().call_later(0.2, health.runtime.supervisor.report, fault)
        async with health.engine(started=never):
            raise AssertionError

    with pytest.raises(library.FaultError) as raised:
        asyncio.run(program())
    never.set()
    assert raised.value.fault.kind is FaultKind.OOM
    assert str(raised.value) == FaultKind.OOM.sentence
    assert current() is None


def test_upstreams_own_refusal_comes_out_as_it_is():
    async def program():
        async with library.install().engine(fails=True):
            raise AssertionError

    with pytest.raises(ValueError, match="no such model"):
        asyncio.run(program())
    assert current() is None


def test_a_start_that_is_cancelled_leaves_nothing():
    never = threading.Event()

    async def program():
        async with asyncio.timeout(0.2), library.install().engine(started=never):
            raise AssertionError

    with pytest.raises(TimeoutError):
        asyncio.run(program())
    never.set()
    assert current() is None


def test_one_layer_at_a_time():
    library.install()
    with pytest.raises(RuntimeError, match="installed already"):
        library.install()


def test_a_setting_that_is_wrong_is_refused_and_nothing_is_installed():
    with pytest.raises(ValueError, match="hang_timeout"):
        library.install(hang_timeout=3)
    assert current() is None
