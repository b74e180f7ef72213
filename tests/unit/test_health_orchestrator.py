"""Upstream's real orchestrator loop with the health layer in it, over fake stage clients.

The fakes do what real stages cannot be made to do on demand: block in shutdown, die at a chosen
moment, or raise on the orchestrator's loop.
"""

import asyncio
import threading
import time
from collections import deque
from concurrent.futures import Future
from types import SimpleNamespace

import janus
from vllm.v1.engine.exceptions import EngineDeadError
from vllm_omni.engine import health_orchestrator
from vllm_omni.engine.health_orchestrator import HealthOrchestrator
from vllm_omni.engine.messages import ErrorMessage, ShutdownRequestMessage
from vllm_omni.engine.orchestrator import OrchestratorRequestState
from vllm_omni.engine.stage_pool import StagePool
from vllm_omni.errors import OmniClientError
from vllm_omni.health.faults import REQUEST_SENTENCE, Fault, FaultKind
from vllm_omni.health.machine import State
from vllm_omni.health.runtime import HealthRuntime, set_current
from vllm_omni.health.settings import HealthSettings
from vllm_omni.outputs import OmniRequestOutput

WAIT_S = 20


class Client:
    """A stage client whose outputs, failures and shutdown the test decides."""

    stage_type = "llm"
    final_output = True
    final_output_type = "text"

    def __init__(self, on_shutdown=lambda: None):
        self.outputs = asyncio.Queue()
        self.on_shutdown = on_shutdown
        self.shutdowns = 0
        self.aborted = []

    async def get_output_async(self):
        output = await self.outputs.get()
        if isinstance(output, Exception):
            raise output
        return output

    async def abort_requests_async(self, request_ids):
        self.aborted += request_ids

    def check_health(self):
        pass

    def shutdown(self):
        self.shutdowns += 1
        self.on_shutdown()


class Service:
    """A running orchestrator with its queues, machine and clients.

    On a thread and a loop of its own, as in a server: upstream ends by cancelling whatever else
    runs on that loop.
    """

    def __init__(self, *stages, **settings):
        self.stages = stages
        self.runtime = HealthRuntime(HealthSettings(**{"settle_s": 0.05, **settings}))
        self.machine = self.runtime.machine
        self.error = None

    def __enter__(self):
        set_current(self.runtime)
        self.runtime.start()
        for stage_id, clients in enumerate(self.stages):
            self.machine.expect_stage(stage_id, len(clients))
        ready = threading.Event()
        self.thread = threading.Thread(target=self._run, args=(ready,))
        self.thread.start()
        assert ready.wait(WAIT_S)
        return self

    def _run(self, ready):
        async def main():
            self.loop = asyncio.get_running_loop()
            self.requests, self.outputs, self.rpcs = janus.Queue(), janus.Queue(), janus.Queue()
            self.pools = [StagePool(i, list(clients)) for i, clients in enumerate(self.stages)]
            self.orchestrator = HealthOrchestrator(
                self.requests.async_q,
                self.outputs.async_q,
                self.rpcs.async_q,
                self.pools,
                event_driven_orch_default=True,
            )
            ready.set()
            await self.orchestrator.run()

        try:
            asyncio.run(main())
        except Exception as exc:
            self.error = exc

    def __exit__(self, *exc):
        self.stop()
        for queue in (self.requests, self.outputs, self.rpcs):
            queue.close()
        self.runtime.stop()
        set_current(None)

    def stop(self):
        self.requests.sync_q.put(ShutdownRequestMessage())
        self.thread.join(WAIT_S)
        assert not self.thread.is_alive()

    def on_loop(self, work):
        """Run ``work`` on the orchestrator's loop and wait for it."""
        done = Future()
        self.loop.call_soon_threadsafe(lambda: done.set_result(work()))
        return done.result(WAIT_S)

    def request(self, request_id, stage_id=0, replica_id=0):
        """A request that is in ``stage_id`` now, on its way to the last stage."""

        def add():
            last = len(self.pools) - 1
            params = [SimpleNamespace() for _ in self.pools]
            state = OrchestratorRequestState(
                request_id, final_stage_id=last, sampling_params_list=params
            )
            state.stage_submit_ts[stage_id] = 1.0
            self.orchestrator.request_states[request_id] = state
            pool = self.pools[stage_id]
            while pool.select_replica_id(request_id) != replica_id:
                pool.release_binding(request_id)

        self.on_loop(add)

    def output(self, client, output):
        """Let a client hand this to the orchestrator, or raise it there."""
        self.on_loop(lambda: client.outputs.put_nowait(output))

    def failures(self, count):
        """The next ``count`` failure messages, by request."""
        messages = [self.outputs.sync_q.get(timeout=WAIT_S) for _ in range(count)]
        assert all(isinstance(m, ErrorMessage) and m.fatal and m.error for m in messages)
        return {message.request_id: message for message in messages}


