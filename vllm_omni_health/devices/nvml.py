# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-omni-health project
"""NVIDIA devices through the driver's own library, NVML; no context is made on any device."""

from __future__ import annotations

import importlib
import os
from collections.abc import Mapping
from typing import Any

from vllm_omni_health.devices.figures import DeviceSample, checked

_VISIBLE = "CUDA_VISIBLE_DEVICES"


class NvmlDevice:
    """One device. ``nvml`` is the module ``pynvml``, or what stands for it in a test."""

    def __init__(self, nvml: Any, index: int | str) -> None:
        """``index``: NVML's number of the device, or a UUID. Raises NVMLError if there is none."""
        self._nvml = nvml
        if isinstance(index, int):
            self._handle = nvml.nvmlDeviceGetHandleByIndex(index)
        else:
            self._handle = nvml.nvmlDeviceGetHandleByUUID(index)
        self.uuid = _text(nvml.nvmlDeviceGetUUID(self._handle))
        self.name = _text(nvml.nvmlDeviceGetName(self._handle))
        self.device = f"gpu:{index}"

    def sample(self) -> DeviceSample:
        """Memory now. Raises NVMLError, for example for a device that is lost, or Nonsense."""
        memory = self._nvml.nvmlDeviceGetMemoryInfo(self._handle)
        return checked(
            DeviceSample(
                self.device,
                total=memory.total,
                # In version 1 of the call, what the driver keeps for itself counts as used.
                used=memory.used,
                free=memory.free,
                processes=self._processes(),
                name=self.name,
                uuid=self.uuid,
            )
        )

    def _processes(self) -> dict[int, int] | None:
        found: dict[int, int] = {}
        for which in ("Compute", "Graphics", "MPSCompute"):
            query = getattr(self._nvml, f"nvmlDeviceGet{which}RunningProcesses", None)
            if query is None:
                continue
            try:
                running = query(self._handle)
            except self._nvml.NVMLError:
                if which == "Compute":
                    return None
                continue
            for process in running:
                if process.usedGpuMemory is None:
                    # Without rights, or under a driver that does not tell.
                    return None
                found[process.pid] = max(found.get(process.pid, 0), process.usedGpuMemory)
        return found


class NvmlUnavailable(Exception):
    """There is a driver, or a library, and it cannot be used."""


def devices(nvml: Any = None, environ: Mapping[str, str] = os.environ) -> list[NvmlDevice]:
    """The devices that this process may use; none where there is no NVIDIA driver.

    ``CUDA_VISIBLE_DEVICES`` counts, with NVML's numbers or with UUIDs. Raises NvmlUnavailable
    for a driver that fails. Blocks: the first call loads the library.
    """
    if nvml is None:
        try:
            nvml = importlib.import_module("pynvml")
        except ImportError:
            return []
    try:
        nvml.nvmlInit()
    except nvml.NVMLError as exc:
        absent = ("NVMLError_LibraryNotFound", "NVMLError_DriverNotLoaded")
        if any(isinstance(exc, getattr(nvml, name, ())) for name in absent):
            return []
        raise NvmlUnavailable(str(exc)) from exc
    try:
        count = nvml.nvmlDeviceGetCount()
        return [NvmlDevice(nvml, index) for index in _visible(count, environ.get(_VISIBLE))]
    except nvml.NVMLError as exc:
        raise NvmlUnavailable(str(exc)) from exc


def _visible(count: int, chosen: str | None) -> list[int | str]:
    """CUDA's reading of the variable: the list ends at the first entry that names no device."""
    if chosen is None:
        return list(range(count))
    found: list[int | str] = []
    for entry in (part.strip() for part in chosen.split(",")):
        if entry.isdigit() and int(entry) < count:
            found.append(int(entry))
        elif entry.startswith(("GPU-", "MIG-")):
            found.append(entry)
        else:
            break
    return found


def _text(value: Any) -> str:
    return value.decode() if isinstance(value, bytes) else str(value)
