# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-omni-health project
"""A start that is refused: one line for the person there, one in the termination log, a status."""

from __future__ import annotations

import os
from pathlib import Path
from typing import NoReturn

from vllm_omni_health.console import complain
from vllm_omni_health.exit_line import line_without_fault, write_line


def refuse(why: object, status: int = 1) -> NoReturn:
    """Say why this process does not start, and end it by SystemExit."""
    complain(why)
    note_refusal(status)
    raise SystemExit(status)


def note_refusal(status: int) -> None:
    """Write to the termination log alone, for who has said why already.

    The settings may be what is wrong, so its file is looked for where it is usually set.
    """
    from vllm_omni_health.settings.model import variable

    log = os.environ.get(variable("termination_log"))
    write_line(line_without_fault(status), Path(log) if log else None, None)
