# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-omni-health project
"""Exception classes that installed packages name, by entry points of the group :data:`GROUP`.

Each entry point stands for a mapping of dotted class names to ``KIND`` or ``KIND:SEVERITY``, or
a function that returns one. Nothing is imported to recognise a class, so a plugin's mapping
best lies in a module that imports nothing heavy.
"""

from __future__ import annotations

import importlib.metadata
from collections.abc import Mapping

from vllm_omni_health.settings.fault_classes import ALLOWED, FaultClassError, checked
from vllm_omni_health.text import one_line

GROUP = "vllm_omni_health.fault_classes"
"""Entry-point group of plugins."""


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
