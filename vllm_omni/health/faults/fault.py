# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-omni-health project
"""What went wrong, as a value that survives every process boundary.

A :class:`Fault` is made once, where the failure is seen, and is handed on from
worker to engine core to orchestrator to API. Each hop may add what it knows
with :meth:`Fault.with_context`; nothing it already holds is overwritten.

Nothing here imports torch, vLLM or the rest of vllm-omni.
"""

from __future__ import annotations

import signal as _signal
import time as _time
from datetime import UTC, datetime
from typing import Any

import msgspec

from vllm_omni_health.kinds import FaultKind, Severity
from vllm_omni_health.text import one_line

MESSAGE_LIMIT = 4096
"""Bytes of UTF-8 kept of an exception's own text. The interesting part of a
CUDA or NCCL message is at its ends; megabytes come from reprs of tensors."""

TRACEBACK_LIMIT = 32768
"""Bytes of UTF-8 kept of a traceback. With every other limit reached, a fault
still encodes to less than a pipe holds by default on Linux (65536 bytes, see
pipe(7)), so that a dying process can write its last words without blocking."""

NAME_LIMIT = 256
"""Bytes of UTF-8 kept of a class name, role, device or request id."""

BASES_LIMIT = 32
"""Names of base classes kept."""


_SHORT_OF_MEMORY = {
    FaultKind.OOM: "The server is short of accelerator memory. Please retry later.",
    FaultKind.HOST_OOM: "The server is short of host memory. Please retry later.",
}
"""Nothing has failed, and nothing has to: requests are refused so that it does not come to that."""

REQUEST_SENTENCE = "The server failed to process a request."
"""What is shown of a fault that is over with the request that met it."""


class FaultDecodeError(ValueError):
    """The bytes received are not an encoded :class:`Fault`."""


class MemoryFigures(msgspec.Struct, frozen=True, kw_only=True):
    """Memory of one device when the fault was made, in bytes; None if unknown."""

    allocated: int | None = None
    reserved: int | None = None
    free: int | None = None
    total: int | None = None


class Fault(msgspec.Struct, frozen=True, kw_only=True):
    """One fault: immutable, bounded in size, encodable whatever it was made from.

    All text is cut and made valid UTF-8 on construction. ``message`` and
    ``traceback`` can hold prompts and paths: they are for the log alone and
    :meth:`public` leaves them out.

    ``exception`` and ``bases`` are full dotted names (the class first, its
    bases along the MRO after it). ``exit_code``, ``signal`` and ``core_dumped`` are
    those of a dead process. ``time`` is wall time in seconds since the epoch.
    """

    kind: FaultKind
    severity: Severity = Severity.FATAL
    exception: str | None = None
    bases: tuple[str, ...] = ()
    message: str = ""
    stage_id: int | None = None
    replica_id: int | None = None
    rank: int | None = None
    pid: int | None = None
    device: str | None = None
    memory: MemoryFigures | None = None
    time: float = msgspec.field(default_factory=_time.time)
    traceback: str | None = None
    role: str | None = None
    exit_code: int | None = None
    signal: str | None = None
    core_dumped: bool | None = None
    request_id: str | None = None

    def __post_init__(self) -> None:
        for name, limit in _TEXT_LIMITS.items():
            text = getattr(self, name)
            if text is not None:
                msgspec.structs.force_setattr(self, name, clip(text, limit))
        bases = tuple(clip(name, NAME_LIMIT) for name in self.bases[:BASES_LIMIT])
        msgspec.structs.force_setattr(self, "bases", bases)

    @property
    def fatal(self) -> bool:
        """Whether the replica that reported this can no longer be trusted."""
        return self.severity is Severity.FATAL

    @property
    def sentence(self) -> str:
        """The one sentence that anyone may see of this fault; never empty."""
        if self.fatal:
            return self.kind.sentence
        return _SHORT_OF_MEMORY.get(self.kind, REQUEST_SENTENCE)

    def with_context(self, **fields: Any) -> Fault:
        """A copy in which those of ``fields`` that are still None are filled in.

        Raises TypeError for a name that is no field of a fault.
        """
        unknown = fields.keys() - set(self.__struct_fields__)
        if unknown:
            raise TypeError(f"a Fault has no field {', '.join(sorted(unknown))}")
        missing = {
            name: value
            for name, value in fields.items()
            if value is not None and getattr(self, name) is None
        }
        return msgspec.structs.replace(self, **missing) if missing else self

    def with_kind(self, kind: FaultKind) -> Fault:
        """A copy of another kind, for the hop that knows better what this failure means."""
        return msgspec.structs.replace(self, kind=kind)

    def public(self) -> dict[str, Any]:
        """What anyone may see: no text of the exception, no traceback, no paths."""
        return {
            "kind": self.kind.value,
            "stage_id": self.stage_id,
            "replica_id": self.replica_id,
            "message": self.sentence,
            "time": iso_time(self.time),
        }

    def as_fatal(self) -> Fault:
        """The same fault where it has ended more than a request."""
        return self if self.fatal else msgspec.structs.replace(self, severity=Severity.FATAL)

    def log_line(self) -> str:
        """Everything except the traceback, on one line, for the server's log."""
        parts = [f"{self.kind} fault" if self.fatal else f"{self.kind} fault of one request"]
        if self.exception is not None:
            parts.append(f"{self.exception}: {self.message}" if self.message else self.exception)
        elif self.message:
            parts.append(self.message)
        where = [
            f"{label} {value}"
            for label, value in (
                ("role", self.role),
                ("stage", self.stage_id),
                ("replica", self.replica_id),
                ("rank", self.rank),
                ("pid", self.pid),
                ("device", self.device),
                ("request", self.request_id),
                ("exit code", self.exit_code),
                ("signal", self.signal),
                ("core", "dumped" if self.core_dumped else None),
            )
            if value is not None
        ]
        if self.memory is not None:
            where += [
                f"{name} {size} bytes"
                for name, size in msgspec.structs.asdict(self.memory).items()
                if size is not None
            ]
        line = ": ".join(parts) + (f" [{', '.join(where)}]" if where else "")
        return one_line(line)

    def encode(self) -> bytes:
        """The fault as msgpack, at most 65536 bytes."""
        return _ENCODER.encode(self)

    @classmethod
    def decode(cls, payload: bytes | bytearray | memoryview) -> Fault:
        """The fault in ``payload``; fields this version does not know are ignored.

        Raises FaultDecodeError, and nothing else, for anything malformed.
        """
        try:
            return _DECODER.decode(payload)
        # Not only DecodeError: a nested payload ends in RecursionError, an
        # object that is no buffer in TypeError.
        except Exception as error:
            raise FaultDecodeError(f"not an encoded fault: {one_line(str(error))}") from error


