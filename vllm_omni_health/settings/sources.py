# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-omni-health project
"""Where settings come from: environment variables and ``--additional-config``.

``--additional-config '{"health": {…}}'`` wins over ``VLLM_OMNI_HEALTH_*``. Whatever is wrong
stops the start with one line that names the key, where it came from, its value and what is
allowed. An environment variable that is set but empty counts as not set.
"""

from __future__ import annotations

import difflib
import json
import os
import stat
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any

from pydantic import TypeAdapter, ValidationError

from vllm_omni_health.settings import fault_classes
from vllm_omni_health.settings.floor import Floor
from vllm_omni_health.settings.model import PREFIX, HealthSettings, as_text, variable
from vllm_omni_health.settings.words import allowed
from vllm_omni_health.text import one_line

SWITCH = "VLLM_OMNI_HEALTH"
"""The variable that switches the whole layer on or off."""

_ON = ("on", "1", "true", "yes")
_OFF = ("off", "0", "false", "no")
_SHOWN_LIMIT = 80


class SettingsError(ValueError):
    """A setting is unknown, of a wrong type or impossible. Its text is one line for a person."""


def enabled(environ: Mapping[str, str] = os.environ) -> bool:
    """Whether the layer is switched on, which is the default.

    Raises SettingsError if ``VLLM_OMNI_HEALTH`` is neither on nor off.
    """
    value = environ.get(SWITCH, "").strip().lower()
    if value in _OFF:
        return False
    if value in _ON or not value:
        return True
    raise SettingsError(
        f"environment variable {SWITCH}={_shown(environ[SWITCH])}: must be one of "
        f"{', '.join(_ON + _OFF)}"
    )


def check_environ(environ: Mapping[str, str] = os.environ) -> None:
    """Look at each variable by itself; an argument may still change what they mean together.

    Raises SettingsError for the first thing that is wrong.
    """
    _from_environ(environ)


def load(
    argument: Mapping[str, Any] | None = None, environ: Mapping[str, str] = os.environ
) -> HealthSettings:
    """The settings in force. ``argument`` is the ``health`` part of ``--additional-config``.

    Raises SettingsError for the first thing that is wrong.
    """
    values = {name: field.default for name, field in HealthSettings.model_fields.items()}
    given, places = _from_environ(environ)
    values |= given
    if argument is not None and not isinstance(argument, Mapping):
        raise SettingsError(
            f'--additional-config: "health" is {_shown(argument)}: must be an object of settings'
        )
    for key, value in (argument or {}).items():
        place = f"--additional-config: health.{key}"
        if key not in values:
            raise _unknown(place, key, values)
        values[key] = _checked(key, value, place, strict=True)
        places[key] = place
    _check_together(values, places)
    # With every field given, nothing is left for pydantic-settings to take from os.environ.
    return HealthSettings(**values)


def _from_environ(environ: Mapping[str, str]) -> tuple[dict[str, Any], dict[str, str]]:
    """The values that variables give, and for each the place to name in messages."""
    values: dict[str, Any] = {}
    places: dict[str, str] = {}
    names_by_variable = {variable(name): name for name in HealthSettings.model_fields}
    for key in sorted(environ):
        if not key.startswith(PREFIX) or environ[key] == "":
            continue
        place = f"environment variable {key}"
        if key not in names_by_variable:
            raise _unknown(place, key, names_by_variable)
        name = names_by_variable[key]
        values[name] = _checked(name, environ[key], place, strict=False)
        places[name] = place
    return values, places


def _checked(name: str, value: Any, place: str, *, strict: bool) -> Any:
    """The value as the setting's type. Strict: JSON's own types, so no "5" for a number."""
    field = HealthSettings.model_fields[name]
    kind: Any = field.annotation
    for constraint in field.metadata:
        kind = Annotated[kind, constraint]
    adapter: TypeAdapter[Any] = TypeAdapter(kind)
    try:
        if strict:
            checked = adapter.validate_json(json.dumps(value), strict=True)
        else:
            checked = adapter.validate_python(value.strip())
    except (ValidationError, TypeError, ValueError):
        shown = f"{place}={_shown(value)}"
        raise SettingsError(f"{shown}: must be {allowed(field)}") from None
    if isinstance(checked, dict):
        try:
            checked = fault_classes.checked(checked)
        except fault_classes.FaultClassError as exc:
            raise SettingsError(f"{place}: {exc}; must be {allowed(field)}") from None
    if isinstance(checked, Path):
        checked = checked.absolute()
        # Better now than when there is a reason to write.
        try:
            usable = not stat.S_ISDIR(_mode(checked)) and stat.S_ISDIR(_mode(checked.parent))
        except (OSError, ValueError):  # no name for a file
            usable = False
        if not usable:
            raise SettingsError(f"{place}={_shown(value)}: must be a file in a folder that exists")
    return checked


def _mode(path: Path) -> int:
    """The file's mode, 0 where there is none; raises for what cannot be a file's name."""
    try:
        return path.stat().st_mode
    except FileNotFoundError:
        return 0


def _check_together(values: Mapping[str, Any], places: Mapping[str, str]) -> None:
    if values["memory_interval_s"] == 0 and Floor.parse(values["min_free_memory"]):
        place = places.get("memory_interval_s", "memory_interval_s")
        raise SettingsError(f"{place}=0: must be above 0 for min_free_memory to have an effect")
    if values["drain_timeout_s"] < values["shutdown_timeout_s"]:
        return
    names = ("drain_timeout_s", "shutdown_timeout_s")
    drain, shutdown = (
        f"{places.get(name, f'{name} (default)')}={as_text(values[name])}" for name in names
    )
    raise SettingsError(f"{drain}: must be below {shutdown}, which includes draining")


def _unknown(place: str, key: object, known: Mapping[str, Any]) -> SettingsError:
    close = difflib.get_close_matches(str(key), known, n=1)
    hint = f"did you mean {close[0]}? " if close else ""
    return SettingsError(f"{_line(place)}: no such setting; {hint}known are {', '.join(known)}")


def _shown(value: Any) -> str:
    try:
        text = json.dumps(value)
    except (TypeError, ValueError):
        text = repr(value)
    return _line(text)


def _line(text: str) -> str:
    line = one_line(text)
    return line if len(line) <= _SHOWN_LIMIT else line[: _SHOWN_LIMIT - 3] + "..."
