# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-omni-health project
"""Figures as a table: a row for each device and each stage on it, with a line of its history.

A stage's replica is shown as ``stage 0/1``: stage 0, replica 1.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Mapping
from typing import Any

from rich.box import SIMPLE_HEAD
from rich.table import Table
from rich.text import Text

from vllm_omni_health.devices.figures import in_words

_BARS = "▁▂▃▄▅▆▇█"
_KEPT = 24

_COLUMNS = (
    "used",
    "of",
    "free",
    "floor",
    "others",
    "re-\nport",
    "unac-\ncount",
    "%",
    "growth\n/min",
)


class History:
    """The latest discrepancies of each row, or its use where nothing can be compared."""

    def __init__(self) -> None:
        self._values: defaultdict[tuple[Any, ...], deque[float]] = defaultdict(
            lambda: deque(maxlen=_KEPT)
        )

    def add(self, body: Mapping[str, Any]) -> None:
        """One more set of figures."""
        for row in (*body["devices"], *body["stages"]):
            discrepancy = row.get("discrepancy")
            value = row.get("used") if discrepancy is None else discrepancy["percent"]
            if value is not None:
                self._values[_key(row)].append(float(value))

    def line(self, row: Mapping[str, Any]) -> str:
        """The sparkline of a row."""
        return sparkline(self._values[_key(row)])


def sparkline(values: deque[float] | list[float]) -> str:
    """One character a value, from the lowest to the highest of them."""
    if not values:
        return ""
    low, high = min(values), max(values)
    span = high - low
    if span <= 0:
        return _BARS[0] * len(values)
    return "".join(_BARS[round((value - low) / span * (len(_BARS) - 1))] for value in values)


def table(name: str, body: Mapping[str, Any], history: History) -> Table:
    """Everything at one moment."""
    # Narrow: it fits into eighty columns with half of the history to be seen.
    shown = Table(
        title=f"memory of {name} at {body['time']}",
        title_justify="left",
        box=SIMPLE_HEAD,
        pad_edge=False,
        padding=(0, 1, 0, 0),
    )
    shown.add_column("where", no_wrap=True, min_width=10)
    for column in _COLUMNS:
        shown.add_column(column, justify="right", no_wrap=True, min_width=5)
    shown.add_column("lately", no_wrap=True, min_width=8)
    for device in body["devices"]:
        style = "bold red" if device.get("pressure") else "bold"
        if device.get("unknown"):
            shown.add_row(Text(device["device"], "bold"), Text("unknown", "yellow"))
            shown.caption = f"{device['device']}: {device['unknown']}"
        else:
            shown.add_row(
                Text(device["device"], style),
                _size(device, "used"),
                _size(device, "total"),
                Text(_size(device, "free"), "red" if device.get("pressure") else ""),
                _size(device, "floor") if device.get("floor") else "",
                _size(device, "others"),
                *_compared(device),
                history.line(device),
            )
        for stage in body["stages"]:
            if stage["device"] == device["device"]:
                shown.add_row(
                    f" stage {stage['stage_id']}/{stage['replica_id']}",
                    _size(stage, "used"),
                    *("", "", "", ""),
                    *_compared(stage),
                    history.line(stage),
                )
    return shown


def _short(size: int) -> str:
    """``20.0G`` for 20 GiB."""
    return in_words(size).removesuffix("iB")


def _key(row: Mapping[str, Any]) -> tuple[Any, ...]:
    return row["device"], row.get("stage_id"), row.get("replica_id")


def _size(row: Mapping[str, Any], name: str) -> str:
    size = row.get(name)
    return "" if size is None else _short(size)


def _compared(row: Mapping[str, Any]) -> tuple[str | Text, ...]:
    """Reported, unaccounted, percent and growth."""
    found = row.get("discrepancy")
    if found is None:
        reserved = row.get("reserved")
        return ("" if reserved is None else _short(reserved), "", "", "")
    style = "bold yellow" if found["alarm"] else ""
    return (
        _short(found["reported"]),
        Text(_short(found["unaccounted"]), style),
        Text(f"{found['percent']:.1f}", style),
        _short(found["trend_bytes_per_s"] * 60),
    )
