"""Pipelines of tiny stages: how many, of which kind, and what is handed from one to the next."""

from __future__ import annotations

from typing import Any

from vllm_omni.config.stage_config import (
    PipelineConfig,
    StageExecutionType,
    StagePipelineConfig,
)
from vllm_omni.inputs.data import OmniTokensPrompt


def hand_over_tokens(
    outputs: list[Any], _prompt: Any = None, _requires_multimodal_data: bool = False
) -> list[OmniTokensPrompt]:
    """The next stage's prompt: this stage's prompt, fault marks and all, and its answer."""
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


def _ar_stage(stage: int, last: bool) -> StagePipelineConfig:
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
        sync_process_input_func=f"{__name__}.hand_over_tokens" if stage else None,
    )


def _ar_chain(stages: int) -> PipelineConfig:
    return PipelineConfig(
        model_type=f"tiny_ar_{stages}",
        model_arch="TinyOmniModel",
        stages=tuple(_ar_stage(stage, stage == stages - 1) for stage in range(stages)),
    )


PIPELINES = tuple(_ar_chain(stages) for stages in (1, 2, 3))
