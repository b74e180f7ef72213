# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-omni-health project
"""Side-by-side benchmarks: upstream alone, and upstream with the health layer."""
