# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-omni-health project
"""Serve two stages, kill one of them under load, and watch what the health layer makes of it.

Run with ``make demo``. Ends with status 0 only if everything went as promised.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import signal
import sys
import time
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from demo_timeline import POLL_S, Newcomers, Timeline, Watcher
from rich.console import Console
from rich.markup import escape
from rich.table import Table
from rich.tree import Tree

from vllm_omni_health.drills import contract
from vllm_omni_health.drills.chat import ChatCall, ChatRequest, Outcome, carry_out
from vllm_omni_health.drills.contract import ExpectedFault
from vllm_omni_health.drills.drill import Drill, Findings, InvalidDrill
from vllm_omni_health.drills.faults import Signal
from vllm_omni_health.drills.load import Load
from vllm_omni_health.drills.ports import reserved_port
from vllm_omni_health.drills.server import Server, ServerNotReady, running
from vllm_omni_health.drills.tree import Role

ROOT = Path(__file__).resolve().parents[1]
LOGS = ROOT / "build" / "demo"
TERMINATION_LOG = LOGS / "termination.log"

STAGES = (1, 1)
HIT = Signal(stage_id=1)
FAULT = ExpectedFault("process_lost", stage_id=1)
GRACE_S = 3
START_S = 180.0
NOTICE_S = 20.0
END_S = 60.0
"""Hang guards: when one is reached the demo goes on and says what it misses."""


async def start(server: Server, console: Console) -> None:
    """Wait for the server, telling how far it is."""
    steps = {Role.ENGINE_CORE: "engine cores", Role.WORKER: "workers loading their models"}

    def step() -> str:
        members = server.tree.refresh()
        for role in (Role.WORKER, Role.ENGINE_CORE):
            if count := sum(member.role is role for member in members):
                return f"{count} of {len(STAGES)} {steps[role]}"
        return "importing vLLM"

    if console.is_terminal:
        with console.status("") as status:
            await server.wait_ready(
                START_S,
                lambda s: status.update(f"starting two stages: {step()} [dim]{s:.0f} s[/]"),
            )
    else:
        await server.wait_ready(
            START_S, _every(10, lambda s: console.print(f"{s:4.0f} s  {step()}"))
        )
    assert server.ready_at is not None
    console.print(f"ready after {server.ready_at - server.started_at:.0f} s\n")


def _every(seconds: float, show: Callable[[float], None]) -> Callable[[float], None]:
    due = 0.0

    def progress(waited: float) -> None:
        nonlocal due
        if waited >= due:
            due = waited + seconds
            show(waited)

    return progress


def show_processes(server: Server, console: Console) -> None:
    """The server's processes as a tree."""
    members = server.tree.refresh()
    tree = Tree(f"[bold]server[/] [dim]pid {server.pid}[/]")
    for core in (m for m in members if m.role is Role.ENGINE_CORE):
        branch = tree.add(f"engine core of stage {core.stage_id} [dim]pid {core.pid}[/]")
        for worker in (m for m in members if m.role is Role.WORKER):
            if worker.stage_id == core.stage_id:
                branch.add(f"worker [dim]pid {worker.pid}[/]")
    console.print(tree)
    console.print()


async def chat(server: Server, console: Console) -> list[str]:
    """Two real requests, one of them streaming; what was wrong with them."""
    broken = []
    for stream in (False, True):
        request = ChatRequest(
            prompt="What is there to see at the seaside?", stream=stream, stage_tokens=[8, 12]
        )
        call = ChatCall(0, stream, "", f"demo-{stream}", time.monotonic())
        console.print(f"[bold]{'streaming' if stream else 'plain'}[/] chat request: ", end="")
        words = partial(console.print, style="cyan", end="", markup=False)
        await carry_out(server.client, request, call, words)
        if not stream:
            words(call.text)
        assert call.ended is not None
        console.print(f"  [dim]{call.status} in {call.ended - call.sent:.2f} s[/]")
        if call.outcome is not Outcome.ANSWERED:
            broken.append(f"a {'streaming' if stream else 'plain'} request: {call.describe()}")
    console.print()
    return broken


@dataclass
class Watched:
    """All that the demo has seen."""

    findings: Findings
    newcomers: Newcomers
    broken_before: list[str]


