# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-omni-health project
"""The processes of a server: which there are, what each is for, and who is left at the end.

A process belongs to the server because of its ancestry (or its session, where the server was
started in one of its own), never because of its name. What it is for is told by its place in
the tree; the title that a process gives itself, and the pids that ``/health`` shows, only say
of which stage and replica it is.
"""

from __future__ import annotations

import os
import re
import signal
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

_PPID = 1
_SESSION = 3
_START_TIME = 19
"""Positions in ``/proc/PID/stat`` after the command's name (proc(5))."""


@dataclass(frozen=True, order=True)
class ProcessId:
    """One process for as long as it exists: its pid, and the clock tick at which it started."""

    pid: int
    start_ticks: int

    @classmethod
    def of(cls, pid: int) -> ProcessId | None:
        """The process that has this pid now, or None."""
        entry = _read_stat(pid)
        return None if entry is None else entry.id

    def alive(self) -> bool:
        """Whether this very process exists and has not ended (a zombie has)."""
        entry = _read_stat(self.pid)
        return entry is not None and entry.id == self and entry.state not in "ZX"

    def send(self, signum: int) -> bool:
        """Send a signal to this process and no other; False when it has ended."""
        try:
            pidfd = os.pidfd_open(self.pid)
        except ProcessLookupError:
            return False
        try:
            # Looked at after the descriptor is open: a reused pid cannot slip in between.
            if not self.alive():
                return False
            signal.pidfd_send_signal(pidfd, signum)
        except ProcessLookupError:
            return False
        finally:
            os.close(pidfd)
        return True


class Role(StrEnum):
    """What a process of a server is for."""

    SERVER = "server"
    ENGINE_CORE = "engine core"
    WORKER = "worker"
    HELPER = "helper"
    """A process of Python's own, such as multiprocessing's resource tracker."""


@dataclass(frozen=True)
class Member:
    """One process of a server. Stage and replica are None where nothing tells them."""

    id: ProcessId
    role: Role
    stage_id: int | None = None
    replica_id: int | None = None
    title: str = ""

    @property
    def pid(self) -> int:
        """The process's pid."""
        return self.id.pid

    def rank(self) -> int:
        """Rank of a worker among those of its replica, as its title says by now; else 0.

        A worker has a plain title until the ranks have found each other.
        """
        found = _RANK_IN_TITLE.search(_title(self.pid))
        return int(found[1]) if found else 0

    def describe(self) -> str:
        """For people: ``engine core of stage 1 (pid 4711)``."""
        where = "" if self.stage_id is None else f" of stage {self.stage_id}"
        if self.replica_id:
            where += f" replica {self.replica_id}"
        return f"{self.role}{where} (pid {self.pid})"


class ProcessTree:
    """All processes that a server has, and has had as far as they were seen.

    Call :meth:`refresh` before something is ended: a process whose parent is gone no longer
    shows whose child it was, but what has been seen once stays a member.

    ``own_session``: the server is the leader of its session, so that every process in the
    session is its own, even if its parent ended before it was seen.
    """

    def __init__(self, root: ProcessId, *, own_session: bool) -> None:
        self.root = root
        self._own_session = own_session
        self._members: dict[ProcessId, Member] = {root: Member(root, Role.SERVER)}

    def refresh(self, health: Mapping[str, Any] | None = None) -> list[Member]:
        """Look at the system; the members that are alive now, the server first.

        ``health`` is a body of ``/health``, whose pids say which stage a process is of.
        """
        processes = _all_processes()
        placed = replicas_by_pid(health)
        if self.root.pid in placed:
            # An inline stage runs in the server's own process, with its workers right below.
            self._members[self.root] = Member(self.root, Role.SERVER, *placed[self.root.pid])
        children: dict[int, list[_Entry]] = {}
        for process in processes.values():
            children.setdefault(process.parent, []).append(process)
        queue = [m.id for m in self._members.values() if m.id == _id_at(processes, m.pid)]
        while queue:
            parent = self._members[queue.pop()]
            for child in children.get(parent.pid, ()):
                queue += self._take(child, parent, placed)
        if self._own_session:
            for process in processes.values():
                if process.session == self.root.pid and process.id not in self._members:
                    self._members[process.id] = _labelled(process, None, placed)
        return [
            member
            for member in self._members.values()
            if (entry := processes.get(member.pid)) is not None
            and entry.id == member.id
            and entry.state not in "ZX"
        ]

    def find(
        self, role: Role, stage_id: int | None = None, replica_id: int | None = None
    ) -> list[Member]:
        """Members seen so far, dead or alive, with this role (and stage, and replica)."""
        return [
            member
            for member in self._members.values()
            if member.role is role
            and stage_id in (None, member.stage_id)
            and replica_id in (None, member.replica_id)
        ]

    def left(self, health: Mapping[str, Any] | None = None) -> list[Member]:
        """Members that are alive now, without the server itself."""
        return [member for member in self.refresh(health) if member.id != self.root]

    def kill(self, roles: Iterable[Role] = tuple(Role)) -> list[Member]:
        """SIGKILL every member with one of these roles; those that were alive."""
        wanted = set(roles)
        targets = [member for member in self.refresh() if member.role in wanted]
        return [member for member in targets if member.id.send(signal.SIGKILL)]

    def _take(
        self, entry: _Entry, parent: Member, placed: Mapping[int, tuple[int, int]]
    ) -> list[ProcessId]:
        """Make ``entry`` a member, or label it better; what is to be looked through next."""
        known = self._members.get(entry.id)
        if known is None:
            self._members[entry.id] = _labelled(entry, parent, placed)
            return [entry.id]
        if known.stage_id is None and known.role is not Role.HELPER:
            self._members[entry.id] = _labelled(entry, parent, placed)
        return []


