# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-omni-health project
"""One drill: a server under load, one thing broken, everything watched to the end."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from vllm_omni_health.drills.chat import ChatCall, ChatRequest, Outcome, Request
from vllm_omni_health.drills.faults import Injection, Mark
from vllm_omni_health.drills.load import Load
from vllm_omni_health.drills.precedence import precedence
from vllm_omni_health.drills.probe import DEFAULT_INTERVAL_S, HealthProbe, View, as_data
from vllm_omni_health.drills.server import Ending, Server, describe_status
from vllm_omni_health.drills.survey import Survey, survey
from vllm_omni_health.drills.traces import Traces
from vllm_omni_health.drills.tree import Member, Role

TREE_POLL_S = 0.1
_LOAD_TRIES = 3
_LOAD_S = 60.0
_SETTLED_S = 0.2
"""A fault's reason settles for up to 0.1 s; a survey taken after that shows the final one."""

_LAST_S = 5.0
"""How long the last bytes and helper processes may take once the server has ended."""

_RACE_S = 0.1
"""An answer that was complete this soon after the fault may have been on its way before it."""


class InvalidDrill(Exception):
    """The drill proves nothing: the load was not in flight when the fault was injected."""


class NoTarget(Exception):
    """The server has no living process of the role and stage that was to be hit."""


@dataclass
class Findings:
    """What was seen in one drill. Times are monotonic; :meth:`as_data` counts from ``zero``."""

    injection: Injection
    zero: float
    """When the signal was sent, or the request with the mark."""
    target: Member | None
    struck: list[ChatCall]
    """The calls that were in flight when the fault took effect."""
    probe_interval_s: float
    raced: list[ChatCall] = field(default_factory=list)
    """Calls that were taken for in flight, but were answered just then."""
    before: Survey | None = None
    after: Survey | None = None
    """What the server said once the fault had settled."""
    health: list[View] = field(default_factory=list)
    calls: list[ChatCall] = field(default_factory=list)
    ending: Ending | None = None
    stages_gone_at: float | None = None
    """When no engine core and no worker was left; looked for every TREE_POLL_S."""
    processes_left: list[Member] = field(default_factory=list)
    traces_left: list[str] = field(default_factory=list)

    @property
    def noticed_at(self) -> float | None:
        """When ``/health`` first said something else after the injection."""
        return next((view.at for view in self.health if view.at > self.zero), None)

    @property
    def last_failed_at(self) -> float | None:
        """When the last of the calls in flight at the injection was failed."""
        ends = [c.ended for c in self.struck if c.outcome is Outcome.FAILED and c.ended]
        return max(ends, default=None)

    def figures(self) -> dict[str, float | None]:
        """The drill's times in seconds after the injection."""
        moments = {
            "to_health_change": self.noticed_at,
            "to_last_failure": self.last_failed_at,
            "to_stages_gone": self.stages_gone_at,
            "to_exit": None if self.ending is None else self.ending.at,
        }
        return {
            name: None if moment is None else round(moment - self.zero, 4)
            for name, moment in moments.items()
        }

    def as_data(self) -> dict[str, Any]:
        """Everything as plain data."""
        return {
            "injection": self.injection.describe(),
            "target": None if self.target is None else self.target.describe(),
            "probe_interval_s": self.probe_interval_s,
            "tree_interval_s": TREE_POLL_S,
            **self.figures(),
            "exit_status": None if self.ending is None else self.ending.status,
            "health": [as_data(view, self.zero) for view in self.health],
            "in_flight": [call.number for call in self.struck],
            "raced": [call.number for call in self.raced],
            "calls": [call.as_data(self.zero) for call in self.calls],
            "processes_left": [member.describe() for member in self.processes_left],
            "traces_left": self.traces_left,
        }


