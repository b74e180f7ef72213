# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-omni-health project
"""Processes as the health layer sees them: who they are, how they ended, how to end them.

A process is identified by pid *and* start time, never by its name: pids are reused, and
titles are set by whoever likes to. Everything here is a plain function or value, usable from
any thread, and imports neither vLLM nor asyncio.
"""

from __future__ import annotations

import ctypes
import os
import signal
from dataclasses import dataclass

_STAT_PPID = 3
_STAT_PGRP = 4
_STAT_UTIME = 13
_STAT_STIME = 14
_STAT_STARTTIME = 21
_STAT_EXIT_CODE = 51
"""Zero-based fields of ``/proc/PID/stat`` (proc(5) counts from one)."""


STOP_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)
"""What people, terminals and service managers tell a process to stop with."""


def read_at_once(path: str) -> str:
    """The text of a small file that the kernel makes up, in three system calls; OSError.

    A thread gives the interpreter away at each call, and may wait milliseconds to get it back.
    """
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        return os.read(fd, _LARGEST).decode("ascii", "replace")
    finally:
        os.close(fd)


_LARGEST = 1 << 16
"""Bytes; more than the files that are read like this can have."""


def _stat_fields(pid: int) -> list[str] | None:
    try:
        text = read_at_once(f"/proc/{pid}/stat")
    except OSError:
        return None
    # The command name may hold spaces and brackets: only what follows the last one is regular.
    head, _, rest = text.rpartition(")")
    return [head.split(" ", 1)[0], head, *rest.split()]


@dataclass(frozen=True)
class ProcessIdentity:
    """One process for as long as it lives: its pid and the kernel's start time in clock ticks."""

    pid: int
    start_ticks: int

    @classmethod
    def of(cls, pid: int) -> ProcessIdentity | None:
        """Identify a process that exists now; None when it does not (any more)."""
        fields = _stat_fields(pid)
        return None if fields is None else cls(pid, int(fields[_STAT_STARTTIME]))

    def exists(self) -> bool:
        """Whether this very process exists, running or as a zombie."""
        return ProcessIdentity.of(self.pid) == self

    def running(self) -> bool:
        """Whether this very process exists and has not ended (a zombie has)."""
        fields = _stat_fields(self.pid)
        return (
            fields is not None
            and int(fields[_STAT_STARTTIME]) == self.start_ticks
            and fields[2] not in ("Z", "X")
        )


@dataclass(frozen=True)
class ExitStatus:
    """How a process ended: an exit code, or the number of the signal that killed it.

    ``core_dumped``: whether the signal left a core dump; None where nobody can tell.
    """

    code: int | None = None
    signal_number: int | None = None
    core_dumped: bool | None = None

    @classmethod
    def from_exit_code(cls, code: int | None) -> ExitStatus:
        """From multiprocessing's exit code, which is minus the signal's number for a signal."""
        if code is None:
            return cls()
        return cls(signal_number=-code) if code < 0 else cls(code=code)

    @property
    def exit_code(self) -> int | None:
        """As multiprocessing and subprocess give it."""
        return self.code if self.signal_number is None else -self.signal_number

    @classmethod
    def from_wait_status(cls, status: int) -> ExitStatus:
        """From the status word of wait(2), which ``/proc/PID/stat`` shows as well."""
        if os.WIFSIGNALED(status):
            return cls(signal_number=os.WTERMSIG(status), core_dumped=os.WCOREDUMP(status))
        return cls(code=os.WEXITSTATUS(status))

    @property
    def signal_name(self) -> str | None:
        """``SIGKILL`` and the like; None when no signal was involved."""
        if self.signal_number is None:
            return None
        try:
            return signal.Signals(self.signal_number).name
        except ValueError:
            return f"signal {self.signal_number}"

    @property
    def stop_signal(self) -> int | None:
        """The signal to stop by which it ended, of its own accord or not; None for other ends."""
        for signum in STOP_SIGNALS:
            if self.signal_number == signum or self.code == 128 + signum:
                return signum
        return None

    def describe(self) -> str:
        """What to write in a log: ``was killed by SIGKILL``, ``exited with status 3``."""
        if self.signal_number is not None:
            dumped = " (core dumped)" if self.core_dumped else ""
            return f"was killed by {self.signal_name}{dumped}"
        if self.code is not None:
            return f"exited with status {self.code}"
        return "is gone"


@dataclass(frozen=True)
class Activity:
    """What the kernel says a process is doing: its state's letter (proc(5)) and its CPU time."""

    state: str
    cpu_ticks: int

    @classmethod
    def of(cls, identity: ProcessIdentity) -> Activity | None:
        """The process's activity now; None when it does not exist any more."""
        fields = _stat_fields(identity.pid)
        if fields is None or int(fields[_STAT_STARTTIME]) != identity.start_ticks:
            return None
        return cls(fields[2], int(fields[_STAT_UTIME]) + int(fields[_STAT_STIME]))

    @property
    def stopped(self) -> bool:
        """Whether a signal has stopped it. Not so while a debugger looks at it (state ``t``)."""
        return self.state == "T"


