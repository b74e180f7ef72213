# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-omni-health project
"""Faults: one meaning per kind, and nothing lost or too large on the way."""

from __future__ import annotations

import contextlib
import json
import pickle

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from vllm_omni.health.faults.fault import (
    BASES_LIMIT,
    MESSAGE_LIMIT,
    NAME_LIMIT,
    TRACEBACK_LIMIT,
    Fault,
    FaultDecodeError,
    FaultError,
    FaultKind,
    MemoryFigures,
    Severity,
    clip,
    iso_time,
    one_line,
    process_lost,
)

PIPE_CAPACITY = 65536

ints = st.none() | st.integers(-(2**63), 2**64 - 1)
# Any code point, lone surrogates included: st.text() leaves those out.
any_text = st.text(st.characters(exclude_categories=()), max_size=200)
names = st.none() | any_text
memory_figures = st.builds(MemoryFigures, allocated=ints, reserved=ints, free=ints, total=ints)
faults = st.builds(
    Fault,
    kind=st.sampled_from(FaultKind),
    severity=st.sampled_from(Severity),
    exception=names,
    bases=st.lists(any_text, max_size=BASES_LIMIT + 4).map(tuple),
    message=any_text,
    stage_id=ints,
    replica_id=ints,
    rank=ints,
    pid=ints,
    device=names,
    memory=st.none() | memory_figures,
    time=st.floats(allow_nan=False),
    traceback=names,
    role=names,
    exit_code=ints,
    signal=names,
    request_id=names,
)


@pytest.mark.parametrize(
    ("kind", "status"),
    [
        ("oom", 81),
        ("host_oom", 82),
        ("accelerator", 83),
        ("collective", 84),
        ("process_lost", 85),
        ("hang", 86),
        ("orchestrator", 87),
        ("engine", 80),
    ],
)
def test_every_kind_has_its_exit_status(kind: str, status: int) -> None:
    assert FaultKind(kind).exit_status == status


def test_the_most_telling_kind_takes_precedence() -> None:
    in_order = sorted(FaultKind, key=lambda kind: kind.precedence)
    assert [kind.value for kind in in_order] == [
        "oom",
        "host_oom",
        "accelerator",
        "process_lost",
        "hang",
        "collective",
        "engine",
        "orchestrator",
    ]


def test_every_kind_has_one_sentence_of_its_own() -> None:
    sentences = {kind.sentence for kind in FaultKind}
    assert len(sentences) == len(FaultKind)
    assert all(sentence.endswith(".") and "\n" not in sentence for sentence in sentences)


# ---- encoding ------------------------------------------------------------------------------


@given(faults)
def test_a_fault_survives_encoding(fault: Fault) -> None:
    assert Fault.decode(fault.encode()) == fault


@given(faults)
def test_a_fault_survives_every_hop(fault: Fault) -> None:
    hop = Fault.decode(Fault.decode(fault.encode()).with_context(role="engine core").encode())
    assert hop == fault.with_context(role="engine core")


@pytest.mark.parametrize("char", ["a", "é", "\U0001f600", "\ud800", "\x00"])
def test_a_fault_with_every_limit_reached_still_fits_into_a_pipe(char: str) -> None:
    text = char * 1_000_000
    fault = Fault(
        kind=FaultKind.ACCELERATOR,
        exception=text,
        bases=(text,) * 1000,
        message=text,
        stage_id=2**63,
        memory=MemoryFigures(allocated=2**63, reserved=2**63, free=2**63, total=2**63),
        traceback=text,
        device=text,
        role=text,
        signal=text,
        request_id=text,
    )
    payload = fault.encode()
    assert len(payload) <= PIPE_CAPACITY
    assert Fault.decode(payload) == fault


def test_a_fault_of_a_later_version_is_understood() -> None:
    fault = Fault(kind=FaultKind.OOM, stage_id=1)
    later = msgspec.msgpack.decode(fault.encode()) | {"invented_later": {"a": [1]}}
    assert Fault.decode(msgspec.msgpack.encode(later)) == fault


@pytest.mark.parametrize(
    "payload",
    [
        b"",
        b"\xc1",
        b"\x93\x01\x02",
        msgspec.msgpack.encode({"kind": "no such kind"}),
        msgspec.msgpack.encode({"kind": "oom", "stage_id": "one"}),
        msgspec.msgpack.encode({"stage_id": 1}),
        msgspec.msgpack.encode({"kind": "oom"}) + b"\x00",
        b"\x91" * 100_000,
    ],
    ids=["empty", "bad byte", "cut", "kind", "type", "no kind", "trailing", "nested"],
)
def test_what_is_no_fault_raises_one_clear_error(payload: bytes) -> None:
    with pytest.raises(FaultDecodeError, match=r"^not an encoded fault: "):
        Fault.decode(payload)


@given(st.binary(max_size=200))
def test_no_bytes_raise_anything_else(payload: bytes) -> None:
    # The only thing it may raise; some bytes are a fault by chance.
    with contextlib.suppress(FaultDecodeError):
        Fault.decode(payload)


# ---- cutting -------------------------------------------------------------------------------


@given(st.text(st.characters(exclude_categories=())), st.integers(0, 200))
def test_clipped_text_is_short_and_valid_and_stays_so(text: str, limit: int) -> None:
    clipped = clip(text, limit)
    assert len(clipped.encode()) <= limit
    assert clip(clipped, limit) == clipped


@given(st.text(max_size=100))
def test_what_fits_is_not_touched(text: str) -> None:
    assert clip(text, 400) == text


