# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-omni-health project
"""What a worker's calls end in reaches someone, also where no answer is read."""

from __future__ import annotations

import contextlib
import os
import threading
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from vllm.v1.engine.core import EngineCoreProc
from vllm_omni.engine.health.ar.process import HealthStageEngineCoreProc
from vllm_omni.engine.health.ar.worker import HealthWorkerProc
from vllm_omni.engine.health.envelope import FaultText
from vllm_omni.health.faults.fault import Fault, FaultKind
from vllm_omni.health.processes.last_words import LastWordsReader, LastWordsWriter, speak_through

OWN, OTHER = 1, 0


class Pipe:
    """The server's end of the replica's last-words pipe."""

    def __init__(self) -> None:
        reading, writing = os.pipe()
        self._reader = LastWordsReader(reading)
        self._writing = writing
        speak_through(LastWordsWriter(writing, shared=True))

    def faults(self) -> list[Fault]:
        return [words.fault for words in self._reader.read() if words.fault is not None]

    def close(self) -> None:
        speak_through(None)
        os.close(self._writing)
        self._reader.close()


@pytest.fixture
def pipe() -> Iterator[Pipe]:
    pipe = Pipe()
    yield pipe
    pipe.close()


class Answers(list[Any]):
    enqueue = list.append


class Model:
    def fail(self, exc: Exception) -> None:
        raise exc

    def double(self, number: int) -> int:
        return 2 * number


@pytest.fixture
def worker() -> HealthWorkerProc:
    """A worker of rank 1 of which everything but its model and queues is left out."""
    worker = object.__new__(HealthWorkerProc)
    worker.rank = OWN
    worker.worker = Model()
    worker.use_async_scheduling = False
    worker.worker_response_mq = Answers()
    return worker


def test_nobody_reads_this_ranks_answer_so_it_is_said(worker: Any, pipe: Pipe) -> None:
    exc = torch.OutOfMemoryError("Tried to allocate")
    worker._execute_worker_rpc(("fail", (exc,), {}, OTHER))
    (fault,) = pipe.faults()
    assert (fault.kind, fault.rank, fault.pid) == (FaultKind.OOM, OWN, os.getpid())
    assert fault.memory is not None
    assert fault.memory.total
    assert worker.worker_response_mq == []


@pytest.mark.parametrize("reply_rank", [OWN, None])
def test_an_answer_that_is_read_says_it_with_its_class(
    worker: Any, pipe: Pipe, reply_rank: int | None
) -> None:
    exc = torch.OutOfMemoryError("Tried to allocate")
    worker._execute_worker_rpc(("fail", (exc,), {}, reply_rank))
    ((status, text),) = worker.worker_response_mq
    assert status is HealthWorkerProc.ResponseStatus.FAILURE
    assert isinstance(text, FaultText)
    assert (text.fault.kind, text.fault.rank) == (FaultKind.OOM, OWN)
    assert pipe.faults() == []


@pytest.mark.parametrize(("reply_rank", "answers"), [(OWN, 1), (None, 1), (OTHER, 0)])
def test_results_are_sent_where_they_are_wanted(
    worker: Any, pipe: Pipe, reply_rank: int | None, answers: int
) -> None:
    worker._execute_worker_rpc(("double", (4,), {}, reply_rank))
    assert [result for _, result in worker.worker_response_mq] == [8] * answers
    assert pipe.faults() == []


@pytest.mark.parametrize("loop", ["worker_busy_loop", "async_output_busy_loop"])
@pytest.mark.parametrize("told", [False, True])
def test_a_loop_that_ends_says_why_unless_it_was_told_to(
    worker: Any, pipe: Pipe, monkeypatch: pytest.MonkeyPatch, loop: str, told: bool
) -> None:
    def end(_self: Any) -> None:
        raise OSError("the queue broke")

    monkeypatch.setattr(HealthWorkerProc.__base__, loop, end)
    worker._told_to_end = threading.Event()
    if told:
        worker._told_to_end.set()
    with pytest.raises(OSError, match="queue"):
        getattr(worker, loop)()
    said = [] if told else ["builtins.OSError"]
    assert [fault.exception for fault in pipe.faults()] == said


def test_a_model_that_cannot_be_loaded_says_why(
    pipe: Pipe, monkeypatch: pytest.MonkeyPatch
) -> None:
    def load(*_args: Any, **_kwargs: Any) -> None:
        raise torch.OutOfMemoryError("weights")

    monkeypatch.setattr(HealthWorkerProc.__base__, "__init__", load)
    with pytest.raises(torch.OutOfMemoryError):
        HealthWorkerProc(rank=3)
    (fault,) = pipe.faults()
    assert (fault.kind, fault.rank) == (FaultKind.OOM, 3)


@pytest.mark.parametrize("thread", ["process_input_sockets", "process_output_sockets"])
def test_an_engine_cores_socket_thread_says_what_ended_it(
    pipe: Pipe, monkeypatch: pytest.MonkeyPatch, thread: str
) -> None:
    def end(*_args: Any) -> None:
        raise MemoryError

    monkeypatch.setattr(EngineCoreProc, thread, end)
    core = object.__new__(HealthStageEngineCoreProc)
    with contextlib.suppress(MemoryError):
        getattr(core, thread)("address")
    (fault,) = pipe.faults()
    assert (fault.kind, fault.pid) == (FaultKind.HOST_OOM, os.getpid())
