# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-omni-health project
"""A diffusion engine ends with its first fatal fault, says so once, and refuses bad requests."""

import asyncio
import contextlib
import os
import queue
import threading
from types import SimpleNamespace

import pytest
import torch
from vllm_omni.diffusion.data import DiffusionOutput
from vllm_omni.engine.health.diffusion import engine as diffusion_engine_health
from vllm_omni.engine.health.diffusion import progress as diffusion_progress
from vllm_omni.engine.health.diffusion.engine import HealthEngineMixin, replica_being_started
from vllm_omni.errors import OmniClientError
from vllm_omni.health.faults.fault import FaultError, FaultKind
from vllm_omni.health.processes.last_words import LastWordsReader, LastWordsWriter, speak_through
from vllm_omni.health.runtime import HealthRuntime, set_current

from vllm_omni_health.settings.model import HealthSettings
from vllm_omni_health.settings.sources import SettingsError

pytestmark = pytest.mark.timeout(30)


class Scheduler:
    """Has requests when the test says so."""

    waiting = False

    def has_requests(self):
        return self.waiting


class Executor:
    """Answers calls with what the test has put there, or raises it."""

    def __init__(self):
        self.result = None
        self.is_shut_down = False
        self.failed = None

    def collective_rpc(self, method, timeout=None, args=(), kwargs=None, unique_reply_rank=None):
        if isinstance(self.result, BaseException):
            raise self.result
        return self.result

    def execute(self, scheduled):
        try:
            return self.collective_rpc("execute_model", unique_reply_rank=0)
        except Exception as exc:
            # As upstream does, which loses class and status.
            return DiffusionOutput(error=str(exc))

    def register_failure_callback(self, callback):
        self.failed = callback


class Engine:
    """The parts of upstream's engine that the mixin is put over."""

    def __init__(self, od_config=None, scheduler=None):
        self._loop_started = False
        self._closed = False
        self._scheduling_paused = False
        self.scheduler = Scheduler()
        self._cv = threading.Condition()
        self.stop_event = threading.Event()
        self.worker_thread = None
        self.scheduled = queue.Queue()
        self.outputs = queue.Queue()
        self.failed_rpcs = []
        self.preparation = None
        self._init_executor(od_config)
        self._init_execute_fn()

    def _init_executor(self, od_config):
        self.executor = Executor()

    def _init_execute_fn(self):
        self.execute_fn = self.executor.execute

    def _busy_loop(self):
        while not self.stop_event.is_set():
            self._process_aborts_queue()
            with contextlib.suppress(queue.Empty):
                scheduled = self.scheduled.get(timeout=0.01)
                if scheduled == "break":
                    raise ZeroDivisionError("the loop itself")
                if scheduled == "give up":
                    self._fail_engine(ValueError("the scheduler lost a request"))
                try:
                    self.outputs.put(self.execute_fn(scheduled))
                except Exception as exc:
                    self.outputs.put(DiffusionOutput.from_exception(exc))

    def _process_aborts_queue(self):
        pass

    def _fail_engine(self, exc):
        self._closed = True

    def _fail_pending_rpcs(self, exc):
        self.failed_rpcs.append(exc)

    def _prepare_request_for_admission(self, request):
        if self.preparation is not None:
            raise self.preparation
        return request

    async def step_streaming(self, request):
        request = self._prepare_request_for_admission(request)
        yield [request]

    def close(self):
        self._closed = True

    def start(self):
        self.worker_thread = threading.Thread(target=self._busy_loop, daemon=True)
        self._loop_started = True
        self.worker_thread.start()

    def ended(self):
        self.worker_thread.join(10)
        return not self.worker_thread.is_alive()


class HealthEngine(HealthEngineMixin, Engine):
    pass


@pytest.fixture
def stated(monkeypatch):
    faults = []
    monkeypatch.setattr(diffusion_engine_health, "_process_outlet", faults.append)
    return faults


@pytest.fixture
def engine(stated):
    engine = HealthEngine()
    engine.start()
    yield engine
    engine.stop_event.set()


