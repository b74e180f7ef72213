# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-omni-health project
"""Whether the kernel's out-of-memory killer has been at work in a process's own cgroup.

A process that it kills ends by SIGKILL and says nothing, exactly as one that somebody killed by
hand. The kernel counts its kills for each memory cgroup: in ``memory.events`` (cgroup v2,
"Control Group v2" in the kernel's documentation) or ``memory.oom_control`` (v1, since Linux
4.19). Both are made up from memory on reading, so reading them does not wait for anything.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

from vllm_omni.health.processes.process import read_at_once

_COUNTER = "oom_kill"
_PROC = Path("/proc")


@dataclass
class OomKills:
    """The counter of one memory cgroup, and how many of its kills are accounted for.

    Shared by all processes of the cgroup that are under watch; not thread-safe.
    """

    file: Path
    seen: int

    @classmethod
    def around(cls, pid: int, proc: Path = _PROC) -> OomKills | None:
        """The counter of the cgroup that a process is in; None where the kernel keeps none.

        ``proc``: where the process file system is mounted.
        """
        for file in _candidates(pid, proc):
            count = _read(file)
            if count is not None:
                return cls(file, count)
        return None

    def claim(self, since: int = 0) -> bool:
        """Take one kill that nobody has claimed; False when there is none.

        ``since``: what the counter stood at when the watch over the process in question began.
        """
        count = _read(self.file)
        if count is None or count <= max(self.seen, since):
            return False
        self.seen += 1
        return True


def _candidates(pid: int, proc: Path) -> list[Path]:
    """Files that may hold the counter: of the v1 memory hierarchy first, where there is one."""
    paths = _cgroup_paths(pid, proc)
    found = []
    for kind, name in (("memory", "memory.oom_control"), ("", "memory.events")):
        folder = _folder(paths.get(kind), kind, proc)
        if folder is not None:
            found.append(folder / name)
    return found


def _cgroup_paths(pid: int, proc: Path) -> dict[str, str]:
    """The process's path in the hierarchy of each controller; "" is the unified one's (v2)."""
    paths = {}
    for line in _lines(proc / str(pid) / "cgroup"):
        _, _, rest = line.partition(":")
        controllers, _, path = rest.partition(":")
        for controller in controllers.split(","):
            paths[controller] = path
    return paths


def _folder(path: str | None, kind: str, proc: Path) -> Path | None:
    """Where the cgroup at ``path`` is seen by this process; mountinfo is described in proc(5).

    In a container the mount may show a part of the hierarchy only, which ``root`` names.
    """
    if path is None:
        return None
    for line in _lines(proc / "self" / "mountinfo"):
        place, _, source = line.partition(" - ")
        fields, origin = place.split(" "), source.split(" ")
        if len(fields) < 5 or len(origin) < 3:
            continue
        root, mount_point = fields[3], fields[4]
        if kind:
            fits = origin[0] == "cgroup" and kind in origin[2].split(",")
        else:
            fits = origin[0] == "cgroup2"
        if not fits:
            continue
        if root == "/":
            inside = path
        elif path == root or path.startswith(root + "/"):
            inside = path[len(root) :]
        else:
            continue
        return Path(os.path.normpath(mount_point + "/" + inside.lstrip("/")))
    return None


def _read(file: Path) -> int | None:
    try:
        text = read_at_once(str(file))
    except OSError:
        return None
    for line in text.splitlines():
        name, _, value = line.partition(" ")
        if name == _COUNTER and value.isdigit():
            return int(value)
    return None


def _lines(file: Path) -> list[str]:
    try:
        return file.read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        return []
