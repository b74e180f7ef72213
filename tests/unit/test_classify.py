# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-omni-health project
"""Classification: by type alone, most telling first, and whatever the exception."""

from __future__ import annotations

import ast
import asyncio
import errno
import gc
import importlib
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from vllm_omni.health.faults import classify as module
from vllm_omni.health.faults.classify import (
    CHAIN_LIMIT,
    classify,
    fault_from_exception,
    walk,
)
from vllm_omni.health.faults.fault import Fault, FaultError, FaultKind, Severity
from vllm_omni.health.faults.table import (
    DEFAULT_CLASSES,
    DEFAULT_CODES,
    DEFAULT_TABLE,
    ClassificationTable,
    class_names,
)


def named(dotted: str, *bases: type[BaseException], **namespace: Any) -> type[BaseException]:
    """A class that says it is ``dotted``, so that no test needs torch or vLLM."""
    dotted_module, _, name = dotted.rpartition(".")
    made = type(name, bases or (RuntimeError,), namespace)
    made.__module__, made.__qualname__ = dotted_module, name
    return made


OutOfMemoryError = named("torch.OutOfMemoryError")
AcceleratorError = named("torch.AcceleratorError")
DistError = named("torch.distributed.DistError")
DistBackendError = named("torch.distributed.DistBackendError", DistError)
VLLMClientError = named("vllm.exceptions.VLLMClientError", Exception)
VLLMValidationError = named("vllm.exceptions.VLLMValidationError", VLLMClientError)
EngineGenerateError = named("vllm.v1.engine.exceptions.EngineGenerateError", Exception)
GuardrailViolationError = named(
    "vllm_omni.errors.GuardrailViolationError",
    named("vllm_omni.errors.OmniClientError", ValueError),
)


def caught(raiser: Callable[[], object]) -> BaseException:
    try:
        raiser()
    except BaseException as exc:
        return exc
    raise AssertionError("nothing was raised")


def kind_of(exc: BaseException) -> str:
    return classify(exc).kind.value


def with_code(code: object) -> BaseException:
    exc = AcceleratorError("CUDA error")
    exc.error_code = code  # type: ignore[attr-defined]
    return exc


# ---- one exception -------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("exc", "kind"),
    [
        (OutOfMemoryError(), "oom"),
        (named("torch.cuda.OutOfMemoryError")(), "oom"),
        (named("custom.PoolExhausted", OutOfMemoryError)(), "oom"),
        (AcceleratorError(), "accelerator"),
        (DistError(), "collective"),
        (DistBackendError(), "collective"),
        (MemoryError(), "host_oom"),
        (named("numpy._core._exceptions._ArrayMemoryError", MemoryError)(), "host_oom"),
        (TimeoutError(), "hang"),
        (named("x.DeliveryTimeoutError", TimeoutError)(), "hang"),
        (OSError(errno.ENOMEM, "mmap"), "host_oom"),
        (OSError(errno.EIO, "disk"), "engine"),
        (BrokenPipeError(), "engine"),
        (ConnectionResetError(), "engine"),
        (RuntimeError("CUDA out of memory"), "engine"),
        (ValueError(), "engine"),
        (KeyboardInterrupt(), "engine"),
    ],
    ids=lambda value: type(value).__name__ if isinstance(value, BaseException) else value,
)
def test_a_class_decides_the_kind_and_is_fatal(exc: BaseException, kind: str) -> None:
    finding = classify(exc)
    assert (finding.kind.value, finding.severity) == (kind, Severity.FATAL)


@pytest.mark.parametrize(
    "exc",
    [
        VLLMValidationError(),
        GuardrailViolationError(),
        EngineGenerateError(),
        asyncio.CancelledError(),
        named("vllm_omni.diffusion.data.DiffusionRequestAbortedError")(),
    ],
    ids=lambda exc: type(exc).__name__,
)
def test_what_concerns_one_request_does_not_condemn_the_replica(exc: BaseException) -> None:
    assert classify(exc).severity is Severity.REQUEST


