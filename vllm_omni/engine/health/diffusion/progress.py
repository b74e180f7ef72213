# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-omni-health project
"""Steps of a diffusion pipeline as progress: one call of a worker is a whole image or film.

Each denoising step calls the pipeline's transformer, which runs a hook of ours first. A worker
process says so through its last-words pipe; where the pipeline runs in the engine's process, the
engine looks here itself.
"""

from __future__ import annotations

import logging
import time
from typing import Any

import torch
from vllm_omni.health.processes.last_words import own_words

logger = logging.getLogger(__name__)

_SAY_EVERY_S = 1.0
"""Time between two words about progress; a fraction of any sensible ``hang_timeout_s``."""

_USUAL_NAMES = ("transformer", "transformer_2", "unet", "dit")
"""Where a pipeline that does not declare its parts has what it calls at each step."""

_last_step = 0.0
_last_said = 0.0


def last_step() -> float:
    """When a step of a pipeline in this process last began; monotonic, in seconds."""
    return _last_step


def watch_steps(worker: Any) -> None:
    """See the steps of the pipeline that upstream's worker wrapper has loaded.

    Harmless without one. A pipeline that is loaded anew later is not seen: only its whole calls
    then count as progress.
    """
    runner = getattr(getattr(worker, "worker", None), "model_runner", None)
    pipeline = getattr(runner, "pipeline", None)
    for name in getattr(pipeline, "_dit_modules", None) or _USUAL_NAMES:
        module = pipeline
        for part in name.split("."):
            module = getattr(module, part, None)
        if isinstance(module, torch.nn.Module):
            module.register_forward_pre_hook(_step)
            logger.debug("[health] the steps of %s are progress", name)


def _step(_module: Any, _args: Any) -> None:
    global _last_step, _last_said
    if torch.compiler.is_compiling():
        # Part of a graph, which has no place for clocks and pipes.
        return
    _last_step = now = time.monotonic()
    words = own_words()
    if words is not None and now - _last_said >= _SAY_EVERY_S:
        _last_said = now
        words.progress()
