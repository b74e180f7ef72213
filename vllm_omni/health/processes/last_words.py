# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-omni-health project
"""The last-words pipe: facts a stage process can state when its output queue cannot.

An engine core's output queue exists only after the model is loaded, and only while the process
is whole. The pipe exists before the process does. Through it a stage process says which worker
processes it has, and, when it fails, why: one JSON object a line. The server's supervisor
reads it beside the process's pidfd.

The writing end never blocks: a process that is failing must not wait for its reader. A fault
fits the pipe, whose capacity is 64 KiB by default (pipe(7)), because faults are cut to size.
"""

from __future__ import annotations

import os
import select
from collections.abc import Iterable, Iterator

import msgspec
from vllm_omni.health.faults.fault import Fault, clip

_READ_CHUNK = 65536
_LONGEST_LINE = 1 << 20
"""A line longer than this is no fault of ours: it is dropped, so that memory stays bounded."""


class WorkerRef(msgspec.Struct, frozen=True):
    """A worker process of an engine core: the rank it runs and its pid."""

    rank: int
    pid: int


class ToldToStop(msgspec.Struct, frozen=True):
    """A process got a signal that would have ended it, and goes on."""

    pid: int
    signum: int


class Words(msgspec.Struct, frozen=True, omit_defaults=True):
    """One line on the pipe: the workers of this process, the fault that ends it, a signal to stop
    that it got, or progress.

    ``progress``: a step of a long call is done, and the process alive.
    """

    workers: tuple[WorkerRef, ...] | None = None
    fault: Fault | None = None
    told: ToldToStop | None = None
    progress: bool = False


class LastWordsWriter:
    """Writes a stage process's words, from any of its threads. Never blocks and never raises.

    ``shared``: other processes write to the same pipe. Lines are then cut to what the kernel
    writes in one piece, or they could end up in one another.
    """

    def __init__(self, fd: int, *, shared: bool = False) -> None:
        self.fd = fd
        self.stated = False
        """Whether this process has said why it ends."""
        self._limit = select.PIPE_BUF if shared else _LONGEST_LINE
        os.set_blocking(fd, False)

    def workers(self, workers: Iterable[WorkerRef]) -> None:
        """Say which worker processes this engine core has."""
        self._write(Words(workers=tuple(workers)))

    def fault(self, fault: Fault) -> None:
        """Say why this process is about to end."""
        self.stated = True
        self._write(Words(fault=fault))

    def told_to_stop(self, signum: int) -> None:
        """Say that this process got a signal to stop, and leaves the judgement to its server."""
        self._write(Words(told=ToldToStop(os.getpid(), signum)))

    def progress(self) -> None:
        """Say that the work gets on. Not more than about once a second: it wakes the reader."""
        self._write(Words(progress=True))

    def _write(self, words: Words) -> None:
        line = msgspec.json.encode(words) + b"\n"
        for shortened in (_short, _shortest):
            if len(line) > self._limit and words.fault is not None:
                line = msgspec.json.encode(Words(fault=shortened(words.fault))) + b"\n"
        try:
            os.write(self.fd, line)
        except OSError:
            # The server is gone or does not read: there is nobody left to tell.
            pass


def _short(fault: Fault) -> Fault:
    """Return the fault without what takes the most room: its traceback, which the process has in
    its own log, most bases, and the end of a long message."""
    return msgspec.structs.replace(
        fault, traceback=None, bases=fault.bases[:4], message=clip(fault.message, 512)
    )


def _shortest(fault: Fault) -> Fault:
    """Return what fits in ``select.PIPE_BUF`` (4096 bytes on Linux) whatever the fault's texts are.

    JSON writes a character as up to six (``\\u0000``), so of all texts only 64 characters of the
    exception's name are kept.
    """
    return Fault(
        kind=fault.kind,
        severity=fault.severity,
        exception=clip(fault.exception, 64) if fault.exception else None,
        rank=fault.rank,
        pid=fault.pid,
        time=fault.time,
    )


_own: LastWordsWriter | None = None


def speak_through(writer: LastWordsWriter | None) -> None:
    """Make ``writer`` the end that this process states its last words through."""
    global _own
    _own = writer


def own_words() -> LastWordsWriter | None:
    """This process's end of its pipe; None in the server, and where nobody listens."""
    return _own


def say(fault: Fault) -> None:
    """Say through this process's pipe why it is about to end; dropped where there is none."""
    if _own is not None:
        _own.fault(fault)


class LastWordsReader:
    """Reads the words of one pipe, on the supervisor's thread alone. Never blocks."""

    def __init__(self, fd: int) -> None:
        self.fd = fd
        self.closed = False
        self._pending = b""
        os.set_blocking(fd, False)

    def read(self) -> Iterator[Words]:
        """Yield what has been said since the last call; sets ``closed`` at end of file.

        A line that cannot be decoded is left out.
        """
        while not self.closed:
            try:
                chunk = os.read(self.fd, _READ_CHUNK)
            except BlockingIOError:
                break
            except OSError:
                chunk = b""
            if not chunk:
                self.closed = True
                break
            self._pending += chunk
        *lines, rest = self._pending.split(b"\n")
        self._pending = rest if len(rest) <= _LONGEST_LINE else b""
        for line in lines:
            try:
                yield msgspec.json.decode(line, type=Words)
            except msgspec.DecodeError:
                continue

    def close(self) -> None:
        """Close the descriptor; harmless when called twice."""
        if self.fd >= 0:
            os.close(self.fd)
            self.fd = -1
            self.closed = True
