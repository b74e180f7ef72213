"""Exception classes that an operator or a plugin adds to the classification table.

A setting names them, and so may installed packages, by entry points of the group
:data:`GROUP`: each stands for a mapping of dotted class names to ``KIND`` or ``KIND:SEVERITY``,
or a function that returns one. Nothing is imported to recognise a class, so a plugin's mapping
best lies in a module that imports nothing heavy.

The server reads both once, when it starts. Stage and worker processes find what came of it in
their environment.
"""

from __future__ import annotations

import importlib.metadata
import logging
import os
from collections.abc import Mapping
from typing import Any

from vllm_omni.health.faults.classify import DEFAULT_TABLE, ClassificationTable
from vllm_omni.health.faults.fault import FaultKind, Severity, one_line

logger = logging.getLogger(__name__)

GROUP = "vllm_omni_health.fault_classes"
"""Entry-point group of plugins."""

VARIABLE = "VLLM_OMNI_HEALTH_FAULT_CLASSES"
"""The setting's environment variable, in which child processes find all classes added."""

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


def from_plugins() -> dict[str, str]:
    """The entries of all plugins. Raises FaultClassError, naming the plugin."""
    entries: dict[str, str] = {}
    for plugin in importlib.metadata.entry_points(group=GROUP):
        place = f"plugin {plugin.name} ({GROUP})"
        try:
            loaded = plugin.load()
            found = loaded() if callable(loaded) else loaded
        except Exception as exc:
            raise FaultClassError(
                f"{place}: cannot be loaded: {type(exc).__name__}: {one_line(str(exc))}"
            ) from exc
        if not isinstance(found, Mapping):
            raise FaultClassError(f"{place}: gives {type(found).__name__}, not a mapping")
        try:
            entries |= checked(found)
        except FaultClassError as exc:
            raise FaultClassError(f"{place}: {exc}; must be {ALLOWED}") from None
    return entries


def table_with(entries: Mapping[str, str]) -> ClassificationTable:
    """The built-in table with entries as :func:`checked` returns them."""
    pairs = {name: verdict.partition(":")[::2] for name, verdict in entries.items()}
    return DEFAULT_TABLE.extended(pairs)


_in_force: ClassificationTable | None = None


def use(table: ClassificationTable | None) -> None:
    """Classify by this table from now on; None: by what the environment says."""
    global _in_force
    _in_force = table


def in_force() -> ClassificationTable:
    """The table of this process. Never raises: it is asked for where something has failed."""
    global _in_force
    if _in_force is None:
        try:
            _in_force = table_with(checked(parse(os.environ.get(VARIABLE, ""))))
        except Exception as exc:
            # The server has checked it before, so this is a process of somebody else's.
            logger.error("[health] %s is ignored: %s", VARIABLE, exc)
            _in_force = DEFAULT_TABLE
    return _in_force
