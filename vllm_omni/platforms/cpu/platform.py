# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-omni-health project
"""The platform class: which workers and backends to use, and what the "device" is."""

from __future__ import annotations

import psutil
import torch
from vllm.platforms.cpu import CpuPlatform
from vllm_omni.health import seams
from vllm_omni.platforms.interface import OmniPlatform, OmniPlatformEnum

# Devices are a way to place stages, not hardware: replicas of one stage want an id each,
# and stages with different ids are started side by side.
VIRTUAL_DEVICES = 16


class CpuOmniPlatform(OmniPlatform, CpuPlatform):
    """vLLM's CPU platform with what vllm-omni asks of a platform on top."""

    _omni_enum = OmniPlatformEnum.OOT
    # Where vllm-omni notes a stage's devices. vLLM reads NUMA nodes from its own variable,
    # and a machine with one node would refuse a stage on device 1.
    device_control_env_var = "VLLM_OMNI_CPU_VISIBLE_DEVICES"

    # -- workers ---------------------------------------------------------------

    @classmethod
    def get_omni_ar_worker_cls(cls) -> str:
        return "vllm_omni.platforms.cpu.worker.CPUARWorker"

    @classmethod
    def get_omni_generation_worker_cls(cls) -> str:
        return "vllm_omni.platforms.cpu.worker.CPUGenerationWorker"

    @classmethod
    def get_diffusion_worker_cls(cls) -> str:
        # Asked for by every process that is about to run a diffusion worker, and by no
        # other: the one place to prepare diffusion for a device without streams.
        seams.install_cpu_diffusion()
        return super().get_diffusion_worker_cls()

    @classmethod
    def get_diffusion_attn_backend_cls(
        cls, selected_backend: str | None, head_size: int, allow_trtllm_default: bool = False
    ) -> str:
        if selected_backend is not None and selected_backend.upper() != "TORCH_SDPA":
            raise ValueError(
                f"diffusion attention backend {selected_backend} does not run on CPU; "
                "use TORCH_SDPA or leave the choice to the platform"
            )
        return "vllm_omni.platforms.cpu.diffusion.CpuSDPABackend"

    @classmethod
    def get_default_stage_config_path(cls) -> str:
        return "vllm_omni/deploy"

    @classmethod
    def supports_torch_inductor(cls) -> bool:
        # Compiling costs minutes on a small machine and gains a tiny model nothing.
        return False

    # -- the device ------------------------------------------------------------

    @classmethod
    def get_torch_device(cls, local_rank: int | None = None) -> torch.device:
        return torch.device("cpu")

    @classmethod
    def get_device_count(cls) -> int:
        return VIRTUAL_DEVICES

    @classmethod
    def get_device_version(cls) -> str | None:
        return None

    @classmethod
    def synchronize(cls) -> None:
        return None

    # -- memory ----------------------------------------------------------------
    # vLLM's Platform answers None for anything that torch.cpu lacks, and callers then call
    # that None. So the memory functions are all defined here.

    @classmethod
    def get_free_memory(cls, device: torch.device | None = None) -> int:
        return int(psutil.virtual_memory().available)

    @classmethod
    def get_device_memory(cls, device: torch.device | None = None) -> tuple[int, int]:
        memory = psutil.virtual_memory()
        return int(memory.available), int(memory.total)

    @classmethod
    def get_device_total_memory(cls, device_id: int = 0) -> int:
        return int(psutil.virtual_memory().total)

    @classmethod
    def empty_cache(cls) -> None:
        return None

    @classmethod
    def reset_peak_memory_stats(cls, device: torch.device | None = None) -> None:
        return None

    @classmethod
    def max_memory_reserved(cls, device: torch.device | None = None) -> int:
        return int(psutil.Process().memory_info().rss)

    @classmethod
    def max_memory_allocated(cls, device: torch.device | None = None) -> int:
        return int(psutil.Process().memory_info().rss)