@pytest.mark.parametrize(
    ("exc", "kind"),
    [
        (torch.OutOfMemoryError("20 GiB"), FaultKind.OOM),
        (torch.AcceleratorError("illegal access"), FaultKind.ACCELERATOR),
        (RuntimeError("a kernel failed"), FaultKind.ENGINE),
    ],
)
def test_a_fatal_fault_ends_the_engine_and_answers_nobody(engine, stated, exc, kind):
    engine.executor.result = exc
    engine.scheduled.put("request")
    assert engine.ended()
    assert [fault.kind for fault in stated] == [kind]
    assert engine.outputs.empty()
    assert isinstance(engine.failed_rpcs[0], FaultError)


def test_a_refused_request_is_a_client_error_and_the_engine_serves_on(engine, stated):
    engine.executor.result = ValueError("size 7x7")
    engine.scheduled.put("request")
    refused = engine.outputs.get(timeout=10)
    assert (refused.error, refused.error_status_code) == ("size 7x7", 400)
    engine.executor.result = DiffusionOutput(output=1)
    engine.scheduled.put("another")
    assert engine.outputs.get(timeout=10).output == 1
    assert stated == []


def test_a_failed_request_fails_alone(engine, stated):
    engine.executor.result = KeyError("image")
    engine.scheduled.put("request")
    output = engine.outputs.get(timeout=10)
    assert "image" in output.error
    assert output.error_status_code is None
    assert stated == []


def test_the_busy_loops_own_failure_is_stated(engine, stated):
    engine.scheduled.put("break")
    assert engine.ended()
    assert [(fault.kind, fault.fatal) for fault in stated] == [(FaultKind.ENGINE, True)]


def test_what_upstream_gives_up_for_is_stated(engine, stated):
    engine.scheduled.put("give up")
    assert engine.ended()
    assert [(fault.kind, fault.fatal) for fault in stated] == [(FaultKind.ENGINE, True)]


@pytest.mark.parametrize(
    ("exc", "count"), [(RuntimeError("no such adapter"), 0), (torch.OutOfMemoryError(), 1)]
)
def test_a_failed_control_call_says_nothing_of_the_replica_unless_its_class_does(
    engine, stated, exc, count
):
    engine.executor.result = exc
    with pytest.raises(type(exc)):
        engine.executor.collective_rpc("add_lora")
    assert len(stated) == count


def test_a_dead_worker_is_stated_without_any_request(engine, stated):
    class Process:
        pid, exitcode = 7, -9

    engine.executor.failed()
    assert stated == []
    engine._workers = (Process,)
    engine.executor.failed()
    assert [fault.kind for fault in stated] == [FaultKind.PROCESS_LOST]


def test_the_warm_up_fails_with_an_exception(stated):
    engine = HealthEngine()
    engine.executor.result = torch.OutOfMemoryError()
    with pytest.raises(FaultError):
        engine.execute_fn("dummy")
    assert [fault.kind for fault in stated] == [FaultKind.OOM]


def test_nothing_is_a_fault_while_the_engine_is_being_closed(engine, stated):
    engine.close()
    assert engine.ended()
    engine.executor.result = RuntimeError("Executor shut down")
    with pytest.raises(RuntimeError):
        engine.executor.collective_rpc("execute_model")
    assert stated == []


def test_an_engine_at_work_is_not_waited_for(engine, monkeypatch):
    monkeypatch.setattr(diffusion_engine_health, "_CLOSE_S", 0.05)
    at_work, go_on = threading.Event(), threading.Event()

    def forward(*args, **kwargs):
        at_work.set()
        go_on.wait(10)

    engine.executor.execute = engine.execute_fn = forward
    engine.scheduled.put("request")
    assert at_work.wait(10)
    engine.close()
    assert not engine._closed, "upstream's closing would have waited for the forward pass"
    go_on.set()


def first_output(engine):
    async def ask():
        async for output in engine.step_streaming("request"):
            return output

    return asyncio.run(asyncio.wait_for(ask(), 0.3))


def test_preprocessing_refuses_with_a_client_error(engine, stated):
    engine.preparation = ValueError("no image")
    with pytest.raises(OmniClientError) as caught:
        first_output(engine)
    assert caught.value.status_code == 400
    engine.preparation = RuntimeError("cannot decode")
    with pytest.raises(RuntimeError, match="cannot decode"):
        first_output(engine)
    engine.preparation = None
    assert first_output(engine) == ["request"]
    assert stated == []


