# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-omni-health project
"""``min_free_memory``: how much of a device must stay free for requests to be admitted."""

from __future__ import annotations

import re
from dataclasses import dataclass

from pydantic import ByteSize, TypeAdapter, ValidationError

ALLOWED = (
    "an amount such as 2GiB, 500MB, 5% or 0, or a list such as gpu=2GiB,host=5% in which gpu, "
    "host or one device (gpu:0) has its own"
)

_DEVICE = re.compile(r"(gpu|host|sim|xpu|npu|cuda|musa)(:[\w-]+)?")
_SIZE: TypeAdapter[ByteSize] = TypeAdapter(ByteSize)


@dataclass(frozen=True)
class Amount:
    """Bytes, or percent of what a device has."""

    size: int = 0
    percent: float = 0.0

    def of(self, total: int) -> int:
        """In bytes, for a device of ``total`` bytes."""
        return max(self.size, int(total * self.percent / 100))


@dataclass(frozen=True)
class Floor:
    """Amounts by device, by kind of device, and (None) for all others."""

    amounts: tuple[tuple[str | None, Amount], ...] = ()

    @classmethod
    def parse(cls, text: str) -> Floor:
        """Read a setting. Raises ValueError, which says what is allowed."""
        amounts: dict[str | None, Amount] = {}
        for part in text.split(","):
            device, equals, amount = part.strip().rpartition("=")
            name = device.strip() if equals else None
            if name is not None and not _DEVICE.fullmatch(name):
                raise ValueError(f"must be {ALLOWED}")
            if name in amounts:
                raise ValueError(f"must be {ALLOWED}")
            amounts[name] = _amount(amount.strip())
        return cls(tuple(amounts.items()))

    def of(self, device: str, total: int) -> int:
        """Bytes that are to stay free on ``device``; 0 for no floor."""
        amounts = dict(self.amounts)
        for name in (device, device.partition(":")[0], None):
            if name in amounts:
                return amounts[name].of(total)
        return 0

    def __bool__(self) -> bool:
        return any(amount.size or amount.percent for _, amount in self.amounts)


def _amount(text: str) -> Amount:
    if text.endswith("%"):
        try:
            percent = float(text[:-1])
        except ValueError:
            percent = -1.0
        if not 0 <= percent < 100:
            raise ValueError(f"must be {ALLOWED}")
        return Amount(percent=percent)
    try:
        size = _SIZE.validate_python(text)
    except ValidationError:
        size = ByteSize(-1)
    if size < 0:
        raise ValueError(f"must be {ALLOWED}")
    return Amount(size=int(size))


def check_floor(text: str) -> str:
    """The text itself, for a settings field. Raises ValueError."""
    Floor.parse(text)
    return text
