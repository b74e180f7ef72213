# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-omni-health project
"""Where the tests find what they serve."""

from pathlib import Path

ROOT = Path(__file__).parents[2]
SERVE = ROOT / "examples" / "cpu" / "serve"
MEMORY_TOOL = ROOT / ".venv" / "bin" / "vllm-omni-memory"
VLLM = ROOT / ".venv" / "bin" / "vllm"
MODEL = ROOT / "build" / "cpu-models" / "ar"
