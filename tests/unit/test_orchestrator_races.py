# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-omni-health project
"""Outputs, faults, aborts and the shutdown in any order: everyone is told once, nothing hangs."""

from __future__ import annotations

import queue
from collections import Counter
from typing import Any

from fake_stages import DiffusionClient, Service, fault, until
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from vllm.v1.engine.exceptions import EngineDeadError
from vllm_omni.engine.messages import AbortRequestMessage, ErrorMessage
from vllm_omni.health.state.machine import ReplicaState, State
from vllm_omni.outputs import OmniRequestOutput

REPLICAS = 3
REQUESTS = 6

EVENTS = st.one_of(
    st.tuples(st.sampled_from(["output", "finish", "abort"]), st.integers(0, REQUESTS - 1)),
    st.tuples(st.sampled_from(["fault", "dead"]), st.integers(0, REPLICAS - 1)),
)


def name(number: int) -> str:
    return f"r{number}"


class Story:
    """One order of events, and what must be so in the end."""

    def __init__(self, service: Service) -> None:
        self.service = service
        self.lost: set[int] = set()
        self.aborted: set[str] = set()
        self.finished: set[str] = set()

    def happen(self, what: str, which: int) -> None:
        client = self.service.stages[0][which % REPLICAS]
        if what == "fault":
            self.lost.add(which)
            self.service.runtime.supervisor.report(fault(replica_id=which))
        elif what == "dead":
            self.lost.add(which)
            self.put(client, EngineDeadError())
        elif what == "abort":
            self.aborted.add(name(which))
            self.service.requests.sync_q.put(AbortRequestMessage(request_ids=[name(which)]))
        else:
            finished = what == "finish"
            if finished:
                self.finished.add(name(which))
            self.put(client, OmniRequestOutput(request_id=name(which), finished=finished))

    def put(self, client: DiffusionClient, output: Any) -> None:
        self.service.on_loop(lambda: client._output_queue.put_nowait(output))

    def settled(self) -> bool:
        machine = self.service.machine
        replicas = range(REPLICAS)
        known = {r for r in replicas if machine.replica_state(0, r) is ReplicaState.LOST}
        all_lost = len(self.lost) == REPLICAS
        spared = {
            name(number)
            for number in range(REQUESTS)
            if number % REPLICAS not in self.lost
            and not all_lost
            and name(number) not in self.aborted | self.finished
        }
        return known == self.lost and set(self.service.orchestrator.request_states) == spared


@settings(max_examples=60, deadline=None, suppress_health_check=list(HealthCheck))
@given(st.lists(EVENTS, max_size=12), st.booleans())
def test_any_order_of_events(events: list[tuple[str, int]], stop_early: bool) -> None:
    clients = [DiffusionClient() for _ in range(REPLICAS)]
    with Service(clients) as service:
        story = Story(service)
        for number in range(REQUESTS):
            service.request(name(number), replica_id=number % REPLICAS)
        for what, which in events:
            story.happen(what, which)
        if not stop_early:
            until(story.settled)
            expected = {0: State.HEALTHY, REPLICAS: State.DEAD}
            assert service.machine.snapshot.state is expected.get(len(story.lost), State.DEGRADED)
        service.stop()
        assert service.error is None
        told: Counter[str] = Counter()
        while True:
            try:
                message = service.outputs.sync_q.get_nowait()
            except queue.Empty:
                break
            if isinstance(message, ErrorMessage):
                assert message.fatal
                assert message.error
                told[message.request_id] += 1
            elif getattr(message, "finished", False):
                told[message.request_id] += 1
        assert all(times == 1 for times in told.values()), told
        if not stop_early:
            for number in range(REQUESTS):
                if name(number) in story.aborted | story.finished:
                    continue
                doomed = number % REPLICAS in story.lost or len(story.lost) == REPLICAS
                assert told[name(number)] == int(doomed), name(number)
        assert all(client.shutdowns == 1 for client in clients)
