# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-omni-health project
"""Precedence for the threads that measure, over the work that they measure.

A drill shares a few cores with several busy processes. Left to the ordinary scheduler, a thread
that mostly sleeps was seen to wait for seconds until it ran again (Linux 6.18, ten busy threads
on two cores): long enough for requests to end before the fault, and for every time to be the
drill's own. A measuring thread needs next to nothing of a core, but it needs it at once.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator

_PRIORITY = 1
"""The lowest of the real-time priorities: ahead of everything ordinary is enough."""


@contextlib.contextmanager
def precedence() -> Iterator[bool]:
    """Let the calling thread run ahead while the block runs, if this user may.

    Yields whether it does. Threads and processes started in the block do not inherit it.
    """
    before = os.sched_getscheduler(0), os.sched_getparam(0)
    try:
        # 0 means the calling thread, not the whole process.
        policy = os.SCHED_RR | os.SCHED_RESET_ON_FORK
        os.sched_setscheduler(0, policy, os.sched_param(_PRIORITY))
    except OSError:
        yield False
        return
    try:
        yield True
    finally:
        os.sched_setscheduler(0, *before)
