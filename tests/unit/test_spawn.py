# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-omni-health project
"""Processes of a stage, real ones: what they run, who is told of them, and how they end."""

from __future__ import annotations

import multiprocessing
import os
import signal
import time
from typing import Any

import pytest
from vllm_omni.engine.health import target
from vllm_omni.engine.health.spawn import WatchedContext
from vllm_omni.health.faults.classify import fault_from_exception
from vllm_omni.health.faults.fault import FaultKind
from vllm_omni.health.processes.last_words import (
    LastWordsReader,
    LastWordsWriter,
    own_words,
    speak_through,
)

pytestmark = pytest.mark.timeout(120)


def end_with(how: str, last_words: Any = None, order: Any = None) -> None:
    def entry() -> None:
        if how == "exit":
            raise SystemExit(7)
        if how == "fail":
            raise MemoryError
        if how == "wait":
            own_words().progress()
            time.sleep(100)

    target.run(entry, fault_from_exception, last_words=last_words, order=order)


@pytest.fixture
def pipe():
    reading, writing = os.pipe()
    reader = LastWordsReader(reading)
    speak_through(LastWordsWriter(writing, shared=True))
    yield reader
    speak_through(None)
    os.close(writing)
    reader.close()


def started(how: str, method: str = "spawn") -> Any:
    context = WatchedContext(multiprocessing.get_context(method), end_with, lambda how: (None, 3))
    process = context.Process(target=print, args=(how,), name="worker", daemon=True)
    process.start()
    return process


def heard(pipe: LastWordsReader, wanted: Any) -> Any:
    """What is wanted of the next words that have it."""
    deadline = time.monotonic() + 100
    while time.monotonic() < deadline:
        for words in pipe.read():
            if wanted(words):
                return wanted(words)
        time.sleep(0.05)
    raise AssertionError("nothing was heard")


@pytest.mark.parametrize(
    ("how", "status", "method"),
    [("return", 0, "spawn"), ("exit", 7, "fork"), ("fail", 1, "spawn"), ("fail", 1, "fork")],
)
def test_a_worker_is_announced_says_why_it_ends_and_ends_so(pipe, how, status, method):
    process = started(how, method)
    process.join(60)
    assert process.exitcode == status
    said = list(pipe.read())
    (workers,) = [words.workers for words in said if words.workers]
    assert [(one.rank, one.pid) for one in workers] == [(3, process.pid)]
    faults = [words.fault for words in said if words.fault]
    assert [fault.kind for fault in faults] == ([FaultKind.HOST_OOM] if how == "fail" else [])
    assert all(fault.fatal for fault in faults)


def test_it_ends_by_its_parents_order_and_by_nobody_elses_signal(pipe):
    process = started("wait")
    heard(pipe, lambda words: words.progress)
    os.kill(process.pid, signal.SIGINT)
    told = heard(pipe, lambda words: words.told)
    assert (told.pid, told.signum) == (process.pid, signal.SIGINT)
    assert process.is_alive()
    process.terminate()
    process.join(30)
    assert process.exitcode == -signal.SIGTERM
