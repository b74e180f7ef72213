# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-omni-health project
"""Tiny models for vllm-omni stages that run anywhere and fail when a prompt says so."""
