# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-omni-health project
"""Upstream's real duplex orchestrator, over stages whose every move the test decides."""

import functools
from unittest.mock import create_autospec

import pytest
from fake_stages import WAIT_S, DiffusionClient, Service, fault, until
from vllm_omni.config.stage_config import DuplexSessionRuntimeConfig
from vllm_omni.engine.duplex.plugin import DuplexModelPlugin
from vllm_omni.engine.duplex_orchestrator import DuplexOrchestratorRequestState
from vllm_omni.engine.health.orchestrator import HealthDuplexOrchestrator
from vllm_omni.engine.messages import ErrorMessage
from vllm_omni.health.state.machine import State
from vllm_omni.outputs import OmniRequestOutput


class Stage(DiffusionClient):
    default_sampling_params = None


def plugin():
    """A model's own part, which does nothing."""
    made = create_autospec(DuplexModelPlugin, instance=True, tts_stage_id=None)
    made.configure_sampling_params.side_effect = lambda *, runtime_config, defaults: defaults
    return made


class DuplexService(Service):
    """A running duplex orchestrator."""

    @property
    def make_orchestrator(self):
        return functools.partial(
            HealthDuplexOrchestrator,
            plugin=plugin(),
            duplex_session_config=DuplexSessionRuntimeConfig(),
        )

    def session(self, session_id, request_id, replica_id=0):
        """A session with a turn under way."""

        def add():
            state = DuplexOrchestratorRequestState(
                request_id,
                sampling_params_list=[None],
                final_stage_id=0,
                session_owned=True,
                session_id=session_id,
            )
            self.orchestrator.request_states[request_id] = state
            self.orchestrator.session_manager.register_request(request_id, session_id)
            pool = self.pools[0]
            while pool.select_replica_id(request_id) != replica_id:
                pool.release_binding(request_id)

        self.on_loop(add)

    def books(self):
        return self.on_loop(lambda: dict(self.orchestrator.request_states))


def test_when_its_last_replica_dies_requests_and_sessions_fail():
    with DuplexService([Stage()]) as service:
        service.request("turn-based")
        service.session("duplex-1", "duplex-1-turn-1")
        service.runtime.supervisor.report(fault())
        assert service.failures(2).keys() == {"turn-based", "duplex-1-turn-1"}
        # Its websocket is known by the session's id.
        for known_as in ("turn-based", "duplex-1-turn-1", "duplex-1"):
            assert service.runtime.request_faults.of(known_as).kind == "oom"
        assert service.machine.snapshot.state is State.DEAD
        until(lambda: not service.books())


def test_with_a_replica_left_the_other_sessions_go_on():
    with DuplexService([Stage(), Stage()]) as service:
        service.session("duplex-1", "turn-1", replica_id=0)
        service.session("duplex-2", "turn-2", replica_id=1)
        service.runtime.supervisor.report(fault(replica_id=0))
        assert service.failures(1).keys() == {"turn-1"}
        assert service.runtime.request_faults.of("duplex-1").kind == "oom"
        assert service.runtime.request_faults.of("duplex-2") is None
        until(lambda: service.books().keys() == {"turn-2"})
        assert service.machine.snapshot.state is State.DEGRADED


def test_a_turn_that_fails_alone_harms_nobody():
    stage = Stage()
    stage.final_output = True
    with DuplexService([stage]) as service:
        service.request("fine")
        service.request("bad")
        service.on_loop(
            lambda: stage._output_queue.put_nowait(OmniRequestOutput.from_error("bad", "it failed"))
        )
        message = service.outputs.sync_q.get(timeout=WAIT_S)
        assert message.request_id == "bad"
        assert service.runtime.request_faults.of("bad").severity == "request"
        assert service.books().keys() == {"fine"}
        assert service.machine.snapshot.state is State.HEALTHY


@pytest.mark.parametrize("sessions", [0, 3])
def test_it_ends_in_order(sessions):
    client = Stage()
    with DuplexService([client]) as service:
        for number in range(sessions):
            service.session(f"duplex-{number}", f"turn-{number}")
        service.stop()
        assert client.shutdowns == 1
        assert service.error is None
        assert service.machine.snapshot.state is State.HEALTHY
        while not service.outputs.sync_q.empty():
            assert not isinstance(service.outputs.sync_q.get(), ErrorMessage)
