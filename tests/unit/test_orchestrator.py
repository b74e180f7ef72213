# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-omni-health project
"""Upstream's real orchestrator loop with the health layer in it, over fake stage clients.

The fakes do what real stages cannot be made to do on demand: block in shutdown, die at a chosen
moment, or raise on the orchestrator's loop.
"""

import functools
import gc
import os
import threading
from types import SimpleNamespace

import msgspec
import psutil
import pytest
from fake_stages import WAIT_S, Client, DiffusionClient, Service, fault, until
from vllm.v1.engine.exceptions import EngineDeadError
from vllm_omni.distributed.omni_coordinator import RandomBalancer
from vllm_omni.engine.health import closing
from vllm_omni.engine.health.orchestrator import HealthOrchestrator
from vllm_omni.engine.membership_controller import MembershipController
from vllm_omni.engine.messages import ErrorMessage, StageSubmissionMessage
from vllm_omni.errors import OmniClientError
from vllm_omni.health.faults.fault import REQUEST_SENTENCE, FaultKind
from vllm_omni.health.state.machine import ReplicaState, State
from vllm_omni.inputs.data import OmniDiffusionSamplingParams
from vllm_omni.outputs import OmniRequestOutput


class FirstStage(DiffusionClient):
    """A stage that puts out whatever it is told, on its way to the next one."""

    final_output = False

    def put(self, output):
        self._output_queue.put_nowait(output)

    def finish(self, request_id):
        self.put(OmniRequestOutput(request_id=request_id, finished=True))


class NextStage(Client):
    """A stage whose input processor the test decides."""

    custom_process_input_func = None

    def __init__(self, process):
        super().__init__()
        self.process = process

    def process_engine_inputs(self, _outputs, *_, **__):
        return self.process()


def raising(exc):
    def process():
        raise exc

    return process


def test_it_starts_healthy():
    with Service([Client()], [Client()]) as service:
        assert service.machine.snapshot.state is State.HEALTHY
        assert not service.runtime.orchestrator_stalled()


def test_the_last_replica_of_a_stage_fails_every_request_whichever_stage_it_is_in():
    clients = [Client(), Client(), Client()]
    with Service(*[[client] for client in clients]) as service:
        for stage_id in range(3):
            service.request(f"in-{stage_id}", stage_id)
        service.runtime.supervisor.report(fault(stage_id=1))
        failures = service.failures(3)
        assert set(failures) == {"in-0", "in-1", "in-2"}
        assert {m.error for m in failures.values()} == {FaultKind.OOM.sentence}
        assert {m.stage_id for m in failures.values()} == {1}
        until(lambda: not service.orchestrator.request_states)
        # The healthy stages are closed as well: their memory is of no use any more.
        until(lambda: all(client.shutdowns == 1 for client in clients))


def test_with_a_survivor_only_requests_bound_to_the_lost_replica_fail():
    lost, survivor = Client(), Client()
    with Service([lost, survivor]) as service:
        service.request("doomed", replica_id=0)
        service.request("spared", replica_id=1)
        service.runtime.supervisor.report(fault(replica_id=0))
        assert set(service.failures(1)) == {"doomed"}
        until(lambda: lost.shutdowns == 1)
        assert set(service.orchestrator.request_states) == {"spared"}
        assert survivor.shutdowns == 0
        assert service.machine.snapshot.state is State.DEGRADED
        assert service.machine.snapshot.accepting
        assert service.pools[0].live_replica_ids() == [1]
        service.runtime.supervisor.report(fault(replica_id=1))
        assert set(service.failures(1)) == {"spared"}
        assert service.machine.snapshot.state is State.DEAD


def test_upstreams_own_detection_counts_when_nothing_else_saw_the_end():
    client = Client()
    with Service([client]) as service:
        service.request("pending")
        service.output(client, EngineDeadError())
        assert set(service.failures(1)) == {"pending"}
        assert service.machine.reason.kind is FaultKind.PROCESS_LOST


