# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-omni-health project
"""Autoregressive stages: the engine core's process, its workers, the channel between them."""