@pytest.mark.parametrize(
    ("code", "kind"),
    [
        (2, "oom"),
        (700, "accelerator"),
        (None, "accelerator"),
        ("2", "accelerator"),
        ([2], "accelerator"),
    ],
)
def test_accelerator_errors_are_told_apart_by_code(code: object, kind: str) -> None:
    assert kind_of(with_code(code)) == kind


def test_a_code_that_cannot_be_read_leaves_the_class_to_decide() -> None:
    def fail(self: object) -> int:
        raise SystemExit

    assert kind_of(named("x.Odd", AcceleratorError, error_code=property(fail))()) == "accelerator"


# ---- exceptions that led to one another ----------------------------------------------------


def test_the_cause_tells_more_than_its_wrapper() -> None:
    def raiser() -> None:
        try:
            raise OutOfMemoryError("inner")
        except RuntimeError as exc:
            raise RuntimeError("Worker failed") from exc

    finding = classify(caught(raiser))
    assert finding.kind is FaultKind.OOM
    assert str(finding.exception) == "inner"


def test_an_exception_raised_while_handling_another_does_not_hide_it() -> None:
    def raiser() -> None:
        try:
            raise MemoryError
        except MemoryError:
            {}["key"]

    assert kind_of(caught(raiser)) == "host_oom"


def test_a_suppressed_context_is_not_looked_at() -> None:
    def raiser() -> None:
        try:
            raise TimeoutError
        except TimeoutError:
            raise RuntimeError("retried, and failed otherwise") from None

    assert kind_of(caught(raiser)) == "engine"


@pytest.mark.parametrize("kind", [kind for kind in FaultKind if kind is not FaultKind.ORCHESTRATOR])
@pytest.mark.parametrize(
    "other", [kind for kind in FaultKind if kind is not FaultKind.ORCHESTRATOR]
)
def test_the_kind_that_takes_precedence_wins_wherever_it_is(
    kind: FaultKind, other: FaultKind
) -> None:
    table = ClassificationTable().extended(
        {f"test.{each.value}": (each, Severity.FATAL) for each in FaultKind}
    )
    outer, inner = named(f"test.{kind.value}")(), named(f"test.{other.value}")()
    outer.__cause__ = inner
    expected = min(kind, other, key=lambda each: each.precedence)
    assert classify(outer, table).kind is expected
    assert classify(ExceptionGroup("", [outer]), table).kind is expected


def test_a_group_is_what_its_most_telling_member_is() -> None:
    nested = ExceptionGroup("tasks", [DistError(), ExceptionGroup("", [OutOfMemoryError()])])
    assert kind_of(nested) == "oom"


def test_a_validation_error_raised_while_an_oom_was_handled_is_an_oom() -> None:
    exc = VLLMValidationError()
    exc.__context__ = OutOfMemoryError()
    assert classify(exc)[:2] == (FaultKind.OOM, Severity.FATAL)


def test_a_wrapped_validation_error_is_still_one_requests_affair() -> None:
    wrapper = RuntimeError("preprocessing failed")
    wrapper.__cause__ = VLLMValidationError()
    assert classify(wrapper).severity is Severity.REQUEST


def test_a_bug_while_a_validation_error_was_handled_is_fatal() -> None:
    bug = KeyError("in the handler")
    bug.__context__ = VLLMValidationError()
    assert classify(bug).severity is Severity.FATAL


def test_a_group_concerns_requests_only_if_every_member_does() -> None:
    both = ExceptionGroup("", [VLLMValidationError(), GuardrailViolationError()])
    mixed = ExceptionGroup("", [VLLMValidationError(), KeyError()])
    assert classify(both).severity is Severity.REQUEST
    assert classify(mixed).severity is Severity.FATAL


def test_an_exception_is_found_at_the_end_of_a_long_chain() -> None:
    head: BaseException = OutOfMemoryError()
    for _ in range(CHAIN_LIMIT - 1):
        outer = RuntimeError()
        outer.__context__ = head
        head = outer
    assert kind_of(head) == "oom"


# ---- the table -----------------------------------------------------------------------------