def test_the_typed_cause_wins_over_upstreams_detection():
    client = Client()
    with Service([client]) as service:
        service.request("pending")
        service.output(client, EngineDeadError())
        service.runtime.supervisor.report(fault())
        assert service.failures(1)["pending"].error == FaultKind.OOM.sentence
        assert service.machine.reason.kind is FaultKind.OOM


def test_a_request_that_arrives_after_the_sweep_is_failed_too():
    with Service([Client()]) as service:
        service.runtime.supervisor.report(fault())
        until(lambda: service.pools[0].live_num_replicas == 0)
        late = SimpleNamespace(type="add_request", request_id="late")
        service.requests.sync_q.put(late)
        assert set(service.failures(1)) == {"late"}


def test_a_client_that_blocks_in_shutdown_holds_up_neither_the_loop_nor_the_end(monkeypatch):
    monkeypatch.setattr(closing, "_CLIENT_CLOSE_S", 0.2)
    release = threading.Event()
    stuck, other = Client(release.wait), Client()
    try:
        with Service([stuck, other]) as service:
            service.request("doomed", replica_id=0)
            service.request("spared", replica_id=1)
            service.runtime.supervisor.report(fault(replica_id=0))
            service.failures(1)
            until(lambda: stuck.shutdowns == 1)
            # The loop still turns: the second loss is handled while the first one blocks.
            service.runtime.supervisor.report(fault(replica_id=1))
            service.failures(1)
            service.stop()
    finally:
        release.set()


def test_stages_are_closed_in_parallel():
    together = threading.Barrier(3)

    # Each waits for the two others: one after another, none would ever return.
    clients = [Client(lambda: together.wait(WAIT_S)) for _ in range(3)]
    with Service(*[[client] for client in clients]) as service:
        service.stop()
        assert not together.broken
        assert service.machine.snapshot.state is State.HEALTHY


def test_a_loop_that_ends_by_an_error_is_the_end_of_the_service():
    client = Client()
    with Service([client]) as service:
        service.request("pending")
        service.output(client, RuntimeError("a bug in routing"))
        service.thread.join(WAIT_S)
        assert str(service.error) == "a bug in routing"
        assert service.machine.snapshot.state is State.DEAD
        assert service.machine.reason.kind is FaultKind.ORCHESTRATOR
        assert client.shutdowns == 1


def test_an_input_processor_that_raises_fails_its_request_alone():
    first, second = FirstStage(), NextStage(raising(KeyError("secret")))
    with Service([first], [second], error_budget=1) as service:
        service.request("doomed")
        service.request("spared")
        service.on_loop(lambda: first.finish("doomed"))
        message = service.outputs.sync_q.get(timeout=WAIT_S)
        while not isinstance(message, ErrorMessage):
            message = service.outputs.sync_q.get(timeout=WAIT_S)
        assert (message.request_id, message.fatal, message.stage_id) == ("doomed", False, 1)
        assert message.error == REQUEST_SENTENCE
        noted = service.runtime.request_faults.of("doomed")
        assert (noted.kind, noted.severity, noted.stage_id) == ("orchestrator", "request", 1)
        assert noted.exception == "builtins.KeyError"
        until(lambda: set(service.orchestrator.request_states) == {"spared"})
        assert service.machine.snapshot.state is State.HEALTHY
        # It goes on routing, and counting.
        service.on_loop(lambda: first.finish("spared"))
        until(lambda: service.machine.snapshot.state is State.DEGRADED)
        assert service.machine.snapshot.accepting
        assert service.runtime.request_faults.of("spared") is not None
        service.stop()
        assert service.error is None


