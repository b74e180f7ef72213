# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-omni-health project
"""Where the layer takes an upstream name and puts its own there: the tables, and who uses them."""

from vllm_omni.health.seams.check import SeamError
from vllm_omni.health.seams.install import (
    Slot,
    assign,
    install_command,
    install_cpu_diffusion,
    install_diffusion_process,
    install_diffusion_worker,
    install_library,
    install_server,
    install_stage_process,
    install_worker,
    original,
)

__all__ = [
    "SeamError",
    "Slot",
    "assign",
    "install_command",
    "install_cpu_diffusion",
    "install_diffusion_process",
    "install_diffusion_worker",
    "install_library",
    "install_server",
    "install_stage_process",
    "install_worker",
    "original",
]