def test_an_operator_can_extend_the_table_with_plain_strings() -> None:
    table = DEFAULT_TABLE.extended(
        {"my.Flaky": ("engine", "request"), "torch.OutOfMemoryError": ("oom", "request")}
    )
    assert classify(named("my.Flaky")(), table).severity is Severity.REQUEST
    assert classify(OutOfMemoryError(), table)[:2] == (FaultKind.OOM, Severity.REQUEST)
    assert classify(AcceleratorError(), table).severity is Severity.FATAL
    assert classify(OutOfMemoryError()).severity is Severity.FATAL


def test_the_nearest_class_decides() -> None:
    table = DEFAULT_TABLE.extended({"my.Special": ("engine", "request")})
    assert classify(named("my.Special", OutOfMemoryError)(), table).severity is Severity.REQUEST


def test_a_table_cannot_be_changed_in_place() -> None:
    with pytest.raises(AttributeError):
        DEFAULT_TABLE.classes = {}
    with pytest.raises(TypeError):
        DEFAULT_TABLE.classes["x.Y"] = (FaultKind.OOM, Severity.FATAL)  # type: ignore[index]


@pytest.mark.parametrize(
    "entry", [{"NoDot": ("oom", "fatal")}, {"a.B": ("none", "fatal")}, {"a.B": ("oom", "none")}]
)
def test_a_wrong_entry_is_refused(entry: dict[str, tuple[str, str]]) -> None:
    with pytest.raises(ValueError, match=r"NoDot|none"):
        DEFAULT_TABLE.extended(entry)


def test_every_class_in_the_table_exists() -> None:
    pytest.importorskip("torch")
    pytest.importorskip("vllm")
    for dotted in {**DEFAULT_CLASSES, **DEFAULT_CODES}:
        module_name, _, name = dotted.rpartition(".")
        assert issubclass(getattr(importlib.import_module(module_name), name), BaseException)


def test_torchs_own_classes_are_recognised() -> None:
    torch = pytest.importorskip("torch")
    assert kind_of(torch.OutOfMemoryError("x")) == "oom"
    assert kind_of(torch.cuda.OutOfMemoryError("x")) == "oom"
    assert kind_of(torch.AcceleratorError("x")) == "accelerator"
    assert kind_of(torch.distributed.DistBackendError("x")) == "collective"
    assert kind_of(torch.distributed.DistNetworkError("x")) == "collective"
    assert kind_of(torch.distributed.DistStoreError("x")) == "collective"


def test_no_message_is_ever_searched() -> None:
    """The text of an exception is read in one function only, and nothing is looked for in it."""
    source = Path(module.__file__).read_text()
    tree = ast.parse(source)
    readers = {
        function.name
        for function in ast.walk(tree)
        if isinstance(function, ast.FunctionDef)
        for node in ast.walk(function)
        if (isinstance(node, ast.Name) and node.id in ("str", "repr", "format"))
        or (isinstance(node, ast.Attribute) and node.attr in ("args", "message", "strerror"))
        if not _is_annotation_only(function, node)
    }
    assert readers == {"_text"}
    imported = {
        alias.name
        for node in ast.walk(tree)
        if isinstance(node, ast.Import)
        for alias in node.names
    }
    assert "re" not in imported


def _is_annotation_only(function: ast.FunctionDef, node: ast.AST) -> bool:
    """Whether ``node`` is a name in an annotation or in isinstance(), and so reads nothing."""
    quiet: list[ast.AST] = [function.args, *([function.returns] if function.returns else [])]
    quiet += [part.annotation for part in ast.walk(function) if isinstance(part, ast.AnnAssign)]
    quiet += [
        call
        for call in ast.walk(function)
        if isinstance(call, ast.Call)
        and isinstance(call.func, ast.Name)
        and call.func.id == "isinstance"
    ]
    return any(node is inside for part in quiet for inside in ast.walk(part))


# ---- the fault -----------------------------------------------------------------------------


