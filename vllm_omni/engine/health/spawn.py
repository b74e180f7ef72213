"""Child processes with a last-words pipe, which the supervisor watches from their start on."""

from __future__ import annotations

import functools
import multiprocessing
import multiprocessing.context
import os
from collections.abc import Callable
from typing import Any

from vllm_omni.health.processes.last_words import LastWordsReader
from vllm_omni.health.processes.process import ExitStatus
from vllm_omni.health.processes.supervisor import Supervisor
from vllm_omni.health.processes.watched import ReplicaKey
from vllm_omni.health.runtime import current


class WatchedProcessMixin:
    """Adds the pipe before the start and the watch right after it.

    ``entry`` is run in the child in place of upstream's target, with the same arguments and
    ``last_words``, the pipe's writing Connection. Subclasses say how they are watched.
    """

    def __init__(self, *, entry: Callable[..., Any], **process: Any) -> None:
        self._words_reader, self._words_writer = self._open_pipe()
        super().__init__(  # type: ignore[call-arg]
            target=functools.partial(entry, last_words=self._words_writer), **process
        )

    def _open_pipe(self) -> tuple[Any, Any]:
        """The reading and the writing Connection."""
        return multiprocessing.Pipe(duplex=False)

    def __getstate__(self) -> dict[str, Any]:
        # What is pickled goes to the child, which has the writing end among its arguments.
        state = self.__dict__.copy()
        state["_words_reader"] = state["_words_writer"] = None
        return state

    def start(self) -> None:
        """Spawn the process and put it under watch."""
        super().start()  # type: ignore[misc]
        # Ours must go, or the pipe would not close when the child ends.
        self._words_writer.close()
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


def _detach(connection: Any) -> int:
    """Take the descriptor out of a Connection, which would close it when collected."""
    fd = os.dup(connection.fileno())
    connection.close()
    return fd
