# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-omni-health project
"""The line of JSON that a server ends with, on stderr and in a termination log.

Here is what needs no fault; ``vllm_omni/health/faults/exit_line.py`` has the line of one.
"""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any, TextIO

SCHEMA_VERSION = 1
"""Value of ``schema``; grows when a field changes its meaning or goes away."""

TERMINATION_LOG_LIMIT = 4096
"""Bytes that the kubelet reads of a container's termination message; the rest is cut off, which
would leave no JSON ("Determine the Reason for Pod Failure" in the Kubernetes documentation)."""

_NO_FAULT = {
    0: "The server stopped as it was told to.",
    1: "The server could not start; its log says why.",
    2: "The server could not start: its command line makes no sense.",
}
_NO_FAULT_OTHER = "The server ended without a fault of its own."


def line_without_fault(exit_status: int) -> str:
    """The line of a server that nothing of its own has ended, without its newline."""
    return json.dumps(without_fault(exit_status))


def without_fault(exit_status: int) -> dict[str, Any]:
    """The fields of that line."""
    return {
        "schema": SCHEMA_VERSION,
        "exit_status": exit_status,
        "kind": None,
        "message": _NO_FAULT.get(exit_status, _NO_FAULT_OTHER),
    }


def write_line(line: str, path: Path | None, stream: TextIO | None) -> bool:
    """Write the line to ``stream``, and to the file at ``path`` if there is one.

    The file is replaced, so a later reason takes the place of an earlier one. Never raises: what
    cannot be written to the file is complained about on the stream. Returns whether everything
    was written.
    """
    written = _write_stream(stream, line)
    if path is None:
        return written
    try:
        _write_file(path, line.encode() + b"\n")
    except (OSError, ValueError) as error:
        _write_stream(stream, f"cannot write the termination log {str(path)!a}: {error!a}")
        return False
    return written


def _write_stream(stream: TextIO | None, line: str) -> bool:
    if stream is None:  # sys.stderr of a process without one
        return False
    try:
        # One write, so that lines of other processes do not come in between.
        stream.write(line + "\n")
        stream.flush()
    except (OSError, ValueError):  # closed, or nobody reads it any more
        return False
    return True


def _write_file(path: Path, data: bytes) -> None:
    # Not blocking: a pipe without a reader must not hold up the exit.
    flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC | os.O_NONBLOCK
    descriptor = os.open(path, flags, 0o644)
    try:
        while data:
            data = data[os.write(descriptor, data) :]
    finally:
        os.close(descriptor)
