# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-omni-health project
"""What a server has outside its own memory: shared-memory segments and socket files.

Both outlive a process that is killed. They are found through the processes that have them
open, so that what other programs make at the same time is not taken for the server's.
"""

from __future__ import annotations

import os
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from vllm_omni_health.drills.tree import Member

_SHM = "/dev/shm/"


@dataclass(frozen=True)
class Traces:
    """Paths of shared-memory segments and socket files in use by a server."""

    shared_memory: frozenset[str] = frozenset()
    sockets: frozenset[str] = frozenset()

    @classmethod
    def of(cls, members: Iterable[Member]) -> Traces:
        """What these processes have mapped or open now, as far as it has a path.

        Ask while they idle: reading the maps of a process that is busy with its memory can take
        seconds.
        """
        segments: set[str] = set()
        inodes: set[str] = set()
        for member in members:
            segments.update(_mapped_segments(member.pid))
            for target in _open_files(member.pid):
                if target.startswith(_SHM):
                    segments.add(target.removesuffix(" (deleted)"))
                elif target.startswith("socket:["):
                    inodes.add(target[len("socket:[") : -1])
        return cls(frozenset(segments), frozenset(_socket_paths(inodes)))

    def __or__(self, other: Traces) -> Traces:
        return Traces(self.shared_memory | other.shared_memory, self.sockets | other.sockets)

    def left(self) -> list[str]:
        """The paths among these that still exist."""
        return sorted(path for path in self.shared_memory | self.sockets if os.path.exists(path))


def _mapped_segments(pid: int) -> Iterable[str]:
    try:
        text = Path(f"/proc/{pid}/maps").read_text(errors="replace")
    except OSError:
        return
    for line in text.splitlines():
        start = line.find(_SHM)
        # A segment that is already unlinked goes with its last process.
        if start >= 0 and not line.endswith(" (deleted)"):
            yield line[start:]


def _open_files(pid: int) -> Iterable[str]:
    folder = f"/proc/{pid}/fd"
    try:
        names = os.listdir(folder)
    except OSError:
        return
    for name in names:
        try:
            yield os.readlink(f"{folder}/{name}")
        except OSError:
            continue


def _socket_paths(inodes: set[str]) -> Iterable[str]:
    for line in Path("/proc/net/unix").read_text(errors="replace").splitlines()[1:]:
        fields = line.split(maxsplit=7)
        # Abstract sockets, written with an @, have no file.
        if len(fields) == 8 and fields[6] in inodes and fields[7].startswith("/"):
            yield fields[7]
