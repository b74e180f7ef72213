"""What the health layer has once per server process, in one place.

Upstream builds its objects deep inside one another, with no argument of ours passed through.
The pieces that we put in their place find the machine, the supervisor and the settings here.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

from vllm_omni.health.faults import Fault
from vllm_omni.health.machine import HealthMachine, State
from vllm_omni.health.memory import metrics
from vllm_omni.health.memory.cost import Admission
from vllm_omni.health.memory.watch import MemoryWatch
from vllm_omni.health.settings import HealthSettings
from vllm_omni.health.supervisor import Supervisor


class HealthRuntime:
    """Settings, state machine and supervisor of this server. Created before any stage is."""

    def __init__(self, settings: HealthSettings) -> None:
        self.settings = settings
        self.machine = HealthMachine(settle_s=settings.settle_s)
        self.supervisor = Supervisor(self.machine)
        self.admission = Admission() if settings.memory_admission else None
        self.memory = MemoryWatch(settings, self.machine, admission=self.admission)
        self.output_bell: Any = None
        """Set by the orchestrator's side; this module knows nothing of event loops."""
        self._unregister: Callable[[], None] = lambda: None
        self._beat: float | None = None
        self._deadline: float | None = None

    def start(self) -> None:
        """Start the supervisor's thread and the memory watch's."""
        self.supervisor.start()
        self.memory.start()
        self._unregister = metrics.register(lambda: self.memory.view)

    def stop(self) -> None:
        """End both threads; idempotent."""
        self.memory.stop()
        self._unregister()
        self.supervisor.stop()

    # The orchestrator's loop says that it turns; anyone may ask when it last did.

    def orchestrator_beat(self) -> None:
        """Called on the orchestrator's loop about once a second."""
        self._beat = time.monotonic()

    def orchestrator_stalled(self) -> bool:
        """Whether the orchestrator's loop has not turned for ``loop_stall_s``."""
        beat = self._beat
        return beat is not None and time.monotonic() - beat > self.settings.loop_stall_s

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

    def fault_of_stage(self, stage_id: int | None) -> Fault | None:
        """The fault a failed request is told about: its stage's own, else the server's."""
        if stage_id is not None:
            fault = self.machine.stage_fault(stage_id)
            if fault is not None:
                return fault
        return self.machine.reason


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
