"""Upstream's real orchestrator loop with the health layer in it, over fake stage clients.

The fakes do what real stages cannot be made to do on demand: block in shutdown, die at a chosen
moment, or raise on the orchestrator's loop.
"""

import asyncio
import threading
import time
from concurrent.futures import Future
from types import SimpleNamespace

import janus
from vllm.v1.engine.exceptions import EngineDeadError
from vllm_omni.engine import health_orchestrator
from vllm_omni.engine.health_orchestrator import HealthOrchestrator
from vllm_omni.engine.messages import ErrorMessage, ShutdownRequestMessage
from vllm_omni.engine.orchestrator import OrchestratorRequestState
from vllm_omni.engine.stage_pool import StagePool
from vllm_omni.health.faults import Fault, FaultKind
from vllm_omni.health.machine import ReplicaState, State
from vllm_omni.health.runtime import HealthRuntime, set_current
from vllm_omni.health.settings import HealthSettings

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

    def __init__(self, *stages):
        self.stages = stages
        self.runtime = HealthRuntime(HealthSettings(settle_s=0.05))
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
            state = OrchestratorRequestState(request_id, final_stage_id=len(self.pools) - 1)
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


def test_two_stages_at_once_keep_the_first_cause():
    with Service([Client()], [Client()]) as service:
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
