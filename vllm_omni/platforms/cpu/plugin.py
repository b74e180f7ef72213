# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-omni-health project
"""Decides whether this process runs on the CPU platform."""

from __future__ import annotations

import logging

logger = logging.getLogger(__name__)

PLATFORM = "vllm_omni.platforms.cpu.platform.CpuOmniPlatform"


def resolve() -> str | None:
    """Name the CPU platform's class, or None where an accelerator platform applies.

    vllm-omni prefers an out-of-tree platform to its own ones, so it is on us to step
    aside: for every platform of its own that detects its hardware, and for a vLLM that is
    not a CPU build, whose workers could not run here anyway.
    """
    from vllm.platforms import current_platform
    from vllm_omni.platforms import (  # type: ignore[attr-defined] # upstream's __init__
        builtin_omni_platform_plugins,
    )

    if not current_platform.is_cpu():
        return None
    for name, detect in builtin_omni_platform_plugins.items():
        try:
            found = detect() is not None
        except Exception:
            # A detector that fails has found nothing; upstream reads it the same way.
            found = False
        if found:
            logger.debug("the CPU platform steps aside for %s", name)
            return None
    return PLATFORM
