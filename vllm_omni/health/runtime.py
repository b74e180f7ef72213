# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-omni-health project
"""What the health layer has once per server process, in one place.

Upstream builds its objects deep inside one another, with no argument of ours passed through.
The pieces that we put in their place find the machine, the supervisor and the settings here.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable
from typing import Any, Protocol

from vllm_omni.health.faults.by_request import RequestFaults
from vllm_omni.health.faults.fault import Fault, FaultKind
from vllm_omni.health.faults.refusals import Refusals
from vllm_omni.health.liveness import stacks
from vllm_omni.health.liveness.loops import BEAT_S, LoopBeat, LoopWatch
from vllm_omni.health.memory import metrics
from vllm_omni.health.memory.watch import MemoryWatch
from vllm_omni.health.processes.supervisor import Supervisor
from vllm_omni.health.state.error_budget import ErrorBudget
from vllm_omni.health.state.machine import HealthMachine, State

from vllm_omni_health.settings.model import HealthSettings

_OVERTIME_S = 1.0
"""How far the end of the process may be behind ``shutdown_timeout_s`` before it is forced. The
orderly end takes its bounds from the same deadline, and is to win."""


class ServiceManager(Protocol):
    """Who outside waits for news of this process, such as systemd."""

    def follow(
        self,
        machine: HealthMachine,
        every: Callable[[float, Callable[[], object]], object],
        well: Callable[[], bool],
    ) -> None:
        """Tell of every move of the machine, and, while all is ``well``, that it is."""

    def ready(self) -> None:
        """Tell that the server listens; said once, however often this is called."""


class HealthRuntime:
    """Settings, state machine and supervisor of this server. Created before any stage is."""

    def __init__(
        self, settings: HealthSettings, service_manager: ServiceManager | None = None
    ) -> None:
        self.settings = settings
        self.machine = HealthMachine(settle_s=settings.settle_s)
        self.supervisor = Supervisor(self.machine)
        self.request_faults = RequestFaults()
        self.refusals = Refusals()
        self.error_budget = ErrorBudget(
            self.machine, settings.error_budget, settings.error_budget_window_s
        )
        self.memory = MemoryWatch(settings, self.machine)
        self.output_bell: Any = None
        """Set by the orchestrator's side; this module knows nothing of event loops."""
        self.orchestrator_beat = LoopBeat("orchestrator")
        self.api_beat = LoopBeat("API server")
        self.end_by_force: Callable[[], object] = lambda: None
        """Ends the process without any loop's help; called on a thread of its own, once. Set by
        who knows how to."""
        self.service_manager = service_manager
        self._unregister: Callable[[], None] = lambda: None
        self._deadline: float | None = None
        self._forced = False

    def start(self) -> None:
        """Start the supervisor's thread and the memory watch's."""
        self.supervisor.start()
        self.memory.start()
        self._unregister = metrics.register(lambda: self.memory.view)
        self._watch_loop(self.orchestrator_beat, self._orchestrator_given_up)
        self._watch_loop(self.api_beat, self._force)
        self.supervisor.every(BEAT_S, self._check_deadline)
        if self.service_manager is not None:
            self.service_manager.follow(self.machine, self.supervisor.every, self._well)

    def _watch_loop(self, beat: LoopBeat, on_end: Callable[[], object]) -> None:
        watch = LoopWatch(
            beat,
            self.machine,
            stall_s=self.settings.loop_stall_s,
            end_s=self.settings.hang_timeout_s,
            on_end=on_end,
        )
        self.supervisor.every(watch.period_s, watch.check)

    def _orchestrator_given_up(self) -> None:
        _in_passing(stacks.log_own, "health-own-stacks")
        # It cannot close the stages any more, and nobody is to wait for their ends here.
        self.supervisor.kill_all(wait_s=0)

    def _force(self) -> None:
        if not self._forced:
            self._forced = True
            _in_passing(stacks.log_own, "health-own-stacks")
            _in_passing(self.end_by_force, "health-force-end")

    def _check_deadline(self) -> None:
        if self._deadline is not None and time.monotonic() > self._deadline + _OVERTIME_S:
            self._force()

    def stop(self) -> None:
        """End both threads; idempotent."""
        self.memory.stop()
        self._unregister()
        self.supervisor.stop()

    def listening(self) -> None:
        """The server answers requests; may be said again and again."""
        if self.service_manager is not None and self.machine.snapshot.started:
            self.service_manager.ready()

    def _well(self) -> bool:
        stalled = self.api_beat.age() > self.settings.loop_stall_s
        return not stalled and not self.restart_needed()

    def orchestrator_stalled(self) -> bool:
        """Whether the orchestrator's loop has not turned for ``loop_stall_s``."""
        return self.orchestrator_beat.age() > self.settings.loop_stall_s

    def thread_stuck(self) -> bool:
        """Whether a thread of this process will never end, so that nobody is to wait for it."""
        reason = self.machine.reason
        if reason is not None and reason.kind is FaultKind.HANG:
            # An inline stage's, unlike those that run in processes that can be killed.
            return reason.pid == os.getpid()
        return self.orchestrator_stalled()

    # From the moment the server is to end, everything shares one allowance of time.

    def begin_shutdown(self) -> None:
        """The server is to end: ``shutdown_timeout_s`` counts from the first call."""
        if self._deadline is None:
            self._deadline = time.monotonic() + self.settings.shutdown_timeout_s

    def shutdown_left(self) -> float:
        """Seconds until the process must have ended; all of them before the shutdown began."""
        if self._deadline is None:
            return self.settings.shutdown_timeout_s
        return max(0.0, self._deadline - time.monotonic())

    def restart_needed(self) -> bool:
        """Whether nothing but a restart can help: what a liveness probe asks."""
        return self.machine.snapshot.state is State.DEAD or self.orchestrator_stalled()

    def request_failed(self, request_id: str, fault: Fault) -> None:
        """The engine's request of this id failed, and the client is not to blame.

        Told by the orchestrator before the client's side hears of it. A failure that is over
        with its request counts against the error budget.
        """
        if self.request_faults.failed(request_id, fault) and not fault.fatal:
            self.error_budget.spend(fault)

    def fault_of_stage(self, stage_id: int | None) -> Fault | None:
        """The fault a failed request is told about: its stage's own, else the server's."""
        if stage_id is not None:
            fault = self.machine.stage_fault(stage_id)
            if fault is not None:
                return fault
        reason = self.machine.reason
        # What a spent error budget shows is the failure of some other request.
        return reason if reason is not None and reason.fatal else None


def _in_passing(call: Callable[[], object], name: str) -> None:
    """On a thread of its own, since what it needs may be held by a thread that is stuck."""
    threading.Thread(target=call, name=name, daemon=True).start()


_current: HealthRuntime | None = None


def set_current(runtime: HealthRuntime | None) -> None:
    """Make ``runtime`` the one this process uses."""
    global _current
    _current = runtime


def current() -> HealthRuntime | None:
    """The runtime of this process, or None where the layer is off."""
    return _current


def require() -> HealthRuntime:
    """The runtime of this process; RuntimeError where the layer was not started."""
    if _current is None:
        raise RuntimeError("the health layer is not started in this process")
    return _current
