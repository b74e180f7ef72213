# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-omni-health project
"""A driver that does what real ones do at their worst: absent, wrong, slow, a device lost."""

from __future__ import annotations

import threading
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

GIB = 1 << 30


class NVMLError(Exception):
    """As pynvml's."""


class LibraryNotFound(NVMLError):
    """As pynvml's."""


class GpuIsLost(NVMLError):
    """As pynvml's."""

    def __str__(self) -> str:
        return "GPU is lost"


@dataclass
class Gpu:
    """One device; a test changes it at will."""

    total: Any = 80 * GIB
    used: Any = 10 * GIB
    free: Any = None
    processes: dict[int, int | None] = field(default_factory=dict)
    lost: bool = False
    release: threading.Event = field(default_factory=threading.Event)
    hangs: bool = False
    asked: int = 0


class FakeNvml:
    """The part of the module ``pynvml`` that is used."""

    NVMLError = NVMLError
    NVMLError_LibraryNotFound = LibraryNotFound

    def __init__(self, *gpus: Gpu, init_error: Exception | None = None) -> None:
        self.gpus = gpus
        self._init_error = init_error

    def nvmlInit(self) -> None:
        if self._init_error is not None:
            raise self._init_error

    def nvmlDeviceGetCount(self) -> int:
        return len(self.gpus)

    def nvmlDeviceGetHandleByIndex(self, index: int) -> Gpu:
        return self.gpus[index]

    def nvmlDeviceGetHandleByUUID(self, uuid: str) -> Gpu:
        return self.gpus[int(uuid.removeprefix("GPU-"))]

    def nvmlDeviceGetUUID(self, gpu: Gpu) -> bytes:
        return f"GPU-{self.gpus.index(gpu)}".encode()

    def nvmlDeviceGetName(self, gpu: Gpu) -> str:
        return "Fake GPU"

    def nvmlDeviceGetMemoryInfo(self, gpu: Gpu) -> Any:
        gpu.asked += 1
        if gpu.hangs:
            gpu.release.wait(60)
        if gpu.lost:
            raise GpuIsLost
        free = gpu.total - gpu.used if gpu.free is None else gpu.free
        return SimpleNamespace(total=gpu.total, used=gpu.used, free=free)

    def nvmlDeviceGetComputeRunningProcesses(self, gpu: Gpu) -> list[Any]:
        return [SimpleNamespace(pid=pid, usedGpuMemory=size) for pid, size in gpu.processes.items()]
