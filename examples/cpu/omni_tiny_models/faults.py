# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-omni-health project
"""Fault marks: ``<|fault:KIND@STAGE|>`` in a prompt makes stage STAGE fail as KIND says.

A mark travels with its prompt, so a later stage sees it as well as the first one. The
stage it names raises the real exception in a real forward pass, or does the real harm.
Those in ROUTING happen in the orchestrator, where the stage's input is made from the output of
the one before. ``<|fault:KIND@STAGE.RANK|>`` strikes one rank of the stage alone. Marks with
another kind, stage or rank are plain text.
"""

from __future__ import annotations

import os
import re
import signal
import time

import torch
import torch.distributed

ROUTING = ("router", "loop")
KINDS = ("oom", "accelerator", "collective", "error", "hang", "exit", "kill", "slow", *ROUTING)
STAGES = range(4)
RANKS = range(2)
EXIT_STATUS = 3
SLOW_STEP_S = 2.0

_MARK = re.compile(
    rf"<\|fault:({'|'.join(KINDS)})"
    rf"@([{STAGES[0]}-{STAGES[-1]}])(?:\.([{RANKS[0]}-{RANKS[-1]}]))?\|>"
)


def mark(kind: str, stage: int, rank: int | None = None) -> str:
    """The mark's text, as it stands in a prompt; for all ranks, or for one."""
    where = f"{stage}" if rank is None else f"{stage}.{rank}"
    return f"<|fault:{kind}@{where}|>"


def kinds_in(text: str, stage: int, rank: int = 0) -> list[str]:
    """Kinds of the marks for ``rank`` of ``stage`` that a forward pass obeys, in order."""
    return [
        kind
        for kind, at, only in _MARK.findall(text)
        if int(at) == stage and kind not in ROUTING and (not only or int(only) == rank)
    ]


def own_rank() -> int:
    """The rank of this process in its stage."""
    distributed = torch.distributed
    ready = distributed.is_available() and distributed.is_initialized()
    return distributed.get_rank() if ready else 0


def inject(kind: str, stage: int) -> None:
    """Fail as ``kind`` says. Returns only for ``slow``, after SLOW_STEP_S seconds."""
    where = f"asked for by a fault mark in stage {stage}"
    match kind:
        case "oom":
            raise torch.OutOfMemoryError(f"Tried to allocate 20.00 GiB, {where}")
        case "accelerator":
            raise torch.AcceleratorError(f"an illegal memory access was encountered, {where}")
        case "collective":
            raise torch.distributed.DistBackendError(f"collective operation timed out, {where}")
        case "error":
            raise RuntimeError(f"forward pass failed, {where}")
        case "hang":
            while True:
                time.sleep(3600)
        case "exit":
            os._exit(EXIT_STATUS)
        case "kill":
            os.kill(os.getpid(), signal.SIGKILL)
            # The signal is delivered to the process, not awaited by this thread.
            time.sleep(3600)
        case "slow":
            time.sleep(SLOW_STEP_S)
        case "router":
            raise LookupError(f"no way on, {where}")
        case "loop":
            # Not an Exception, so it ends the event loop that it is raised on.
            raise SystemExit(where)
        case _:
            raise ValueError(f"unknown fault kind {kind!r}; known: {', '.join(KINDS)}")
