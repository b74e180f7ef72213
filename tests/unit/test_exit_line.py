# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-omni-health project
"""The one line that says why the server ended."""

from __future__ import annotations

import io
import json
import os
from pathlib import Path

import pytest
from vllm_omni.health.faults.exit_line import exit_line, write_exit_line
from vllm_omni.health.faults.fault import Fault, FaultKind, process_lost

from vllm_omni_health.exit_line import TERMINATION_LOG_LIMIT


class Broken(io.StringIO):
    """A stream nobody reads any more."""

    def write(self, text: str) -> int:
        raise BrokenPipeError


def test_the_line_says_what_happened_where() -> None:
    fault = process_lost(-9, stage_id=1, replica_id=0, rank=2, pid=4711, time=0.0)
    assert json.loads(exit_line(fault, 85)) == {
        "schema": 1,
        "exit_status": 85,
        "kind": "process_lost",
        "message": FaultKind.PROCESS_LOST.sentence,
        "stage_id": 1,
        "replica_id": 0,
        "rank": 2,
        "pid": 4711,
        "exception": None,
        "exit_code": -9,
        "signal": "SIGKILL",
        "core_dumped": None,
        "time": "1970-01-01T00:00:00.000Z",
    }


def test_no_text_of_the_exception_gets_out() -> None:
    fault = Fault(
        kind=FaultKind.OOM,
        exception="torch.OutOfMemoryError",
        message="SECRET",
        traceback="SECRET",
        request_id="SECRET",
        device="SECRET",
    )
    line = exit_line(fault, 81)
    assert "SECRET" not in line
    assert json.loads(line)["exception"] == "torch.OutOfMemoryError"


@pytest.mark.parametrize("status", [0, 1, 143])
def test_an_end_without_a_fault_has_a_line_too(status: int) -> None:
    reason = json.loads(exit_line(None, status))
    assert (reason["exit_status"], reason["kind"]) == (status, None)
    assert reason["message"].endswith(".")


def test_a_clean_stop_is_told_from_other_ends() -> None:
    sentences = {json.loads(exit_line(None, status))["message"] for status in (0, 1)}
    assert len(sentences) == 2


@pytest.mark.parametrize("char", ["x", "é", "\U0001f600", "\x00", '"', "\n"])
def test_the_line_fits_into_a_termination_log_as_ascii(char: str) -> None:
    text = char * 100_000
    fault = Fault(
        kind=FaultKind.ACCELERATOR,
        exception=text,
        signal=text,
        message=text,
        role=text,
        stage_id=-(2**63),
        replica_id=2**63,
        rank=2**63,
        pid=2**63,
        exit_code=-(2**63),
    )
    line = exit_line(fault, 83)
    assert len(line.encode("ascii")) + 1 <= TERMINATION_LOG_LIMIT
    assert "\n" not in line
    assert json.loads(line)["kind"] == "accelerator"


def test_stream_and_file_get_the_same_line(tmp_path: Path) -> None:
    log, stream = tmp_path / "log", io.StringIO()
    fault = Fault(kind=FaultKind.OOM, time=0.0)
    assert write_exit_line(fault, 81, log, stream)
    assert log.read_text() == stream.getvalue() == exit_line(fault, 81) + "\n"


def test_a_later_reason_takes_the_place_of_an_earlier_one(tmp_path: Path) -> None:
    log = tmp_path / "log"
    fault = Fault(kind=FaultKind.ACCELERATOR, exception="a" * 100, time=0.0)
    write_exit_line(fault, 83, log, io.StringIO())
    write_exit_line(None, 0, log, io.StringIO())
    assert log.read_text() == exit_line(None, 0) + "\n"


def test_without_a_file_only_the_stream_is_written() -> None:
    stream = io.StringIO()
    assert write_exit_line(None, 0, None, stream)
    assert stream.getvalue().count("\n") == 1


@pytest.mark.parametrize("name", ["no/such/folder", ".", "nul\0byte"])
def test_a_file_that_cannot_be_written_is_complained_about(tmp_path: Path, name: str) -> None:
    stream = io.StringIO()
    assert not write_exit_line(None, 1, tmp_path / name, stream)
    lines = stream.getvalue().splitlines()
    assert lines[0] == exit_line(None, 1)
    assert lines[1].startswith("cannot write the termination log")
    assert len(lines) == 2


def test_a_pipe_that_nobody_reads_does_not_hold_up_the_exit(tmp_path: Path) -> None:
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    assert not write_exit_line(None, 1, pipe, io.StringIO())


@pytest.mark.parametrize("stream", [None, Broken()])
def test_a_stream_that_is_gone_does_not_keep_the_file_from_being_written(
    tmp_path: Path, stream: io.StringIO | None
) -> None:
    log = tmp_path / "log"
    assert not write_exit_line(None, 1, log, stream)
    assert log.read_text() == exit_line(None, 1) + "\n"


def test_a_closed_stream_raises_nothing(tmp_path: Path) -> None:
    stream = io.StringIO()
    stream.close()
    assert not write_exit_line(None, 1, tmp_path / "no" / "folder", stream)
