# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-omni-health project
"""Child processes with a last-words pipe, which the supervisor watches from their start on.

And with one for the order to end, which goes ahead of the signal that ends them: see
:mod:`vllm_omni.health.processes.stop_signals`.
"""

from __future__ import annotations

import contextlib
import functools
import multiprocessing
import multiprocessing.context
import os
from collections.abc import Callable
from multiprocessing import util
from multiprocessing.connection import Connection
from typing import Any

from vllm_omni.health.processes.last_words import LastWordsReader, WorkerRef, own_words
from vllm_omni.health.processes.process import ExitStatus
from vllm_omni.health.processes.supervisor import Supervisor
from vllm_omni.health.runtime import current
from vllm_omni.health.state.values import ReplicaKey


class WatchedProcessMixin:
    """Adds the pipe before the start and the watch right after it.

    ``entry`` is run in the child in place of upstream's target, with the same arguments and
    ``last_words``, the pipe's writing Connection, and ``order``, the reading one of the pipe for
    the order to end. Both are None where no server of this layer listens, as on a host with
    stages alone. ``key``: the replica, if it is known here. ``rank``: of a worker; None for the
    root process of a replica.
    """

    def __init__(
        self,
        *,
        entry: Callable[..., Any],
        key: ReplicaKey | None,
        rank: int | None = None,
        **process: Any,
    ) -> None:
        self._key = key
        self._rank = rank
        self._words_reader, self._words_writer = self._open_pipe()
        self._order_reader: Any = None
        self._order_writer: Any = None
        if self._words_writer is not None:
            self._order_reader, self._order_writer = multiprocessing.Pipe(duplex=False)
        super().__init__(  # type: ignore[call-arg]
            target=functools.partial(
                entry, last_words=self._words_writer, order=self._order_reader
            ),
            **process,
        )

    def _open_pipe(self) -> tuple[Any, Any]:
        """The reading and the writing Connection."""
        words = own_words()
        if words is not None:
            # One pipe for a replica's own process and its workers; the server reads it.
            return None, Connection(os.dup(words.fd), readable=False)
        return (None, None) if current() is None else multiprocessing.Pipe(duplex=False)

    def __getstate__(self) -> dict[str, Any]:
        # What is pickled goes to the child, which has its ends among its arguments.
        state = self.__dict__.copy()
        state["_words_reader"] = state["_words_writer"] = None
        state["_order_reader"] = state["_order_writer"] = None
        return state

    def terminate(self) -> None:
        """Multiprocessing's SIGTERM, with the order to end ahead of it."""
        if self._order_writer is not None:
            _give(self._order_writer)
        super().terminate()  # type: ignore[misc]

    def start(self) -> None:
        """Spawn the process and put it under watch."""
        super().start()  # type: ignore[misc]
        # Ours must go, or the pipes would not close when the child ends.
        for end in (self._words_writer, self._order_reader):
            if end is not None:
                end.close()
        if self._order_writer is not None:
            # At exit multiprocessing ends daemons without terminate(), and waits for them.
            util.Finalize(self, _give, args=(self._order_writer,), exitpriority=1)
        words, runtime = own_words(), current()
        pid: int = self.pid  # type: ignore[attr-defined]
        if words is not None and self._rank is not None:
            words.workers([WorkerRef(rank=self._rank, pid=pid)])
        elif runtime is not None:
            reader, self._words_reader = self._words_reader, None
            self._watch(runtime.supervisor, pid, LastWordsReader(_detach(reader)))

    def _watch(self, supervisor: Supervisor, pid: int, words: LastWordsReader) -> None:
        if self._key is None:
            words.close()
        elif self._rank is None:
            supervisor.watch_engine_core(
                *self._key, pid, words=words, exit_status=self._exit_status
            )
        else:
            supervisor.watch_worker(
                *self._key, self._rank, pid, words=words, exit_status=self._exit_status
            )

    def _exit_status(self) -> ExitStatus:
        return ExitStatus.from_exit_code(self.exitcode)  # type: ignore[attr-defined]


class SpawnWatchedProcess(WatchedProcessMixin, multiprocessing.context.SpawnProcess):
    """A process of a stage started by spawn."""


class ForkWatchedProcess(WatchedProcessMixin, multiprocessing.context.ForkProcess):
    """A process of a stage started by fork, which library use of vLLM may choose."""


class WatchedContext:
    """A multiprocessing context that makes processes of stages; all else is the real one's.

    ``entry``: what they run. ``place``: which replica and rank one is, by the arguments that
    upstream has for it.
    """

    def __init__(
        self,
        context: Any,
        entry: Callable[..., Any],
        place: Callable[..., tuple[ReplicaKey | None, int | None]],
    ) -> None:
        self._context = context
        self._entry = entry
        self._place = place

    def __getattr__(self, name: str) -> Any:
        return getattr(self._context, name)

    def Process(
        self,
        *,
        target: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
        **process: Any,
    ) -> SpawnWatchedProcess | ForkWatchedProcess:
        """Takes the place of the context's class; ``target`` is upstream's."""
        del target
        kwargs = kwargs or {}
        key, rank = self._place(*args, **kwargs)
        fork = self._context.get_start_method() == "fork"
        made = ForkWatchedProcess if fork else SpawnWatchedProcess
        return made(entry=self._entry, key=key, rank=rank, args=args, kwargs=kwargs, **process)


def _give(order: Connection) -> None:
    with contextlib.suppress(OSError):  # who has ended needs none
        order.send_bytes(b"end")


def _detach(connection: Any) -> int:
    """Take the descriptor out of a Connection, which would close it when collected."""
    fd = os.dup(connection.fileno())
    connection.close()
    return fd
