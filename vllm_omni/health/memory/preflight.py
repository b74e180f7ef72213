# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-omni-health project
"""What is looked at before stages start, and once they are ready, while stopping is still cheap.

Enough memory free, nothing of somebody else's holding it, shared memory and limits such that
stages can run. All that is wrong is said in one line, which stops the start or goes to the log.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Iterable
from pathlib import Path

from vllm_omni.health.memory.view import DeviceRow
from vllm_omni.health.memory.watch import MemoryWatch
from vllm_omni.health.processes.process import parent_pid

from vllm_omni_health.devices.figures import DeviceSample, in_words
from vllm_omni_health.devices.host import HOST, anonymous_bytes

logger = logging.getLogger(__name__)

_GIB = 1 << 30

HOST_NEEDED = 2 * _GIB
"""A server (0.8 GB) and one stage (1.4 GB without its model) were measured to take this much."""

SHM_NEEDED = 256 << 20
"""vLLM's queue between an engine core and its workers is 160 MiB of shared memory (10 chunks of
16 MiB), and collectives want some. Docker gives a container 64 MiB unless told otherwise."""

_FOREIGN_SHARE = 0.01
"""Part of a device that others may hold without a word: monitoring, a display."""

_ROUNDS = 5
"""Rounds of queries in which a slow driver may come up, each bounded."""


class PreflightError(Exception):
    """Memory is not as it should be, and ``preflight`` is ``fail``. Its text is one line."""


def before_start(watch: MemoryWatch, mode: str, shm: Path = Path("/dev/shm")) -> list[str]:
    """Look before any stage is started; what is wrong, having told.

    ``mode`` is the setting ``preflight``. Blocks for some seconds at most. Raises PreflightError.
    """
    if mode == "off":
        return []
    watch.sample()
    for _ in range(_ROUNDS - 1):
        if not any(row.unknown for row in watch.view.devices):
            break
        watch.sample()
    problems = [
        *_devices(watch.view.devices),
        *(problem for sample in watch.samples for problem in _foreign(sample, watch.owners)),
        *_host(watch.view.devices),
        *_orphans(watch.owners),
        *_shared_memory(shm),
    ]
    return _tell("before the start", problems, mode)


def when_ready(watch: MemoryWatch, mode: str) -> list[str]:
    """Look when all stages are ready, and nothing is served yet. As :func:`before_start`."""
    if mode == "off":
        return []
    watch.sample()
    problems = [
        *_devices(watch.view.devices),
        *(problem for sample in watch.samples for problem in _foreign(sample, watch.owners)),
    ]
    return _tell("with all stages ready", problems, mode)


def _tell(moment: str, problems: list[str], mode: str) -> list[str]:
    if problems:
        line = f"memory is not as it should be {moment}: {'; '.join(problems)}"
        if mode == "fail":
            raise PreflightError(f"{line} (preflight=warn starts all the same)")
        logger.warning("[health] %s", line)
    return problems


def _devices(rows: Iterable[DeviceRow]) -> list[str]:
    problems = []
    for row in rows:
        if row.unknown is not None:
            problems.append(f"{row.device}: unknown: {row.unknown}")
        elif row.free is not None and row.floor and row.free < row.floor:
            problems.append(
                f"{row.device}: {in_words(row.free)} free of {in_words(row.total)}, less than "
                f"min_free_memory, {in_words(row.floor)}"
            )
    return problems


def _host(rows: Iterable[DeviceRow]) -> list[str]:
    return [
        f"{row.device}: {in_words(row.free)} free of {in_words(row.total)} ({row.name}), and a "
        f"server with one stage takes {in_words(HOST_NEEDED)}"
        for row in rows
        if row.device == HOST and row.free is not None and row.free < HOST_NEEDED
    ]


def _foreign(sample: DeviceSample, owners: Iterable[int]) -> list[str]:
    """Others that hold memory of an accelerator, by pid."""
    if sample.device == HOST or sample.total is None or sample.used is None:
        return []
    least = sample.total * _FOREIGN_SHARE
    ours = set(owners)
    held = {pid: size for pid, size in (sample.processes or {}).items() if pid not in ours}
    if sum(held.values()) > least:
        return [f"{sample.device}: held by other processes: {_names(held)}"]
    unseen = sample.used - sum((sample.processes or {}).values()) - (sample.service or 0)
    nobody_seen = not sample.processes and not sample.service
    if nobody_seen and unseen > max(least, _GIB):
        return [
            f"{sample.device}: {in_words(sample.used)} in use by processes that cannot be seen "
            "from here, such as those of another container"
        ]
    return []


def _orphans(owners: Iterable[int]) -> list[str]:
    """Stage processes whose server is gone: those of a run that was killed without this layer.

    Ancestry says that they have lost their server; that they are of vLLM, only their title does.
    """
    ours = set(owners)
    left = []
    for entry in os.scandir("/proc"):
        if entry.name.isdigit() and int(entry.name) not in ours:
            pid = int(entry.name)
            if _title(pid).startswith("VLLM::") and parent_pid(pid) == 1:
                left.append(pid)
    if not left:
        return []
    return [f"{HOST}: left of an earlier run: {_names(anonymous_bytes(left))}"]


def _shared_memory(shm: Path) -> list[str]:
    try:
        stat = os.statvfs(shm)
    except OSError as exc:
        return [f"{shm}: {exc.strerror}; vLLM's processes need shared memory"]
    free = stat.f_bavail * stat.f_frsize
    if free >= SHM_NEEDED:
        return []
    return [
        f"{shm}: {in_words(free)} free, and {in_words(SHM_NEEDED)} are needed (for a container: "
        "--shm-size=1g, or an emptyDir volume with medium: Memory)"
    ]


def _names(held: dict[int, int]) -> str:
    by_size = sorted(held.items(), key=lambda item: -item[1])
    return ", ".join(f"pid {pid} ({_comm(pid)}) {in_words(size)}" for pid, size in by_size)


def _comm(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/comm").read_text().strip()
    except OSError:
        return "not seen from here"


def _title(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")[0].decode(errors="replace")
    except OSError:
        return ""
