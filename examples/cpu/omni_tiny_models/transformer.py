# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-omni-health project
"""The tiny diffusion model's network. Imports torch alone, so that its builder is quick."""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import nn

# Pixels a side that one latent stands for, and latents a side that one token does.
DECODER_SCALE = 8
PATCH = 2

# Makes a block's attention from its number of heads, their size and the layer's name.
AttentionFactory = Callable[[int, int, str], nn.Module]


class _Block(nn.Module):
    """Self-attention and a feed-forward layer, both residual."""

    def __init__(self, width: int, heads: int, attention: nn.Module) -> None:
        super().__init__()
        self.heads = heads
        self.norm1 = nn.LayerNorm(width)
        self.qkv = nn.Linear(width, 3 * width)
        self.attention = attention
        self.out = nn.Linear(width, width)
        self.norm2 = nn.LayerNorm(width)
        self.mlp = nn.Sequential(
            nn.Linear(width, 2 * width), nn.GELU(), nn.Linear(2 * width, width)
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = (
            part.unflatten(-1, (self.heads, -1)) for part in self.qkv(self.norm1(x)).chunk(3, -1)
        )
        x = x + self.out(self.attention(q, k, v).flatten(-2))
        return x + self.mlp(self.norm2(x))


class TinyTransformer(nn.Module):
    """Predicts the velocity of latents, given the time and the prompt's bytes.

    Attention has no weights of its own, so without a factory the network can be built and
    saved, but not run.
    """

    def __init__(
        self,
        channels: int,
        width: int,
        heads: int,
        layers: int,
        make_attention: AttentionFactory = lambda heads, size, name: nn.Identity(),
    ) -> None:
        super().__init__()
        self.patchify = nn.Conv2d(channels, width, PATCH, PATCH)
        self.text = nn.Embedding(256, width)
        self.time = nn.Linear(2, width)
        self.blocks = nn.ModuleList(
            _Block(width, heads, make_attention(heads, width // heads, f"blocks.{i}.attention"))
            for i in range(layers)
        )
        self.unpatchify = nn.ConvTranspose2d(width, channels, PATCH, PATCH)
        self.decoder = nn.Conv2d(channels, 3, 1)

    def forward(self, latents: torch.Tensor, time: float, text: torch.Tensor) -> torch.Tensor:
        patches = self.patchify(latents)
        rows, columns = patches.shape[-2:]
        phase = latents.new_tensor([math.sin(time), math.cos(time)])
        tokens = torch.cat([self.text(text), patches.flatten(2).transpose(1, 2)], dim=1)
        tokens = tokens + self.time(phase)
        for block in self.blocks:
            tokens = block(tokens)
        patches = tokens[:, text.shape[1] :].transpose(1, 2).unflatten(-1, (rows, columns))
        return self.unpatchify(patches)

    def decode(self, latents: torch.Tensor) -> torch.Tensor:
        """An RGB image in [-1, 1]."""
        smooth = nn.functional.interpolate(latents, scale_factor=DECODER_SCALE, mode="bilinear")
        return torch.tanh(self.decoder(smooth))
