"""Settings of the health layer: environment variables and ``--additional-config``.

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
from typing import Annotated, Any, Literal, NamedTuple, get_args, get_origin

import annotated_types
from pydantic import (
    AfterValidator,
    AllowInfNan,
    BeforeValidator,
    Field,
    TypeAdapter,
    ValidationError,
)
from pydantic.fields import FieldInfo
from pydantic_settings import BaseSettings, NoDecode, SettingsConfigDict
from vllm_omni.health.faults import classes as fault_classes
from vllm_omni.health.faults.fault import one_line
from vllm_omni.health.memory.floor import ALLOWED as FLOOR_ALLOWED
from vllm_omni.health.memory.floor import Floor, check_floor

SWITCH = "VLLM_OMNI_HEALTH"
"""The variable that switches the whole layer on or off."""

PREFIX = "VLLM_OMNI_HEALTH_"
"""What the variables of single settings begin with."""

_ON = ("on", "1", "true", "yes")
_OFF = ("off", "0", "false", "no")
_SHOWN_LIMIT = 80


class SettingsError(ValueError):
    """A setting is unknown, of a wrong type or impossible. Its text is one line for a person."""


def _field(
    default: Any, description: str, *, unit: str = "", allowed: str = "", **bounds: Any
) -> Any:
    extra: Any = {"unit": unit, "allowed": allowed}
    return Field(default, description=description, json_schema_extra=extra, **bounds)


Seconds = Annotated[float, AllowInfNan(False)]
Number = Annotated[float, AllowInfNan(False)]


def _entries(value: Any) -> Any:
    return fault_classes.parse(value) if isinstance(value, str) else value


FaultClasses = Annotated[
    dict[str, str],
    NoDecode,  # in the environment it is no JSON
    BeforeValidator(_entries),
]


class HealthSettings(BaseSettings):
    """All settings, validated and immutable. Made by :func:`load`, never directly:
    what pydantic-settings itself reads from the environment has no check for unknown names.
    """

    model_config = SettingsConfigDict(
        env_prefix=PREFIX, env_ignore_empty=True, extra="forbid", frozen=True
    )

    policy: Literal["exit", "hold"] = _field(
        "exit",
        "After a fault that leaves no way to serve: end the process with the fault's exit "
        "status, or stay up answering 503 until told to stop",
    )
    exit_grace_s: Seconds = _field(
        5.0,
        "How long a server that is about to exit still answers 503, so that probes and load "
        "balancers see it",
        unit="seconds",
        ge=0,
        le=3600,
    )
    retry_after_s: int = _field(
        10, "Retry-After header of 503 answers", unit="seconds", ge=0, le=86400
    )
    degraded_is_unhealthy: bool = _field(
        False, "Whether /health answers 503 in every DEGRADED state, also while it accepts"
    )
    termination_log: Path | None = _field(
        None,
        "File that gets the reason for the exit as one line of JSON; in Kubernetes "
        "/dev/termination-log",
    )
    drain_timeout_s: Seconds = _field(
        0.0,
        "How long requests in flight may go on when the server is told to stop; part of "
        "shutdown_timeout_s",
        unit="seconds",
        ge=0,
        le=86400,
    )
    shutdown_timeout_s: Seconds = _field(
        30.0,
        "Longest time from being told to stop to the end of the process",
        unit="seconds",
        ge=1,
        le=86400,
    )
    hang_timeout_s: Seconds = _field(
        300.0,
        "How long a stage, or one of the server's own loops, may make no progress before it "
        "counts as hung and is ended; 0 switches this off. Longer than the longest single step, "
        "such as a long prefill",
        unit="seconds",
        ge=0,
        le=86400,
    )
    remote_timeout_s: Seconds = _field(
        30.0,
        "How long a stage on another host may send no heartbeat before it counts as lost; they "
        "come every five seconds, and are passed on every five",
        unit="seconds",
        ge=12,
        le=3600,
    )
    loop_stall_s: Seconds = _field(
        10.0,
        "How long the orchestrator's loop may stand still before requests are refused and "
        "/livez asks for a restart",
        unit="seconds",
        ge=1,
        le=3600,
    )
    error_budget: int = _field(
        0,
        "How many requests may fail by errors of the server's within error_budget_window_s; with "
        "more the server is DEGRADED and still accepts. 0 switches this off. Requests that the "
        "client is to blame for, or that it aborts, do not count",
        unit="failed requests",
        ge=0,
        le=100000,
    )
    error_budget_window_s: Seconds = _field(
        60.0,
        "The time in which failed requests count against error_budget",
        unit="seconds",
        ge=1,
        le=86400,
    )
    fault_classes: FaultClasses = _field(
        {},
        "Exception classes that are known by name beyond those of the table built in, or in "
        "their place: CLASS=KIND, or CLASS=KIND:SEVERITY, comma-separated; as JSON an object",
    )
    settle_s: Seconds = _field(
        0.1,
        "How long a more telling fault may replace the first one as the reason",
        unit="seconds",
        ge=0,
        le=5,
    )
    min_free_memory: Annotated[str, AfterValidator(check_floor)] = _field(
        "0",
        "Memory that has to be free, on each device in use, for new requests to be admitted; 0 "
        "switches this off",
        allowed=FLOOR_ALLOWED,
    )
    memory_interval_s: Seconds = _field(
        1.0,
        "Time between two looks at memory; 0 switches all watching of memory off",
        unit="seconds",
        ge=0,
        le=3600,
    )
    memory_recover_s: Seconds = _field(
        5.0,
        "How long memory has to be above min_free_memory before requests are admitted again",
        unit="seconds",
        ge=0,
        le=3600,
    )
    memory_discrepancy_pct: Number = _field(
        5.0,
        "Growth of memory that no stage accounts for, in percent of what is expected, above "
        "which there is a warning; 0 switches the warning off",
        unit="percent",
        ge=0,
        le=1000,
    )
    memory_window_s: Seconds = _field(
        30.0,
        "How long such growth has to last for the warning",
        unit="seconds",
        ge=0,
        le=86400,
    )
    preflight: Literal["fail", "warn", "off"] = _field(
        "warn",
        "What to do when memory is not as it should be before stages start, or once they are "
        "ready: stop the start, say so in the log, or not look at all",
    )
    simulated_device: Path | None = _field(
        None,
        "For drills alone: a file that stands for one more device, whose memory is what the "
        "file says",
    )

    def to_environ(self) -> dict[str, str]:
        """These settings as environment variables, for child processes.

        Every setting is named, so that updating an environment with them leaves nothing of
        what it said before.
        """
        return {variable(name): _as_text(getattr(self, name)) for name in type(self).model_fields}


def variable(name: str) -> str:
    """The environment variable of a setting."""
    return PREFIX + name.upper()


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


def load(
    argument: Mapping[str, Any] | None = None, environ: Mapping[str, str] = os.environ
) -> HealthSettings:
    """The settings in force. ``argument`` is the ``health`` part of ``--additional-config``.

    Raises SettingsError for the first thing that is wrong.
    """
    values = {name: field.default for name, field in HealthSettings.model_fields.items()}
    places: dict[str, str] = {}
    names_by_variable = {variable(name): name for name in values}
    for key in sorted(environ):
        if not key.startswith(PREFIX) or environ[key] == "":
            continue
        place = f"environment variable {key}"
        if key not in names_by_variable:
            raise _unknown(place, key, names_by_variable)
        name = names_by_variable[key]
        values[name] = _checked(name, environ[key], place, strict=False)
        places[name] = place
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


class SettingRow(NamedTuple):
    """One setting as documentation shows it."""

    name: str
    variable: str
    default: str
    unit: str
    allowed: str
    description: str


def describe() -> tuple[SettingRow, ...]:
    """All settings, for ``--help`` and the documentation."""
    return tuple(
        SettingRow(
            name=name,
            variable=variable(name),
            default=_as_text(field.default),
            unit=_unit(field),
            allowed=_allowed(field),
            description=field.description or "",
        )
        for name, field in HealthSettings.model_fields.items()
    )


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
        raise SettingsError(f"{shown}: must be {_allowed(field)}") from None
    if isinstance(checked, dict):
        try:
            checked = fault_classes.checked(checked)
        except fault_classes.FaultClassError as exc:
            raise SettingsError(f"{place}: {exc}; must be {_allowed(field)}") from None
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
        f"{places.get(name, f'{name} (default)')}={_as_text(values[name])}" for name in names
    )
    raise SettingsError(f"{drain}: must be below {shutdown}, which includes draining")


def _unknown(place: str, key: object, known: Mapping[str, Any]) -> SettingsError:
    close = difflib.get_close_matches(str(key), known, n=1)
    hint = f"did you mean {close[0]}? " if close else ""
    return SettingsError(f"{_line(place)}: no such setting; {hint}known are {', '.join(known)}")


def _unit(field: FieldInfo) -> str:
    extra = field.json_schema_extra
    return str(extra.get("unit", "")) if isinstance(extra, dict) else ""


def _allowed(field: FieldInfo) -> str:
    """What a field accepts, in words."""
    extra = field.json_schema_extra
    if isinstance(extra, dict) and extra.get("allowed"):
        return str(extra["allowed"])
    if get_origin(field.annotation) is Literal:
        return " or ".join(get_args(field.annotation))
    if field.annotation is bool:
        return "true or false"
    if field.annotation == dict[str, str]:
        return fault_classes.ALLOWED
    if field.annotation not in (int, float):
        return "the path of a file"
    low = next(item.ge for item in field.metadata if isinstance(item, annotated_types.Ge))
    high = next(item.le for item in field.metadata if isinstance(item, annotated_types.Le))
    number = "a whole number" if field.annotation is int else "a number"
    return f"{number} of {_unit(field)} from {low} to {high}"


def _as_text(value: Any) -> str:
    if value is None:
        return ""
    if isinstance(value, dict):
        return fault_classes.render(value)
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, float):
        return repr(int(value)) if value.is_integer() else repr(value)
    return str(value)


def _shown(value: Any) -> str:
    try:
        text = json.dumps(value)
    except (TypeError, ValueError):
        text = repr(value)
    return _line(text)


def _line(text: str) -> str:
    line = one_line(text)
    return line if len(line) <= _SHOWN_LIMIT else line[: _SHOWN_LIMIT - 3] + "..."
