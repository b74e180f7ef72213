# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-omni-health project
"""Which exception class is which kind of fault, and the table that is in force in this process.

Classes are named by dotted strings and found along the MRO. The server adds what a setting and
plugins name, once, when it starts; stage and worker processes find it in their environment.
"""

from __future__ import annotations

import errno
import logging
import os
from collections.abc import Iterator, Mapping
from types import MappingProxyType
from typing import NamedTuple

from vllm_omni_health.kinds import FaultKind, Severity
from vllm_omni_health.settings import fault_classes

logger = logging.getLogger(__name__)

VARIABLE = "VLLM_OMNI_HEALTH_FAULT_CLASSES"
"""The setting's environment variable, in which child processes find all classes added."""

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
                code = attribute(exc, rule.attribute)
                kind = rule.kinds.get(code) if isinstance(code, int) else None
                if kind is not None:
                    return kind, verdict[1] if verdict is not None else Severity.FATAL
            if verdict is not None:
                return verdict
        return None


DEFAULT_TABLE = ClassificationTable()


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
# this runs where a process tries to say why it is dying: hence attribute() and BaseException.


def attribute(exc: BaseException, name: str) -> object:
    """``exc.name``, or None where that fails in whatever way."""
    try:
        return getattr(exc, name, None)
    except BaseException:
        return None


def table_with(entries: Mapping[str, str]) -> ClassificationTable:
    """The built-in table with entries as ``fault_classes.checked`` returns them."""
    pairs = {name: verdict.partition(":")[::2] for name, verdict in entries.items()}
    return DEFAULT_TABLE.extended(pairs)


_in_force: ClassificationTable | None = None


def use(table: ClassificationTable | None) -> None:
    """Classify by this table from now on; None: by what the environment says."""
    global _in_force
    _in_force = table


def in_force() -> ClassificationTable:
    """The table of this process. Never raises: it is asked for where something has failed."""
    global _in_force
    if _in_force is None:
        try:
            entries = fault_classes.parse(os.environ.get(VARIABLE, ""))
            _in_force = table_with(fault_classes.checked(entries))
        except Exception as exc:
            # The server has checked it before, so this is a process of somebody else's.
            logger.error("[health] %s is ignored: %s", VARIABLE, exc)
            _in_force = DEFAULT_TABLE
    return _in_force
