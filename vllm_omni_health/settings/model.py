# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-omni-health project
"""The settings themselves: names, types, defaults, units and bounds."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, AllowInfNan, BeforeValidator, Field
from pydantic_settings import BaseSettings, NoDecode, SettingsConfigDict

from vllm_omni_health.settings import fault_classes
from vllm_omni_health.settings.floor import ALLOWED as FLOOR_ALLOWED
from vllm_omni_health.settings.floor import check_floor

PREFIX = "VLLM_OMNI_HEALTH_"
"""What the variables of single settings begin with."""


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
    """All settings, validated and immutable. Made by ``sources.load``, never directly: what
    pydantic-settings itself reads from the environment has no check for unknown names.
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
        return {variable(name): as_text(getattr(self, name)) for name in type(self).model_fields}


def variable(name: str) -> str:
    """The environment variable of a setting."""
    return PREFIX + name.upper()


def as_text(value: Any) -> str:
    """A setting's value as it is written in its environment variable."""
    if value is None:
        return ""
    if isinstance(value, dict):
        return fault_classes.render(value)
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, float):
        return repr(int(value)) if value.is_integer() else repr(value)
    return str(value)