def test_the_fault_is_that_of_the_telling_exception_with_the_whole_traceback() -> None:
    def raiser() -> None:
        try:
            raise DistBackendError("NCCL watchdog")
        except RuntimeError as exc:
            raise RuntimeError("Executor failed") from exc

    fault = fault_from_exception(caught(raiser), role="worker", rank=1)
    assert fault.kind is FaultKind.COLLECTIVE
    assert fault.exception == "torch.distributed.DistBackendError"
    assert fault.bases == (
        "torch.distributed.DistError",
        "builtins.RuntimeError",
        "builtins.Exception",
        "builtins.BaseException",
    )
    assert fault.message == "NCCL watchdog"
    assert (fault.role, fault.rank) == ("worker", 1)
    assert fault.traceback is not None
    assert "in raiser" in fault.traceback
    assert "Executor failed" in fault.traceback
    assert "NCCL watchdog" in fault.traceback


def test_a_fault_that_was_raised_is_given_back() -> None:
    inner = Fault(kind=FaultKind.OOM, message="from the worker", rank=3)
    outer = RuntimeError("wrapped on the way")
    outer.__cause__ = pickle.loads(pickle.dumps(FaultError(inner)))
    assert fault_from_exception(outer, rank=0, stage_id=1) == inner.with_context(stage_id=1)


def test_wrong_context_does_not_lose_the_fault() -> None:
    fault = fault_from_exception(OutOfMemoryError(), stage=1, role=object(), stage_id=2)
    assert (fault.kind, fault.stage_id, fault.role) == (FaultKind.OOM, 2, None)


# ---- whatever the exception ----------------------------------------------------------------


def _raise_exit(*_: object) -> Any:
    raise SystemExit("from inside")


class _Meta(type):
    __module__ = property(_raise_exit)
    __mro__ = property(_raise_exit)  # type: ignore[assignment]


class _Unspeakable(Exception):
    __cause__ = property(_raise_exit)  # type: ignore[assignment]
    __context__ = property(_raise_exit)  # type: ignore[assignment]
    __suppress_context__ = property(_raise_exit)  # type: ignore[assignment]
    __traceback__ = property(_raise_exit)  # type: ignore[assignment]
    __notes__ = property(_raise_exit)
    args = property(_raise_exit)  # type: ignore[assignment]
    __str__ = __repr__ = __hash__ = __eq__ = _raise_exit  # type: ignore[assignment]


class _NoText(Exception):
    __str__ = object.__sizeof__  # type: ignore[assignment]  # a number


class _Text(str):
    __slots__ = ()
    encode = __len__ = __getitem__ = _raise_exit  # type: ignore[assignment]


class _OddText(Exception):
    def __str__(self) -> str:
        return _Text("odd")


class _Metaclassed(Exception, metaclass=_Meta):
    pass


class _LyingGroup(ExceptionGroup[Exception]):
    exceptions = property(_raise_exit)  # type: ignore[assignment]


ODD = [
    _Unspeakable,
    _NoText,
    _OddText,
    _Metaclassed,
    lambda: _LyingGroup("", [ValueError()]),
    lambda: MemoryError("x" * 5_000_000),
    lambda: ValueError("\ud800\x00"),
    lambda: VLLMValidationError("request"),
    OutOfMemoryError,
    SystemExit,
    KeyboardInterrupt,
    GeneratorExit,
    lambda: UnicodeDecodeError("utf-8", b"\xff", 0, 1, "x"),
    lambda: SyntaxError("x", ("file", -1, 2**40, "text")),
]


@pytest.mark.parametrize("make", ODD)
def test_an_odd_exception_still_makes_a_fault(make: Callable[[], BaseException]) -> None:
    def raiser() -> None:
        raise make()

    fault = fault_from_exception(caught(raiser), stage_id=1)
    assert Fault.decode(fault.encode()) == fault
    assert fault.stage_id == 1


def test_an_oom_is_recognised_next_to_one_that_says_nothing() -> None:
    group = BaseExceptionGroup("", [_Unspeakable(), _Metaclassed(), OutOfMemoryError()])
    assert fault_from_exception(group).kind is FaultKind.OOM


def test_text_that_cannot_be_had_says_so() -> None:
    assert fault_from_exception(_NoText()).message == ("(str() of the exception raised TypeError)")
    assert fault_from_exception(_OddText()).message == "odd"


