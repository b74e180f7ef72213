# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-omni-health project
"""How much memory a device has and this process holds of it, for a fault's record."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

import psutil
import torch
from vllm_omni.health.faults.fault import MemoryFigures

logger = logging.getLogger(__name__)


def memory_figures(device: Any = None) -> MemoryFigures | None:
    """Figures of ``device`` (default: the current one), in bytes, as far as they can be had.

    On the CPU ``allocated`` is what this process has resident. Asks the allocator and the driver
    on the calling thread; after a fault that broke the device they answer with an error, which
    leaves a figure unknown. None when nothing is known. Never raises.
    """
    try:
        found = _of_accelerator(device) if torch.accelerator.is_available() else _of_host()
    except Exception:
        logger.debug("[health] no memory figures", exc_info=True)
        return None
    return None if found == MemoryFigures() else found


def _of_accelerator(device: Any) -> MemoryFigures:
    free, total = _asked(torch.accelerator.get_memory_info, device) or (None, None)
    return MemoryFigures(
        allocated=_asked(torch.accelerator.memory_allocated, device),
        reserved=_asked(torch.accelerator.memory_reserved, device),
        free=free,
        total=total,
    )


def _of_host() -> MemoryFigures:
    machine = psutil.virtual_memory()
    return MemoryFigures(
        allocated=psutil.Process().memory_info().rss,
        free=machine.available,
        total=machine.total,
    )


def _asked(question: Callable[..., Any], device: Any) -> Any:
    try:
        return question() if device is None else question(device)
    except Exception:
        logger.debug("[health] %s cannot be asked", question.__name__, exc_info=True)
        return None
