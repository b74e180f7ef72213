# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-omni-health project
"""All devices at one moment: each asked at the same time, and none waited for too long."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from vllm_omni_health.devices import nvml as nvml_devices
from vllm_omni_health.devices.bounded import BoundedQuery, NoAnswer
from vllm_omni_health.devices.figures import Device, DeviceSample
from vllm_omni_health.devices.host import Host
from vllm_omni_health.devices.simulated import SimulatedDevice

QUERY_S = 2.0
"""Bound for one round of queries. NVML takes up to some tens of milliseconds a device."""


def _accelerators() -> Sequence[Device]:
    return nvml_devices.devices()


class Devices:
    """The devices of this machine that matter to a service. Calls must not overlap.

    ``discover`` finds the accelerators; it is asked like a query, because the first call to a
    driver can hang as well. While it has no answer, an accelerator ``gpu`` is shown as unknown.
    """

    def __init__(
        self,
        *,
        simulated: Path | None = None,
        host: Device | None = None,
        discover: Callable[[], Sequence[Device]] = _accelerators,
        query_s: float = QUERY_S,
    ) -> None:
        self._query_s = query_s
        self._discovery: BoundedQuery[Sequence[Device]] | None = BoundedQuery(
            discover, "memory-discover"
        )
        self._queries: dict[str, BoundedQuery[DeviceSample]] = {}
        self._known: dict[str, Any] = {}
        for device in (host or Host(), *([SimulatedDevice(simulated)] if simulated else ())):
            self._add(device)

    def _add(self, device: Device) -> None:
        self._queries[device.device] = BoundedQuery(device.sample, f"memory-{device.device}")
        self._known[device.device] = device

    def sample(self) -> list[DeviceSample]:
        """One round. A query that hangs or fails makes its own device unknown and nothing else."""
        deadline = time.monotonic() + self._query_s
        if self._discovery is not None:
            self._discovery.begin()
        for query in self._queries.values():
            query.begin()
        found = self._discover(deadline)
        asked = [self._ask(name, query, deadline) for name, query in self._queries.items()]
        return asked + found

    def close(self) -> None:
        """Let the queries' threads end."""
        for query in (*self._queries.values(), self._discovery):
            if query is not None:
                query.close()

    def _discover(self, deadline: float) -> list[DeviceSample]:
        if self._discovery is None:
            return []
        try:
            devices = self._discovery.result(deadline)
        except Exception as exc:
            return [DeviceSample("gpu", unknown=_why(exc))]
        self._discovery.close()
        self._discovery = None
        for device in devices:
            self._add(device)
            self._queries[device.device].begin()
        return []

    def _ask(self, name: str, query: BoundedQuery[DeviceSample], deadline: float) -> DeviceSample:
        try:
            return query.result(deadline)
        except Exception as exc:
            device = self._known[name]
            return DeviceSample(
                name,
                name=getattr(device, "name", None),
                uuid=getattr(device, "uuid", None),
                unknown=_why(exc),
            )


def _why(exc: Exception) -> str:
    """A reason that anyone may see: texts of drivers, and no paths."""
    if isinstance(exc, OSError):
        return exc.strerror or type(exc).__name__
    if isinstance(exc, NoAnswer):
        return "the query does not answer"
    return str(exc) or type(exc).__name__
