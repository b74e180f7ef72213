# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-omni-health project
"""Whether upstream is as the tables say, and ours as upstream needs it. Changes nothing."""

from __future__ import annotations

import dis
import importlib
import inspect
import types
from collections.abc import Iterator
from typing import Any

from vllm_omni.health.seams.rows import Seam, Use

from vllm_omni_health.upstream import UpstreamError

OURS = (
    "vllm_omni.health.",
    "vllm_omni.engine.health.",
    "vllm_omni.entrypoints.health.",
    "vllm_omni.platforms.cpu.",
    "vllm_omni_health.",
)
"""Beginnings of the names of this layer's modules."""


class SeamError(UpstreamError):
    """Upstream is not as the layer expects it; one line names what, and what is supported."""


def checked_seam(seam: Seam) -> tuple[Any, str, Any, Any]:
    """Owner, attribute's name, what is there now, and what is to be there."""
    try:
        owner, name, found = resolve(seam.target, missing=seam.new)
        if seam.new and found is not None:
            raise SeamError(f"{seam.target} exists, where none was expected")
        if seam.signature:
            _check_signature(seam.target, found, seam.signature)
        replacement = replacement_of(seam.replacement)
        if callable(found) and callable(replacement) and seam.signature:
            _check_fits(seam.target, replacement, found)
    except SeamError as exc:
        raise SeamError(f"{exc} (needed because: {seam.why})") from None
    if isinstance(owner, type) and isinstance(vars(owner).get(name), staticmethod):
        replacement = staticmethod(replacement)
    return owner, name, found, replacement


def check_use(use: Use) -> None:
    """SeamError unless upstream has every member, with its signature, and ours fit them."""
    classes = [resolve(name)[2] for name in use.upstream]
    ours = [
        one
        for one in (inspect.getmro(replacement_of(use.subclass)) if use.subclass else ())
        if is_ours(one)
    ]
    for member, signature in use.declared().items():
        holders = [one for one in classes if has_member(one, member)]
        if not holders or (use.subclass and len(holders) < len(classes)):
            raise SeamError(f"{use.upstream[0]} has no {member}")
        for holder in holders:
            where = f"{holder.__module__}:{holder.__name__}.{member}"
            found = getattr(holder, member, None)
            if signature:
                _check_signature(where, found, signature)
            for one in ours:
                if inspect.isroutine(found) and member in vars(one):
                    _check_fits(where, getattr(one, member), found)


def _check_signature(where: str, function: Any, expected: str) -> None:
    found = signature_of(function)
    if found != expected:
        raise SeamError(f"{where} is {found}, not {expected}")


def _check_fits(where: str, ours: Any, theirs: Any) -> None:
    if not accepts(ours, theirs):
        raise SeamError(f"{where} is {signature_of(theirs)}, and ours is {signature_of(ours)}")


def resolve(dotted: str, *, missing: bool = False) -> tuple[Any, str, Any]:
    """Owner, name and value of ``module:attribute.path``; None as the value if it is missing."""
    module, _, path = dotted.partition(":")
    try:
        owner: Any = importlib.import_module(module)
        *parents, name = path.split(".")
        for parent in parents:
            owner = getattr(owner, parent)
        return owner, name, getattr(owner, name, None) if missing else getattr(owner, name)
    except (ImportError, AttributeError) as exc:
        raise SeamError(f"{dotted} cannot be found ({_first_line(exc)})") from None


def replacement_of(dotted: str) -> Any:
    """What of ours goes by this name."""
    try:
        return resolve(dotted)[2]
    except SeamError:
        raise
    except Exception as exc:
        # Our module is written for another upstream.
        problem = f"{type(exc).__name__}: {_first_line(exc)}"
        raise SeamError(f"{dotted} cannot be loaded ({problem})") from None


def _first_line(exc: BaseException) -> str:
    return next(iter(str(exc).splitlines()), type(exc).__name__)


# ---- what a class has --------------------------------------------------------------------------


def is_ours(one: type) -> bool:
    """Whether a class is of this layer, by its module."""
    return one.__module__.startswith(OURS)


def has_member(one: type, name: str) -> bool:
    """Whether instances of a class have this attribute.

    One that nothing but a method assigns is found in the code of the methods.
    """
    return (
        hasattr(one, name)
        or any(name in getattr(base, "__annotations__", ()) for base in one.__mro__)
        or any(name in _assigned(base) for base in one.__mro__)
    )


def _assigned(one: type) -> Iterator[str]:
    for value in vars(one).values():
        for code in _codes(value):
            for instruction in dis.get_instructions(code):
                if instruction.opname == "STORE_ATTR":
                    yield instruction.argval
            if "__setattr__" in code.co_names:
                yield from (text for text in code.co_consts if isinstance(text, str))


def _codes(value: Any) -> Iterator[types.CodeType]:
    function = inspect.unwrap(getattr(value, "__func__", getattr(value, "fget", None) or value))
    code = getattr(function, "__code__", None)
    if isinstance(code, types.CodeType):
        yield code


def signature_of(function: Any) -> str:
    """Parameters by name and kind, and whether it is async: ``async (self, one, *, other)``."""
    try:
        signature = inspect.signature(function)
    except (TypeError, ValueError):
        return "no function"
    bare = [
        one.replace(annotation=one.empty, default=one.empty)
        for one in signature.parameters.values()
    ]
    return f"{_kind(function)}{inspect.Signature(bare)}"


def _kind(function: Any) -> str:
    function = inspect.unwrap(function)
    if inspect.isasyncgenfunction(function):
        return "async iterator "
    return "async " if inspect.iscoroutinefunction(function) else ""


_POSITIONAL = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)


def accepts(ours: Any, theirs: Any) -> bool:
    """Whether ``ours`` can be called in every way in which ``theirs`` can."""
    if _kind(ours) != _kind(theirs) and inspect.isroutine(ours):
        return False
    takes = list(inspect.signature(ours).parameters.values())
    kinds = {one.kind for one in takes}
    rest = inspect.Parameter.VAR_POSITIONAL in kinds
    keywords = inspect.Parameter.VAR_KEYWORD in kinds
    positional = [one.name for one in takes if one.kind in _POSITIONAL]
    named = {one.name for one in takes if one.kind is inspect.Parameter.KEYWORD_ONLY}
    given: set[str] = set()
    variable: set[inspect._ParameterKind] = set()
    place = 0
    for one in inspect.signature(theirs).parameters.values():
        if one.kind in _POSITIONAL and place < len(positional):
            if one.name not in (positional[place], "self"):
                return False
            given.add(positional[place])
            place += 1
        elif one.kind in _POSITIONAL:
            if not (rest and keywords):
                return False
        elif one.kind is inspect.Parameter.KEYWORD_ONLY:
            if one.name not in named and one.name not in positional and not keywords:
                return False
            given.add(one.name)
        elif one.kind in kinds:
            variable.add(one.kind)
        else:
            return False
    required = {
        one.name
        for one in takes
        if one.default is one.empty
        and (one.kind is one.KEYWORD_ONLY or one.kind in _POSITIONAL)
        and not (one.kind in _POSITIONAL and inspect.Parameter.VAR_POSITIONAL in variable)
    }
    return required <= given
