# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-omni-health project
"""The settings in words, for error messages and the documentation."""

from __future__ import annotations

from typing import Literal, NamedTuple, get_args, get_origin

import annotated_types
from pydantic.fields import FieldInfo

from vllm_omni_health.settings import fault_classes
from vllm_omni_health.settings.model import HealthSettings, as_text, variable


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
            default=as_text(field.default),
            unit=unit(field),
            allowed=allowed(field),
            description=field.description or "",
        )
        for name, field in HealthSettings.model_fields.items()
    )


def unit(field: FieldInfo) -> str:
    """What a field's number counts; empty where it is none."""
    extra = field.json_schema_extra
    return str(extra.get("unit", "")) if isinstance(extra, dict) else ""


def allowed(field: FieldInfo) -> str:
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
    return f"{number} of {unit(field)} from {low} to {high}"
