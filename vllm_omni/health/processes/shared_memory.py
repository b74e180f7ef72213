# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-omni-health project
"""Shared-memory segments of the stages, so that none is left behind.

vLLM's CPU communicator makes one a rank, whose name nothing but the end of an undisturbed
interpreter removes. Memory outlives its name: once every rank has mapped it, the name serves
nobody, and without it the kernel frees the memory with the last process, however that ends.
"""

from __future__ import annotations

import contextlib
import os
import re

from vllm_omni.health.processes import left_behind

_FOLDER = "/dev/shm"
"""Where Linux shows POSIX shared memory, shm_overview(7)."""

_SEGMENT = re.compile(rf" ({_FOLDER}/vllm_dist_\S+-cpushm_\d+)$", re.MULTILINE)
"""Names of vLLM's CPU communicator, each with a UUID of its replica in it. Segments that Python
makes (``psm_``) go by its resource tracker, and NCCL removes the names of its own at once."""


_MAPPED = re.compile(rf"(\d+)\s+{_FOLDER}/", re.MULTILINE)
"""The inode of each mapping of shared memory. A semaphore is mapped under another name, which is
gone, than the one it gets: glibc's sem_open makes a file of its own and links it."""

_TRACKED = ("psm_", "sem.mp-")
"""Segments and semaphores that Python makes, which its resource tracker removes while it lives."""


def _tracked(maps: str) -> list[str]:
    """The names of those among what is mapped."""
    inodes = {int(inode) for inode in _MAPPED.findall(maps)}
    with contextlib.suppress(OSError), os.scandir(_FOLDER) as entries:
        return [
            entry.path
            for entry in entries
            if entry.name.startswith(_TRACKED) and entry.inode() in inodes
        ]
    return []


def remove_names(pid: int) -> None:
    """Remove the names of the segments that a stage process has mapped by now.

    Those that are another's to remove are listed, in case that everything is killed at once.

    Not before all of its peers have mapped them as well, or are about to be ended. Harmless for
    a process that is gone or cannot be looked at.
    """
    try:
        with open(f"/proc/{pid}/maps", encoding="utf-8", errors="replace") as file:
            maps = file.read()
    except OSError:
        return
    left_behind.note(_tracked(maps))
    paths = set(_SEGMENT.findall(maps))
    for path in paths:
        with contextlib.suppress(OSError):
            os.unlink(path)
