# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-omni-health project
"""Image requests: what a diffusion stage is put under load with."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

from vllm_omni_health.drills.chat import MODEL

SLOW = "<|fault:slow@{stage}|>"
"""The tiny pipeline's mark for a step that takes two seconds instead of milliseconds."""

SLOW_STEP_S = 2.0


@dataclass(frozen=True)
class ImageRequest:
    """One request for an image. ``steps``: None leaves their number to the deployment."""

    prompt: str = "A lighthouse at the seaside."
    steps: int | None = None
    size: str = "64x64"
    label: str = "an image"
    path: ClassVar[str] = "/v1/images/generations"
    stream: ClassVar[bool] = False

    @classmethod
    def slow(cls, stage_id: int = 0, *, steps: int = 20) -> ImageRequest:
        """One that takes two seconds a step in ``stage_id``."""
        prompt = f"A lighthouse at the seaside. {SLOW.format(stage=stage_id)}"
        return cls(prompt, steps, label=f"a slow image in stage {stage_id}")

    def body(self) -> dict[str, Any]:
        """The JSON body."""
        body = {"model": MODEL, "prompt": self.prompt, "size": self.size, "n": 1}
        return body if self.steps is None else {**body, "num_inference_steps": self.steps}