class Drill:
    """A drill on a ready server. As a context manager; entering begins to watch ``/health``.

    In between, the thread has precedence over ordinary work.

    ``stages``: the number of replicas of each stage.
    """

    def __init__(
        self,
        server: Server,
        stages: Sequence[int],
        *,
        probe_interval_s: float = DEFAULT_INTERVAL_S,
        on_view: Callable[[View], None] | None = None,
        on_call: Callable[[ChatCall], None] | None = None,
    ) -> None:
        self.server = server
        self.stages = stages
        self.probe = HealthProbe(server.url, interval_s=probe_interval_s, on_change=on_view)
        self.load: Load | None = None
        self._on_call = on_call
        self._loads: list[Load] = []
        self._traces = Traces()
        self._before: Survey | None = None
        self._precedence = contextlib.ExitStack()

    async def __aenter__(self) -> Drill:
        self._before = await survey(self.server.client)
        members = self.server.tree.refresh(self._before.health)
        self._traces = Traces.of(members)
        self._precedence.enter_context(precedence())
        self.probe.start()
        return self

    async def __aexit__(self, *_exc: object) -> None:
        for load in self._loads:
            await load.hang_up()
        await asyncio.to_thread(self.probe.stop)
        self._precedence.close()

    def one_of_each(self) -> list[ChatRequest]:
        """A plain and a streaming request in each stage."""
        stages = len(self.stages)
        return [
            ChatRequest.staying_in(stage, stages, stream=stream)
            for stage in range(stages)
            for stream in (False, True)
        ]

    async def put_under_load(self, requests: Sequence[Request], *, repeat: bool = False) -> Load:
        """Send ``requests`` and wait until all of them are surely in flight.

        Raises InvalidDrill when that cannot be had.
        """
        for _ in range(_LOAD_TRIES):
            load = Load(self.server.url, requests, repeat=repeat, on_end=self._on_call)
            self._loads.append(load)
            load.start()
            if await load.under_way(_LOAD_S, for_s=1.0):
                self.load = load
                return load
            await load.hang_up()
        raise InvalidDrill("the requests ended before the fault could be injected")

    async def inject(self, injection: Injection) -> Findings:
        """Break it. Raises NoTarget, or InvalidDrill when no load is in flight any more."""
        members = self.server.tree.refresh()
        target = None if isinstance(injection, Mark) else self._target(injection, members)
        # From here to the injection nothing is awaited, so nothing can end in between.
        struck = [] if self.load is None else self.load.in_flight()
        if self.load is not None and not struck:
            raise InvalidDrill("no request was in flight at the injection")
        zero = time.monotonic()
        if target is not None and not isinstance(injection, Mark):
            if not target.id.send(injection.signum):
                raise NoTarget(f"{target.describe()} ended before it was hit")
        elif isinstance(injection, Mark):
            self._carrier().add(injection.request(len(self.stages)))
        return Findings(
            injection=injection,
            zero=zero,
            target=target,
            struck=struck,
            probe_interval_s=self.probe.interval_s,
            before=self._before,
        )

    async def until(
        self, wanted: Callable[[View], bool], findings: Findings, timeout_s: float
    ) -> View | None:
        """Wait for an answer of ``/health``, after the injection, that is as wanted."""
        return await asyncio.to_thread(
            self.probe.wait_for, wanted, since=findings.zero, timeout_s=timeout_s
        )

    async def look_around(self, findings: Findings) -> Survey:
        """Survey the server as it is once the fault has settled, with two new requests."""
        await asyncio.sleep(_SETTLED_S)
        findings.after = await survey(self.server.client, newcomers=True)
        return findings.after

    async def watch_to_the_end(self, findings: Findings, timeout_s: float) -> None:
        """Wait for the server's end and for its last process; both at most ``timeout_s``."""
        watcher = asyncio.create_task(self._watch_stages(findings), name="drill-tree")
        try:
            findings.ending = await self.server.wait_end(timeout_s)
        finally:
            watcher.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await watcher
        if self.load is not None:
            self.load.stop()
            await self.load.settled(timeout_s if findings.ending is None else _LAST_S)
        if findings.ending is not None:
            # Python's resource tracker ends when it sees that the server has.
            await self.server.wait_processes_gone(_LAST_S)
        self.collect(findings)

    async def watch_stages_gone(self, findings: Findings, timeout_s: float) -> list[Member]:
        """Wait until no engine core and no worker is left; those that are, in the end."""
        left = await self.server.wait_processes_gone(timeout_s, _of_a_stage)
        if not left:
            findings.stages_gone_at = time.monotonic()
        return left

    async def watch_replica_gone(self, findings: Findings, timeout_s: float) -> list[Member]:
        """Wait until nothing is left of the replica that was hit; what is, in the end."""
        hit = (findings.injection.stage_id, findings.injection.replica_id)

        def of_replica(member: Member) -> bool:
            return _of_a_stage(member) and (member.stage_id, member.replica_id or 0) == hit

        return await self.server.wait_processes_gone(timeout_s, of_replica)

    def collect(self, findings: Findings) -> None:
        """Put what was recorded so far into the findings."""
        findings.health = [v for v in self.probe.changes if v.at >= findings.zero]
        findings.calls = [call for load in self._loads for call in load.calls]
        findings.processes_left = self.server.tree.left()
        findings.traces_left = self._traces.left()
        _set_raced_apart(findings)

    async def _watch_stages(self, findings: Findings) -> None:
        while findings.stages_gone_at is None:
            if not any(_of_a_stage(member) for member in self.server.tree.left()):
                findings.stages_gone_at = time.monotonic()
            await asyncio.sleep(TREE_POLL_S)

    def _target(self, injection: Any, members: Sequence[Member]) -> Member:
        for member in members:
            if (
                member.role is injection.role
                and member.stage_id == injection.stage_id
                and (member.replica_id or 0) == injection.replica_id
                and injection.rank in (None, member.rank())
            ):
                return member
        raise NoTarget(
            f"no living target for: {injection.describe()}; there are "
            + ", ".join(member.describe() for member in members)
        )

    def _carrier(self) -> Load:
        """A load of its own for the mark, so that it does not count as in flight."""
        load = Load(self.server.url, (), on_end=self._on_call)
        self._loads.append(load)
        return load