def test_a_cut_keeps_head_and_tail_and_says_how_much_is_missing() -> None:
    text = "begin" + "x" * 10_000 + "end"
    clipped = clip(text, 1000)
    head, mark, tail = clipped.partition("\n... [")
    missing, _, tail = tail.partition(" bytes cut] ...\n")
    assert head.startswith("begin")
    assert tail.endswith("end")
    assert mark
    assert len(head) + len(tail) + int(missing) == len(text)


def test_limits_are_kept_by_construction() -> None:
    fault = Fault(
        kind=FaultKind.ENGINE, message="m" * 10**6, traceback="t" * 10**6, exception="e" * 10**4
    )
    assert len(fault.message) <= MESSAGE_LIMIT
    assert fault.traceback is not None
    assert len(fault.traceback) <= TRACEBACK_LIMIT
    assert fault.exception is not None
    assert len(fault.exception) <= NAME_LIMIT


# ---- context -------------------------------------------------------------------------------


@given(faults, faults)
def test_context_fills_gaps_and_overwrites_nothing(fault: Fault, other: Fault) -> None:
    known = msgspec.structs.asdict(fault)
    offered = msgspec.structs.asdict(other)
    filled = msgspec.structs.asdict(fault.with_context(**offered))
    for name, value in filled.items():
        assert value == (offered[name] if known[name] is None else known[name])


def test_zero_is_known() -> None:
    fault = Fault(kind=FaultKind.OOM, stage_id=0, rank=None)
    filled = fault.with_context(stage_id=3, rank=4)
    assert (filled.stage_id, filled.rank) == (0, 4)


def test_context_that_is_no_field_is_refused() -> None:
    with pytest.raises(TypeError, match="no field stage"):
        Fault(kind=FaultKind.OOM).with_context(stage=1)


def test_another_kind_keeps_everything_else() -> None:
    fault = Fault(kind=FaultKind.ENGINE, message="m", rank=2, time=5.0)
    other = fault.with_kind(FaultKind.ORCHESTRATOR)
    assert other.kind is FaultKind.ORCHESTRATOR
    assert other.with_kind(FaultKind.ENGINE) == fault


# ---- what is shown to whom -----------------------------------------------------------------


def test_the_public_form_has_no_text_of_the_exception() -> None:
    fault = Fault(
        kind=FaultKind.OOM,
        exception="SECRET",
        bases=("SECRET",),
        message="SECRET prompt in /SECRET/path",
        traceback="SECRET",
        device="SECRET",
        request_id="SECRET",
        stage_id=1,
        replica_id=0,
        time=0.0,
    )
    public = fault.public()
    assert public == {
        "kind": "oom",
        "stage_id": 1,
        "replica_id": 0,
        "message": FaultKind.OOM.sentence,
        "time": "1970-01-01T00:00:00.000Z",
    }
    assert "SECRET" not in json.dumps(public)


@given(faults)
def test_the_public_form_and_the_log_line_can_be_written(fault: Fault) -> None:
    json.dumps(fault.public()).encode()
    line = fault.log_line()
    line.encode()
    assert line.isprintable()


def test_the_log_line_says_what_and_where_on_one_line() -> None:
    line = Fault(
        kind=FaultKind.OOM,
        exception="torch.OutOfMemoryError",
        message="tried to\nallocate",
        stage_id=1,
        replica_id=0,
        rank=3,
        pid=4711,
        device="cuda:3",
        role="worker",
        traceback="do not show",
        memory=MemoryFigures(free=5),
    ).log_line()
    assert line == (
        r"oom fault: torch.OutOfMemoryError: tried to\nallocate [role worker, stage 1, replica 0, "
        "rank 3, pid 4711, device cuda:3, free 5 bytes]"
    )


def test_a_request_scoped_fault_is_told_apart_in_the_log() -> None:
    fault = Fault(kind=FaultKind.ENGINE, severity=Severity.REQUEST)
    assert fault.log_line() == "engine fault of one request"
    assert not fault.fatal


def test_one_line_cannot_be_made_to_look_like_two() -> None:
    assert one_line("a\nb\r\x1b[31m\u2028c") == r"a\nb\r\x1b[31m\u2028c"


@pytest.mark.parametrize("seconds", [float("inf"), float("nan"), 1e300, -1e300])
def test_a_nonsense_time_does_not_hide_the_fault(seconds: float) -> None:
    assert iso_time(seconds).endswith("Z")
    assert Fault(kind=FaultKind.OOM, time=seconds).public()["kind"] == "oom"


def test_times_are_utc_to_the_millisecond() -> None:
    assert iso_time(1.5) == "1970-01-01T00:00:01.500Z"


# ---- other ways to make one ----------------------------------------------------------------


@pytest.mark.parametrize(
    ("exit_code", "signal"),
    [(-9, "SIGKILL"), (-11, "SIGSEGV"), (-40, "signal 40"), (3, None), (0, None), (None, None)],
)
def test_a_lost_process_says_how_it_ended(exit_code: int | None, signal: str | None) -> None:
    fault = process_lost(exit_code, stage_id=1, pid=5)
    assert fault.kind is FaultKind.PROCESS_LOST
    assert (fault.exit_code, fault.signal, fault.stage_id, fault.pid) == (exit_code, signal, 1, 5)
    assert fault.fatal


def test_a_process_killed_for_memory_is_a_host_oom() -> None:
    fault = process_lost(-9, host_oom=True)
    assert (fault.kind, fault.signal) == (FaultKind.HOST_OOM, "SIGKILL")


def test_an_error_carries_its_fault_through_pickle_and_shows_no_secret() -> None:
    fault = Fault(kind=FaultKind.HANG, message="SECRET", stage_id=2)
    error = pickle.loads(pickle.dumps(FaultError(fault)))
    assert type(error) is FaultError
    assert error.fault == fault
    assert str(error) == FaultKind.HANG.sentence
