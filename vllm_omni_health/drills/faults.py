# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-omni-health project
"""What can be broken, and what the server has promised to do about it."""

from __future__ import annotations

import signal
from dataclasses import dataclass

from vllm_omni_health.drills.chat import ChatRequest, Request
from vllm_omni_health.drills.images import SLOW, SLOW_STEP_S, ImageRequest
from vllm_omni_health.drills.tree import Role

EXIT_STATUS = {
    "engine": 80,
    "oom": 81,
    "host_oom": 82,
    "accelerator": 83,
    "collective": 84,
    "process_lost": 85,
    "hang": 86,
    "orchestrator": 87,
}
"""Exit status of a server by the kind of the fault that ended it."""

START_FAILED = 1
"""Exit status of a server that could not start."""

KIND_OF_MARK = {
    "oom": "oom",
    "accelerator": "accelerator",
    "collective": "collective",
    "error": "engine",
    "exit": "process_lost",
    "kill": "process_lost",
    "hang": "hang",
    "loop": "orchestrator",
}
"""Kind of the fault that a mark in a prompt causes, by the mark's own word."""


@dataclass(frozen=True)
class Signal:
    """A signal to one process of a stage."""

    stage_id: int
    role: Role = Role.ENGINE_CORE
    replica_id: int = 0
    signum: signal.Signals = signal.SIGKILL
    kind: str = "process_lost"
    """Kind of the fault that this is to become."""
    rank: int | None = None
    """Of several workers of a replica the one with this rank; None for any."""

    def describe(self) -> str:
        """For people: ``SIGKILL to the engine core of stage 1``."""
        where = f" replica {self.replica_id}" if self.replica_id else ""
        where += "" if self.rank is None else f" rank {self.rank}"
        return f"{self.signum.name} to the {self.role} of stage {self.stage_id}{where}"


@dataclass(frozen=True)
class Mark:
    """A prompt that makes a stage of the tiny models fail in its forward pass."""

    stage_id: int
    word: str = "error"
    replica_id: int = 0
    rank: int | None = None
    """The one rank that it strikes; None for all."""

    @property
    def text(self) -> str:
        """The mark itself."""
        rank = "" if self.rank is None else f".{self.rank}"
        return f"<|fault:{self.word}@{self.stage_id}{rank}|>"

    @property
    def kind(self) -> str:
        """Kind of the fault that this is to become."""
        return KIND_OF_MARK[self.word]

    def request(self, stages: int) -> Request:
        """The request that carries the mark; it gets to the stage quickly."""
        return ChatRequest(
            prompt=f"Please fail. {self.text}",
            stage_tokens=[2] * stages,
            label="the one with the mark",
        )

    def describe(self) -> str:
        """For people: ``fault mark error in stage 0``."""
        rank = "" if self.rank is None else f" rank {self.rank}"
        return f"fault mark {self.word} in stage {self.stage_id}{rank}"


@dataclass(frozen=True)
class ImageMark(Mark):
    """The same in a request for an image, which a diffusion stage fails in one of its steps.

    ``after_s``: about how long it stays in the stage before, two seconds a step. ``preparing``:
    it strikes when a stage that executes step by step prepares the request.
    """

    after_s: float = 0.0
    preparing: bool = False

    def request(self, stages: int) -> ImageRequest:
        """The request that carries the mark."""
        del stages
        if not self.after_s:
            return ImageRequest(f"Please fail. {self.text}", 2, label="the one with the mark")
        slow, times = SLOW.format(stage=self.stage_id), max(1, round(self.after_s / SLOW_STEP_S))
        if self.preparing:
            # A request of a single step is struck already when it is prepared, mark by mark.
            prompt, steps = f"Please fail. {slow * times}{self.text}", 1
        else:
            # The mark strikes half-way through the steps, each of which is slow.
            prompt, steps = f"Please fail. {slow}{self.text}", 2 * times
        return ImageRequest(prompt, steps, label="the one with the mark")

    def describe(self) -> str:
        """For people: ``fault mark oom in stage 0 while preparing``."""
        return super().describe() + (" while preparing" if self.preparing else "")


Injection = Signal | Mark