def _of_a_stage(member: Member) -> bool:
    return member.role in (Role.ENGINE_CORE, Role.WORKER)


def _set_raced_apart(findings: Findings) -> None:
    """Who was answered in full before the fault took effect was not in flight.

    A signal takes a moment until it is noticed, a mark until it has reached its stage.
    """
    ends = [c.ended for c in findings.struck if c.outcome is Outcome.FAILED and c.ended]
    moment = min([*ends, findings.noticed_at or findings.zero])
    for call in findings.struck[:]:
        if call.outcome is Outcome.ANSWERED and call.ended and call.ended < moment + _RACE_S:
            findings.struck.remove(call)
            findings.raced.append(call)


async def fatal_drill(
    server: Server,
    stages: Sequence[int],
    injection: Injection,
    *,
    notice_s: float = 30.0,
    end_s: float = 90.0,
    requests: Sequence[Request] | None = None,
) -> Findings:
    """The whole of a drill whose fault ends the server: load, injection, survey, end.

    ``requests``: default is a plain and a streaming one in each stage. The time-outs are hang
    guards; when one is reached the findings say so by what they lack. Raises InvalidDrill when
    not every request was in flight when the fault took effect.
    """
    async with Drill(server, stages) as drill:
        await drill.put_under_load(drill.one_of_each() if requests is None else requests)
        findings = await drill.inject(injection)
        if await drill.until(lambda view: view.status != 200, findings, notice_s):
            await drill.look_around(findings)
        await drill.watch_to_the_end(findings, end_s)
    if findings.raced:
        raise InvalidDrill("requests were answered just when the fault was injected")
    return findings


def told(findings: Findings) -> str:
    """The findings as a few lines of text, for a log or a failed assertion."""
    lines = [f"{findings.injection.describe()}; polled every {findings.probe_interval_s:g} s"]
    lines += [f"  {v.at - findings.zero:+.3f} s  /health {v.describe()}" for v in findings.health]
    for call in findings.calls:
        end = "" if call.ended is None else f"{call.ended - findings.zero:+.3f} s  "
        lines.append(f"  {end}request {call.number} {call.label}: {call.describe()}")
    if findings.ending is not None:
        status = describe_status(findings.ending.status)
        lines.append(f"  {findings.ending.at - findings.zero:+.3f} s  exit status {status}")
    lines += [f"  left: {member.describe()}" for member in findings.processes_left]
    return "\n".join(lines)
