# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-omni-health project
"""The tiny diffusion pipeline: denoises a small image and obeys fault marks as it does.

A real pipeline in miniature: bytes of the prompt as text embedding, a transformer of two
blocks over image and text tokens with vllm-omni's attention, a decoder to RGB.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import torch
from torch import nn
from vllm_omni.diffusion.attention.layer import Attention
from vllm_omni.diffusion.data import DiffusionOutput, OmniDiffusionConfig
from vllm_omni.diffusion.model_loader.diffusers_loader import DiffusersPipelineLoader
from vllm_omni.diffusion.worker.input_batch import InputBatch
from vllm_omni.diffusion.worker.request_batch import DiffusionRequestBatch
from vllm_omni.diffusion.worker.utils import StepRequestState

from omni_tiny_models.faults import inject, kinds_in, own_rank
from omni_tiny_models.transformer import DECODER_SCALE, PATCH, TinyTransformer

MAX_TEXT = 128
DEFAULT_SIZE = 64
DEFAULT_STEPS = 20
SIZE_STEP = DECODER_SCALE * PATCH


def _attention(heads: int, head_size: int, name: str) -> Attention:
    return Attention(
        num_heads=heads,
        head_size=head_size,
        causal=False,
        softmax_scale=head_size**-0.5,
        prefix=f"transformer.{name}",
    )


@dataclass
class _Job:
    """One request under way."""

    kinds: list[str]
    steps: int
    latents: torch.Tensor
    tokens: torch.Tensor


class TinyDiffusionPipeline(nn.Module):
    """What vllm-omni's diffusion model runner loads and calls."""

    supports_step_execution: ClassVar[bool] = True

    # Read by vllm-omni to find a pipeline's parts.
    _dit_modules: ClassVar[list[str]] = ["transformer"]
    _encoder_modules: ClassVar[list[str]] = []
    _vae_modules: ClassVar[list[str]] = []
    _resident_modules: ClassVar[list[str]] = []

    def __init__(self, *, od_config: OmniDiffusionConfig, prefix: str = "") -> None:
        super().__init__()
        self._stage = od_config.stage_id
        folder = Path(str(od_config.model)) / "transformer"
        sizes = json.loads((folder / "config.json").read_text())["sizes"]
        self._channels = sizes["channels"]
        self.transformer = TinyTransformer(**sizes, make_attention=_attention)
        self.weights_sources = [
            DiffusersPipelineLoader.ComponentSource(
                model_or_path=str(od_config.model),
                subfolder="transformer",
                revision=None,
                prefix="transformer.",
            )
        ]

    @torch.inference_mode()
    def forward(self, req: DiffusionRequestBatch) -> DiffusionOutput:
        """Denoise one request. Faults strike half-way, slowness at every step."""
        job = self._begin(req.prompts[0], req.sampling_params)
        for step in range(job.steps):
            job.latents = job.latents + self._velocity(job, step) / job.steps
        return DiffusionOutput(output=self.transformer.decode(job.latents))

    # -- the same, step by step, for a stage with step_execution -------------------

    @torch.inference_mode()
    def prepare_encode(self, state: StepRequestState, **_more: Any) -> StepRequestState:
        """Set a request up. A fault in a request of a single step strikes in here."""
        job = self._begin(state.prompt, state.sampling)
        if job.steps == 1:
            self._strike(job, 0)
        state.extra["job"] = job
        state.latents = job.latents
        state.timesteps = torch.arange(job.steps) / job.steps
        state.prompt_embeds = torch.zeros(len(job.latents), 1, 1)
        return state

    @torch.inference_mode()
    def denoise_step(
        self,
        input_batch: InputBatch,
        *,
        states: Sequence[StepRequestState] | None = None,
        **_more: Any,
    ) -> torch.Tensor:
        """One step of every request in the batch."""
        del input_batch
        velocities = []
        for state in states or ():
            job = state.extra["job"]
            job.latents = state.latents
            velocities.append(self._velocity(job, state.step_index))
        return torch.cat(velocities)

    @torch.inference_mode()
    def step_scheduler(
        self, state: StepRequestState, noise_pred: torch.Tensor, **_more: Any
    ) -> None:
        """Advance one request by its part of the step."""
        state.latents = state.latents + noise_pred / state.total_steps
        state.step_index += 1

    @torch.inference_mode()
    def post_decode(self, state: StepRequestState, **_more: Any) -> DiffusionOutput:
        """The image of a request that is through."""
        return DiffusionOutput(output=self.transformer.decode(state.latents))

    # -- both ----------------------------------------------------------------------

    def _begin(self, prompt: Any, params: Any) -> _Job:
        text = prompt if isinstance(prompt, str) else (prompt.get("prompt") or "")
        steps = params.num_inference_steps or DEFAULT_STEPS
        height, width = params.height or DEFAULT_SIZE, params.width or DEFAULT_SIZE
        for side in (height, width):
            # As real pipelines do: their input is checked in here, with ValueError.
            if side % SIZE_STEP or side <= 0:
                raise ValueError(f"size {width}x{height}: sides must be multiples of {SIZE_STEP}")
        images = max(params.num_outputs_per_prompt, 1)
        shape = (images, self._channels, height // DECODER_SCALE, width // DECODER_SCALE)
        encoded = list(text.encode()[:MAX_TEXT]) or [0]
        return _Job(
            kinds=kinds_in(text, self._stage, own_rank()),
            steps=steps,
            latents=torch.randn(shape, generator=params.generator),
            tokens=torch.tensor([encoded] * images),
        )

    def _velocity(self, job: _Job, step: int) -> torch.Tensor:
        self._strike(job, step)
        return self.transformer(job.latents, step / job.steps, job.tokens)

    def _strike(self, job: _Job, step: int) -> None:
        for kind in job.kinds:
            if kind == "slow" or step == job.steps // 2:
                inject(kind, self._stage)

    def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> set[str]:
        """Fill in the saved weights; returns the names of those that were there."""
        parameters = dict(self.named_parameters())
        loaded = set()
        for name, value in weights:
            parameters[name].data.copy_(value)
            loaded.add(name)
        return loaded


def image_postprocessor(od_config: OmniDiffusionConfig) -> Callable[[torch.Tensor], list[Any]]:
    """Turns a batch of RGB tensors into images, in the server process."""
    from diffusers.image_processor import VaeImageProcessor

    return VaeImageProcessor(vae_scale_factor=DECODER_SCALE).postprocess