def replicas_by_pid(health: Mapping[str, Any] | None) -> dict[int, tuple[int, int]]:
    """Stage and replica by the pid of their engine core, from a body of ``/health``."""
    placed: dict[int, tuple[int, int]] = {}
    for stage in (health or {}).get("stages") or ():
        for one in stage.get("replicas") or ():
            if one.get("pid") is not None:
                placed[one["pid"]] = (stage["stage_id"], one["replica_id"])
    return placed


@dataclass(frozen=True)
class _Entry:
    """One process as ``/proc`` shows it."""

    id: ProcessId
    parent: int
    session: int
    state: str

    def title(self) -> str:
        return _title(self.id.pid)


def _title(pid: int) -> str:
    # The kernel reads it from the process's memory, and waits while that is being changed:
    # up to seconds in a busy process. So it is not read again once it has told its stage.
    try:
        with open(f"/proc/{pid}/cmdline", "rb") as file:
            return file.read().replace(b"\0", b" ").decode(errors="replace").strip()
    except OSError:
        return ""


def _read_stat(pid: int) -> _Entry | None:
    try:
        with open(f"/proc/{pid}/stat", encoding="ascii", errors="replace") as file:
            text = file.read()
    except OSError:
        return None
    # The name may hold spaces and brackets: only what follows the last bracket is regular.
    fields = text.rpartition(")")[2].split()
    if len(fields) <= _START_TIME:
        return None
    return _Entry(
        id=ProcessId(pid, int(fields[_START_TIME])),
        parent=int(fields[_PPID]),
        session=int(fields[_SESSION]),
        state=fields[0],
    )


def _all_processes() -> dict[int, _Entry]:
    found = {}
    for name in os.listdir("/proc"):
        if name.isdigit() and (entry := _read_stat(int(name))) is not None:
            found[entry.id.pid] = entry
    return found


def _id_at(processes: Mapping[int, _Entry], pid: int) -> ProcessId | None:
    entry = processes.get(pid)
    return None if entry is None else entry.id


_STAGE_IN_TITLE = re.compile(r"stage_?(\d+)(?:_replica_?(\d+))?", re.IGNORECASE)
_RANK_IN_TITLE = re.compile(r"_TP(\d+)", re.IGNORECASE)
_PYTHONS_OWN = ("multiprocessing.resource_tracker", "multiprocessing.forkserver")


def _labelled(
    entry: _Entry, parent: Member | None, placed: Mapping[int, tuple[int, int]]
) -> Member:
    """Role by place in the tree; stage and replica by what is known of them."""
    title = entry.title()
    place = placed.get(entry.id.pid)
    if place is None and (found := _STAGE_IN_TITLE.search(title)):
        place = (int(found[1]), int(found[2] or 0))
    if any(name in title for name in _PYTHONS_OWN):
        role = Role.HELPER
    elif parent is None:
        role = Role.WORKER if "worker" in title.lower() else Role.HELPER
    elif parent.role is Role.SERVER:
        # An inline stage has its worker right below the server, and a diffusion replica with a
        # process of its own calls that process a worker as well.
        worker = "worker" in title.lower() and entry.id.pid not in placed
        role = Role.WORKER if worker else Role.ENGINE_CORE
    else:
        role = Role.WORKER if parent.role is Role.ENGINE_CORE else Role.HELPER
    if place is None and parent is not None and parent.stage_id is not None:
        place = (parent.stage_id, parent.replica_id or 0)
    stage_id, replica_id = place if place is not None else (None, None)
    return Member(entry.id, role, stage_id, replica_id, title)