def test_a_fatal_fault_in_preprocessing_is_stated_and_left_to_the_orchestrator(engine, stated):
    engine.preparation = torch.OutOfMemoryError()
    with pytest.raises(TimeoutError):
        first_output(engine)
    assert [fault.kind for fault in stated] == [FaultKind.OOM]


@contextlib.contextmanager
def server(**settings):
    runtime = HealthRuntime(HealthSettings(**settings))
    set_current(runtime)
    token = replica_being_started.set((0, 0))
    try:
        yield runtime
    finally:
        replica_being_started.reset(token)
        set_current(None)


def test_in_the_server_process_the_replica_is_the_server_itself():
    with server() as runtime:
        engine = HealthEngine()
        runtime.supervisor.replica_ready(0, 0)
        runtime.machine.started()
        engine.start()
        engine.executor.result = torch.OutOfMemoryError()
        engine.scheduled.put("request")
        assert engine.ended()
        snapshot = runtime.machine.snapshot
        assert (snapshot.state, snapshot.fault.kind) == ("DEAD", FaultKind.OOM)
        assert runtime.supervisor.kill_all() == [], "and we are still here"


def test_an_inline_stage_cannot_be_held():
    with server(policy="hold"), pytest.raises(SettingsError, match="policy hold: stage 0"):
        HealthEngine()


# ---- liveness ------------------------------------------------------------------------------


@pytest.fixture
def clock(monkeypatch):
    """Time for the engine that passes only when the test says so: ``clock.now``."""

    class Clock:
        now = 1000.0

        def monotonic(self):
            return self.now

    clock = Clock()
    monkeypatch.setattr(diffusion_engine_health, "time", clock)
    monkeypatch.setattr(diffusion_progress, "time", clock)
    monkeypatch.setattr(diffusion_progress, "_last_step", 0.0)
    return clock


def test_an_engine_without_work_is_never_silent(clock):
    engine = HealthEngine()
    clock.now += 3600
    assert engine.silent_s() == 0


def test_an_engine_is_silent_from_the_last_step_of_its_work(clock):
    engine = HealthEngine()
    asked = []

    def execute(_scheduled):
        clock.now += 100
        asked.append(engine.silent_s())
        pipeline.transformer(torch.zeros(1))
        asked.append(engine.silent_s())
        clock.now += 30
        asked.append(engine.silent_s())

    pipeline = SimpleNamespace(_dit_modules=["transformer"], transformer=torch.nn.Identity())
    runner = SimpleNamespace(pipeline=pipeline)
    diffusion_progress.watch_steps(SimpleNamespace(worker=SimpleNamespace(model_runner=runner)))
    engine._execute(execute, None)
    assert asked == [100, 0, 30]
    clock.now += 3600
    assert engine.silent_s() == 0


def test_requests_that_nobody_takes_up_are_silence_while_the_loop_stands(clock):
    engine = HealthEngine()
    engine.silent_s()
    engine.scheduler.waiting = True
    clock.now += 50
    assert engine.silent_s() == 50
    engine._process_aborts_queue()
    assert engine.silent_s() == 0
    engine._scheduling_paused = True
    clock.now += 50
    assert engine.silent_s() == 0


def test_a_worker_process_tells_of_its_steps_but_not_of_each(clock):
    read_fd, write_fd = os.pipe()
    words = LastWordsReader(read_fd)
    speak_through(LastWordsWriter(write_fd, shared=True))
    try:
        for _ in range(100):
            clock.now += 0.1
            diffusion_progress._step(None, ())
        heard = list(words.read())
        assert 8 <= len(heard) <= 11
        assert all(word.progress and word.fault is None for word in heard)
    finally:
        speak_through(None)
        os.close(write_fd)
        words.close()


def test_an_engine_with_its_worker_inside_reports_the_workers_memory_until_it_closes(
    stated, monkeypatch
):
    told = []
    monkeypatch.setattr(
        diffusion_engine_health,
        "report_regularly",
        lambda worker: told.append(worker) or (lambda: told.append("end")),
    )
    monkeypatch.setattr(Executor, "driver_worker", "worker", raising=False)
    engine = HealthEngine()
    engine.start()
    assert told == ["worker"]
    engine.close()
    assert told == ["worker", "end"]
