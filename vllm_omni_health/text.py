# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-omni-health project
"""Text that has to stay on one line."""

from __future__ import annotations


def one_line(text: str) -> str:
    """``text`` with line breaks and control characters written as escapes."""
    return "".join(
        char if char.isprintable() else char.encode("unicode_escape").decode("ascii")
        for char in text
    )
