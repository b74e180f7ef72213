# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-omni-health project
"""What a stage process says on its pipe arrives whole, and never blocks the speaker."""

import os
import select

import pytest
from vllm_omni.health.faults.fault import Fault, FaultKind
from vllm_omni.health.processes.last_words import LastWordsReader, LastWordsWriter, WorkerRef


@pytest.fixture
def pipe():
    read_fd, write_fd = os.pipe()
    reader, writer = LastWordsReader(read_fd), LastWordsWriter(write_fd)
    closed = []

    def close_writer():
        if not closed:
            closed.append(os.close(write_fd))

    yield reader, writer, write_fd, close_writer
    close_writer()
    reader.close()


def test_workers_and_fault_arrive_in_order(pipe):
    reader, writer, _, close_writer = pipe
    fault = Fault(kind=FaultKind.OOM, message="no room\nat all", traceback="x" * 30000, rank=1)
    writer.workers([WorkerRef(rank=0, pid=41), WorkerRef(rank=1, pid=42)])
    writer.fault(fault)
    first, second = reader.read()
    assert first.workers == (WorkerRef(0, 41), WorkerRef(1, 42))
    assert second.fault == fault
    assert not reader.closed
    close_writer()
    assert list(reader.read()) == []
    assert reader.closed


def test_a_line_in_two_pieces_is_one_line(pipe):
    reader, _, write_fd, _ = pipe
    os.write(write_fd, b'{"workers":[{"rank":0,')
    assert list(reader.read()) == []
    os.write(write_fd, b'"pid":7}]}\n')
    (words,) = reader.read()
    assert words.workers == (WorkerRef(0, 7),)


def test_garbage_and_a_half_line_at_the_end_are_dropped(pipe):
    reader, writer, write_fd, close_writer = pipe
    os.write(write_fd, b"\x00garbage\n[]\n")
    writer.workers([WorkerRef(rank=0, pid=7)])
    os.write(write_fd, b'{"fault":{"kind":"oo')
    close_writer()
    (words,) = reader.read()
    assert words.workers == (WorkerRef(0, 7),)
    assert reader.closed


def test_a_full_pipe_or_no_reader_does_not_hold_up_the_speaker(pipe):
    reader, writer, _, _ = pipe
    fault = Fault(kind=FaultKind.ENGINE, message="x" * 4000, traceback="y" * 30000)
    for _ in range(50):
        writer.fault(fault)
    assert next(iter(reader.read())).fault == fault
    reader.close()
    writer.fault(fault)


@pytest.mark.parametrize("text", ["x" * 30000, "\x01" * 30000, '"' * 30000])
def test_on_a_shared_pipe_a_line_is_written_in_one_piece(pipe, text):
    reader, _, write_fd, _ = pipe
    fault = Fault(
        kind=FaultKind.OOM, exception=text, message=text, traceback=text, device=text, rank=3, pid=7
    )
    LastWordsWriter(write_fd, shared=True).fault(fault)
    assert len(os.read(reader.fd, 1 << 20)) <= select.PIPE_BUF
    LastWordsWriter(write_fd, shared=True).fault(fault)
    (words,) = reader.read()
    told = words.fault
    assert (told.kind, told.rank, told.pid, told.time) == (FaultKind.OOM, 3, 7, fault.time)
