# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-omni-health project
"""The watch: a thread that samples device memory, judges it, and tells the state machine.

It has nothing to do with any event loop. Queries run on further threads (see
``vllm_omni_health.devices.bounded``), so that neither a driver that hangs nor one that fails
does more than make its figure unknown.
"""

from __future__ import annotations

import logging
import os
import threading
import time
from collections.abc import Callable
from dataclasses import asdict, replace

from vllm_omni.health.faults.fault import Fault, FaultKind, MemoryFigures, Severity
from vllm_omni.health.memory.account import (
    DeviceAccount,
    Latest,
    Owners,
    StageAccount,
    gather,
)
from vllm_omni.health.memory.discrepancy import GapTracker
from vllm_omni.health.memory.ownership import owned
from vllm_omni.health.memory.pressure import PressureGate
from vllm_omni.health.memory.reports import Reports
from vllm_omni.health.memory.view import (
    NOTHING,
    DeviceRow,
    Discrepancy,
    MemoryView,
    StageRow,
)
from vllm_omni.health.processes.left_behind import own_folder
from vllm_omni.health.state.causes import memory_pressure
from vllm_omni.health.state.machine import HealthMachine, ReplicaState
from vllm_omni.health.state.values import ReplicaKey, Snapshot

from vllm_omni_health.devices.figures import DeviceSample, in_words
from vllm_omni_health.devices.host import HOST
from vllm_omni_health.devices.survey import Devices
from vllm_omni_health.settings.floor import Floor
from vllm_omni_health.settings.model import HealthSettings

logger = logging.getLogger(__name__)

DISCREPANCY = "memory discrepancy"
DISCREPANCY_OVER = "memory discrepancy over"
"""Causes of the events in the history."""


