# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-omni-health project
"""``python -m bench.orphans``: how long anything is left of a killed server, and workers that hang.

Servers are killed by SIGKILL at random moments of their lives, upstream's and the layer's in
turn, at the same moments; then the time is taken until the last process below them is gone.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import random
import signal
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from rich.console import Console

from bench.measure import QUICK
from bench.report import Results, Row, Section, as_markdown, environment, missed, show
from bench.servers import ENVIRONMENT, SERVE, START_S, Progress, Variant
from bench.stats import median
from vllm_omni_health.drills.drill import Drill
from vllm_omni_health.drills.ports import reserved_port
from vllm_omni_health.drills.precedence import precedence
from vllm_omni_health.drills.server import GONE_POLL_S, Server, running
from vllm_omni_health.drills.tree import Role

DEPLOYMENT, STAGES = "ar-2", (1, 1)

MOMENTS = ("start-up", "idle", "load", "shutdown")
"""When a server is killed: while it starts; ready, without and with requests; or told to stop."""

GUARD_S = 60.0
"""How long descendants are awaited; upstream's would stay for ever on some devices."""

GONE_AT_MOST_S = 1.0
HANG_TIMEOUT_S = 5.0
HANG_AT_MOST_S = 1.0
"""How far behind ``hang_timeout_s`` a stopped worker may be noticed."""

_FIRST_START_S = 30.0
"""Taken for the length of a start until one has been seen."""


@dataclass(frozen=True)
class Kill:
    """One killed server. ``moment`` is one of MOMENTS; times are in seconds."""

    variant: Variant
    moment: str
    after_start_s: float
    descendants: int
    gone_s: float | None
    """From the signal to the end of the last one; None when some were left in the end."""


@dataclass(frozen=True)
class Hang:
    """One stopped worker, under load: the time until ``/health`` named it; None if it did not."""

    variant: Variant
    noticed_s: float | None


@contextlib.asynccontextmanager
async def served(
    variant: Variant, folder: Path, env: dict[str, str] | None = None
) -> AsyncIterator[Server]:
    """A server that has just been started, not ready yet."""
    with reserved_port() as port:
        async with running(
            [str(SERVE), DEPLOYMENT, "--port", str(port)],
            url=f"http://127.0.0.1:{port}",
            folder=folder / f"{variant}-{Server.started}",
            env={**ENVIRONMENT[variant], **(env or {})},
        ) as server:
            yield server


async def kill(variant: Variant, moment: str, at: float, folder: Path) -> tuple[Kill, float]:
    """Kill one server ``at`` seconds after the moment began; and the time that its start took.

    The processes that it has are looked for all the time up to then, as afterwards an orphan
    shows no more whose it was.
    """
    async with served(variant, folder) as server, contextlib.AsyncExitStack() as stack:
        start_s = 0.0
        if moment != "start-up":
            start_s = await server.wait_ready(START_S)
        if moment == "load":
            drill = await stack.enter_async_context(Drill(server, STAGES))
            await drill.put_under_load(drill.one_of_each(), repeat=True)
        if moment == "shutdown":
            server.tree.refresh()
            server.send(signal.SIGTERM)
        until = time.monotonic() + at
        while time.monotonic() < until and server.ending is None:
            server.tree.refresh()
            await asyncio.sleep(GONE_POLL_S)
        with precedence():
            descendants = len(server.tree.left())
            began = time.monotonic()
            server.send(signal.SIGKILL)
            left = await server.wait_processes_gone(GUARD_S)
            gone_s = None if left else time.monotonic() - began
        return Kill(variant, moment, at, descendants, gone_s), start_s


async def hang(variant: Variant, folder: Path) -> Hang:
    """Stop a worker under load, and wait until ``/health`` has given up its stage."""
    env = (
        {}
        if variant is Variant.UPSTREAM
        else {"VLLM_OMNI_HEALTH_HANG_TIMEOUT_S": f"{HANG_TIMEOUT_S:g}"}
    )
    async with served(variant, folder, env) as server:
        await server.wait_ready(START_S)
        async with Drill(server, STAGES) as drill:
            await drill.put_under_load(drill.one_of_each())
            worker = next(
                member
                for member in server.tree.refresh()
                if member.role is Role.WORKER and member.stage_id == 0
            )
            began = time.monotonic()
            worker.id.send(signal.SIGSTOP)
            view = await asyncio.to_thread(
                drill.probe.wait_for,
                lambda view: view.status != 200,
                since=began,
                timeout_s=4 * HANG_TIMEOUT_S,
            )
            return Hang(variant, None if view is None else view.at - began)


async def measure(
    kills: int, hangs: int, moments: Sequence[str], seed: int, progress: Progress
) -> tuple[list[Kill], list[Hang]]:
    """All of it: ``kills`` servers of each variant, and as many stopped workers as ``hangs``."""
    chance = random.Random(seed)
    start_s = _FIRST_START_S
    killed, hung = [], []
    with tempfile.TemporaryDirectory(prefix="orphans-") as name:
        for number in range(kills):
            moment = moments[number % len(moments)]
            spans = {"start-up": (1.0, start_s), "shutdown": (0.0, 0.5)}
            at = chance.uniform(*spans.get(moment, (0.0, 3.0)))
            for variant in Variant:
                progress(f"kill {number + 1} of {kills}: {variant}, {moment}")
                result, took_s = await kill(variant, moment, at, Path(name))
                killed.append(result)
                start_s = took_s or start_s
        for number in range(hangs):
            for variant in Variant:
                progress(f"stopped worker {number + 1} of {hangs}: {variant}")
                hung.append(await hang(variant, Path(name)))
    return killed, hung


