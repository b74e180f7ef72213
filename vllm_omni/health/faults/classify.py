# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-omni-health project
"""From an exception to a :class:`Fault`, by the types involved and never by their text.

Classes are named by dotted strings and found along the MRO, so that nothing has
to be imported to recognise them, and a class that pickle could not carry is
still recognised by the names of its bases.

An exception is judged by every exception that its traceback would show: itself,
its ``__cause__``, or else its ``__context__`` unless that is suppressed, and the
members of groups. Of all those that the table knows, the most telling wins
(:attr:`FaultKind.precedence`). An exception that nothing in the table matches is
an ``engine`` fault, and fatal.
"""

from __future__ import annotations

import logging
import traceback
from collections.abc import Iterator
from typing import Any, NamedTuple

from vllm_omni.health.faults.fault import Fault, FaultError, FaultKind, Severity
from vllm_omni.health.faults.table import ClassificationTable, attribute, class_names, in_force

logger = logging.getLogger(__name__)

CHAIN_LIMIT = 256
"""Exceptions looked at in one graph; code that retries in a loop builds long chains."""

FRAME_LIMIT = 64
"""Innermost frames kept per exception in a traceback's text."""


class Finding(NamedTuple):
    """The verdict on an exception graph and the exception in it that gave it."""

    kind: FaultKind
    severity: Severity
    exception: BaseException


def classify(exc: BaseException, table: ClassificationTable | None = None) -> Finding:
    """Judge ``exc`` by its own class and those of everything that led to it.

    ``table``: by default the one in force in this process (table.py).

    Fatal beats request-scoped: a validation error raised while an OOM was handled is an OOM.
    Request-scoped is only what says so itself, or wraps such an error by ``raise … from`` in a
    class without an entry of its own; a group is only if all its members are.
    """
    table = table or in_force()
    best: Finding | None = None
    for found in walk(exc):
        verdict = table.verdict(found)
        if verdict is None or verdict[1] is not Severity.FATAL:
            continue
        if best is None or verdict[0].precedence < best.kind.precedence:
            best = Finding(*verdict, found)
    if best is not None:
        return best
    request = _request_scoped(exc, table)
    return request or Finding(FaultKind.ENGINE, Severity.FATAL, exc)


def fault_from_exception(
    exc: BaseException, *, table: ClassificationTable | None = None, **context: Any
) -> Fault:
    """The fault that ``exc`` stands for. Never raises, whatever the exception.

    ``exception``, ``bases`` and ``message`` are those of the exception that decided the kind;
    the traceback shows the whole chain. A :class:`FaultError` anywhere in the chain gives back
    the fault it carries. ``context`` holds further fields of :class:`Fault`, filled in where
    they are still unknown.
    """
    fault = _carried_fault(exc) or _make_fault(exc, table)
    try:
        return fault.with_context(**context)
    except Exception:
        # A bug in the caller's context, but not one worth losing the fault for.
        logger.exception("a fault does not take all of its context")
    for name, value in context.items():
        try:
            fault = fault.with_context(**{name: value})
        except Exception:
            continue
    return fault


def walk(exc: BaseException) -> Iterator[BaseException]:
    """``exc`` and what led to it, nearest first, each once, at most CHAIN_LIMIT of them."""
    seen: set[int] = set()
    queue = [exc]
    while queue:
        following: list[BaseException] = []
        for found in queue:
            if id(found) in seen:
                continue
            if len(seen) == CHAIN_LIMIT:
                return
            seen.add(id(found))
            yield found
            following.extend(_members(found))
            cause = _cause(found)
            if cause is None and not attribute(found, "__suppress_context__"):
                cause = _exception(attribute(found, "__context__"))
            if cause is not None:
                following.append(cause)
        queue = following


def _exception(value: object) -> BaseException | None:
    return value if issubclass(type(value), BaseException) else None  # type: ignore[return-value]


def _cause(exc: BaseException) -> BaseException | None:
    return _exception(attribute(exc, "__cause__"))


def _members(exc: BaseException) -> list[BaseException]:
    if not issubclass(type(exc), BaseExceptionGroup):
        return []
    members = attribute(exc, "exceptions")
    if not isinstance(members, tuple):
        return []
    return [member for member in members[:CHAIN_LIMIT] if _exception(member) is not None]


def _request_scoped(exc: BaseException, table: ClassificationTable) -> Finding | None:
    """The finding that ``exc`` is of one request, or None. No fatal class is in its graph."""
    for _ in range(CHAIN_LIMIT):
        verdict = table.verdict(exc)
        if verdict is not None:
            return Finding(*verdict, exc)
        members = _members(exc)
        if members:
            # Nested groups are not followed: what no one wrote on purpose is not trusted.
            verdicts = [table.verdict(member) for member in members]
            first = verdicts[0]
            return Finding(*first, members[0]) if first and all(verdicts) else None
        cause = _cause(exc)
        if cause is None:
            return None
        exc = cause
    return None


def _carried_fault(exc: BaseException) -> Fault | None:
    for found in walk(exc):
        if issubclass(type(found), FaultError):
            fault = attribute(found, "fault")
            if isinstance(fault, Fault):
                return fault
    return None


def _make_fault(exc: BaseException, table: ClassificationTable | None) -> Fault:
    kind, severity, telling = classify(exc, table)
    names = tuple(class_names(type(telling)))
    try:
        return Fault(
            kind=kind,
            severity=severity,
            exception=names[0] if names else None,
            bases=names[1:],
            message=_text(telling),
            traceback=_traceback_text(exc, telling),
        )
    except MemoryError:
        # What is known without further memory is the part that matters.
        return Fault(kind=kind, severity=severity, exception=names[0] if names else None)


def _text(exc: BaseException) -> str:
    try:
        # str() may return an instance of a subclass with methods of its own.
        return str.__str__(str(exc))
    except BaseException as error:
        return f"(str() of the exception raised {type(error).__name__})"


def _traceback_text(exc: BaseException, telling: BaseException) -> str:
    """The traceback as Python prints it, as far as that can be had."""
    try:
        whole = sum(1 for _ in walk(exc)) < CHAIN_LIMIT
        shown = [exc] if whole or telling is exc else [telling, exc]
        return "".join(
            line
            for one in shown
            for line in traceback.format_exception(
                type(one), one, one.__traceback__, limit=-FRAME_LIMIT, chain=whole
            )
        )
    except BaseException:
        return "(the traceback could not be formatted)"
