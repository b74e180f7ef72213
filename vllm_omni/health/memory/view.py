# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-omni-health project
"""The figures as they are shown: plain immutable rows, and the bodies made of them."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from typing import Any

from vllm_omni.health.faults.fault import iso_time
from vllm_omni.health.memory.discrepancy import Gap


@dataclass(frozen=True)
class Discrepancy:
    """A :class:`Gap` as it is shown."""

    actual: int
    reported: int
    overhead: int
    unaccounted: int
    percent: float
    trend_bytes_per_s: int
    alarm: bool

    @classmethod
    def of(cls, gap: Gap | None) -> Discrepancy | None:
        """The gap in whole bytes; None when there is no gap to show, as a figure is unknown."""
        if gap is None:
            return None
        return cls(
            gap.actual,
            gap.reported,
            gap.overhead,
            gap.unaccounted,
            round(gap.percent, 2),
            round(gap.trend),
            gap.alarm,
        )


@dataclass(frozen=True, kw_only=True)
class DeviceRow:
    """One device; bytes, None for unknown. ``service`` and ``others`` share ``used``."""

    device: str
    name: str | None = None
    total: int | None = None
    used: int | None = None
    free: int | None = None
    service: int | None = None
    others: int | None = None
    floor: int | None = None
    pressure: bool = False
    discrepancy: Discrepancy | None = None
    unknown: str | None = None


@dataclass(frozen=True, kw_only=True)
class StageRow:
    """One replica on one device. ``used`` is measured, the rest is what the stage reports.

    ``age_s`` is that of the report; None when there is none.
    """

    stage_id: int
    replica_id: int
    device: str
    used: int | None = None
    allocated: int | None = None
    reserved: int | None = None
    kv_total: int | None = None
    kv_used: int | None = None
    age_s: float | None = None
    discrepancy: Discrepancy | None = None


@dataclass(frozen=True)
class MemoryView:
    """All rows at one moment. ``time`` is wall time in seconds; None: nothing was sampled yet."""

    time: float | None = None
    devices: tuple[DeviceRow, ...] = ()
    stages: tuple[StageRow, ...] = ()
    short: dict[str, Any] = field(default_factory=dict)
    full: dict[str, Any] = field(default_factory=dict)

    @classmethod
    def make(
        cls,
        time: float | None,
        devices: tuple[DeviceRow, ...],
        stages: tuple[StageRow, ...],
    ) -> MemoryView:
        """With the bodies, which are asked for more often than they change."""
        stamp = None if time is None else iso_time(time)
        return cls(
            time,
            devices,
            stages,
            short={"time": stamp, "devices": [_short(row) for row in devices]},
            full={
                "time": stamp,
                "devices": [asdict(row) for row in devices],
                "stages": [asdict(row) for row in stages],
            },
        )


def _short(row: DeviceRow) -> dict[str, Any]:
    """What ``/health`` shows of a device."""
    return {
        "device": row.device,
        "total": row.total,
        "used": row.used,
        "free": row.free,
        "floor": row.floor,
        "pressure": row.pressure,
        "discrepancy_pct": None if row.discrepancy is None else row.discrepancy.percent,
    }


NOTHING = MemoryView.make(None, (), ())
"""Before the first sample, and where the watch is off."""
