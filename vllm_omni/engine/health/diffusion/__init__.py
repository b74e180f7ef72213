# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-omni-health project
"""Diffusion stages: the replica's process or inline engine, its workers, the channel to it."""
