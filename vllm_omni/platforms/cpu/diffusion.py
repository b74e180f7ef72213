# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-omni-health project
"""What diffusion workers need on a device without streams and without flash attention."""

from __future__ import annotations

import torch
from vllm.logger import init_logger
from vllm_omni.diffusion.attention.backends.abstract import AttentionMetadata
from vllm_omni.diffusion.attention.backends.sdpa import SDPABackend, SDPAImpl
from vllm_omni.diffusion.data import AsyncDiffusionOutput, AsyncOutputKind
from vllm_omni.diffusion.ipc import pack_diffusion_output_shm
from vllm_omni.diffusion.worker.diffusion_worker import WorkerProc
from vllm_omni.health import seams

logger = init_logger(__name__)


class CpuSDPAImpl(SDPAImpl):
    """Torch's scaled-dot-product attention; upstream dispatches by accelerator only."""

    def forward(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        attn_metadata: AttentionMetadata | None = None,
    ) -> torch.Tensor:
        return self._forward_impl(query, key, value, attn_metadata)


class CpuSDPABackend(SDPABackend):
    """The attention backend of diffusion models on CPU."""

    @staticmethod
    def get_impl_cls() -> type[SDPAImpl]:
        return CpuSDPAImpl


def send_outputs(worker: WorkerProc) -> None:
    """Send finished outputs from the worker's output thread until told to stop.

    The counterpart of the loop that copies from the device on a stream of its own. On CPU
    there is no accelerator to ask for a stream, and the output is in memory already.
    """
    while (item := worker._async_output_queue.get()) is not None:
        output, output_id, _event = item
        message = AsyncDiffusionOutput(kind=AsyncOutputKind.OUTPUT_READY, async_output_id=output_id)
        try:
            pack_diffusion_output_shm(output)
            seams.assign(message, output=output)
        except Exception:
            logger.exception("packing diffusion output %s failed", output_id)
            seams.assign(message, error="packing the output into shared memory failed")
        worker._enqueue_result(message)
        with worker._async_output_done:
            left = max(0, worker._async_output_pending - 1)
            seams.assign(worker, _async_output_pending=left)
            worker._async_output_done.notify_all()