async def kill_under_load(server: Server, console: Console) -> Watched:
    """The drill itself."""
    broken = await chat(server, console)
    timeline = Timeline(console)
    newcomers = Newcomers(timeline)
    async with contextlib.AsyncExitStack() as stack:
        drill = await stack.enter_async_context(
            Drill(
                server,
                STAGES,
                probe_interval_s=POLL_S,
                on_view=timeline.view,
                on_call=timeline.call,
            )
        )
        requests = drill.one_of_each() * 2
        await drill.put_under_load(requests)
        others = Load(
            server.url,
            [ChatRequest(stage_tokens=[1, 1], label="newcomer")],
            repeat=True,
            on_end=newcomers.note,
        )
        await stack.enter_async_context(others)
        await asyncio.sleep(0.5)
        stack.push_async_callback(_cancel, asyncio.create_task(Watcher(server, timeline).run()))
        findings = await drill.inject(HIT)
        timeline.zero = findings.zero
        assert findings.target is not None
        console.print(
            f"[bold red]SIGKILL[/] to the {escape(findings.target.describe())}, "
            f"{len(findings.struck)} requests in flight in both stages"
        )
        if await drill.until(lambda view: view.status != 200, findings, NOTICE_S):
            await drill.look_around(findings)
        await drill.watch_to_the_end(findings, END_S)
        if findings.ending is not None:
            status = findings.ending.status
            timeline.note(findings.ending.at, "server", f"ended with status {status}", "bold")
    console.print()
    return Watched(findings, newcomers, broken)


async def _cancel(task: asyncio.Task[None]) -> None:
    task.cancel()
    with contextlib.suppress(asyncio.CancelledError):
        await task


def bands(watched: Watched, console: Console, width: int = 60) -> None:
    """The whole drill at a glance: one band each for the server's health and its clients."""
    findings = watched.findings
    end = (findings.ending.at if findings.ending else findings.zero + END_S) + 0.5
    begin = findings.zero - 1.0
    moments = [begin + (end - begin) * (i + 0.5) / width for i in range(width)]

    def health(moment: float) -> tuple[str, str]:
        latest = [view for view in findings.health if view.at <= moment]
        if not latest or latest[-1].status == 200:
            return "█", "green"
        return ("▒", "red") if latest[-1].status == 503 else ("·", "dim")

    def in_flight(moment: float) -> tuple[str, str]:
        count = sum(call.in_flight_at(moment) for call in findings.struck)
        return (str(min(count, 9)), "cyan") if count else ("·", "dim")

    def stages(moment: float) -> tuple[str, str]:
        if moment < findings.zero:
            return "█", "green"
        gone = findings.stages_gone_at
        return ("·", "dim") if gone is not None and moment >= gone else ("▒", "yellow")

    def band(name: str, look: Callable[[float], tuple[str, str]]) -> str:
        cells = "".join(f"[{style}]{sign}[/]" for sign, style in map(look, moments))
        return f"  {name:<12}{cells}"

    console.print(band("/health", health) + "  █ 200  ▒ 503  · gone")
    console.print(band("stages", stages) + "  █ both  ▒ being closed  · gone")
    console.print(band("in flight", in_flight) + "  requests of before the kill")
    kill = int((findings.zero - begin) / (end - begin) * width)
    console.print(
        f"  {'':<12}{' ' * kill}↑ kill{' ' * (width - kill - 12)}{end - findings.zero:.1f} s\n"
    )


def show_words(watched: Watched, console: Console) -> None:
    """What the server said, word for word: to a client, and to whoever restarts it."""
    error = next((call.error for call in watched.findings.struck if call.error), None)
    reason = TERMINATION_LOG.read_text().strip() if TERMINATION_LOG.exists() else "nothing"
    for who, what in (("a client was told", json.dumps(error)), ("the termination log", reason)):
        console.print(f"  [bold]{who}[/]: [dim]{escape(what)}[/]", soft_wrap=True)
    console.print()


