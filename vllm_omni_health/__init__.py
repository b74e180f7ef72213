# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-omni-health project
"""The part of the health layer that imports neither vLLM nor vllm_omni, and so starts fast."""