class MemoryWatch:
    """One per server. ``view`` is a plain attribute, replaced as a whole by every sample, and so
    are ``samples`` and ``owners``, from which it was made.

    ``receive`` and reading are for any thread. ``sample`` is serialised: it is the watch's own
    thread's, and that of whoever looks before stages start and when they are ready.
    """

    def __init__(
        self,
        settings: HealthSettings,
        machine: HealthMachine,
        devices: Devices | None = None,
        clock: Callable[[], float] = time.monotonic,
        processes: Callable[[Snapshot], Owners] = owned,
    ) -> None:
        self.view: MemoryView = NOTHING
        self.samples: tuple[DeviceSample, ...] = ()
        self.owners: Owners = {}
        self.reports = Reports(clock)
        self._settings = settings
        self._machine = machine
        self._devices = devices or Devices(simulated=settings.simulated_device)
        self._clock = clock
        self._processes = processes
        self._floor = Floor.parse(settings.min_free_memory)
        self._gates: dict[str, PressureGate] = {}
        self._gaps: dict[tuple[str, ReplicaKey | None], GapTracker] = {}
        self._unknown: dict[str, str] = {}
        self._serial = threading.Lock()
        self._stop = threading.Event()
        self._thread: threading.Thread | None = None

    # ---- lifecycle ---------------------------------------------------------------------------

    def start(self) -> None:
        """Start the thread, unless ``memory_interval_s`` is 0."""
        if self._settings.memory_interval_s > 0:
            self._thread = threading.Thread(target=self._run, name="health-memory", daemon=True)
            self._thread.start()

    def stop(self, timeout_s: float = 0.5) -> None:
        """End the thread; idempotent. It is a daemon, and waited for only so long."""
        self._stop.set()
        self._devices.close()
        thread = self._thread
        if thread is not None and thread is not threading.current_thread():
            thread.join(timeout_s)

    def receive(self, key: ReplicaKey, answer: object) -> None:
        """The answer of a replica to a ping, which may hold its figures."""
        self.reports.receive(key, answer)

    def _run(self) -> None:
        while not self._stop.is_set():
            try:
                self.sample()
            except Exception:
                # Whatever it is, the next sample may be fine, and nothing else may suffer.
                logger.exception("[health] sampling memory failed")
            self._stop.wait(self._settings.memory_interval_s)

    # ---- one round ---------------------------------------------------------------------------

    def sample(self) -> MemoryView:
        """Ask every device, judge what it says, tell the machine. Blocks, for a bounded time."""
        with self._serial:
            self.samples = tuple(self._devices.sample())
            snapshot = self._machine.snapshot
            self.owners = self._processes(snapshot)
            self.reports.collect(own_folder(), self.owners)
            live, reports = self._live(snapshot)
            accounts = gather(self.samples, self.owners, reports, live)
            any_in_use = any(one.in_use for one in accounts.devices if one.sample.device != HOST)
            now = self._clock()
            devices = tuple(
                self._judge(one, now, one.in_use or not any_in_use, snapshot.started)
                for one in accounts.devices
            )
            stages = tuple(self._stage_row(one, now, snapshot.started) for one in accounts.stages)
            self.view = MemoryView.make(time.time(), devices, stages)
            return self.view

    def _live(self, snapshot: Snapshot) -> tuple[frozenset[ReplicaKey], Latest]:
        live = set()
        for stage in snapshot.stages:
            for replica in stage.replicas:
                key = (stage.stage_id, replica.replica_id)
                if replica.state is ReplicaState.LOST:
                    self.reports.forget(key)
                else:
                    live.add(key)
        return frozenset(live), self.reports.latest()

    def _judge(
        self, account: DeviceAccount, now: float, floor_counts: bool, started: bool
    ) -> DeviceRow:
        sample = account.sample
        self._log_unknown(sample.device, sample.unknown)
        floor = None
        if sample.total is not None:
            floor = self._floor.of(sample.device, sample.total) if floor_counts else 0
        row = DeviceRow(
            device=sample.device,
            name=sample.name,
            total=sample.total,
            used=sample.used,
            free=sample.free,
            service=account.service,
            others=account.others,
            floor=floor,
            pressure=self._pressure(account, now, floor),
            discrepancy=self._compare(
                (sample.device, None),
                now,
                account.actual if started else None,
                account.reported,
                account.reporters,
            ),
            unknown=sample.unknown,
        )
        return row

    def _log_unknown(self, device: str, why: str | None) -> None:
        if why is not None and self._unknown.get(device) != why:
            logger.warning("[health] memory of %s is unknown: %s", device, why)
        elif why is None and device in self._unknown:
            logger.warning("[health] memory of %s is known again", device)
        if why is None:
            self._unknown.pop(device, None)
        else:
            self._unknown[device] = why

    # ---- the floor ---------------------------------------------------------------------------

    def _pressure(self, account: DeviceAccount, now: float, floor: int | None) -> bool:
        sample = account.sample
        gate = self._gates.get(sample.device)
        if gate is None:
            gate = self._gates[sample.device] = PressureGate(self._settings.memory_recover_s)
        before = gate.on
        after = gate.feed(now, sample.free if floor is not None else None, floor or 0)
        if after and not before:
            logger.error(
                "[health] %s is short of memory: %s free of %s, min_free_memory is %s; no new "
                "requests",
                sample.device,
                in_words(sample.free),
                in_words(sample.total),
                in_words(floor),
            )
            self._machine.arise(memory_pressure(sample.device), pressure_fault(account))
        elif before and not after:
            logger.warning(
                "[health] %s has memory again: %s free", sample.device, in_words(sample.free)
            )
            self._machine.end(memory_pressure(sample.device))
        return after

    # ---- the discrepancy ---------------------------------------------------------------------

    def _compare(
        self,
        what: tuple[str, ReplicaKey | None],
        now: float,
        actual: int | None,
        reported: int | None,
        reporters: frozenset[int],
    ) -> Discrepancy | None:
        tracker = self._gaps.get(what)
        if tracker is None:
            tracker = self._gaps[what] = GapTracker(
                self._settings.memory_discrepancy_pct, self._settings.memory_window_s
            )
        before = tracker.alarm
        shown = Discrepancy.of(tracker.feed(now, actual, reported, reporters))
        if shown is not None and shown.alarm is not before:
            self._tell(what, shown)
        return shown

    def _tell(self, what: tuple[str, ReplicaKey | None], shown: Discrepancy) -> None:
        device, key = what
        detail = {
            "device": device,
            "stage_id": None if key is None else key[0],
            "replica_id": None if key is None else key[1],
            "limit_pct": self._settings.memory_discrepancy_pct,
            **asdict(shown),
        }
        logger.warning(
            "[health] %s on %s%s: %s (%.1f %%) that nobody accounts for; %s measured, %s reported",
            DISCREPANCY if shown.alarm else DISCREPANCY_OVER,
            device,
            "" if key is None else f", stage {key[0]} replica {key[1]}",
            in_words(shown.unaccounted),
            shown.percent,
            in_words(shown.actual),
            in_words(shown.reported),
        )
        self._machine.noted(DISCREPANCY if shown.alarm else DISCREPANCY_OVER, detail)

    def _stage_row(self, account: StageAccount, now: float, started: bool) -> StageRow:
        comparable = started and account.fresh
        row = account.row
        gap = self._compare(
            (row.device, account.key),
            now,
            row.used if comparable else None,
            row.reserved,
            account.ranks,
        )
        return replace(row, discrepancy=gap)


def pressure_fault(account: DeviceAccount) -> Fault:
    """The fault of a device short of memory.

    Its severity is that of a request: requests are refused, and every replica is as good as
    before. Its kind is what would follow if nobody did anything.
    """
    sample = account.sample
    return Fault(
        kind=FaultKind.HOST_OOM if sample.device == HOST else FaultKind.OOM,
        severity=Severity.REQUEST,
        role="memory watch",
        device=sample.device,
        pid=os.getpid(),
        memory=MemoryFigures(free=sample.free, total=sample.total),
    )
