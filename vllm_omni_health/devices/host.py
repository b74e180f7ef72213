# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-omni-health project
"""Host memory: the limit of the control group this process is in, else the machine's memory."""

from __future__ import annotations

import os
from collections.abc import Iterable
from pathlib import Path

import psutil

from vllm_omni_health.devices.figures import DeviceSample, checked

HOST = "host"

_PAGE = os.sysconf("SC_PAGE_SIZE")


class Host:
    """The memory that processes here can get.

    A control group's limit counts, and those of all groups around it: the one with the least
    room decides. Memory that the kernel can take back (the file cache) counts as free, in
    groups as on the machine. ``cgroups`` and ``proc`` are where those file systems are.
    """

    device = HOST

    def __init__(
        self, cgroups: Path = Path("/sys/fs/cgroup"), proc: Path = Path("/proc/self/cgroup")
    ) -> None:
        self._cgroups = cgroups
        self._proc = proc

    def sample(self) -> DeviceSample:
        """Memory now."""
        machine = psutil.virtual_memory()
        total, free, name = machine.total, machine.available, "machine"
        for group in self.groups():
            limit, used = group.limit, group.used
            if limit is None or used is None or limit >= machine.total:
                continue
            room = max(0, limit - used)
            if name == "machine" or room < free:
                total, name = limit, "control group"
            free = min(free, room)
        free = min(free, total)
        return checked(DeviceSample(HOST, total=total, used=total - free, free=free, name=name))

    def groups(self) -> list[MemoryGroup]:
        """The control groups that limit this process, its own first, as far as they can be seen."""
        try:
            lines = self._proc.read_text().splitlines()
        except OSError:
            return []
        v2 = v1 = None
        for line in lines:
            _, controllers, path = line.split(":", 2)
            if "memory" in controllers.split(","):
                v1 = path
            elif not controllers:
                v2 = path
        if v1 is not None:
            return self._upwards(self._cgroups / "memory", v1, _V1)
        if v2 is not None:
            return self._upwards(self._cgroups, v2, _V2)
        return []

    @staticmethod
    def _upwards(mount: Path, path: str, files: tuple[str, str, str]) -> list[MemoryGroup]:
        folder = mount / path.lstrip("/")
        if not folder.is_dir():
            # In a container the path is the host's, and the mount shows the container's group.
            folder = mount
        chain = [folder]
        while chain[-1] != mount and mount in chain[-1].parents:
            chain.append(chain[-1].parent)
        return [MemoryGroup(one, files) for one in chain]


_V2 = ("memory.max", "memory.current", "inactive_file")
_V1 = ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file")


class MemoryGroup:
    """One control group; None stands for what it does not tell, or does not limit."""

    def __init__(self, folder: Path, files: tuple[str, str, str]) -> None:
        self._folder = folder
        self._limit, self._usage, self._reclaimable = files

    @property
    def limit(self) -> int | None:
        """Bytes that the group may use; None for no limit."""
        return self._number(self._limit)

    @property
    def used(self) -> int | None:
        """Bytes in use that the kernel cannot simply take back."""
        usage = self._number(self._usage)
        return None if usage is None else max(0, usage - self._cache())

    def _number(self, name: str) -> int | None:
        try:
            text = (self._folder / name).read_text().strip()
        except OSError:
            return None
        return int(text) if text.isdigit() else None

    def _cache(self) -> int:
        try:
            lines = (self._folder / "memory.stat").read_text().splitlines()
        except OSError:
            return 0
        for line in lines:
            name, _, value = line.partition(" ")
            if name == self._reclaimable:
                return int(value)
        return 0


def anonymous_bytes(pids: Iterable[int]) -> dict[int, int]:
    """Memory that each of these processes has for itself: resident, and neither file nor shared.

    Sums over processes count nothing twice. Processes that have ended are left out.
    """
    found = {}
    for pid in pids:
        try:
            with open(f"/proc/{pid}/statm", encoding="ascii") as file:
                fields = file.read().split()
        except OSError:
            continue
        if len(fields) > 2:
            found[pid] = max(0, int(fields[1]) - int(fields[2])) * _PAGE
    return found
