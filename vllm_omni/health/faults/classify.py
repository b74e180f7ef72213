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

import errno
import logging
import traceback
from collections.abc import Iterator, Mapping
from types import MappingProxyType
from typing import Any, NamedTuple

from vllm_omni.health.faults.fault import (
    Fault,
    FaultError,
    FaultKind,
    Severity,
)

logger = logging.getLogger(__name__)

CHAIN_LIMIT = 256
"""Exceptions looked at in one graph; code that retries in a loop builds long chains."""

FRAME_LIMIT = 64
"""Innermost frames kept per exception in a traceback's text."""

Verdict = tuple[FaultKind, Severity]
"""What the table says about a class."""

_FATAL = Severity.FATAL
_REQUEST = (FaultKind.ENGINE, Severity.REQUEST)

DEFAULT_CLASSES: Mapping[str, Verdict] = MappingProxyType(
    {
        # torch 2.13; torch.cuda.OutOfMemoryError is the same class under an older name.
        "torch.OutOfMemoryError": (FaultKind.OOM, _FATAL),
        "torch.cuda.OutOfMemoryError": (FaultKind.OOM, _FATAL),
        "torch.AcceleratorError": (FaultKind.ACCELERATOR, _FATAL),
        # Base of DistBackendError, DistNetworkError, DistStoreError and QueueEmptyError.
        "torch.distributed.DistError": (FaultKind.COLLECTIVE, _FATAL),
        "builtins.MemoryError": (FaultKind.HOST_OOM, _FATAL),
        # vLLM's multiprocess executor raises it when execute_model takes too long.
        "builtins.TimeoutError": (FaultKind.HANG, _FATAL),
        # The request is wrong, or may not be served now. A bare ValueError is not listed: it is
        # as often a bug of the server's as a mistake of the client's.
        "vllm.exceptions.VLLMClientError": _REQUEST,
        "vllm.exceptions.GracefulHTTPError": _REQUEST,
        "vllm_omni.errors.OmniClientError": _REQUEST,
        "vllm_omni.entrypoints.openai.errors.InvalidInputReferenceError": _REQUEST,
        "vllm_omni.protocol.realtime.errors.RealtimeProtocolError": _REQUEST,
        "vllm_omni.diffusion.diffusion_kv.manager.DiffusionKVAdmissionError": _REQUEST,
        # One generation failed and vLLM calls it recoverable; a fatal cause still wins.
        "vllm.exceptions.GenerationError": _REQUEST,
        "vllm.v1.engine.exceptions.EngineGenerateError": _REQUEST,
        # A client's abort.
        "vllm_omni.diffusion.data.DiffusionRequestAbortedError": _REQUEST,
        "asyncio.exceptions.CancelledError": _REQUEST,
    }
)


class CodeRule(NamedTuple):
    """Codes that tell apart errors which share one class.

    ``attribute`` of an instance holds the code; a code that is not listed leaves the class's
    own verdict as it is.
    """

    attribute: str
    kinds: Mapping[int, FaultKind]


DEFAULT_CODES: Mapping[str, CodeRule] = MappingProxyType(
    {
        # torch sets error_code to the runtime's own number. 2 is cudaErrorMemoryAllocation
        # (CUDA Runtime API, enum cudaError) and hipErrorOutOfMemory (HIP, enum hipError_t): an
        # allocation outside torch's allocator, such as a graph's or a library's workspace.
        "torch.AcceleratorError": CodeRule("error_code", MappingProxyType({2: FaultKind.OOM})),
        # ENOMEM, errno(3): mmap or fork found no memory, also for shared memory.
        "builtins.OSError": CodeRule("errno", MappingProxyType({errno.ENOMEM: FaultKind.HOST_OOM})),
    }
)