class FirstStage(Client):
    """A stage that puts out whatever it is told, on its way to the next one."""

    stage_type = "diffusion"
    final_output = False

    def __init__(self):
        super().__init__()
        self.ready = deque()

    def get_diffusion_output_nowait(self):
        return self.ready.popleft() if self.ready else None

    def finish(self, request_id):
        self.ready.append(OmniRequestOutput(request_id=request_id, finished=True))


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


def until(condition):
    deadline = time.monotonic() + WAIT_S
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.005)


def fault(stage_id=0, replica_id=0, kind=FaultKind.OOM):
    return Fault(kind=kind, stage_id=stage_id, replica_id=replica_id)


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
    monkeypatch.setattr(health_orchestrator, "_CLIENT_CLOSE_S", 0.2)
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
        first.finish("doomed")
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
        first.finish("spared")
        until(lambda: service.machine.snapshot.state is State.DEGRADED)
        assert service.machine.snapshot.accepting
        assert service.runtime.request_faults.of("spared") is not None
        service.stop()
        assert service.error is None


def test_an_input_processor_can_refuse_a_request_as_the_clients_mistake():
    first, second = FirstStage(), NextStage(raising(OmniClientError("too long", status_code=413)))
    with Service([first], [second]) as service:
        service.request("refused")
        first.finish("refused")
        message = service.outputs.sync_q.get(timeout=WAIT_S)
        while not isinstance(message, ErrorMessage):
            message = service.outputs.sync_q.get(timeout=WAIT_S)
        assert (message.status_code, message.error) == (413, "too long")
        assert service.runtime.request_faults.of("refused") is None


def test_an_input_processor_that_runs_out_of_memory_is_more_than_one_request():
    first, second = FirstStage(), NextStage(raising(MemoryError()))
    with Service([first], [second]) as service:
        service.request("pending")
        first.finish("pending")
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
            sampling_params_list=[],
        )
        service.requests.sync_q.put(bad)
        message = service.outputs.sync_q.get(timeout=WAIT_S)
        assert (message.request_id, message.error) == ("bad", REQUEST_SENTENCE)
        assert service.runtime.request_faults.of("bad").kind == "orchestrator"
        service.request("fine")
        assert service.machine.snapshot.state is State.HEALTHY


def test_an_error_output_of_a_stage_is_noted_and_counts_unless_the_client_is_to_blame():
    first = FirstStage()
    first.final_output = True
    with Service([first], error_budget=1) as service:
        for request_id, status in (("mine-1", 400), ("mine-2", 422), ("yours-1", None)):
            service.request(request_id)
            output = OmniRequestOutput.from_error(request_id, "it", status_code=status)
            first.ready.append(output)
            assert service.outputs.sync_q.get(timeout=WAIT_S).request_id == request_id
        assert service.runtime.request_faults.of("mine-1") is None
        noted = service.runtime.request_faults.of("yours-1")
        assert (noted.kind, noted.fatal, noted.stage_id) == ("engine", False, 0)
        assert service.machine.snapshot.state is State.HEALTHY
        service.request("yours-2")
        first.ready.append(OmniRequestOutput.from_error("yours-2", "it"))
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