@st.composite
def exception_graphs(draw: st.DrawFn) -> BaseException:
    """Exceptions linked at random: cycles, self-loops, shared nodes and groups of groups."""
    makers = [*ODD, RuntimeError, TimeoutError, DistBackendError, AcceleratorError]
    makers.remove(_Unspeakable)  # its links cannot be set
    nodes: list[BaseException] = []
    for _ in range(draw(st.integers(1, 8))):
        if nodes and draw(st.booleans()):
            members = draw(st.lists(st.sampled_from(nodes), min_size=1, max_size=4))
            nodes.append(BaseExceptionGroup("group", members))
        else:
            nodes.append(draw(st.sampled_from(makers))())
    link = st.none() | st.sampled_from(nodes)
    for node in nodes:
        node.__context__ = draw(link)
        if draw(st.booleans()):
            node.__cause__ = draw(link)
        node.__suppress_context__ = draw(st.booleans())
    return draw(st.sampled_from(nodes))


@settings(deadline=None)
@given(exception_graphs())
def test_any_graph_of_exceptions_makes_a_fault(exc: BaseException) -> None:
    fault = fault_from_exception(exc, pid=1)
    assert Fault.decode(fault.encode()) == fault
    assert fault.pid == 1
    reached = [kind_of_one for kind_of_one in map(_own_kind, walk(exc)) if kind_of_one]
    if reached:
        assert fault.kind is min(reached, key=lambda kind: kind.precedence)
        assert fault.fatal
    else:
        assert fault.kind is FaultKind.ENGINE


def _own_kind(exc: BaseException) -> FaultKind | None:
    verdict = DEFAULT_TABLE.verdict(exc)
    return verdict[0] if verdict is not None and verdict[1] is Severity.FATAL else None


@settings(deadline=None)
@given(exception_graphs())
def test_a_walk_meets_every_exception_once(exc: BaseException) -> None:
    met = list(walk(exc))
    assert len({id(one) for one in met}) == len(met) <= CHAIN_LIMIT


@pytest.mark.parametrize("link", ["__cause__", "__context__"])
def test_a_chain_without_end_in_sight_is_left_at_some_point(link: str) -> None:
    head: BaseException = OutOfMemoryError("first")
    for number in range(50_000):
        outer = RuntimeError(number)
        setattr(outer, link, head)
        head = outer
    fault = fault_from_exception(head)
    assert fault.kind is FaultKind.ENGINE
    assert len(list(walk(head))) == CHAIN_LIMIT
    assert len(fault.encode()) < 65536
    _unlink(head, link)


def _unlink(head: BaseException | None, link: str) -> None:
    # Freeing a chain of this length at once would recurse as deep.
    while head is not None:
        following = getattr(head, link)
        setattr(head, link, None)
        head = following
    gc.collect()


def test_groups_nested_without_end_in_sight_make_a_fault() -> None:
    head: BaseException = OutOfMemoryError("first")
    for _ in range(CHAIN_LIMIT - 1):
        head = BaseExceptionGroup("g", [head])
    assert fault_from_exception(head).kind is FaultKind.OOM


def test_a_group_of_very_many_makes_a_fault() -> None:
    fault = fault_from_exception(ExceptionGroup("g", [ValueError(n) for n in range(100_000)]))
    assert fault.kind is FaultKind.ENGINE
    assert len(fault.encode()) < 65536


def test_running_out_of_memory_for_the_text_keeps_the_kind(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    real = module.Fault

    def no_room(**fields: Any) -> Fault:
        if "traceback" in fields:
            raise MemoryError
        return real(**fields)

    monkeypatch.setattr(module, "Fault", no_room)
    fault = module._make_fault(MemoryError("x"), DEFAULT_TABLE)
    assert (fault.kind, fault.exception) == (FaultKind.HOST_OOM, "builtins.MemoryError")


def test_class_names_follow_the_mro() -> None:
    assert list(class_names(ConnectionResetError)) == [
        "builtins.ConnectionResetError",
        "builtins.ConnectionError",
        "builtins.OSError",
        "builtins.Exception",
        "builtins.BaseException",
    ]
