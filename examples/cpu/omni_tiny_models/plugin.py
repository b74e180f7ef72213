# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-omni-health project
"""Entry point: tells vLLM and vllm-omni about the tiny models and their pipelines."""

from __future__ import annotations

import gc


def register() -> None:
    """Register models and pipelines; called in every process, at times more than once."""
    # `serve` has Python start with the garbage collector off (omni_tiny_models.pth): it costs
    # a quarter of the time that imports take. They are over when plugins are loaded.
    gc.enable()

    from vllm.model_executor.models import ModelRegistry
    from vllm_omni.config.pipeline_registry import OMNI_PIPELINES, register_pipeline
    from vllm_omni.diffusion.registry import register_diffusion_model
    from vllm_omni.model_executor.models.registry import OmniModelRegistry

    from omni_tiny_models.ar import TinyOmniModel
    from omni_tiny_models.pipelines import PIPELINES

    # The class rather than its name, which vLLM would look into in a process of its own.
    for registry in (ModelRegistry, OmniModelRegistry):
        registry.register_model("TinyOmniModel", TinyOmniModel)
    for pipeline in PIPELINES:
        if pipeline.model_type not in OMNI_PIPELINES:
            register_pipeline(pipeline)
    register_diffusion_model(
        "TinyDiffusionPipeline",
        "omni_tiny_models.diffusion",
        "TinyDiffusionPipeline",
        post_process_func_name="image_postprocessor",
    )