class ClassificationTable:
    """Dotted class name → kind and severity. Immutable; any thread may use it."""

    __slots__ = ("classes", "codes")

    classes: Mapping[str, Verdict]
    codes: Mapping[str, CodeRule]

    def __init__(
        self,
        classes: Mapping[str, Verdict] = DEFAULT_CLASSES,
        codes: Mapping[str, CodeRule] = DEFAULT_CODES,
    ) -> None:
        object.__setattr__(self, "classes", MappingProxyType(dict(classes)))
        object.__setattr__(self, "codes", MappingProxyType(dict(codes)))

    def __setattr__(self, name: str, value: object) -> None:
        raise AttributeError("a ClassificationTable cannot be changed; use extended()")

    def extended(self, classes: Mapping[str, tuple[str, str]]) -> ClassificationTable:
        """A table in which ``classes`` are added to, or replace, what this one has.

        Kinds and severities may be given as plain strings. Raises ValueError for a name that is
        not dotted and for an unknown kind or severity.
        """
        added: dict[str, Verdict] = {}
        for name, (kind, severity) in classes.items():
            if "." not in name:
                raise ValueError(f"{name!r} is not a dotted class name; write builtins.{name}?")
            added[name] = (FaultKind(kind), Severity(severity))
        return ClassificationTable({**self.classes, **added}, self.codes)

    def verdict(self, exc: BaseException) -> Verdict | None:
        """What the table says about ``exc`` alone, without its causes; None if nothing.

        The nearest class along the MRO that is listed decides.
        """
        for name in class_names(type(exc)):
            verdict = self.classes.get(name)
            rule = self.codes.get(name)
            if rule is not None:
                code = _attribute(exc, rule.attribute)
                kind = rule.kinds.get(code) if isinstance(code, int) else None
                if kind is not None:
                    return kind, verdict[1] if verdict is not None else Severity.FATAL
            if verdict is not None:
                return verdict
        return None


DEFAULT_TABLE = ClassificationTable()


class Finding(NamedTuple):
    """The verdict on an exception graph and the exception in it that gave it."""

    kind: FaultKind
    severity: Severity
    exception: BaseException


def classify(exc: BaseException, table: ClassificationTable | None = None) -> Finding:
    """Judge ``exc`` by its own class and those of everything that led to it.

    ``table``: by default the one in force in this process (classes.py).

    Fatal beats request-scoped: a validation error raised while an OOM was handled is an OOM.
    Request-scoped is only what says so itself, or wraps such an error by ``raise … from`` in a
    class without an entry of its own; a group is only if all its members are.
    """
    table = table or _table_in_force()
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


def _table_in_force() -> ClassificationTable:
    try:
        # Here, because it builds on this module.
        from vllm_omni.health.faults.classes import in_force
    except BaseException:  # not even memory for an import may be left
        return DEFAULT_TABLE
    return in_force()


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
            if cause is None and not _attribute(found, "__suppress_context__"):
                cause = _exception(_attribute(found, "__context__"))
            if cause is not None:
                following.append(cause)
        queue = following


def class_names(cls: type) -> Iterator[str]:
    """Dotted names of ``cls`` and its bases, along the MRO, without ``builtins.object``."""
    for base in type.__dict__["__mro__"].__get__(cls):
        if base is object:
            continue
        try:
            module, name = base.__module__, base.__qualname__
        except BaseException:  # a metaclass may do anything
            continue
        if isinstance(module, str) and isinstance(name, str):
            yield f"{module}.{name}"


# An exception's class can replace any attribute by a property that raises, also SystemExit, and
# this runs where a process tries to say why it is dying: hence _attribute() and BaseException.


def _attribute(exc: BaseException, name: str) -> object:
    try:
        return getattr(exc, name, None)
    except BaseException:
        return None


def _exception(value: object) -> BaseException | None:
    return value if issubclass(type(value), BaseException) else None  # type: ignore[return-value]


def _cause(exc: BaseException) -> BaseException | None:
    return _exception(_attribute(exc, "__cause__"))


def _members(exc: BaseException) -> list[BaseException]:
    if not issubclass(type(exc), BaseExceptionGroup):
        return []
    members = _attribute(exc, "exceptions")
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
            fault = _attribute(found, "fault")
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
