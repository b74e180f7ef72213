# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-omni-health project
"""What the demo shows as it happens: one line for each thing that anyone can see."""

from __future__ import annotations

import asyncio
import time
from dataclasses import dataclass

from rich.console import Console
from rich.markup import escape

from vllm_omni_health.drills.chat import ChatCall, Outcome
from vllm_omni_health.drills.probe import View
from vllm_omni_health.drills.server import Server
from vllm_omni_health.drills.tree import Member, Role

POLL_S = 0.005
"""How often ``/health`` is asked; processes are looked at every fourth time."""

STYLES = {"DEAD": "bold red", "DEGRADED": "yellow", "HEALTHY": "green"}


class Timeline:
    """What happens, one line each as it happens, in seconds after the kill."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self.zero: float | None = None

    def note(self, at: float, who: str, what: str, style: str = "") -> None:
        """One line, for something that happened at ``at`` (monotonic)."""
        if self.zero is None or at < self.zero:
            return
        clock = f"{at - self.zero:+8.3f} s"
        self._console.print(f"  [dim]{clock}[/]  [bold]{who:<10}[/] [{style or 'none'}]{what}[/]")

    def view(self, view: View) -> None:
        """A change of ``/health``."""
        style = STYLES.get(view.state or "", "dim")
        self.note(view.at, "/health", escape(view.describe()), style)

    def call(self, call: ChatCall) -> None:
        """The end of a request that was in flight at the kill."""
        if call.ended is None:
            return
        kind = "streaming" if call.stream else "plain"
        if call.outcome is not Outcome.FAILED:
            what, style = call.describe(), "bold red"
        elif call.error_events:
            what, style = "error event, then " + "[DONE]" * call.done_events, "yellow"
        else:
            what, style = f"HTTP {call.status} with an error body", "yellow"
        text = f"{kind} request {call.label}: {what}"
        self.note(call.ended, f"client {call.number}", escape(text), style)


@dataclass
class Watcher:
    """Notes the end of every process of the stages."""

    server: Server
    timeline: Timeline

    async def run(self) -> None:
        """Look until cancelled."""
        alive = self._stage_processes()
        while True:
            now = self._stage_processes()
            for identity in alive.keys() - now.keys():
                what = f"{alive[identity].describe()} is gone"
                self.timeline.note(time.monotonic(), "process", escape(what), "dim")
            alive = now
            await asyncio.sleep(POLL_S * 4)

    def _stage_processes(self) -> dict[object, Member]:
        return {
            member.id: member
            for member in self.server.tree.left()
            if member.role in (Role.ENGINE_CORE, Role.WORKER)
        }


class Newcomers:
    """A client that goes on sending short requests: what does it get, and since when?"""

    def __init__(self, timeline: Timeline) -> None:
        self._timeline = timeline
        self._last = ""
        self.calls: list[ChatCall] = []

    def note(self, call: ChatCall) -> None:
        """The end of one of its requests; the first of each kind goes to the timeline."""
        if call.outcome is Outcome.GIVEN_UP:
            return
        self.calls.append(call)
        if call.outcome is not Outcome.ANSWERED and call.outcome != self._last:
            self._last = call.outcome
            retry = call.headers.get("retry-after")
            what = f"{call.describe()}, Retry-After {retry}" if retry else call.describe()
            ended = call.ended or time.monotonic()
            self._timeline.note(ended, "newcomer", escape(what), "yellow")

    def refused(self) -> list[ChatCall]:
        """Those that were refused with 503."""
        return [call for call in self.calls if call.outcome is Outcome.REFUSED]
