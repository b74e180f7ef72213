# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-omni-health project
"""Which signals stop the server, and what does not hear them."""

import os
import signal
from multiprocessing import resource_tracker
from pathlib import Path

import pytest
from vllm_omni.entrypoints.health.server import signals


@pytest.fixture(autouse=True)
def _handlers_as_before():
    before = {signum: signal.getsignal(signum) for signum in (signal.SIGHUP, signal.SIGTERM)}
    yield
    for signum, handler in before.items():
        signal.signal(signum, handler)


def ignored(pid):
    (line,) = (x for x in Path(f"/proc/{pid}/status").read_text().splitlines() if "SigIgn" in x)
    mask = int(line.split()[1], 16)
    return {signum for signum in range(1, 32) if mask >> (signum - 1) & 1}


def test_a_closed_terminal_stops_it():
    signal.signal(signal.SIGHUP, signal.SIG_DFL)
    assert set(signals.to_stop()) == {signal.SIGTERM, signal.SIGINT, signal.SIGHUP}


def test_under_nohup_a_closed_terminal_does_not():
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
    assert set(signals.to_stop()) == {signal.SIGTERM, signal.SIGINT}


@pytest.mark.parametrize(
    ("before", "signum", "at_once"),
    [
        ([], signal.SIGTERM, False),
        ([], signal.SIGHUP, False),
        ([signal.SIGTERM], signal.SIGTERM, True),
        ([signal.SIGINT], signal.SIGTERM, True),
        ([signal.SIGHUP], signal.SIGINT, True),
        ([signal.SIGHUP], signal.SIGHUP, False),
        ([signal.SIGTERM], signal.SIGHUP, False),
    ],
)
def test_what_insists(before, signum, at_once):
    assert signals.insists(signum, before) is at_once


def test_the_resource_tracker_outlives_the_terminal(monkeypatch):
    tracker = resource_tracker.ResourceTracker()
    monkeypatch.setattr(resource_tracker, "ensure_running", tracker.ensure_running)
    signal.signal(signal.SIGHUP, signal.SIG_DFL)
    signals.start_resource_tracker()
    try:
        assert signal.SIGHUP in ignored(tracker._pid)
        assert signal.getsignal(signal.SIGHUP) is signal.SIG_DFL
    finally:
        tracker._stop()


@pytest.mark.parametrize("nohup", [False, True])
def test_a_host_with_stages_alone_takes_a_closed_terminal_for_sigterm(nohup):
    told = []
    signal.signal(signal.SIGHUP, signal.SIG_IGN if nohup else signal.SIG_DFL)
    signals.hang_up_as_sigterm()
    # Upstream's own handler comes later.
    signal.signal(signal.SIGTERM, lambda *_: told.append(True))
    os.kill(os.getpid(), signal.SIGHUP)
    assert told == ([] if nohup else [True])
