# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-omni-health project
"""The reason for a server's end, as one line of JSON, for stderr and a termination log."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, TextIO

from vllm_omni.health.faults.fault import Fault

from vllm_omni_health.exit_line import SCHEMA_VERSION, line_without_fault, write_line


def exit_line(fault: Fault | None, exit_status: int) -> str:
    """The line without its newline: ASCII, and with one at most TERMINATION_LOG_LIMIT bytes.

    Like :meth:`Fault.public` it has no text of an exception, no prompt and no paths.
    """
    if fault is None:
        return line_without_fault(exit_status)
    reason: dict[str, Any] = {"schema": SCHEMA_VERSION, "exit_status": exit_status}
    reason |= fault.public()
    reason |= {
        "rank": fault.rank,
        "pid": fault.pid,
        "exception": fault.exception,
        "exit_code": fault.exit_code,
        "signal": fault.signal,
        "core_dumped": fault.core_dumped,
    }
    return json.dumps(reason)


def write_exit_line(
    fault: Fault | None, exit_status: int, path: Path | None, stream: TextIO | None
) -> bool:
    """Write the line to ``stream``, and to the file at ``path`` if there is one, as
    :func:`vllm_omni_health.exit_line.write_line` does. Never raises; whether all was written.
    """
    return write_line(exit_line(fault, exit_status), path, stream)
