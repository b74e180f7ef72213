# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-omni-health project
"""Who holds what: samples of devices, owners of processes and reports of stages put together.

A pure function of what was asked for elsewhere; every figure that cannot be had is None.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from vllm_omni.health.memory.reports import FRESH_S, RankReport, StageReport
from vllm_omni.health.memory.view import StageRow
from vllm_omni.health.state.values import ReplicaKey

from vllm_omni_health.devices.figures import DeviceSample, Nonsense, checked
from vllm_omni_health.devices.host import HOST, anonymous_bytes

Owners = Mapping[int, ReplicaKey | None]
Latest = Mapping[ReplicaKey, tuple[float, StageReport]]


@dataclass(frozen=True)
class StageAccount:
    """One replica on one device, as it will be shown. ``ranks``: pids of those that report it."""

    row: StageRow
    ranks: frozenset[int] = frozenset()

    @property
    def key(self) -> ReplicaKey:
        """Whose it is."""
        return self.row.stage_id, self.row.replica_id

    @property
    def fresh(self) -> bool:
        """Whether its report still counts."""
        return self.row.age_s is not None and self.row.age_s <= FRESH_S


@dataclass(frozen=True, kw_only=True)
class DeviceAccount:
    """One device. ``reported`` is the sum over stages, None while one that holds memory is mute.

    ``actual`` is what ``reported`` is to be compared with: this service's share, or all that is
    in use where shares cannot be told.
    """

    sample: DeviceSample
    service: int | None
    others: int | None
    reported: int | None
    actual: int | None
    reporters: frozenset[int]
    in_use: bool


@dataclass(frozen=True)
class Accounts:
    """Everything at one moment."""

    devices: tuple[DeviceAccount, ...]
    stages: tuple[StageAccount, ...]


def gather(
    samples: Sequence[DeviceSample], owners: Owners, reports: Latest, live: frozenset[ReplicaKey]
) -> Accounts:
    """Put it together. ``live``: the replicas that are there; only their reports count."""
    samples = [*samples, *_seen_by_torch(samples, reports)]
    samples = [_with_host_processes(sample, owners) for sample in samples]
    by_uuid = {sample.uuid: sample.device for sample in samples if sample.uuid}
    stages = [
        account
        for key, (age, report) in sorted(reports.items())
        if key in live
        for account in _stage_accounts(key, age, report, by_uuid)
    ]
    stages = [
        replace(stage, row=replace(stage.row, used=_used_by(stage, samples, owners)))
        for stage in stages
    ]
    for sample in samples:
        stages += _mute(
            sample, owners, live, {s.key for s in stages if s.row.device == sample.device}
        )
        stages += [
            StageAccount(_row((stage, 0), sample.device, reserved=size, age_s=0.0))
            for stage, size in (sample.reported or {}).items()
        ]
    devices = [_device_account(sample, stages, owners, live) for sample in samples]
    return Accounts(tuple(devices), tuple(stages))


def _row(key: ReplicaKey, device: str, **figures: Any) -> StageRow:
    return StageRow(stage_id=key[0], replica_id=key[1], device=device, **figures)


def _device_name(rank: RankReport, by_uuid: Mapping[str, str]) -> str:
    if rank.uuid is not None and rank.uuid in by_uuid:
        return by_uuid[rank.uuid]
    return HOST if rank.device.partition(":")[0] == "cpu" else rank.device


def _seen_by_torch(samples: Sequence[DeviceSample], reports: Latest) -> list[DeviceSample]:
    """Devices that only the stages' torch can see: not NVIDIA's, or without a usable driver."""
    known = {sample.uuid for sample in samples if sample.uuid}
    found: dict[str, DeviceSample] = {}
    for age, report in reports.values():
        for rank in report.ranks:
            if rank.total is None or rank.free is None or rank.uuid in known or age > FRESH_S:
                continue
            device = rank.device
            used = rank.total - rank.free
            try:
                found[device] = checked(
                    DeviceSample(device, total=rank.total, used=used, free=rank.free)
                )
            except Nonsense as exc:
                found[device] = DeviceSample(device, unknown=str(exc))
    return list(found.values())


def _with_host_processes(sample: DeviceSample, owners: Owners) -> DeviceSample:
    if sample.device != HOST:
        return sample
    return replace(sample, processes=anonymous_bytes(owners))


def _stage_accounts(
    key: ReplicaKey, age: float, report: StageReport, by_uuid: Mapping[str, str]
) -> list[StageAccount]:
    """One account for each device that the replica's ranks are on."""
    ranks: dict[str, list[RankReport]] = {}
    for rank in report.ranks:
        ranks.setdefault(_device_name(rank, by_uuid), []).append(rank)
    return [
        StageAccount(
            _row(
                key,
                device,
                allocated=_sum([rank.allocated for rank in there]),
                reserved=_sum([rank.reserved for rank in there]),
                kv_total=_times(report.kv_total, len(there)),
                kv_used=_times(report.kv_used, len(there)),
                age_s=round(age, 1),
            ),
            ranks=frozenset(rank.pid for rank in there),
        )
        for device, there in ranks.items()
    ]


