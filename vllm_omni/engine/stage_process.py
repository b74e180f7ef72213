"""How the server spawns an engine-core process: with our target, a last-words pipe and a watch.

Upstream's process manager asks vLLM for a multiprocessing context and makes its processes from
that. It gets the same context here, whose ``Process`` is one that the supervisor knows.
"""

from __future__ import annotations

import functools
import multiprocessing
import multiprocessing.context
import os
from typing import Any

from vllm.utils.system_utils import get_mp_context as upstream_get_mp_context
from vllm_omni.engine.stage_core import run_stage_core
from vllm_omni.health.last_words import LastWordsReader
from vllm_omni.health.processes import ExitStatus
from vllm_omni.health.runtime import current


class _StageProcessMixin:
    """Adds the pipe before the start and the watch right after it."""

    def __init__(self, *, target: Any, kwargs: dict[str, Any], name: str | None = None) -> None:
        del target
        reader, writer = multiprocessing.Pipe(duplex=False)
        self._words_reader: Any = reader
        self._words_writer: Any = writer
        self._stage_id = int(kwargs["omni_stage_id"])
        self._replica_id = int(kwargs["omni_replica_id"])
        super().__init__(  # type: ignore[call-arg]
            target=functools.partial(run_stage_core, last_words=writer), kwargs=kwargs, name=name
        )

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
        runtime.supervisor.watch_engine_core(
            self._stage_id,
            self._replica_id,
            self.pid,  # type: ignore[attr-defined]
            words=LastWordsReader(_detach(reader)),
            exit_status=self._exit_status,
        )

    def _exit_status(self) -> ExitStatus:
        return ExitStatus.from_exit_code(self.exitcode)  # type: ignore[attr-defined]


class SpawnStageProcess(_StageProcessMixin, multiprocessing.context.SpawnProcess):
    """An engine-core process started by spawn."""


class ForkStageProcess(_StageProcessMixin, multiprocessing.context.ForkProcess):
    """An engine-core process started by fork, which library use of vLLM may choose."""


class _StageContext:
    """A multiprocessing context that makes stage processes; all else is the real one's."""

    def __init__(self, context: Any) -> None:
        self._context = context
        fork = context.get_start_method() == "fork"
        self.Process = ForkStageProcess if fork else SpawnStageProcess

    def __getattr__(self, name: str) -> Any:
        return getattr(self._context, name)


def get_mp_context() -> Any:
    """Replaces the name that upstream's stage process manager makes its processes with."""
    return _StageContext(upstream_get_mp_context())


def _detach(connection: Any) -> int:
    """Take the descriptor out of a Connection, which would close it when collected."""
    fd = os.dup(connection.fileno())
    connection.close()
    return fd
