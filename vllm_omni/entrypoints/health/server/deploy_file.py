# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-omni-health project
"""A deploy file as its author sees it: with lines, and as strict as a person would be.

Upstream reads these files leniently: a key it does not know at the top level, a second stage of
the same number or a stage without a number are passed over. What is refused here is what upstream
cannot read, or reads without using it. What may be in a file is asked of upstream's own classes.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterator
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, get_type_hints

import yaml
from pydantic import TypeAdapter, ValidationError
from vllm_omni.config.stage_config import _DEPLOY_DIR, DeployConfig
from vllm_omni.engine.arg_utils import OrchestratorArgs
from vllm_omni.entrypoints.health.server.arguments import BadInput

from vllm_omni_health.text import one_line

_BASE = "base_config"
"""The key that names another file, which this one is put on top of."""

_SIMPLE = (bool, bool | None, int, int | None)
"""Types of which a value is checked here: upstream takes what is given for them."""


@dataclass(frozen=True)
class Entry:
    """One key of a stage, and where it is. ``stage_id`` is None where the stage has none."""

    place: str
    stage_id: Any
    key: str
    value: Any


def find(name: str) -> Path | None:
    """The file that upstream would take for the option's value; None where there is none."""
    for path in (Path(name), Path(_DEPLOY_DIR) / name):
        if path.exists() and name:
            return path
    return None


def check(path: Path, option: str = "--deploy-config") -> tuple[Entry, ...]:
    """Look at a file and those it is based on; all keys of all stages, the base's last.

    Raises BadInput for the first thing that is wrong.
    """
    file = _File(path, option)
    entries = tuple(file.check())
    base = file.values.get(_BASE)
    if not isinstance(base, str):
        return entries
    place = f"{option} {path}: {_BASE}"
    if not (path.parent / base).exists():
        raise BadInput(f"{place}: no such file: {path.parent / base}")
    if (path.parent / base).resolve() == path.resolve():
        raise BadInput(f"{place}: names the file itself")
    return entries + check(path.parent / base, place)


class _File:
    def __init__(self, path: Path, option: str) -> None:
        self._place = f"{option} {path}"
        try:
            self._root = yaml.compose(path.read_bytes(), Loader=yaml.SafeLoader)
        except OSError as exc:
            raise BadInput(f"{self._place}: cannot be read: {exc.strerror}") from None
        except yaml.MarkedYAMLError as exc:
            mark = exc.problem_mark or exc.context_mark
            where = f" line {mark.line + 1}, column {mark.column + 1}:" if mark else ""
            raise BadInput(f"{self._place}:{where} not YAML: {exc.problem}") from None
        except (yaml.YAMLError, UnicodeDecodeError) as exc:
            raise BadInput(f"{self._place}: not YAML: {one_line(str(exc))}") from None
        self.values: dict[str, Any] = {}

    def check(self) -> Iterator[Entry]:
        """All keys of its stages. Raises BadInput."""
        if self._root is None:
            raise BadInput(f"{self._place}: is empty; it needs at least stages")
        top = self._mapping(self._root, "", "the file")
        known = {field.name for field in fields(DeployConfig)} | {_BASE}
        # Upstream keeps what configures an option beside what configures a deployment.
        also = {field.name for field in fields(OrchestratorArgs)}
        for key, node in top.items():
            if key not in known | also:
                raise BadInput(f"{self._at(node)} {key}: no such key; {_meant(key, known)}")
            self.values[key] = _value(node)
            self._check_type(key, node)
        if "stages" in top:
            yield from self._stages(top["stages"], "stages")
        platforms = top.get("platforms")
        if platforms is not None and self.values["platforms"] is not None:
            for name, node in self._mapping(platforms, "platforms", "").items():
                platform = self._mapping(node, f"platforms.{name}", "")
                if "stages" in platform:
                    yield from self._stages(platform["stages"], f"platforms.{name}.stages")

    def _check_type(self, key: str, node: yaml.Node) -> None:
        kind = get_type_hints(DeployConfig).get(key)
        value = self.values[key]
        if kind not in _SIMPLE or value is None:
            return
        try:
            TypeAdapter(kind).validate_python(value)
        except ValidationError as exc:
            what = exc.errors()[0]["msg"].lower()
            raise BadInput(f"{self._at(node)} {key}={value!r}: {what}") from None

    def _stages(self, node: yaml.Node, what: str) -> Iterator[Entry]:
        if not isinstance(node, yaml.SequenceNode):
            if _value(node) is None:
                return
            raise BadInput(f"{self._at(node)} {what}: must be a list of stages")
        seen: dict[int, int] = {}
        for item in node.value:
            stage = self._mapping(item, what, "each entry")
            if "stage_id" not in stage:
                raise BadInput(f"{self._at(item)} {what}: a stage without stage_id")
            id_node = stage["stage_id"]
            stage_id = _value(id_node)
            if type(stage_id) is not int or stage_id < 0:
                raise BadInput(
                    f"{self._at(id_node)} {what}: stage_id={stage_id!r}: "
                    "must be a whole number from 0"
                )
            if stage_id in seen:
                raise BadInput(
                    f"{self._at(id_node)} {what}: stage_id={stage_id} is that of the stage in "
                    f"line {seen[stage_id]}; each must have its own"
                )
            seen[stage_id] = id_node.start_mark.line + 1
            yield from self._entries(stage, stage_id)

    def _entries(self, stage: dict[str, yaml.Node], stage_id: int) -> Iterator[Entry]:
        for key, node in stage.items():
            place = f"{self._at(node)} stage {stage_id}:"
            if key in ("engine_args", "engine_extras", "runtime") and _value(node) is not None:
                yield from self._entries(self._mapping(node, f"{key}", ""), stage_id)
            yield Entry(place, stage_id, key, _value(node))

    def _mapping(self, node: yaml.Node, what: str, who: str) -> dict[str, yaml.Node]:
        if isinstance(node, yaml.MappingNode):
            found: dict[str, yaml.Node] = {}
            for key, value in node.value:
                name = str(_value(key))
                if name in found:
                    line = found[name].start_mark.line + 1
                    raise BadInput(f"{self._at(key)} {name}: is there already, in line {line}")
                found[name] = value
            return found
        what = " ".join(filter(None, (f"{what}:" if what else "", who)))
        raise BadInput(f"{self._at(node)} {what} must be a mapping, not {_value(node)!r}")

    def _at(self, node: yaml.Node) -> str:
        return f"{self._place}: line {node.start_mark.line + 1}:"


def _value(node: yaml.Node) -> Any:
    try:
        return yaml.SafeLoader("").construct_document(node)
    except yaml.YAMLError:
        return getattr(node, "value", None)


def _meant(key: str, known: set[str]) -> str:
    close = difflib.get_close_matches(key, known, n=1)
    return f"did you mean {close[0]}?" if close else f"known are {', '.join(sorted(known))}"
