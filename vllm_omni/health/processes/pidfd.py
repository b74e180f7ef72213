# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-omni-health project
"""File descriptors of processes and threads, which become readable when those end."""

from __future__ import annotations

import errno
import fcntl
import os
import select
import signal
import struct
import time

from vllm_omni.health.processes.process import ExitStatus, ProcessIdentity

_PIDFD_THREAD = os.O_EXCL
"""Value of PIDFD_THREAD (include/uapi/linux/pidfd.h)."""

_INFO = struct.Struct("=QQ11Ii")
"""The first version of struct pidfd_info (the same file): mask, cgroup id, ids, exit code."""
_PIDFD_GET_INFO = (3 << 30) | (_INFO.size << 16) | (0xFF << 8) | 11
"""``_IOWR(PIDFS_IOCTL_MAGIC, 11, struct pidfd_info)``."""
_INFO_EXIT = 1 << 3
"""PIDFD_INFO_EXIT, since Linux 6.15: the exit code is wanted, or, in an answer, is there."""


def open_pidfd(identity: ProcessIdentity) -> int | None:
    """A file descriptor that becomes readable when this process ends; None when it is gone.

    The identity is compared after the descriptor exists, so a reused pid cannot slip in.
    """
    try:
        fd = os.pidfd_open(identity.pid)
    except OSError as exc:
        if exc.errno == errno.ESRCH:
            return None
        raise
    if identity.exists():
        return fd
    os.close(fd)
    return None


def open_thread_pidfds(identity: ProcessIdentity) -> list[int]:
    """A descriptor for each thread that the process has now, readable when the thread ends.

    When a process is killed, all of its threads but one end within a millisecond; the last one
    first gives back the memory of the process (seconds for large ones, or with a device
    attached), and only then does the process's own pidfd become readable. Empty before Linux
    6.9, which brought PIDFD_THREAD (pidfd_open(2)).
    """
    fds = []
    try:
        entries = list(os.scandir(f"/proc/{identity.pid}/task"))
    except OSError:
        return []
    for entry in entries:
        try:
            fds.append(os.pidfd_open(int(entry.name), _PIDFD_THREAD))
        except OSError:
            # EINVAL: an older kernel. ESRCH: that thread has just ended.
            continue
    if fds and not identity.exists():
        for fd in fds:
            os.close(fd)
        return []
    return fds


def thread_exit_status(pidfd: int) -> ExitStatus | None:
    """How the thread behind this descriptor has ended; None where the kernel does not tell.

    Takes one system call that looks at no memory of the process. ``/proc`` does look, and who
    reads there while a process gives back its memory may have to do that work in its place.
    """
    request = bytearray(_INFO.pack(_INFO_EXIT, *[0] * 13))
    try:
        fcntl.ioctl(pidfd, _PIDFD_GET_INFO, request)
    except OSError:
        # An older kernel, or the thread was not counted as ended yet.
        return None
    mask, *_, status = _INFO.unpack(request)
    return ExitStatus.from_wait_status(status) if mask & _INFO_EXIT else None


def kill_process(process: ProcessIdentity, signum: int = signal.SIGKILL) -> bool:
    """Signal this one process and no other; False when it is not there any more."""
    pidfd = open_pidfd(process)
    if pidfd is None:
        return False
    try:
        signal.pidfd_send_signal(pidfd, signum)
    except ProcessLookupError:
        return False
    finally:
        os.close(pidfd)
    return True


def await_ends(pids: list[int], timeout_s: float) -> list[int]:
    """Wait for these processes to end; the pids that have not after ``timeout_s`` seconds."""
    deadline = time.monotonic() + timeout_s
    left = []
    for pid in pids:
        try:
            fd = os.pidfd_open(pid)
        except OSError:
            continue
        try:
            ready, _, _ = select.select([fd], [], [], max(0.0, deadline - time.monotonic()))
            if not ready:
                left.append(pid)
        finally:
            os.close(fd)
    return left
