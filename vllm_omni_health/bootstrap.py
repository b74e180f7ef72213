# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-omni-health project
"""The first thing that a spawned child process does: tie its life to its parent's.

And to its parent's alone: what a terminal sends to all processes of its session is the parent's to
react to, also while the child imports modules.

A process that has lost its parent holds device memory for nobody, and a server that is restarted
then fails for lack of it. A thread that watches for the parent cannot help while Python imports
modules or a kernel runs with the GIL held; the kernel's own parent-death signal always can.

multiprocessing's spawn sends a child two pickles: preparation data first, which the child loads
before it imports its parent's main module, then the process object. The name in the preparation
data is an :class:`ArmedName` here. Loading it calls :func:`arm`.
"""

from __future__ import annotations

import ctypes
import os
import signal
from multiprocessing import spawn
from typing import Any

_PR_SET_PDEATHSIG = 1
"""From linux/prctl.h."""

_upstream_get_preparation_data = spawn.get_preparation_data


def set_death_signal(sig: int = signal.SIGKILL) -> None:
    """Have the kernel send this process SIGKILL when the thread that spawned it ends.

    Also takes the place of upstream's function of this name, which asks for SIGTERM: a stage
    process that is busy, or still importing, answers that after seconds. The argument is
    accepted and ignored.
    """
    del sig
    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)


def arm(name: str, parent_pid: int) -> str:
    """Called in the child, on its main thread. Returns the process's name, and not in an orphan."""
    set_death_signal()
    for signum in (signal.SIGINT, signal.SIGHUP):
        signal.signal(signum, signal.SIG_IGN)
    # The parent may have ended before the kernel knew that we care.
    if os.getppid() != parent_pid:
        os._exit(128 + signal.SIGKILL)
    return name


class ArmedName(str):
    """A process's name that, when it is unpickled, arms the process that does so."""

    def __reduce__(self) -> tuple[Any, ...]:
        return arm, (str(self), os.getpid())


def get_preparation_data(name: str) -> dict[str, Any]:
    """Replaces multiprocessing's own, for every child that this process spawns."""
    data: dict[str, Any] = _upstream_get_preparation_data(name)
    data["name"] = ArmedName(data.get("name", name))
    return data
