# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-omni-health project
"""What a server leaves behind when everything of it is killed at once, and who removes it.

A server has a folder of its own, in which it holds a lock for as long as it lives: the kernel
gives the lock back with the process, whatever ended it. In the folder is a list of what the
server's processes have made elsewhere under names that only an orderly end removes. The next start
removes what is listed in a folder whose lock is free, and the folder. Nothing else is touched:
no file that is not listed or that has another inode by now, that is another user's, or that any
process has open or mapped.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import re
import shutil
import stat
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path

SERVERS_FOLDER = "vllm-omni-"
"""What the names of servers' own folders begin with."""

_FOLDER = "VLLM_RPC_BASE_PATH"
"""vLLM's variable for the folder of socket files, which children inherit."""

_LOCK = "owner"
_LIST = "left-behind"
_OURS = re.compile(r"psm_\w+|sem\.mp-\w+|vllm_dist_\w+")
"""Names that Python's shared memory and semaphores have, and vLLM's file stores."""

_held: dict[str, int] = {}
"""Locks of this process by folder; never closed, as closing gives the lock back."""


def own_folder(environ: Mapping[str, str] = os.environ) -> Path | None:
    """The folder that the server made for itself and its children, and removes at its end.

    None where it has made none: what is left anywhere else would stay.
    """
    folder = Path(environ.get(_FOLDER, ""))
    return folder if folder.name.startswith(SERVERS_FOLDER) else None


def hold(folder: Path) -> None:
    """Take the lock of a folder that this server has just made. Raises OSError."""
    descriptor = os.open(folder / _LOCK, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    with contextlib.suppress(OSError):  # a file system without locks: then nobody sweeps here
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    _held[str(folder)] = descriptor


def note(paths: Iterable[str]) -> None:
    """Add files to the list of this process's server. One that is not there yet has a name that
    nobody else will ever use, such as a UUID."""
    folder = own_folder()
    lines = []
    for path in paths:
        inode = "-"
        with contextlib.suppress(OSError):
            inode = str(os.lstat(path).st_ino)
        lines.append(f"{inode} {path}\n")
    if folder is None or not lines:
        return
    with contextlib.suppress(OSError), open(folder / _LIST, "a") as file:
        # One write, so that lines of several processes do not mix.
        file.write("".join(lines))


def remove_folder(folder: Path) -> None:
    """The orderly end: remove file stores of stages that were killed, and the folder.

    Segments are left to Python's resource tracker, which knows them all and is told of its end.
    """
    _remove(path for path in _listed(folder) if path.name.startswith("vllm_dist_"))
    shutil.rmtree(folder, ignore_errors=True)


def sweep(base: Path) -> list[str]:
    """Remove what dead servers of this user have left, whose folders are in ``base``.

    What was removed. Never raises: nothing here is worth a start.
    """
    removed: list[str] = []
    try:
        folders = [base / name for name in os.listdir(base) if name.startswith(SERVERS_FOLDER)]
    except OSError:
        return removed
    for folder in folders:
        with contextlib.suppress(OSError), _lock_of_dead(folder) as dead:
            if dead:
                removed += _remove(_listed(folder))
                shutil.rmtree(folder, ignore_errors=True)
                removed.append(str(folder))
    return removed


@contextlib.contextmanager
def _lock_of_dead(folder: Path) -> Iterator[bool]:
    """Whether this is the folder of a server that has ended; if so, its lock is held meanwhile."""
    found = os.lstat(folder)
    if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.geteuid():
        yield False
        return
    descriptor = os.open(folder / _LOCK, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW)
    try:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            yield False
            return
        yield True
    finally:
        os.close(descriptor)


def _listed(folder: Path) -> list[Path]:
    """What is on the list and still the file that it was."""
    try:
        lines = (folder / _LIST).read_text().splitlines()
    except (OSError, UnicodeDecodeError):
        return []
    found = []
    for line in dict.fromkeys(lines):
        inode, _, name = line.partition(" ")
        path = Path(name)
        with contextlib.suppress(OSError):
            status = os.lstat(path)
            mine = status.st_uid == os.geteuid() and stat.S_ISREG(status.st_mode)
            if mine and inode in (str(status.st_ino), "-") and _OURS.fullmatch(path.name):
                found.append(path)
    return found


def _remove(paths: Iterable[Path]) -> list[str]:
    candidates = list(paths)
    if not candidates:
        return []
    used = _in_use()
    removed = []
    for path in candidates:
        with contextlib.suppress(OSError):
            if _file(os.lstat(path)) not in used:
                os.unlink(path)
                removed.append(str(path))
    return removed


def _in_use() -> set[tuple[int, int]]:
    """Files that any process has open or mapped, as far as this one may look: (device, inode)."""
    found: set[tuple[int, int]] = set()
    for pid in filter(str.isdigit, os.listdir("/proc")):
        with contextlib.suppress(OSError), open(f"/proc/{pid}/maps", errors="replace") as file:
            for line in file:
                # address, permissions, offset, device, inode, path: proc_pid_maps(5)
                device, inode = line.split(maxsplit=5)[3:5]
                major, minor = (int(part, 16) for part in device.split(":"))
                found.add((os.makedev(major, minor), int(inode)))
        with contextlib.suppress(OSError):
            for fd in os.listdir(f"/proc/{pid}/fd"):
                with contextlib.suppress(OSError):
                    found.add(_file(os.stat(f"/proc/{pid}/fd/{fd}")))
    return found


def _file(status: os.stat_result) -> tuple[int, int]:
    return status.st_dev, status.st_ino
