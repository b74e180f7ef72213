# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-omni-health project
"""Workers of LLM stages: vLLM's CPU worker around vllm-omni's model runners."""

# ruff: noqa: I001 - vLLM asks for cpu_worker, which loads its shared-memory extension, first.
from __future__ import annotations

from typing import ClassVar

from vllm.v1.worker.cpu_worker import CPUWorker
from vllm.v1.worker.cpu_model_runner import CPUModelRunner
from vllm_omni.worker.gpu_ar_model_runner import GPUARModelRunner
from vllm_omni.worker.gpu_generation_model_runner import GPUGenerationModelRunner
from vllm_omni.worker.mixins import OmniWorkerMixin


class CPUARModelRunner(GPUARModelRunner, CPUModelRunner):
    """An AR stage's model runner, with vLLM's replacements for device tensors and streams."""


class CPUGenerationModelRunner(GPUGenerationModelRunner, CPUModelRunner):
    """A generation stage's model runner, with the same replacements."""


class _OmniCPUWorker(OmniWorkerMixin, CPUWorker):
    model_runner_cls: ClassVar[type[CPUModelRunner]]

    def init_device(self) -> None:
        super().init_device()
        # CPUWorker has no hook for the runner's class and has just made a plain one.
        # Nothing is loaded yet, so making ours in its place costs milliseconds.
        self.use_v2_model_runner = False
        self.model_runner = self.model_runner_cls(self.vllm_config, self.device)


class CPUARWorker(_OmniCPUWorker):
    """Worker of an autoregressive stage."""

    model_runner_cls = CPUARModelRunner


class CPUGenerationWorker(_OmniCPUWorker):
    """Worker of a generation stage (one forward pass an output, no sampling loop)."""

    model_runner_cls = CPUGenerationModelRunner
