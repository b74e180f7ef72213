# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-omni-health project
"""Installs the tables, and sets what else of upstream's is set. No other module does either.

All of a process's table is checked, and everything of ours that it names is imported, before the
first row is installed: the layer is there as a whole or the start stops with one line. Importing
this module imports nothing of upstream; installing does.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from vllm_omni.health.seams.check import SeamError, check_use, checked_seam
from vllm_omni.health.seams.rows import Table
from vllm_omni.health.seams.tables import (
    COMMAND,
    CPU_DIFFUSION,
    DIFFUSION_PROCESS,
    DIFFUSION_WORKER,
    LIBRARY,
    SERVER,
    STAGE_PROCESS,
    WORKER,
)

from vllm_omni_health.upstream import check_versions, unfit

_originals: dict[str, Any] = {}


# ---- one function for each kind of process -----------------------------------------------------


def install_command() -> None:
    """Take the ``serve`` command. Done while upstream builds its argument parser."""
    _install(COMMAND)


def install_server() -> None:
    """Take everything else that a server process needs."""
    _install(SERVER)


def install_library() -> None:
    """Take what a process needs that uses the engine without the HTTP server."""
    _install(LIBRARY)


def install_stage_process() -> None:
    """Take what an engine-core process needs."""
    _install(STAGE_PROCESS)


def install_worker() -> None:
    """Take what a worker process needs."""
    _install(WORKER)


def install_diffusion_process() -> None:
    """Take what a diffusion replica's own process needs."""
    _install(DIFFUSION_PROCESS)


def install_diffusion_worker() -> None:
    """Take what a diffusion worker process needs."""
    _install(DIFFUSION_WORKER)


def install_cpu_diffusion() -> None:
    """Take what a diffusion worker needs on a device without streams, also with the layer off."""
    _install(CPU_DIFFUSION)


def original(target: str) -> Any:
    """What stood at ``target`` before it was taken. KeyError when it was not."""
    return _originals[target]


def assign(thing: Any, **attributes: Any) -> None:
    """Set attributes of an object of upstream's; SeamError where it has no such attribute."""
    for name, value in attributes.items():
        if not hasattr(thing, name):
            raise SeamError(f"{type(thing).__name__}.{name} cannot be set: there is none")
        setattr(thing, name, value)


class Slot:
    """Data descriptor for an attribute that upstream assigns on its instances.

    Put on upstream's class it makes ``convert(instance, value)`` of whatever is assigned, from the
    first assignment on: upstream keeps references to what it has read.
    """

    def __init__(self, name: str, convert: Callable[[Any, Any], Any]) -> None:
        self._name = name
        self._convert = convert

    def __get__(self, instance: Any, owner: type | None = None) -> Any:
        if instance is None:
            return self
        try:
            return vars(instance)[self._name]
        except KeyError:
            raise AttributeError(self._name) from None

    def __set__(self, instance: Any, value: Any) -> None:
        vars(instance)[self._name] = self._convert(instance, value)


# ---- checking and installing -------------------------------------------------------------------


def _install(table: Table) -> None:
    versions = check_versions()
    try:
        for use in table.uses:
            check_use(use)
        rows = [
            (seam.target, *checked_seam(seam))
            for seam in table.seams
            if seam.target not in _originals
        ]
    except SeamError as exc:
        raise SeamError(unfit(versions, str(exc))) from None
    for target, owner, name, found, replacement in rows:
        _originals[target] = found
        setattr(owner, name, replacement)
