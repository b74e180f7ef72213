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

from vllm_omni.health.processes.last_words import LastWordsReader
from vllm_omni.health.processes.process import ExitStatus
from vllm_omni.health.processes.supervisor import Supervisor
from vllm_omni.health.processes.watched import ReplicaKey
from vllm_omni.health.runtime import current


class WatchedProcessMixin:
    """Adds the pipe before the start and the watch right after it.

    ``entry`` is run in the child in place of upstream's target, with the same arguments and
    ``last_words``, the pipe's writing Connection, and ``order``, the reading one of the pipe for
    the order to end. Both are None where no server of this layer listens, as on a host with
    stages alone. Subclasses say how they are watched.
    """

    def __init__(self, *, entry: Callable[..., Any], **process: Any) -> None:
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
        runtime = current()
        if runtime is None:
            return
        reader, self._words_reader = self._words_reader, None
        self._watch(
            runtime.supervisor,
            self.pid,  # type: ignore[attr-defined]
            LastWordsReader(_detach(reader)),
        )

    def _watch(self, supervisor: Supervisor, pid: int, words: LastWordsReader) -> None:
        raise NotImplementedError

    def _exit_status(self) -> ExitStatus:
        return ExitStatus.from_exit_code(self.exitcode)  # type: ignore[attr-defined]


class _StageProcessMixin(WatchedProcessMixin):
    """The root process of a replica."""

    def __init__(self, *, key: ReplicaKey, **process: Any) -> None:
        self._key = key
        super().__init__(**process)

    def _watch(self, supervisor: Supervisor, pid: int, words: LastWordsReader) -> None:
        supervisor.watch_engine_core(*self._key, pid, words=words, exit_status=self._exit_status)


class SpawnStageProcess(_StageProcessMixin, multiprocessing.context.SpawnProcess):
    """A replica's root process started by spawn."""


class ForkStageProcess(_StageProcessMixin, multiprocessing.context.ForkProcess):
    """A replica's root process started by fork, which library use of vLLM may choose."""


class StageContext:
    """A multiprocessing context that makes replicas' root processes; all else is the real one's.

    ``entry``: what they run. ``key_of``: which replica it is, by the arguments for the process.
    """

    def __init__(
        self,
        context: Any,
        entry: Callable[..., Any],
        key_of: Callable[[dict[str, Any]], ReplicaKey],
    ) -> None:
        self._context = context
        self._entry = entry
        self._key_of = key_of

    def __getattr__(self, name: str) -> Any:
        return getattr(self._context, name)

    def Process(
        self, *, target: Any, kwargs: dict[str, Any], name: str | None = None
    ) -> SpawnStageProcess | ForkStageProcess:
        """Takes the place of the context's class; ``target`` is upstream's."""
        del target
        fork = self._context.get_start_method() == "fork"
        process = ForkStageProcess if fork else SpawnStageProcess
        return process(entry=self._entry, key=self._key_of(kwargs), kwargs=kwargs, name=name)


def _give(order: Connection) -> None:
    with contextlib.suppress(OSError):  # who has ended needs none
        order.send_bytes(b"end")


def _detach(connection: Any) -> int:
    """Take the descriptor out of a Connection, which would close it when collected."""
    fd = os.dup(connection.fileno())
    connection.close()
    return fd
