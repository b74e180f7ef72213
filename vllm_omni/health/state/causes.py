# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-omni-health project
"""What is wrong at present, and which of the faults behind it is given as the reason."""

from __future__ import annotations

from dataclasses import dataclass

from vllm_omni.health.faults.fault import Fault


@dataclass(frozen=True)
class Cause:
    """A condition that can be wrong, by the key under which it is known while it is."""

    key: tuple[str | int, ...]
    begins: str
    """What the history calls its beginning."""
    ends: str | None = None
    """What the history calls its end; None where nothing ends it, and the server is dead by it."""
    stops_admission: bool = False
    """Whether no request is admitted while it lasts, in any stage."""
    competes: bool = True
    """Whether its fault may be the reason of an end. A mere shortage ends nothing, and gives way
    as the reason to whatever really fails."""


FAILED_START = Cause(("start",), "start failed")
ORCHESTRATOR_ENDED = Cause(("orchestrator",), "orchestrator ended")
"""Its loop ended, or will never turn again, without being told to."""
ERROR_BUDGET_SPENT = Cause(
    ("error budget",), "error budget spent", "error budget restored", competes=False
)
"""More requests failed of late than are put up with."""


def replica_out(stage_id: int, replica_id: int) -> Cause:
    """A lost or suspect replica."""
    return Cause(("replica", stage_id, replica_id), "replica lost", "replica ready")


def memory_pressure(device: str) -> Cause:
    """A device with too little free memory to admit requests."""
    return Cause(
        ("memory", device),
        "memory pressure",
        "memory pressure over",
        stops_admission=True,
        competes=False,
    )


def loop_stalled(loop: str) -> Cause:
    """An event loop of the server that does not turn, and requests with it."""
    return Cause(("loop", loop), "loop stalled", "loop turns again", stops_admission=True)


@dataclass(frozen=True)
class _Settling:
    """The most telling fault of a window of time that opened with the first one.

    ``yields``: it is a mere shortage, and gives way as the reason to whatever really fails.
    """

    fault: Fault
    opened: float
    yields: bool = False

    def joined(self, fault: Fault, now: float, settle_s: float) -> _Settling:
        """With one more fault: better and in time, it takes the place."""
        if now - self.opened > settle_s or fault.kind.precedence >= self.fault.kind.precedence:
            return self
        return _Settling(fault, self.opened)


class Causes:
    """Causes in the order in which they arose, and the reason. The caller serialises.

    The first fault is the reason; one that takes precedence replaces it, and only within
    ``settle_s`` seconds of the first. ``now`` is always monotonic time in seconds.
    """

    def __init__(self, settle_s: float) -> None:
        self._settle_s = settle_s
        # None: nobody said why.
        self._causes: dict[Cause, _Settling | None] = {}
        self._reason: _Settling | None = None
        self._reason_cause: Cause | None = None
        # The same for all faults of late. What a process said just before it died tells more
        # than its death, and only its death is a cause.
        self._recent: _Settling | None = None

    def __contains__(self, cause: Cause) -> bool:
        return cause in self._causes

    def __bool__(self) -> bool:
        return bool(self._causes)

    @property
    def reason(self) -> Fault | None:
        """The fault that is the reason so far."""
        return self._reason.fault if self._reason is not None else None

    @property
    def fatal(self) -> bool:
        """Whether there is one that nothing ends."""
        return any(cause.ends is None for cause in self._causes)

    @property
    def stop_admission(self) -> bool:
        """Whether any of them lets no request in."""
        return any(cause.stops_admission for cause in self._causes)

    def of_stage(self, stage_id: int) -> Fault | None:
        """Why the latest replica of this stage to be lost or suspect is so."""
        found = None
        for cause, settling in self._causes.items():
            if cause.key[:2] == ("replica", stage_id) and settling is not None:
                found = settling.fault
        return found

    def settles_in(self, now: float) -> float:
        """Seconds until the reason is final; 0 when it is, or there is none."""
        if self._reason is None:
            return 0.0
        return max(0.0, self._reason.opened + self._settle_s - now)

    def arise(self, cause: Cause, fault: Fault | None, now: float) -> None:
        """Something is wrong from now on; or it is already, and there is a further fault."""
        if fault is None:
            self._causes.setdefault(cause, None)
            return
        if not cause.competes:
            alone = self._causes[cause] = _Settling(fault, now, yields=True)
            if self._reason is None:
                self._reason, self._reason_cause = alone, cause
            return
        self._compete(fault, now)
        known = self._causes.get(cause)
        self._causes[cause] = (
            _Settling(fault, now) if known is None else known.joined(fault, now, self._settle_s)
        )
        if self._reason is None or self._reason.yields:
            self._reason, self._reason_cause = self._recent, cause

    def note(self, fault: Fault, now: float) -> None:
        """A fault that causes nothing by itself."""
        self._compete(fault, now)
        if fault.stage_id is not None and fault.replica_id is not None:
            cause = replica_out(fault.stage_id, fault.replica_id)
            known = self._causes.get(cause)
            if known is not None:
                self._causes[cause] = known.joined(fault, now, self._settle_s)

    def end(self, cause: Cause, *, keep_reason: bool) -> None:
        """Something is not wrong any more; the reason passes to the oldest that still is."""
        self._causes.pop(cause, None)
        if cause == self._reason_cause and not keep_reason:
            left = ((key, why) for key, why in self._causes.items() if why is not None)
            self._reason_cause, self._reason = next(left, (None, None))

    def turn_fatal(self) -> None:
        """The server cannot serve any more, by the fault that arose last.

        What made it degraded, perhaps hours ago, is then not the reason.
        """
        self._reason = self._recent

    def _compete(self, fault: Fault, now: float) -> None:
        """Let a fault compete for the reason there is, and for one that opens soon."""
        if self._recent is None or now - self._recent.opened > self._settle_s:
            self._recent = _Settling(fault, now)
        else:
            self._recent = self._recent.joined(fault, now, self._settle_s)
        if self._reason is not None:
            self._reason = self._reason.joined(fault, now, self._settle_s)
