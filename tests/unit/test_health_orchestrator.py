"""Upstream's real orchestrator loop with the health layer in it, over fake stage clients.

The fakes do what real stages cannot be made to do on demand: block in shutdown, die at a chosen
moment, or raise on the orchestrator's loop.
"""

import gc
import os
import threading
from types import SimpleNamespace

import psutil
from fake_stages import WAIT_S, Client, Service, fault, until
from vllm.v1.engine.exceptions import EngineDeadError
from vllm_omni.engine import health_orchestrator
from vllm_omni.health.faults import FaultKind
from vllm_omni.health.machine import State


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
