# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-omni-health project
"""Where the threads of a process that hangs are: its stacks, for the log, before it is killed.

A stage's process offers them: at a signal Python's faulthandler writes the stacks of all threads
into a file in memory, which the server finds by its name in ``/proc`` and reads. That works while
another thread holds Python's lock, or never comes back from a library. Stacks have files, lines
and functions in them; no values, and so nothing of anybody's prompt.

A process that is stopped, or offers nothing, is described by what the kernel shows of its threads,
and by py-spy where that is installed. Everything here is bounded, and none of it matters to what
happens then.
"""

from __future__ import annotations

import contextlib
import faulthandler
import logging
import os
import shutil
import signal
import subprocess
import time
from collections.abc import Sequence
from pathlib import Path

from vllm_omni.health.processes.pidfd import kill_process
from vllm_omni.health.processes.process import Activity, ProcessIdentity
from vllm_omni.health.processes.watched import Replica

logger = logging.getLogger(__name__)

SIGNAL = signal.SIGRTMIN + 7
"""Asks for the stacks. A real-time signal, of which nothing else here makes use."""

TAKE_S = 2.0
"""Bound for the stacks of all processes of a replica together."""

_QUIET_S = 0.15
"""A dump is taken to be complete when nothing was added to it for this long."""

_LOOK_S = 0.02

_LONGEST = 32 * 1024
"""Characters of one process's stacks that go to the log."""

_THREADS = 64
"""Threads of which the kernel is asked."""

_NAME = "omni-health-stacks"

_file: int | None = None


def offer() -> None:
    """Have this process write its stacks when it is asked to. Again in a forked child."""
    global _file
    if _file is not None:
        os.close(_file)
    _file = os.memfd_create(_NAME)
    faulthandler.register(SIGNAL, file=_file, all_threads=True)


def log_replica(replica: Replica) -> None:
    """Log where every process of this replica is. Blocks for up to about TAKE_S; never raises."""
    deadline = time.monotonic() + TAKE_S
    try:
        if replica.inline:
            log_own()
        for one in list(replica.processes):
            rank = "" if one.rank is None else f" rank {one.rank}"
            text = take(one.identity, deadline)
            logger.error("[health] %s%s (pid %d):\n%s", one.role, rank, one.identity.pid, text)
    except Exception:
        logger.exception("[health] the stacks of a replica that hangs could not be had")


def log_own() -> None:
    """Log where the threads of this very process are; never raises."""
    try:
        with open(os.memfd_create(_NAME), "rb") as file:
            faulthandler.dump_traceback(file, all_threads=True)
            text = _end_of(file.fileno())
        logger.error("[health] this server (pid %d):\n%s", os.getpid(), text)
    except Exception:
        logger.exception("[health] the server's own stacks could not be had")


def take(identity: ProcessIdentity, deadline: float) -> str:
    """The stacks of a process, or what else can be told of it. ``deadline`` is monotonic."""
    activity = Activity.of(identity)
    if activity is None:
        return "is gone"
    if not activity.stopped:
        stacks = _offered(identity, deadline)
        if stacks:
            return stacks
    return "\n".join(filter(None, [_kernels_view(identity), _spied(identity, deadline)]))


def _offered(identity: ProcessIdentity, deadline: float) -> str:
    with contextlib.suppress(OSError), contextlib.ExitStack() as stack:
        file = _find(identity.pid)
        if file is None:
            return ""
        fd = os.open(file, os.O_RDONLY)
        stack.callback(os.close, fd)
        before = size = os.fstat(fd).st_size
        if not kill_process(identity, SIGNAL):
            return ""
        grown_at = time.monotonic()
        while (now := time.monotonic()) < deadline:
            if size > before and now - grown_at > _QUIET_S:
                break
            time.sleep(_LOOK_S)
            if (found := os.fstat(fd).st_size) != size:
                size, grown_at = found, now
        return _end_of(fd, before)
    return ""


def _end_of(fd: int, start: int = 0) -> str:
    """What is in a file from ``start`` on, or the end of it: the main thread comes last."""
    start = max(start, os.fstat(fd).st_size - _LONGEST)
    return os.pread(fd, _LONGEST, start).decode(errors="replace")


def _find(pid: int) -> Path | None:
    for entry in Path(f"/proc/{pid}/fd").iterdir():
        with contextlib.suppress(OSError):
            if os.readlink(entry).startswith(f"/memfd:{_NAME}"):
                return entry
    return None


def _kernels_view(identity: ProcessIdentity) -> str:
    lines = []
    with contextlib.suppress(OSError):
        for task in sorted(Path(f"/proc/{identity.pid}/task").iterdir())[:_THREADS]:
            lines.append(f"  thread {task.name} {_word(task, 'comm')}: {_state(task)}")
    return "\n".join(lines)[:_LONGEST]


def _state(task: Path) -> str:
    state = _word(task, "stat").rpartition(")")[2].split()[:1]
    return f"state {''.join(state) or '?'}, waits in {_word(task, 'wchan') or '?'}"


def _word(task: Path, name: str) -> str:
    with contextlib.suppress(OSError):
        return (task / name).read_text(errors="replace").strip()
    return ""


def _spied(identity: ProcessIdentity, deadline: float) -> str:
    tool = shutil.which("py-spy")
    left = deadline - time.monotonic()
    if tool is None or left <= 0:
        return ""
    command: Sequence[str] = [tool, "dump", "--nonblocking", "--pid", str(identity.pid)]
    with contextlib.suppress(OSError, subprocess.SubprocessError):
        done = subprocess.run(command, capture_output=True, text=True, timeout=left, check=True)
        return done.stdout[:_LONGEST]
    return ""