def test_an_input_processor_can_refuse_a_request_as_the_clients_mistake():
    first, second = FirstStage(), NextStage(raising(OmniClientError("too long", status_code=413)))
    with Service([first], [second]) as service:
        service.request("refused")
        service.on_loop(lambda: first.finish("refused"))
        message = service.outputs.sync_q.get(timeout=WAIT_S)
        while not isinstance(message, ErrorMessage):
            message = service.outputs.sync_q.get(timeout=WAIT_S)
        assert (message.status_code, message.error) == (413, "too long")
        assert service.runtime.request_faults.of("refused") is None


def test_an_input_processor_that_runs_out_of_memory_is_more_than_one_request():
    first, second = FirstStage(), NextStage(raising(MemoryError()))
    with Service([first], [second]) as service:
        service.request("pending")
        service.on_loop(lambda: first.finish("pending"))
        service.thread.join(WAIT_S)
        assert service.machine.snapshot.state is State.DEAD
        assert service.machine.reason.kind is FaultKind.HOST_OOM


def test_a_request_that_cannot_be_taken_in_fails_alone():
    with Service([Client()]) as service:
        bad = SimpleNamespace(
            type="add_request",
            request_id="bad",
            prompt=None,
            original_prompt=None,
            sampling_params_list=[SimpleNamespace()],
        )
        service.requests.sync_q.put(bad)
        message = service.outputs.sync_q.get(timeout=WAIT_S)
        assert (message.request_id, message.error) == ("bad", REQUEST_SENTENCE)
        assert service.runtime.request_faults.of("bad").kind == "orchestrator"
        service.request("fine")
        assert service.machine.snapshot.state is State.HEALTHY


@pytest.mark.parametrize(
    "raised",
    [
        pytest.param("\ud800".encode, id="half a character"),
        pytest.param(lambda: msgspec.msgpack.encode(object()), id="no value of msgpack's"),
        pytest.param(lambda: msgspec.msgpack.encode(1 << 70), id="a number too large"),
        pytest.param(lambda: msgspec.msgpack.decode(b"\x05", type=str), id="another type"),
    ],
)
def test_what_cannot_be_sent_to_a_stage_is_the_clients_mistake_and_counts_for_nothing(raised):
    class Sending(DiffusionClient):
        async def add_request_async(self, *_, **__):
            raised()

    with Service([Sending()], error_budget=1) as service:
        for number in range(3):
            service.requests.sync_q.put(
                StageSubmissionMessage(
                    type="add_request",
                    request_id=f"bad-{number}",
                    prompt={"prompt": "a boat"},
                    original_prompt=None,
                    output_prompt_text=None,
                    sampling_params_list=[OmniDiffusionSamplingParams()],
                    final_stage_id=0,
                    final_output_stage_ids=[0],
                    preprocess_ms=0.0,
                    request_timestamp=0.0,
                    enqueue_ts=0.0,
                )
            )
            message = service.outputs.sync_q.get(timeout=WAIT_S)
            assert (message.request_id, message.status_code) == (f"bad-{number}", 400)
            assert service.runtime.request_faults.of(f"bad-{number}") is None
            assert service.runtime.refusals.of(f"bad-{number}").status == 400
        assert service.on_loop(lambda: dict(service.orchestrator.request_states)) == {}
        assert service.machine.snapshot.state is State.HEALTHY


def test_an_error_output_of_a_stage_is_noted_and_counts_unless_the_client_is_to_blame():
    first = FirstStage()
    first.final_output = True
    with Service([first], error_budget=1) as service:
        for request_id, status in (("mine-1", 400), ("mine-2", 422), ("yours-1", None)):
            service.request(request_id)
            output = OmniRequestOutput.from_error(request_id, "it", status_code=status)
            service.on_loop(functools.partial(first.put, output))
            assert service.outputs.sync_q.get(timeout=WAIT_S).request_id == request_id
        assert service.runtime.request_faults.of("mine-1") is None
        assert service.runtime.refusals.of("mine-2").status == 422
        noted = service.runtime.request_faults.of("yours-1")
        assert (noted.kind, noted.fatal, noted.stage_id) == ("engine", False, 0)
        assert service.machine.snapshot.state is State.HEALTHY
        service.request("yours-2")
        service.on_loop(lambda: first.put(OmniRequestOutput.from_error("yours-2", "it")))
        until(lambda: service.machine.snapshot.state is State.DEGRADED)


