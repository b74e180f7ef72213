# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-omni-health project
"""The dependencies declared are those imported, derived from the sources."""

from __future__ import annotations

import ast
import importlib.metadata
import re
import sys
import tomllib
from pathlib import Path

ROOT = Path(__file__).parents[2]

BROUGHT = {
    "vllm": "the user's own build of it, under whatever name",
    "torch": "the user's own build of it",
    "vllm_omni": "declared as vllm-omni; the folder is ours as well",
    "vllm_omni_health": "ours",
}
"""What is imported and not declared by the name that it is imported by."""

OPTIONAL = {"omni_tiny_models"}


def imported() -> set[str]:
    """Top-level modules that our sources import, without Python's own."""
    found: set[str] = set()
    for folder in ("vllm_omni", "vllm_omni_health"):
        for path in (ROOT / folder).rglob("*.py"):
            for node in ast.walk(ast.parse(path.read_text())):
                if isinstance(node, ast.Import):
                    found |= {alias.name.partition(".")[0] for alias in node.names}
                elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
                    found.add(node.module.partition(".")[0])
                elif (
                    isinstance(node, ast.Call)
                    and ast.unparse(node.func) == "importlib.import_module"
                    and isinstance(node.args[0], ast.Constant)
                ):
                    found.add(str(node.args[0].value).partition(".")[0])
    return found - sys.stdlib_module_names - BROUGHT.keys() - OPTIONAL


def normal(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


def declared() -> set[str]:
    """Names of the distributions that the package declares."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    names = (re.match(r"[\w.-]+", line) for line in project["dependencies"])
    return {normal(match.group()) for match in names if match}


def test_what_is_imported_is_declared_and_nothing_else() -> None:
    providers = importlib.metadata.packages_distributions()
    needed = {module: {normal(name) for name in providers.get(module, [])} for module in imported()}
    missing = sorted(module for module, names in needed.items() if not names & declared())
    assert missing == []
    used = set().union(*needed.values()) | {"vllm-omni"}
    assert sorted(declared() - used) == []
