# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-omni-health project
"""The figures for Prometheus, on the endpoint that upstream serves."""

from __future__ import annotations

from collections.abc import Callable, Iterable

from prometheus_client import REGISTRY, CollectorRegistry
from prometheus_client.core import GaugeMetricFamily, Metric
from prometheus_client.registry import Collector
from vllm_omni.health.memory.view import DeviceRow, Discrepancy, MemoryView, StageRow

_PREFIX = "vllm_omni_health_memory"

_DEVICE = ("total", "used", "free", "service", "others", "floor")
_STAGE = ("used", "allocated", "reserved", "kv_total", "kv_used")


class MemoryCollector(Collector):
    """Makes metrics of the latest view whenever it is asked. What is unknown is left out."""

    def __init__(self, view: Callable[[], MemoryView]) -> None:
        self._view = view

    def describe(self) -> Iterable[Metric]:
        """Nothing, so that registering asks for nothing."""
        return []

    def collect(self) -> Iterable[Metric]:
        """Called by the endpoint, on any thread."""
        view = self._view()
        device = GaugeMetricFamily(
            f"{_PREFIX}_device_bytes", "Memory of a device in bytes.", labels=["device", "what"]
        )
        stage = GaugeMetricFamily(
            f"{_PREFIX}_stage_bytes",
            "Memory of a stage's replica on a device in bytes: measured, and as reported.",
            labels=["stage", "replica", "device", "what"],
        )
        unaccounted = GaugeMetricFamily(
            f"{_PREFIX}_unaccounted_bytes",
            "Growth since the start of what is used and not reported; stage is empty for a device.",
            labels=["stage", "replica", "device"],
        )
        percent = GaugeMetricFamily(
            f"{_PREFIX}_discrepancy_percent",
            "The same in percent of what was expected.",
            labels=["stage", "replica", "device"],
        )
        pressure = GaugeMetricFamily(
            f"{_PREFIX}_pressure", "1 while a device is short of memory.", labels=["device"]
        )
        for row in view.devices:
            _sizes(device, [row.device], row, _DEVICE)
            pressure.add_metric([row.device], float(row.pressure))
            _gaps(unaccounted, percent, ["", "", row.device], row.discrepancy)
        for stage_row in view.stages:
            labels = [str(stage_row.stage_id), str(stage_row.replica_id), stage_row.device]
            _sizes(stage, labels, stage_row, _STAGE)
            _gaps(unaccounted, percent, labels, stage_row.discrepancy)
        return [device, stage, unaccounted, percent, pressure]


def _sizes(
    family: GaugeMetricFamily, labels: list[str], row: DeviceRow | StageRow, names: tuple[str, ...]
) -> None:
    for name in names:
        size = getattr(row, name)
        if size is not None:
            family.add_metric([*labels, name], size)


def _gaps(
    unaccounted: GaugeMetricFamily,
    percent: GaugeMetricFamily,
    labels: list[str],
    shown: Discrepancy | None,
) -> None:
    if shown is not None:
        unaccounted.add_metric(labels, shown.unaccounted)
        percent.add_metric(labels, shown.percent)


def register(
    view: Callable[[], MemoryView], registry: CollectorRegistry = REGISTRY
) -> Callable[[], None]:
    """Have the figures on ``registry``; the result, when called, takes them off again."""
    collector = MemoryCollector(view)
    registry.register(collector)

    def unregister() -> None:
        try:
            registry.unregister(collector)
        except KeyError:
            # Somebody has cleared the registry.
            pass

    return unregister