def _used_by(stage: StageAccount, samples: Sequence[DeviceSample], owners: Owners) -> int | None:
    """Measured: what the replica's processes hold there."""
    for sample in samples:
        if sample.device == stage.row.device and sample.processes is not None:
            held = [size for pid, size in sample.processes.items() if owners.get(pid) == stage.key]
            return sum(held) if held else None
    return None


def _mute(
    sample: DeviceSample,
    owners: Owners,
    live: frozenset[ReplicaKey],
    reporting: set[ReplicaKey],
) -> list[StageAccount]:
    """Replicas that hold memory on the device and report nothing of it."""
    held: dict[ReplicaKey, int] = {}
    for pid, size in (sample.processes or {}).items():
        key = owners.get(pid)
        if key is not None and key in live and key not in reporting and size:
            held[key] = held.get(key, 0) + size
    return [StageAccount(_row(key, sample.device, used=size)) for key, size in sorted(held.items())]


def _device_account(
    sample: DeviceSample,
    stages: Sequence[StageAccount],
    owners: Owners,
    live: frozenset[ReplicaKey],
) -> DeviceAccount:
    here = [stage for stage in stages if stage.row.device == sample.device]
    reporting = [stage for stage in here if stage.row.age_s is not None]
    service = _service(sample, owners, bool(reporting))
    others = None
    if service is not None and sample.used is not None:
        service = min(service, sample.used)
        others = sample.used - service
    complete = all(stage.fresh and stage.row.reserved is not None for stage in here)
    if service is None:
        # Nobody can tell whose memory it is, so anybody who is mute may hold some of it.
        complete = complete and live <= {stage.key for stage in reporting}
    return DeviceAccount(
        sample=sample,
        service=service,
        others=others,
        reported=_sum([stage.row.reserved for stage in here]) if complete and here else None,
        actual=service if service is not None else sample.used,
        reporters=frozenset().union(*(stage.ranks for stage in here)),
        in_use=bool(here) or bool(service) or sample.device == HOST,
    )


def _service(sample: DeviceSample, owners: Owners, reporting: bool) -> int | None:
    """This service's share; None where a driver's pids are not those that are seen here."""
    if sample.processes is None:
        return sample.service
    ours = [size for pid, size in sample.processes.items() if pid in owners]
    if reporting and not ours and sample.service is None:
        return None
    return sum(ours) + (sample.service or 0)


def _sum(sizes: Sequence[int | None]) -> int | None:
    known = [size for size in sizes if size is not None]
    return sum(known) if len(known) == len(sizes) and known else None


def _times(size: int | None, count: int) -> int | None:
    return None if size is None else size * count
