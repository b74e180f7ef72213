# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-omni-health project
"""Pipelines of tiny stages: how many, of which kind, and what is handed from one to the next."""

from __future__ import annotations

from typing import Any

from vllm_omni.config.stage_config import (
    PipelineConfig,
    StageExecutionType,
    StagePipelineConfig,
)
from vllm_omni.inputs.data import OmniTokensPrompt

from omni_tiny_models.faults import ROUTING, inject
from omni_tiny_models.vocabulary import FAULT_BY_TOKEN, text_of


def _obey_marks(output: Any, stage: int) -> None:
    for token in output.prompt_token_ids or ():
        kind, at, _ = FAULT_BY_TOKEN.get(token, ("", -1, None))
        if kind in ROUTING and at == stage:
            inject(kind, stage)


def _hand_over_tokens(outputs: list[Any], stage: int) -> list[OmniTokensPrompt]:
    """The prompt of ``stage``: the prompt of the one before, marks and all, and its answer."""
    for output in outputs:
        _obey_marks(output, stage)
    return [
        OmniTokensPrompt(
            prompt_token_ids=[
                *(output.prompt_token_ids or ()),
                *output.outputs[0].cumulative_token_ids,
            ],
            additional_information=None,
            multi_modal_data=None,
            mm_processor_kwargs=None,
        )
        for output in outputs
    ]


# Named in the pipelines by their dotted paths, so each is a function of its own.


def hand_over_to_1(
    outputs: list[Any], _prompt: Any = None, _requires_multimodal_data: bool = False
) -> list[OmniTokensPrompt]:
    """The input processor of stage 1."""
    return _hand_over_tokens(outputs, 1)


def hand_over_to_2(
    outputs: list[Any], _prompt: Any = None, _requires_multimodal_data: bool = False
) -> list[OmniTokensPrompt]:
    """The input processor of stage 2."""
    return _hand_over_tokens(outputs, 2)


def text_only(prompt: Any, _sampling_params: Any = None) -> Any:
    """An image request as the AR stage takes it: without sizes meant for image processors."""
    if not isinstance(prompt, dict):
        return prompt
    return {key: prompt[key] for key in ("prompt", "prompt_token_ids") if key in prompt}


def hand_over_text(outputs: list[Any], *_others: Any, **_more: Any) -> dict[str, Any] | None:
    """A diffusion stage's prompt: the AR stage's prompt, fault marks and all, and its answer."""
    if not outputs:
        return None
    output = outputs[0]
    _obey_marks(output, 1)
    tokens = [*(output.prompt_token_ids or ()), *output.outputs[0].cumulative_token_ids]
    return {"prompt": text_of(tokens)}


def _ar_stage(stage: int, last: bool, **more: Any) -> StagePipelineConfig:
    return StagePipelineConfig(
        stage_id=stage,
        model_stage=f"ar{stage}",
        execution_type=StageExecutionType.LLM_AR,
        input_sources=(stage - 1,) if stage else (),
        final_output=last,
        final_output_type="text" if last else None,
        owns_tokenizer=stage == 0,
        engine_output_type="text",
        sampling_constraints={"detokenize": True},
        sync_process_input_func=f"{__name__}.hand_over_to_{stage}" if stage else None,
        **more,
    )


def _ar_chain(stages: int) -> PipelineConfig:
    return PipelineConfig(
        model_type=f"tiny_ar_{stages}",
        model_arch="TinyOmniModel",
        stages=tuple(_ar_stage(stage, stage == stages - 1) for stage in range(stages)),
    )


def _diffusion_stage(stage: int) -> StagePipelineConfig:
    return StagePipelineConfig(
        stage_id=stage,
        model_stage="diffusion",
        execution_type=StageExecutionType.DIFFUSION,
        input_sources=(stage - 1,) if stage else (),
        final_output=True,
        final_output_type="image",
        model_arch="TinyDiffusionPipeline",
        custom_process_input_func=f"{__name__}.hand_over_text" if stage else None,
    )


_DIFFUSION = PipelineConfig(
    model_type="tiny_diffusion",
    model_arch="TinyDiffusionPipeline",
    stages=(_diffusion_stage(0),),
)

_AR_DIFFUSION = PipelineConfig(
    model_type="tiny_ar_diffusion",
    model_arch="TinyOmniModel",
    stages=(
        _ar_stage(0, last=False, prompt_transform_func=f"{__name__}.text_only"),
        _diffusion_stage(1),
    ),
)

PIPELINES = (*(_ar_chain(stages) for stages in (1, 2, 3)), _DIFFUSION, _AR_DIFFUSION)
