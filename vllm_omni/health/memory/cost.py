"""Admission by cost: what requests will take, against what is free and already promised.

An estimate is linear: bytes for each unit of work, learnt for each device and kind of work from
what requests were seen to take. Units are tokens, or pixels of all images and frames; steps make
a request longer and not larger. As torch keeps what it once took, the most that was ever used
is a peak that no sample can miss, and what is kept can be used again without taking more.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from vllm_omni.health.memory.view import DeviceRow

from vllm_omni_health.devices.host import HOST

_ERRORS_KEPT = 64

_NOISE = 1 << 20
"""Bytes by which use can rise without meaning anything."""


@dataclass(frozen=True)
class Cost:
    """What a request asks for: ``units`` (tokens or pixels) of ``kind``."""

    kind: str
    units: float


@dataclass(frozen=True)
class Ticket:
    """A request that was admitted; handed back when it ends. Compared by identity."""

    cost: Cost
    number: int


@dataclass
class _Model:
    """What one kind of work takes on one device, held between two bounds that are observed."""

    per_unit: float | None = None
    observations: int = 0
    errors: deque[float] = field(default_factory=lambda: deque(maxlen=_ERRORS_KEPT))

    def took(self, units: float, taken: int) -> None:
        """With ``units`` in flight use rose to ``taken``: each unit takes that much or more."""
        if self.per_unit is None or self.per_unit * units < taken:
            self._learn(units, taken)

    def fitted(self, units: float, peak: int) -> None:
        """A request of ``units`` ended, and use never was above ``peak``: no unit takes more."""
        if self.per_unit is None or self.per_unit * units > peak:
            self._learn(units, peak)

    def _learn(self, units: float, size: int) -> None:
        if self.per_unit is not None:
            predicted = self.per_unit * units
            self.errors.append(100.0 * abs(predicted - size) / max(predicted, size, 1.0))
        self.per_unit = size / units
        self.observations += 1


@dataclass
class _Device:
    """One device as of its latest sample, in bytes.

    ``room``: what requests may have in all, which is what is free above the floor, and what
    they have or have had and torch keeps for them.
    """

    baseline: int
    peak: int = 0
    room: int = 0


class Admission:
    """Admits requests by what they cost. For any thread; holds its lock for microseconds.

    While nothing is known of a kind of work, or nothing is in flight, a request is admitted: that
    is how it becomes known, and a wrong estimate cannot refuse for ever.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._tickets: dict[int, Ticket] = {}
        self._numbers = 0
        self._refused = 0
        self._devices: dict[str, _Device] = {}
        self._models: dict[tuple[str, str], _Model] = {}
        # Since the sample before: the most units in flight, and the largest that has ended.
        self._most: dict[str, float] = {}
        self._ended: dict[str, float] = {}

    # ---- requests, on the API server's loop ----------------------------------------------------

    def enter(self, cost: Cost) -> Ticket | None:
        """Admit a request, or (None) refuse it."""
        with self._lock:
            if self._tickets and not self._fits(cost):
                self._refused += 1
                return None
            self._numbers += 1
            ticket = self._tickets[self._numbers] = Ticket(cost, self._numbers)
            self._note()
            return ticket

    def leave(self, ticket: Ticket) -> None:
        """The request has ended, however it did. A second time does nothing."""
        with self._lock:
            if self._tickets.pop(ticket.number, None) is not None:
                cost = ticket.cost
                self._ended[cost.kind] = max(self._ended.get(cost.kind, 0.0), cost.units)

    def _fits(self, cost: Cost) -> bool:
        work = [cost, *(ticket.cost for ticket in self._tickets.values())]
        for name, device in self._devices.items():
            if self._bytes(name, cost) is None:
                continue
            if sum(self._bytes(name, one) or 0.0 for one in work) > device.room:
                return False
        return True

    def _bytes(self, device: str, cost: Cost) -> float | None:
        model = self._models.get((device, cost.kind))
        if model is None or model.per_unit is None:
            return None
        return model.per_unit * cost.units

    def _note(self) -> None:
        units: dict[str, float] = {}
        for ticket in self._tickets.values():
            units[ticket.cost.kind] = units.get(ticket.cost.kind, 0.0) + ticket.cost.units
        for kind, total in units.items():
            self._most[kind] = max(self._most.get(kind, 0.0), total)

    # ---- samples, on the watch's thread --------------------------------------------------------

    def observe(self, rows: Sequence[DeviceRow]) -> None:
        """Learn from a sample, and from what was in flight since the one before.

        Of the host only where there is no accelerator: what is given back there between two
        samples has not been seen.
        """
        accelerators = [row for row in rows if row.device != HOST]
        with self._lock:
            for row in accelerators or rows:
                used = row.service if row.service is not None else row.used
                if used is not None and row.free is not None and _counts(row):
                    self._observe(row, used, row.free)
            self._most.clear()
            self._ended.clear()
            self._note()

    def _observe(self, row: DeviceRow, used: int, free: int) -> None:
        device = self._devices.get(row.device)
        if not self._most:
            if device is None:
                device = self._devices[row.device] = _Device(baseline=used)
            device.baseline = min(device.baseline, used)
        if device is None:
            # Nobody knows what the server uses by itself.
            return
        taken = max(0, used - device.baseline)
        device.room = max(0, free - (row.floor or 0)) + taken
        rose = taken > device.peak + _NOISE
        device.peak = max(device.peak, taken)
        if rose and len(self._most) == 1:
            ((kind, units),) = self._most.items()
            self._model(row.device, kind).took(units, taken)
        if row.device != HOST:
            for kind, units in self._ended.items():
                self._model(row.device, kind).fitted(units, device.peak)

    def _model(self, device: str, kind: str) -> _Model:
        return self._models.setdefault((device, kind), _Model())

    def body(self) -> dict[str, Any]:
        """What ``/health/memory`` shows of it.

        ``error_pct``: by how much the latest estimates that turned out wrong were wrong, mean of
        up to 64, in percent of the larger of estimate and truth; None while none was.
        """
        with self._lock:
            return {
                "in_flight": len(self._tickets),
                "refused": self._refused,
                "room": {name: device.room for name, device in self._devices.items()},
                "learnt": [
                    {
                        "device": device,
                        "kind": kind,
                        "bytes_per_unit": model.per_unit,
                        "observations": model.observations,
                        "error_pct": _mean(model.errors),
                    }
                    for (device, kind), model in self._models.items()
                ],
            }


def _counts(row: DeviceRow) -> bool:
    """Whether it is a device of this service's."""
    return bool(row.service or row.floor or row.discrepancy is not None)


def _mean(values: deque[float]) -> float | None:
    return round(sum(values) / len(values), 1) if values else None
