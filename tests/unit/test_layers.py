# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-omni-health project
"""Who imports whom: rooms that go in one direction, and no circle anywhere."""

from __future__ import annotations

import ast
import graphlib
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PACKAGES = ("vllm_omni", "vllm_omni_health")
LICENCE = (
    "# SPDX-License-Identifier: Apache-2.0",
    "# SPDX-FileCopyrightText: Copyright contributors to the vllm-omni-health project",
)

LONGEST_MODULE = 400 + len(LICENCE)
OVER = {
    "vllm_omni/engine/health/orchestrator.py",
    "vllm_omni/health/processes/supervisor.py",
    "vllm_omni/health/state/machine.py",
}
"""Not split yet."""


KNOWN = {("vllm_omni.health.liveness.pings", "vllm.v1.engine.exceptions")}
"""One exception class of vLLM's, which no room below it has a name for."""


def sources() -> dict[str, Path]:
    """Our modules by their dotted names."""
    found = {}
    for package in PACKAGES:
        for path in (ROOT / package).rglob("*.py"):
            parts = path.relative_to(ROOT).with_suffix("").parts
            found[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path
    return found


def imports(path: Path) -> set[str]:
    """Everything that the module imports, wherever in it, as dotted names."""
    found: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            found |= {node.module} | {f"{node.module}.{alias.name}" for alias in node.names}
    return found


MODULES = sources()


def test_no_module_imports_itself_by_way_of_others() -> None:
    graph = {name: imports(path) & MODULES.keys() - {name} for name, path in MODULES.items()}
    graphlib.TopologicalSorter(graph).prepare()  # raises CycleError, which names the circle


@pytest.mark.parametrize(
    ("room", "strangers"),
    [
        ("vllm_omni_health", ("vllm", "torch")),
        ("vllm_omni_health.settings", ("vllm_omni_health.devices", "vllm_omni_health.drills")),
        ("vllm_omni.health", ("vllm", "torch", "fastapi", "starlette", "uvicorn")),
    ],
)
def test_a_room_knows_nothing_of(room: str, strangers: tuple[str, ...]) -> None:
    for name, path in MODULES.items():
        if name == room or name.startswith(f"{room}."):
            for imported in imports(path):
                if any(name == who and imported.startswith(what) for who, what in KNOWN):
                    continue
                assert not any(
                    imported == stranger or imported.startswith(f"{stranger}.")
                    for stranger in strangers
                ), f"{name} imports {imported}"


def test_every_module_says_under_which_licence_it_is() -> None:
    without = [
        name
        for name, path in MODULES.items()
        if not path.read_text().startswith("\n".join(LICENCE) + "\n")
    ]
    assert without == []


def test_no_module_is_too_long() -> None:
    long = {
        str(path.relative_to(ROOT))
        for path in MODULES.values()
        if len(path.read_text().splitlines()) > LONGEST_MODULE
    }
    assert long <= OVER