def test_a_failure_is_noted_before_it_is_told():
    with Service([Client()]) as service:
        service.request("pending")
        service.runtime.supervisor.report(fault())
        assert set(service.failures(1)) == {"pending"}
        noted = service.runtime.request_faults.of("pending")
        assert (noted.kind, noted.fatal) == (FaultKind.OOM, True)


def test_a_duplex_sessions_failure_is_noted_for_the_session():
    """Its requests are the engine's own; the client's side knows the session."""
    with Service([Client()]) as service:
        service.request("turn-1")
        service.orchestrator.request_states["turn-1"].session_id = "duplex-1"
        service.runtime.supervisor.report(fault())
        service.failures(1)
        assert service.runtime.request_faults.of("duplex-1").kind is FaultKind.OOM


def test_two_stages_at_once_keep_the_first_cause():
    # Wide enough for two threads on a machine that is busy.
    with Service([Client()], [Client()], settle_s=2) as service:
        service.request("pending")
        both = [fault(stage_id=0), fault(stage_id=1, kind=FaultKind.ENGINE)]
        reports = [
            threading.Thread(target=service.runtime.supervisor.report, args=(one,)) for one in both
        ]
        for report in reports:
            report.start()
        assert set(service.failures(1)) == {"pending"}
        assert service.machine.reason.kind is FaultKind.OOM
        for report in reports:
            report.join()
        kinds = [m.fault["kind"] for m in service.machine.history() if m.fault]
        assert {"oom", "engine"} <= set(kinds)


def test_a_hundred_lives_leave_nothing_behind():
    """Started, faulted or stopped, over and over: no thread, descriptor or memory is kept."""

    def live(number):
        clients = [Client(), Client()]
        with Service(clients) as service:
            service.request("pending", replica_id=0)
            if number % 2:
                service.runtime.supervisor.report(fault(replica_id=0))
                service.failures(1)
                until(lambda: clients[0].shutdowns == 1)

    def held():
        gc.collect()
        descriptors = len(os.listdir("/proc/self/fd"))
        return threading.active_count(), descriptors, psutil.Process().memory_info().rss

    for number in range(20):
        live(number)
    threads, descriptors, memory = held()
    for number in range(100):
        live(number)
    after = held()
    assert after[:2] == (threads, descriptors)
    assert after[2] - memory < 16 * 2**20


def test_replicas_that_register_later_are_known_and_one_that_comes_back_heals():
    with Service([Client(), Client()]) as service:
        service.on_loop(lambda: service.pools[0].clients.append(Client()))
        until(lambda: service.machine.replica_state(0, 2) is ReplicaState.LIVE)
        service.runtime.supervisor.report(fault(replica_id=0))
        until(lambda: service.pools[0].clients[0] is None)
        assert service.machine.snapshot.state is State.DEGRADED

        def come_back():
            service.pools[0].clients[0] = Client()

        service.on_loop(come_back)
        until(lambda: service.machine.snapshot.state is State.HEALTHY)
        service.runtime.supervisor.report(fault(replica_id=0, kind=FaultKind.ENGINE))
        until(lambda: service.pools[0].clients[0] is None)


class Distributed(Service):
    """With upstream's watch on stages of other hosts, of which there are none."""

    def make_orchestrator(self, *args, **kwargs):
        membership = MembershipController(
            self.pools, "tcp://127.0.0.1:9", RandomBalancer, lambda *_: None
        )
        return HealthOrchestrator(*args, membership_controller=membership, **kwargs)


def test_the_watch_on_other_hosts_does_not_hold_up_the_end():
    with Distributed([Client()]) as service:
        # Asserts that the loop has ended.
        service.stop()
