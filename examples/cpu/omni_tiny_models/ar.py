# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-omni-health project
"""The tiny AR model: Qwen2 with two layers, which obeys fault marks in its prompt."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import torch
from vllm.config import VllmConfig
from vllm.model_executor.models.qwen2 import Qwen2ForCausalLM
from vllm.sequence import IntermediateTensors

from omni_tiny_models import vocabulary
from omni_tiny_models.faults import ROUTING, inject, own_rank


class TinyOmniModel(Qwen2ForCausalLM):
    """A Qwen2 that answers with words only and fails as the marks for its stage say.

    A ``slow`` request has to be known again at every decode step, where the model sees one
    token of it. So while a request is slow, it is answered with its stage's slow word.
    """

    have_multimodal_outputs = False
    # Asks vllm-omni for the rows at which the batch's requests begin and end.
    supports_omni_query_start_loc = True

    def __init__(self, *, vllm_config: VllmConfig, prefix: str = "") -> None:
        super().__init__(vllm_config=vllm_config, prefix=prefix)
        stage = int(getattr(vllm_config.model_config, "stage_id", 0) or 0)
        self._stage = stage
        self._marks = {
            token: kind
            for token, (kind, at, rank) in vocabulary.FAULT_BY_TOKEN.items()
            if at == stage and kind not in ROUTING and rank in (None, own_rank())
        }
        self._slow_word = vocabulary.SLOW_WORD_ID[stage]
        self._slow_marks = [token for token, kind in self._marks.items() if kind == "slow"]

    def forward(
        self,
        input_ids: torch.Tensor,
        positions: torch.Tensor,
        intermediate_tensors: IntermediateTensors | None = None,
        inputs_embeds: torch.Tensor | None = None,
        omni_query_start_loc: torch.Tensor | None = None,
        **_omni: Any,
    ) -> torch.Tensor | IntermediateTensors:
        for token in torch.unique(input_ids[input_ids >= vocabulary.FIRST_SPECIAL]).tolist():
            if (kind := self._marks.get(token, "slow")) != "slow":
                inject(kind, self._stage)
        hidden = super().forward(input_ids, positions, intermediate_tensors, inputs_embeds)
        slow = input_ids == self._slow_word
        for token in self._slow_marks:
            slow |= input_ids == token
        if slow.any():
            inject("slow", self._stage)
            hidden = self._steer(hidden, slow, omni_query_start_loc)
        return hidden

    def _steer(
        self, hidden: torch.Tensor, slow: torch.Tensor, starts: torch.Tensor | None
    ) -> torch.Tensor:
        """Mark the last row of every slow request, the one its next token is read from."""
        hidden = hidden.clone()
        bounds = starts.tolist() if starts is not None else [0, len(slow)]
        for start, end in pairwise(bounds):
            if slow[start:end].any():
                hidden[end - 1] = torch.inf
        return hidden

    def compute_logits(self, hidden_states: torch.Tensor) -> torch.Tensor | None:
        """Logits of words alone: bytes and marks would stream as broken or empty text."""
        slow = torch.isinf(hidden_states).any(dim=-1)
        logits = super().compute_logits(hidden_states.nan_to_num(posinf=0.0))
        if logits is None:
            return None
        logits[:, : vocabulary.FIRST_WORD] = -torch.inf
        logits[:, vocabulary.FIRST_SLOW_WORD :] = -torch.inf
        if slow.any():
            logits[slow] = -torch.inf
            logits[slow, self._slow_word] = 0.0
        return logits