def promises(watched: Watched, server: Server) -> list[tuple[str, str, list[str]]]:
    """Each promise, what was observed, and how it was broken, if it was."""
    findings = watched.findings
    figures = {
        name: "never" if value is None else f"{value * 1000:.0f} ms"
        for name, value in findings.figures().items()
    }
    failed = [call for call in findings.struck if call.outcome is Outcome.FAILED]
    newcomers = watched.newcomers
    status = None if findings.ending is None else findings.ending.status
    reason = TERMINATION_LOG.read_text() if TERMINATION_LOG.exists() else None
    survey = findings.after
    silent = [c for c in findings.calls if c.outcome in (Outcome.PENDING, Outcome.GIVEN_UP)]
    return [
        (
            "two stages serve chat requests",
            "one plain and one streaming answer",
            watched.broken_before
            + (contract.healthy(findings.before, STAGES) if findings.before else ["no survey"]),
        ),
        (
            "every request in flight is failed at once",
            f"{len(failed)} of {len(findings.struck)}, the last after {figures['to_last_failure']}",
            [what for call in findings.struck for what in contract.failed_call(call, FAULT)]
            + [f"request {call.number} was never answered" for call in silent],
        ),
        (
            "/health says 503 DEAD, and why",
            f"after {figures['to_health_change']}, polled every {POLL_S * 1000:g} ms",
            contract.dead(survey, STAGES, FAULT) if survey else ["/health never changed"],
        ),
        (
            "new requests are refused with 503",
            f"{len(newcomers.refused())}, with Retry-After",
            [what for call in newcomers.refused() for what in contract.refused_call(call, FAULT)]
            or ([] if newcomers.refused() else ["none was refused"]),
        ),
        (
            "the healthy stage is closed as well",
            f"stages gone after {figures['to_stages_gone']}",
            [] if findings.stages_gone_at is not None else ["a stage is still there"],
        ),
        (
            "the termination log names the fault",
            f"{FAULT.kind}, stage {FAULT.stage_id}",
            contract.reason(reason, server.stderr, FAULT),
        ),
        (
            "the exit status says why",
            f"status {status} after {figures['to_exit']}",
            [] if status == FAULT.exit_status else [f"status {status}, not {FAULT.exit_status}"],
        ),
        (
            "nothing is left",
            f"{len(findings.processes_left)} processes",
            [f"left: {member.describe()}" for member in findings.processes_left],
        ),
    ]


def verdict(kept: Sequence[tuple[str, str, list[str]]], console: Console) -> bool:
    """Print what was promised and what was seen; whether all of it was kept."""
    table = Table(box=None, padding=(0, 2, 0, 0), show_header=False)
    for promise, observed, broken in kept:
        sign = "[red]✗[/]" if broken else "[green]✓[/]"
        table.add_row(f"  {sign}", promise, f"[dim]{escape(observed)}[/]")
        for what in broken:
            table.add_row("", f"[red]{escape(what)}[/]", "")
    console.print(table)
    return not any(broken for _, _, broken in kept)


@contextlib.asynccontextmanager
async def serving() -> AsyncIterator[Server]:
    """The server of the demo."""
    env = {
        "VLLM_OMNI_HEALTH_EXIT_GRACE_S": str(GRACE_S),
        "VLLM_OMNI_HEALTH_TERMINATION_LOG": str(TERMINATION_LOG),
    }
    with reserved_port() as port:
        command = [str(ROOT / "examples" / "cpu" / "serve"), "ar-2", "--port", str(port)]
        url = f"http://127.0.0.1:{port}"
        async with running(command, url=url, folder=LOGS, env=env) as server:
            yield server


async def demo(console: Console) -> int:
    """The whole demo; its exit status."""
    this = asyncio.current_task()
    assert this is not None
    # As for Ctrl-C, which asyncio.run() takes care of: clean up, then end.
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, this.cancel)
    began = time.monotonic()
    LOGS.mkdir(parents=True, exist_ok=True)
    TERMINATION_LOG.unlink(missing_ok=True)
    console.rule("[bold]Two stages, one of them killed under load")
    async with serving() as server:
        try:
            await start(server, console)
            show_processes(server, console)
            watched = await kill_under_load(server, console)
        except (ServerNotReady, InvalidDrill) as exc:
            console.print(f"[red]{escape(str(exc))}[/]")
            return 1
        bands(watched, console)
        show_words(watched, console)
        good = verdict(promises(watched, server), console)
    seconds = time.monotonic() - began
    end = "[green]all as promised[/]" if good else "[red]not as promised[/]; logs in build/demo"
    console.print(f"\n{end} [dim]({seconds:.0f} s)[/]")
    return 0 if good else 1


def main() -> int:
    """Run the demo; the exit status."""
    argparse.ArgumentParser(
        prog="make demo",
        description="Serves two stages of a tiny model on this machine's CPU, puts them under "
        "load, kills one, and shows what everybody gets. Logs are in build/demo.",
    ).parse_args()
    console = Console(highlight=False)
    if not console.is_terminal:
        console = Console(highlight=False, width=110)
    try:
        return asyncio.run(demo(console))
    except (KeyboardInterrupt, asyncio.CancelledError):
        console.print("interrupted; the server and its processes are gone")
        return 130


if __name__ == "__main__":
    sys.exit(main())
