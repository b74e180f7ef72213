# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-omni-health project
"""What is known of one device's memory at one moment."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol

from pydantic import ByteSize


@dataclass(frozen=True)
class DeviceSample:
    """Memory of one device, in bytes. None is unknown, and ``unknown`` then says why.

    ``device``: ``gpu:0``, ``host`` or ``sim:0``; the part before the colon is its kind.
    ``processes``: bytes by pid, as far as they can be told apart; None when they cannot.
    ``reported``: what stages report, by stage, where the device itself plays them (drills).
    """

    device: str
    total: int | None = None
    used: int | None = None
    free: int | None = None
    processes: Mapping[int, int] | None = None
    name: str | None = None
    uuid: str | None = None
    reported: Mapping[int, int] | None = None
    service: int | None = None
    unknown: str | None = None

    @property
    def kind(self) -> str:
        """``gpu``, ``host`` or ``sim``."""
        return self.device.partition(":")[0]


class Device(Protocol):
    """Something whose memory can be asked for. ``sample`` blocks, and may raise or hang."""

    @property
    def device(self) -> str:
        """Its name, as in its samples."""

    def sample(self) -> DeviceSample:
        """Its memory now."""


class Nonsense(ValueError):
    """A driver or a file gave figures that cannot be true."""


def checked(sample: DeviceSample) -> DeviceSample:
    """The sample itself. Raises Nonsense for figures that contradict each other."""
    total, used, free = sample.total, sample.used, sample.free
    if not isinstance(total, int) or not isinstance(used, int) or not isinstance(free, int):
        raise Nonsense(f"{sample.device}: total {total!r}, used {used!r}, free {free!r}")
    if total <= 0 or not 0 <= used <= total or not 0 <= free <= total:
        raise Nonsense(f"{sample.device}: {used} bytes used and {free} free of {total}")
    return sample


def in_words(size: int | None) -> str:
    """Bytes for people: ``2.0GiB``; ``unknown`` for None."""
    if size is None:
        return "unknown"
    sign = "-" if size < 0 else ""
    return sign + str(ByteSize(abs(size)).human_readable())
