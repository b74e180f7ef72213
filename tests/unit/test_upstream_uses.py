# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-omni-health project
"""What our sources use of upstream is declared, all of it and nothing else; and who sets what."""

from __future__ import annotations

import ast
import importlib

import pytest
from upstream_uses import (
    SOURCES,
    accesses,
    modules,
    of_objects,
    of_subclass,
    our_classes,
    resolve,
    subclasses_of_upstream,
)
from vllm_omni.health.seams import tables
from vllm_omni.health.seams.rows import Table, Use
from vllm_omni.health.seams.uses_stages import USED_BY_CPU_PLATFORM

TREES = modules()
ALL = (
    *dict.fromkeys(
        use for table in vars(tables).values() if isinstance(table, Table) for use in table.uses
    ),
    *USED_BY_CPU_PLATFORM,
)

OUR_OBJECTS = {
    "self._health.output_bell",
    "self._closer.tasks",
    "runtime.end_by_force",
    "bell.taken",
    "call.asks_for_job",
    "call.job_id",
    "call.refused",
    # The command line's namespace, of which options that are ours are taken out.
    "args.additional_config",
    "args.dispatch_function",
    "args.shutdown_timeout",
}
"""What of others' attributes is set elsewhere than in the seams, and is not upstream's."""


def derived(use: Use) -> set[str]:
    found = of_objects(use, TREES)
    if use.subclass:
        upstream = [resolve(name) for name in use.upstream]
        found |= of_subclass(resolve(use.subclass), upstream, TREES)
    return found


@pytest.mark.parametrize("use", ALL, ids=lambda use: use.upstream[0])
def test_what_is_used_is_declared_and_what_is_declared_is_used(use: Use) -> None:
    assert sorted(derived(use)) == sorted(use.declared())


def test_every_class_that_inherits_from_upstream_is_declared() -> None:
    declared = {
        f"{one.__module__}:{one.__name__}"
        for use in ALL
        if use.subclass
        for one in our_classes(resolve(use.subclass))
    }
    missing = subclasses_of_upstream(iter(TREES)) - declared
    # One whose body has no function overrides nothing and uses nothing.
    bodies = {
        f"{name}:{node.name}": any(
            isinstance(part, ast.FunctionDef | ast.AsyncFunctionDef) for part in node.body
        )
        for name, tree in TREES.items()
        for node in ast.walk(tree)
        if isinstance(node, ast.ClassDef)
    }
    assert [name for name in missing if bodies[name]] == []


def test_nothing_private_of_anybody_elses_is_used_undeclared() -> None:
    declared = {
        (module, name.strip())
        for use in ALL
        for module, _, names in (seen.partition(":") for seen in use.seen_as)
        for name in names.split(",")
    }
    offenders = set()
    for module, tree in TREES.items():
        imported = vars(importlib.import_module(module))
        for expression, attribute in accesses(tree):
            private = attribute.startswith("_") and not attribute.startswith("__")
            own = expression in ("self", "cls", "super()")
            of_module = type(imported.get(expression)).__name__ == "module"
            if private and not own and not of_module and (module, expression) not in declared:
                offenders.add(f"{module}: {expression}.{attribute}")
    assert offenders == set()


def test_only_the_seams_set_what_is_not_ones_own() -> None:
    found = set()
    for name, tree in TREES.items():
        if not name.startswith("vllm_omni.health."):
            found |= set_elsewhere(tree)
    assert found == OUR_OBJECTS


def test_where_no_object_of_upstreams_comes_nothing_that_is_imported_is_changed() -> None:
    found = set()
    for folder in ("vllm_omni/health", "vllm_omni_health"):
        for path in (SOURCES / folder).rglob("*.py"):
            if path.parent.name != "seams":
                tree = ast.parse(path.read_text())
                imported = {
                    (name.asname or name.name).split(".")[0]
                    for node in ast.walk(tree)
                    if isinstance(node, ast.Import | ast.ImportFrom)
                    for name in node.names
                }
                found |= {
                    expression
                    for expression in set_elsewhere(tree)
                    if expression.startswith(("setattr(", "delattr("))
                    or expression.split(".")[0] in imported
                }
    assert found == {"sys.stdout", "sys.stderr"}


def set_elsewhere(tree: ast.AST) -> set[str]:
    """Attributes that are set of anything but ``self``, however that is done."""
    found = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store | ast.Del):
            if ast.unparse(node.value) not in ("self", "cls"):
                found.add(ast.unparse(node))
        elif isinstance(node, ast.Subscript) and isinstance(node.ctx, ast.Store | ast.Del):
            holder = ast.unparse(node.value)
            if holder.endswith(".__dict__") or holder.startswith("vars("):
                found.add(ast.unparse(node))
        elif isinstance(node, ast.Call) and ast.unparse(node.func).split(".")[-1] in (
            "setattr",
            "__setattr__",
            "delattr",
        ):
            found.add(ast.unparse(node))
    return found


@pytest.mark.parametrize(
    "source",
    [
        "client.sends = 1",
        "upstream.module.Name = ours",
        "a = b.c = 1",
        "(a, b.c) = 1, 2",
        "worker.done += 1",
        "del client.sends",
        "vars(pipeline)['forward'] = 1",
        "client.__dict__['x'] = 1",
        "setattr(client, 'x', 1)",
        "object.__setattr__(client, 'x', 1)",
        "for client.x in y: pass",
        "with a as client.x: pass",
    ],
)
def test_every_way_of_setting_is_seen(source: str) -> None:
    assert set_elsewhere(ast.parse(source))


def test_setting_ones_own_is_free() -> None:
    assert not set_elsewhere(ast.parse("self.x = self.y[1] = 2\nx[1] = 3"))
