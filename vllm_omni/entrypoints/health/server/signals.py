# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-omni-health project
"""Which signals tell the server to stop, and what it starts that must not hear them."""

from __future__ import annotations

import os
import signal
from multiprocessing import resource_tracker

_ALWAYS = (signal.SIGTERM, signal.SIGINT)


def to_stop() -> tuple[signal.Signals, ...]:
    """The signals that tell this process to stop.

    SIGHUP, by which a terminal says that it is closed, is one of them unless whoever started the
    process has it ignored, as nohup(1) does.
    """
    if signal.getsignal(signal.SIGHUP) is signal.SIG_IGN:
        return _ALWAYS
    return (*_ALWAYS, signal.SIGHUP)


def insists(signum: int, before: list[int]) -> bool:
    """Whether this signal, after those ``before``, means that the server is to end at once.

    SIGHUP never does: a shell and its terminal both send it, and systemd can right after SIGTERM.
    """
    return bool(before) and signum != signal.SIGHUP


def start_resource_tracker() -> None:
    """Start Python's resource tracker, deaf to SIGHUP, as it makes itself to the other signals.

    It is in the terminal's group of processes like the server, and what it tracks is needed to the
    end. On the main thread.
    """
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        resource_tracker.ensure_running()
    finally:
        signal.signal(signal.SIGHUP, before)


def hang_up_as_sigterm() -> None:
    """Have SIGHUP, unless it is ignored, do what SIGTERM does in this process."""
    if signal.SIGHUP in to_stop():
        signal.signal(signal.SIGHUP, lambda *_: os.kill(os.getpid(), signal.SIGTERM))