CLOCK_TICKS_PER_S = os.sysconf("SC_CLK_TCK")
"""Unit of CPU times and start times in ``/proc``."""


def parent_pid(pid: int) -> int | None:
    """The parent's pid, or None when the process does not exist."""
    fields = _stat_fields(pid)
    return None if fields is None else int(fields[_STAT_PPID])


def process_group(pid: int) -> int | None:
    """The process group a process is in, or None when it does not exist."""
    fields = _stat_fields(pid)
    return None if fields is None else int(fields[_STAT_PGRP])


def exit_under_way(identity: ProcessIdentity) -> ExitStatus | None:
    """How this process is ending while it still is; None when it is not, or ends with 0.

    The kernel shows the status of the whole group as soon as its end has begun. A stopped
    process shows the number of the stop signal in the same place.
    """
    fields = _stat_fields(identity.pid)
    if fields is None or len(fields) <= _STAT_EXIT_CODE:
        return None
    if int(fields[_STAT_STARTTIME]) != identity.start_ticks or fields[2] in ("T", "t"):
        return None
    status = int(fields[_STAT_EXIT_CODE])
    return ExitStatus.from_wait_status(status) if status else None


def peek_exit_status(pid: int) -> ExitStatus:
    """How a process that has just ended did end, without reaping it.

    Works for our own child until somebody reaps it, and for any process of the same user while
    it is a zombie. An empty status means that nobody can tell any more.
    """
    try:
        info = os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT)
    except ChildProcessError:
        info = None
    if info is not None:
        if info.si_code == os.CLD_EXITED:
            return ExitStatus(code=info.si_status)
        return ExitStatus(signal_number=info.si_status, core_dumped=info.si_code == os.CLD_DUMPED)
    fields = _stat_fields(pid)
    if fields is None or fields[2] != "Z" or len(fields) <= _STAT_EXIT_CODE:
        return ExitStatus()
    return ExitStatus.from_wait_status(int(fields[_STAT_EXIT_CODE]))


def group_members(pgid: int) -> list[int]:
    """The pids now in a process group, zombies left out."""
    members = []
    for entry in os.scandir("/proc"):
        if not entry.name.isdigit():
            continue
        fields = _stat_fields(int(entry.name))
        if fields is not None and int(fields[_STAT_PGRP]) == pgid and fields[2] != "Z":
            members.append(int(entry.name))
    return members


def kill_group(leader: ProcessIdentity, signum: int = signal.SIGKILL) -> bool:
    """Signal the whole process group that ``leader`` leads or led; False when nobody was there.

    Safe against reuse of the number: while a group has members the kernel gives its number to
    no new process, so the number is stale only when a *different* process now has that pid.
    """
    current = ProcessIdentity.of(leader.pid)
    if current is not None and current != leader:
        return False
    if current is not None and process_group(leader.pid) != leader.pid:
        # Killed before it became a group leader: it alone is ours, its group is the server's.
        try:
            os.kill(leader.pid, signum)
        except ProcessLookupError:
            return False
        return True
    try:
        os.killpg(leader.pid, signum)
    except (ProcessLookupError, PermissionError):
        return False
    return True


def reap(pid: int) -> None:
    """Take the exit status of a child that has ended, so that no zombie is left of it."""
    try:
        os.waitpid(pid, os.WNOHANG)
    except ChildProcessError:
        # Not our child, or reaped already.
        pass


def adopts_orphans() -> bool:
    """Whether orphaned descendants become this process's children: pid 1, or a subreaper."""
    subreaper = ctypes.c_int(0)
    ctypes.CDLL(None).prctl(_PR_GET_CHILD_SUBREAPER, ctypes.byref(subreaper), 0, 0, 0)
    return os.getpid() == 1 or bool(subreaper.value)


def reap_adopted(groups: set[int]) -> list[int]:
    """Take the exit status of children in these process groups that their leaders started.

    The leaders themselves are children that somebody else waits for, as is every child outside
    of these groups. Returns the pids.
    """
    found = []
    for entry in os.scandir("/proc"):
        if not entry.name.isdigit():
            continue
        fields = _stat_fields(int(entry.name))
        if (
            fields is not None
            and fields[2] == "Z"
            and int(fields[_STAT_PPID]) == os.getpid()
            and int(fields[_STAT_PGRP]) in groups - {int(entry.name)}
        ):
            reap(int(entry.name))
            found.append(int(entry.name))
    return found


_PR_GET_CHILD_SUBREAPER = 37
"""From linux/prctl.h."""
