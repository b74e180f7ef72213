# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-omni-health project
"""A hog: a process that takes memory and keeps it until it is told to let go.

Of the machine, or of a control group that it joins first, of an accelerator, or of a simulated
device. Run as
``python -m vllm_omni_health.drills.hog 2GiB``; it says ``holding N`` once it has the memory, and
ends, giving all of it back, when its standard input ends. So it cannot outlive who started it.
"""

from __future__ import annotations

import contextlib
import importlib
import mmap
import os
import select
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any

import typer
from pydantic import ByteSize, TypeAdapter, ValidationError

from vllm_omni_health.devices.simulated import SimulatedDevice

_READY_S = 60.0
"""Hang guard: taking gigabytes lasts seconds."""

_ENDED_S = 30.0

_POPULATE_WRITE = 23
"""MADV_POPULATE_WRITE of madvise(2), Linux 5.14: every page is really there."""


class Memory:
    """Real memory of this process, every page of it written to."""

    def __init__(self) -> None:
        self._block: mmap.mmap | None = None

    def take(self, size: int) -> None:
        """Hold ``size`` bytes. MemoryError or OSError when they cannot be had."""
        self._block = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        try:
            self._block.madvise(_POPULATE_WRITE)
        except OSError:
            for place in range(0, size, mmap.PAGESIZE):
                self._block[place] = 1

    def give_back(self) -> None:
        """Hold nothing."""
        if self._block is not None:
            self._block.close()
            self._block = None


class Simulated:
    """Memory of a simulated device."""

    def __init__(self, path: Path) -> None:
        self._device = SimulatedDevice(path)

    def take(self, size: int) -> None:
        """Hold ``size`` bytes. MemoryError when there is no room."""
        if not self._device.hold(os.getpid(), size):
            raise MemoryError(f"{self._device.device} has no room for {size} bytes")

    def give_back(self) -> None:
        """Hold nothing."""
        self._device.hold(os.getpid(), 0)


class Accelerator:
    """Memory of a real device, through torch."""

    def __init__(self, device: str) -> None:
        # Seconds, and only here is there a need for it.
        self._torch = importlib.import_module("torch")
        self._device = device
        self._block: Any = None

    def take(self, size: int) -> None:
        """Hold ``size`` bytes. torch.OutOfMemoryError, a RuntimeError, when there is no room."""
        self._block = self._torch.empty(size, dtype=self._torch.uint8, device=self._device)

    def give_back(self) -> None:
        """Hold nothing, but for the device's context."""
        self._block = None
        self._torch.accelerator.empty_cache()


def join(cgroup: Path) -> None:
    """Put this process into a control group: a folder of a mounted cgroup file system."""
    (cgroup / "cgroup.procs").write_text(str(os.getpid()))


def run(
    size: Annotated[str, typer.Argument(help="how much to take: 2GiB, 500MB")],
    cgroup: Annotated[Path | None, typer.Option(help="control group to join first")] = None,
    simulated: Annotated[Path | None, typer.Option(help="file of a simulated device")] = None,
    device: Annotated[str | None, typer.Option(help="torch's name of a device: cuda:0")] = None,
    square: Annotated[
        tuple[float, float] | None,
        typer.Option(help="seconds to hold, and seconds to let go, over and over"),
    ] = None,
) -> None:
    """Take memory and hold it until standard input ends."""
    try:
        bytes_ = int(TypeAdapter(ByteSize).validate_python(size))
    except ValidationError:
        raise typer.BadParameter(f"{size}: must be a size such as 2GiB or 500MB") from None
    memory: Memory | Simulated | Accelerator | None = None
    try:
        memory = _memory(simulated, device)
        if cgroup is not None:
            join(cgroup)
        memory.take(bytes_)
        print(f"holding {bytes_}", flush=True)
        on, off = square or (None, None)
        while not _told_to_end(on):
            memory.give_back()
            if _told_to_end(off):
                break
            memory.take(bytes_)
    except (MemoryError, OSError, RuntimeError) as exc:
        print(f"hog: cannot take {size}: {exc}", file=sys.stderr)
        raise typer.Exit(1) from None
    finally:
        if memory is not None:
            memory.give_back()


def _memory(simulated: Path | None, device: str | None) -> Memory | Simulated | Accelerator:
    if simulated is not None:
        return Simulated(simulated)
    return Memory() if device is None else Accelerator(device)


def _told_to_end(within_s: float | None) -> bool:
    ready, _, _ = select.select([sys.stdin], [], [], within_s)
    return bool(ready)


@contextlib.contextmanager
def hogging(size: str | int, *options: str) -> Iterator[subprocess.Popen[bytes]]:
    """A hog for as long as the block runs. RuntimeError when it cannot take what it is to."""
    command = [sys.executable, "-m", __name__, str(size), *options]
    process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    assert process.stdin is not None
    assert process.stdout is not None
    try:
        ready, _, _ = select.select([process.stdout], [], [], _READY_S)
        line = process.stdout.readline() if ready else b""
        if not line.startswith(b"holding"):
            raise RuntimeError(f"the hog did not get {size}")
        yield process
    finally:
        process.stdin.close()
        try:
            process.wait(_ENDED_S)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
        process.stdout.close()


if __name__ == "__main__":
    typer.run(run)
