# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-omni-health project
"""The verdict over a run of figures: did memory that nobody accounts for pass a threshold?"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

Where = tuple[str, int | None, int | None]
"""(device, stage_id, replica_id); the last two are None for the device as a whole."""


@dataclass
class _Watched:
    above_since: float | None = None
    passed: bool = False
    first: float | None = None
    last: float = 0.0
    peak: float = float("-inf")


@dataclass
class Verdict:
    """Fed with figures during and after a load.

    The threshold is passed where a discrepancy was above it for ``for_s`` seconds without a
    break: what stages report is up to some seconds older than what is measured, so a single
    figure can be off while memory grows as it is meant to.
    """

    threshold_pct: float
    for_s: float
    _rows: dict[Where, _Watched] = field(default_factory=dict)

    def feed(self, now: float, body: Mapping[str, Any]) -> None:
        """One more set of figures, at monotonic second ``now``."""
        for row in (*body["devices"], *body["stages"]):
            found = row.get("discrepancy")
            if found is None:
                continue
            where = (row["device"], row.get("stage_id"), row.get("replica_id"))
            self._feed_row(now, self._rows.setdefault(where, _Watched()), found["percent"])

    def _feed_row(self, now: float, row: _Watched, percent: float) -> None:
        row.first = percent if row.first is None else row.first
        row.last, row.peak = percent, max(row.peak, percent)
        if percent <= self.threshold_pct:
            row.above_since = None
            return
        if row.above_since is None:
            row.above_since = now
        if now - row.above_since >= self.for_s:
            row.passed = True

    @property
    def compared(self) -> bool:
        """Whether there was anything to judge."""
        return bool(self._rows)

    @property
    def passed(self) -> list[Where]:
        """Where the threshold was passed."""
        return [where for where, row in self._rows.items() if row.passed]

    def rows(self) -> list[dict[str, Any]]:
        """What was seen, as plain data."""
        return [
            {
                "device": device,
                "stage_id": stage_id,
                "replica_id": replica_id,
                "first_pct": row.first,
                "peak_pct": row.peak,
                "last_pct": row.last,
                "passed_threshold": row.passed,
            }
            for (device, stage_id, replica_id), row in self._rows.items()
        ]


def describe(row: Mapping[str, Any]) -> str:
    """A row of :meth:`Verdict.rows` for people."""
    where = str(row["device"])
    if row["stage_id"] is not None:
        where += f", stage {row['stage_id']} replica {row['replica_id']}"
    return (
        f"{where}: {row['first_pct']:.2f} % at first, {row['peak_pct']:.2f} % at most, "
        f"{row['last_pct']:.2f} % at last"
    )