def sections(killed: Sequence[Kill], hung: Sequence[Hang]) -> list[Section]:
    """The report."""
    found = []
    if killed:
        rows = []
        for moment in MOMENTS:
            rows += _kill_rows([one for one in killed if one.moment == moment], moment)
        rows += _kill_rows(killed, "all")
        found.append(
            Section(
                "Server killed: until its last process is gone",
                rows,
                f"Two stages; SIGKILL at random moments, the same for both; looked every "
                f"{GONE_POLL_S * 1000:g} ms, for up to {GUARD_S:g} s.",
            )
        )
    if hung:
        times = {
            variant: [one.noticed_s for one in hung if one.variant == variant]
            for variant in Variant
        }
        layer = [one - HANG_TIMEOUT_S for one in times[Variant.LAYER] if one is not None]
        kept = len(layer) == len(times[Variant.LAYER]) and max(layer) <= HANG_AT_MOST_S
        unnoticed = times[Variant.UPSTREAM].count(None)
        found.append(
            Section(
                "Worker stopped under load",
                [
                    Row(
                        "until /health says so, s after hang_timeout_s (worst)",
                        f"not in {4 * HANG_TIMEOUT_S:g} s" if unnoticed else "noticed",
                        f"{max(layer):+.2f}" if layer else "never",
                        wanted=f"<= +{HANG_AT_MOST_S:g}",
                        verdict="kept" if kept else "missed",
                    )
                ],
                f"SIGSTOP; hang_timeout_s={HANG_TIMEOUT_S:g}; {len(layer)} of each.",
            )
        )
    return found


def _kill_rows(killed: Sequence[Kill], name: str) -> list[Row]:
    if not killed:
        return []
    times = {
        variant: [
            GUARD_S if one.gone_s is None else one.gone_s
            for one in killed
            if one.variant == variant
        ]
        for variant in Variant
    }
    upstream, layer = times[Variant.UPSTREAM], times[Variant.LAYER]
    worst = max(layer)
    return [
        Row(
            f"{name} ({len(layer)} each): p50, s", f"{median(upstream):.2f}", f"{median(layer):.2f}"
        ),
        Row(
            f"{name} ({len(layer)} each): max, s",
            f"{max(upstream):.2f}",
            f"{worst:.2f}",
            wanted=f"<= {GONE_AT_MOST_S:g}",
            verdict="kept" if worst <= GONE_AT_MOST_S else "missed",
        ),
    ]


def as_data(results: Results, killed: Sequence[Kill], hung: Sequence[Hang]) -> dict[str, Any]:
    """Everything as plain data."""
    return {
        **environment(results),
        "report": [asdict(section) for section in sections(killed, hung)],
        "kills": [asdict(one) for one in killed],
        "hangs": [asdict(one) for one in hung],
    }


def main() -> int:
    """Measure; the exit status."""
    parser = argparse.ArgumentParser(prog="python -m bench.orphans", description=__doc__)
    parser.add_argument("--kills", type=int, default=30, help="servers of each kind to kill")
    parser.add_argument("--hangs", type=int, default=3, help="workers of each kind to stop")
    parser.add_argument(
        "--moments", nargs="+", choices=MOMENTS, default=MOMENTS, help="kill at these, in turn"
    )
    parser.add_argument("--seed", type=int, default=1, help="chooses the moments")
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "results")
    parser.add_argument(
        "--more", action="store_true", help="add to the results of the same day, if there are any"
    )
    parser.add_argument("--check", action="store_true", help="status 1 when a figure is missed")
    args = parser.parse_args()
    console = Console(width=None if sys.stdout.isatty() else 130)
    results = Results(QUICK)
    began = time.monotonic()

    def progress(what: str) -> None:
        console.print(f"{time.monotonic() - began:4.0f} s  {what}", highlight=False)

    killed, hung = asyncio.run(measure(args.kills, args.hangs, args.moments, args.seed, progress))
    name = f"{results.date:%Y-%m-%d}-orphans"
    args.out.mkdir(parents=True, exist_ok=True)
    if args.more and (args.out / f"{name}.json").is_file():
        before = json.loads((args.out / f"{name}.json").read_text())
        killed = [Kill(**one) for one in before["kills"]] + killed
        hung = [Hang(**one) for one in before["hangs"]] + hung
    report = sections(killed, hung)
    data = as_data(results, killed, hung)
    (args.out / f"{name}.json").write_text(json.dumps(data, indent=1) + "\n")
    (args.out / f"{name}.md").write_text(as_markdown(results, report))
    show(report, console)
    return 1 if args.check and missed(report) else 0


if __name__ == "__main__":
    sys.exit(main())
