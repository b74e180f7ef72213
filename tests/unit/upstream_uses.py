# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-omni-health project
"""What our sources use of upstream, read from their syntax trees."""

from __future__ import annotations

import ast
import importlib
import inspect
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from vllm_omni.health.seams.check import has_member, is_ours
from vllm_omni.health.seams.rows import Use

SOURCES = Path(__file__).parents[2]
FOLDERS = (
    "vllm_omni/health",
    "vllm_omni/engine/health",
    "vllm_omni/entrypoints/health",
    "vllm_omni/platforms/cpu",
)


def modules() -> dict[str, ast.Module]:
    """Dotted names and trees of all modules that may import upstream."""
    return {
        ".".join(path.relative_to(SOURCES).with_suffix("").parts): ast.parse(path.read_text())
        for folder in FOLDERS
        for path in sorted((SOURCES / folder).rglob("*.py"))
        if path.name != "__init__.py"
    }


def resolve(dotted: str) -> Any:
    module, _, path = dotted.partition(":")
    found: Any = importlib.import_module(module)
    for name in path.split("."):
        found = getattr(found, name)
    return found


def our_classes(subclass: type) -> list[type]:
    return [one for one in inspect.getmro(subclass) if is_ours(one)]


def subclasses_of_upstream(names: Iterator[str]) -> set[str]:
    """Our classes that inherit from one of upstream's."""
    found = set()
    for name in names:
        for one in vars(importlib.import_module(name)).values():
            if isinstance(one, type) and one.__module__ == name and not issubclass(one, Exception):
                bases = [base for base in one.__mro__ if not is_ours(base)]
                if any(base.__module__.startswith(("vllm.", "vllm_omni.")) for base in bases):
                    found.add(f"{name}:{one.__name__}")
    return found


class _OfClass(ast.NodeVisitor):
    """Members of ``self``, ``cls`` and ``super()`` that one class mentions, and those it has."""

    def __init__(self) -> None:
        self.used: set[str] = set()
        self.own: set[str] = set()
        self.defined: set[str] = set()

    def visit_Attribute(self, node: ast.Attribute) -> None:
        value = node.value
        if isinstance(value, ast.Name) and value.id in ("self", "cls"):
            self.used.add(node.attr)
            if isinstance(node.ctx, ast.Store):
                self.own.add(node.attr)
        if isinstance(value, ast.Call) and ast.unparse(value.func) == "super":
            self.used.add(node.attr)
        self.generic_visit(node)

    def visit_Call(self, node: ast.Call) -> None:
        asked = asked_for(node)
        if asked is not None and asked[0] == "self":
            self.used.add(asked[1])
        self.generic_visit(node)


def asked_for(node: ast.Call) -> tuple[str, str] | None:
    """Expression and name of a ``getattr(x, "name", …)`` or ``hasattr``, or of seams.assign()."""
    called = ast.unparse(node.func)
    if called in ("getattr", "hasattr") and isinstance(node.args[1], ast.Constant):
        return ast.unparse(node.args[0]), str(node.args[1].value)
    return None


def of_subclass(subclass: type, upstream: list[type], trees: dict[str, ast.Module]) -> set[str]:
    """Members of ``upstream`` that ``subclass`` overrides or uses."""
    ours = our_classes(subclass)
    visitor = _OfClass()
    for one in ours:
        tree = trees[one.__module__]
        (node,) = [
            node
            for node in ast.walk(tree)
            if isinstance(node, ast.ClassDef) and node.name == one.__name__
        ]
        visitor.visit(node)
        for part in node.body:
            if isinstance(part, ast.FunctionDef | ast.AsyncFunctionDef):
                visitor.defined.add(part.name)
            elif isinstance(part, ast.Assign):
                visitor.defined |= {ast.unparse(target) for target in part.targets}
            elif isinstance(part, ast.AnnAssign) and part.value is not None:
                visitor.defined.add(ast.unparse(part.target))
    mentioned = visitor.used | visitor.defined
    theirs = {name for name in mentioned if all(has_member(one, name) for one in upstream)}
    nobodys = visitor.used - visitor.own - visitor.defined - theirs
    assert not nobodys, f"{subclass.__name__} uses what neither it nor upstream has: {nobodys}"
    return {name for name in theirs if not (name.startswith("__") and name != "__init__")} - set(
        vars(object)
    ) | ({"__init__"} & visitor.defined)


def of_objects(use: Use, trees: dict[str, ast.Module]) -> set[str]:
    """Members that are used of objects where they go by the names that ``use`` tells."""
    found = set()
    for seen in use.seen_as:
        module, _, expressions = seen.partition(":")
        names = {name.strip() for name in expressions.split(",")}
        for expression, attribute in accesses(trees[module]):
            if expression in names:
                found.add(attribute)
    return found


def accesses(tree: ast.AST) -> Iterator[tuple[str, str]]:
    """Every attribute access in a tree: expression and attribute."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute):
            yield ast.unparse(node.value), node.attr
        elif isinstance(node, ast.Call):
            asked = asked_for(node)
            if asked is not None:
                yield asked
            if ast.unparse(node.func) == "seams.assign":
                for keyword in node.keywords:
                    yield ast.unparse(node.args[0]), str(keyword.arg)
