# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-omni-health project
"""Exception classes that an operator or a plugin names: the form of their entries.

A dotted class name stands for ``KIND`` or ``KIND:SEVERITY``. What comes of the entries is the
business of ``vllm_omni/health/faults/table.py``.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from vllm_omni_health.kinds import FaultKind, Severity
from vllm_omni_health.text import one_line

ALLOWED = (
    f"CLASS=KIND or CLASS=KIND:SEVERITY, comma-separated; kinds are {', '.join(FaultKind)}, "
    f"severities {' or '.join(Severity)}, of which {Severity.FATAL} is the default"
)
"""What the setting accepts, in words."""


class FaultClassError(ValueError):
    """An entry makes no sense. Its text is one line that names the entry and what is wrong."""


def parse(text: str) -> dict[str, str]:
    """The entries in the setting's text form, not checked yet."""
    entries: dict[str, str] = {}
    for entry in filter(None, (part.strip() for part in text.split(","))):
        name, _, verdict = entry.partition("=")
        entries[name.strip()] = verdict.strip()
    return entries


def render(entries: Mapping[str, str]) -> str:
    """The text form of entries."""
    return ", ".join(f"{name}={verdict}" for name, verdict in entries.items())


def checked(entries: Mapping[str, Any]) -> dict[str, str]:
    """The same entries, severities filled in. Raises FaultClassError for the first bad one."""
    return {name: _checked(name, verdict) for name, verdict in entries.items()}


def _checked(name: Any, verdict: Any) -> str:
    shown = one_line(f"{name}={verdict}")
    if not isinstance(name, str) or not all(part.isidentifier() for part in name.split(".")):
        raise FaultClassError(f"{shown}: not the dotted name of a class")
    if "." not in name:
        raise FaultClassError(f"{shown}: write builtins.{name} for a class of Python's own")
    kind, _, severity = str(verdict).partition(":")
    if kind not in list(FaultKind):
        raise FaultClassError(f"{shown}: no kind {kind!r}")
    if (severity or Severity.FATAL) not in list(Severity):
        raise FaultClassError(f"{shown}: no severity {severity!r}")
    return f"{kind}:{severity or Severity.FATAL}"
