# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-omni-health project
"""The orchestrator's side of the health layer, and what runs in stage processes and workers."""
