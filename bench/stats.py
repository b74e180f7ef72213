# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-omni-health project
"""Figures from samples, and how far they can be trusted."""

from __future__ import annotations

import random
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TypeVar

_RESAMPLINGS = 300
_CONFIDENCE = 0.9


def percentile(values: Sequence[float], percent: float) -> float:
    """The value below which ``percent`` of the values lie, interpolated; nan for none."""
    if not values:
        return float("nan")
    ordered = sorted(values)
    place = (len(ordered) - 1) * percent / 100
    low = int(place)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (ordered[high] - ordered[low]) * (place - low)


def median(values: Sequence[float]) -> float:
    """The median; nan for no values."""
    return statistics.median(values) if values else float("nan")


@dataclass(frozen=True)
class Ratio:
    """Layer over upstream, with the bounds that it stays in when rounds are drawn anew."""

    value: float
    low: float
    high: float


T = TypeVar("T")


def ratio(rounds: Sequence[tuple[T, T]], figure: Callable[[Sequence[T]], float]) -> Ratio:
    """Ratio of a figure that is taken of all of a variant's rounds; bounds by a bootstrap.

    A pair of rounds, upstream's and the layer's, is drawn as a whole: taken right after one
    another, they share what the machine did meanwhile.
    """
    chance = random.Random(1)
    drawn = sorted(
        _ratio([chance.choice(rounds) for _ in rounds], figure) for _ in range(_RESAMPLINGS)
    )
    outside = (1 - _CONFIDENCE) / 2
    return Ratio(
        _ratio(rounds, figure),
        percentile(drawn, 100 * outside),
        percentile(drawn, 100 * (1 - outside)),
    )


def _ratio(rounds: Sequence[tuple[T, T]], figure: Callable[[Sequence[T]], float]) -> float:
    upstream = figure([pair[0] for pair in rounds])
    layer = figure([pair[1] for pair in rounds])
    return layer / upstream if upstream else float("nan")