_TEXT_LIMITS = {
    "message": MESSAGE_LIMIT,
    "traceback": TRACEBACK_LIMIT,
    "exception": NAME_LIMIT,
    "device": NAME_LIMIT,
    "role": NAME_LIMIT,
    "signal": NAME_LIMIT,
    "request_id": NAME_LIMIT,
}
_ENCODER = msgspec.msgpack.Encoder()
_DECODER = msgspec.msgpack.Decoder(Fault)


class FaultError(RuntimeError):
    """A fault on its way through code that can only raise.

    ``classify.fault_from_exception`` gives back the very fault it carries, so
    re-raising across a layer loses nothing. Its text is the public sentence.
    """

    def __init__(self, fault: Fault) -> None:
        super().__init__(fault.sentence)
        self.fault = fault

    def __reduce__(self) -> tuple[type[FaultError], tuple[Fault]]:
        return type(self), (self.fault,)


def process_lost(exit_code: int | None, *, host_oom: bool = False, **context: Any) -> Fault:
    """The fault of a process that ended without saying why.

    ``exit_code`` is as ``multiprocessing`` and ``subprocess`` give it: minus
    the signal's number for a death by signal, None if it could not be read.
    ``host_oom``: the cgroup counted an OOM kill at that time. ``context``
    holds further fields of :class:`Fault`.
    """
    name = None
    if exit_code is not None and exit_code < 0:
        try:
            name = _signal.Signals(-exit_code).name
        except ValueError:  # real-time signals have no name
            name = f"signal {-exit_code}"
    kind = FaultKind.HOST_OOM if host_oom else FaultKind.PROCESS_LOST
    return Fault(kind=kind, exit_code=exit_code, signal=name, **context)


def clip(text: str, limit: int) -> str:
    """``text`` as valid UTF-8 of at most ``limit`` bytes, its middle cut out if need be.

    The cut is marked with the number of bytes that are missing. A second call
    with the same limit changes nothing.
    """
    # Slicing first keeps a message of many megabytes from being copied several
    # times over in a process that may be out of memory. A character is at
    # least one byte, so the first and last `limit` of them are enough.
    dropped = 0
    if len(text) > 2 * limit:
        dropped = len(text) - 2 * limit
        text = text[:limit] + text[-limit:]
    # surrogates cannot be encoded; file names and truncated JSON contain them
    data = text.encode("utf-8", "backslashreplace")
    if len(data) <= limit:
        return data.decode("utf-8")
    mark = b"\n... [%d bytes cut] ...\n"
    room = limit - len(mark % (len(data) + dropped))
    if room < 2:
        return data[:limit].decode("utf-8", "ignore")
    head, tail = room - room // 2, room // 2
    missing = len(data) - room + dropped
    kept = data[:head], mark % missing, data[-tail:]
    return b"".join(kept).decode("utf-8", "ignore")


def iso_time(seconds: float) -> str:
    """Wall time as ISO 8601 in UTC with milliseconds, ending in ``Z``."""
    try:
        moment = datetime.fromtimestamp(seconds, UTC)
    except (ValueError, OverflowError, OSError):
        # a nonsense time in a fault must not hide the fault
        moment = datetime.fromtimestamp(0, UTC)
    return moment.isoformat(timespec="milliseconds").replace("+00:00", "Z")
