# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-omni-health project
"""``python -m bench.shutdown``: from SIGTERM to the end, upstream alone and with the layer.

Each deployment is stopped while it idles and while requests are in flight, by a server of either
variant in turn. A server that has not ended after GIVE_UP_S is killed and counts as never ending.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import signal
import statistics
import sys
import tempfile
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from bench.__main__ import shown_progress
from bench.servers import ENVIRONMENT, SERVE, START_S, Progress, Variant
from vllm_omni_health.drills.chat import ChatRequest, Request
from vllm_omni_health.drills.images import ImageRequest
from vllm_omni_health.drills.load import Load
from vllm_omni_health.drills.ports import reserved_port
from vllm_omni_health.drills.server import Server, ServerNotReady, running

DEPLOYMENTS = {"ar-1": 1, "ar-2": 2, "ar-3": 3, "diffusion": 0, "diffusion-mp": 0}
"""By name, with the number of AR stages."""

IN_FLIGHT = 8
GIVE_UP_S = 20.0
IDLE_AT_MOST_S = 3.0
ANSWERED_AT_MOST_S = 1.0
LOADED_AT_MOST_S = 4.0
RATIO_AT_MOST = 0.3
"""Of upstream's time, idle and with three stages."""


@dataclass(frozen=True)
class Stop:
    """One server that was told to stop. Times in seconds after SIGTERM; None: not in time."""

    deployment: str
    variant: Variant
    loaded: bool
    exit_s: float | None
    status: int | None
    answered_s: float | None = None
    """When the last request in flight was answered, if all were."""
    left: int = 0
    """Processes that were left when the server had ended, or was given up."""


def _requests(deployment: str) -> list[Request]:
    stages = DEPLOYMENTS[deployment]
    if not stages:
        return [ImageRequest.slow()] * IN_FLIGHT
    return [
        ChatRequest.staying_in(number % stages, stages, stream=bool(number % 2))
        for number in range(IN_FLIGHT)
    ]


async def stop(deployment: str, variant: Variant, loaded: bool, folder: Path) -> Stop:
    """Start a server, tell it to stop, and watch. Raises ServerNotReady."""
    with reserved_port() as port:
        async with running(
            [str(SERVE), deployment, "--port", str(port)],
            url=f"http://127.0.0.1:{port}",
            folder=folder / f"{deployment}-{variant}-{port}",
            env=ENVIRONMENT[variant],
        ) as server:
            await server.wait_ready(START_S)
            if not loaded:
                # What a start leaves to be done is over by then.
                await asyncio.sleep(2)
                return await _told(server, deployment, variant, None)
            async with Load(server.url, _requests(deployment)) as load:
                await load.under_way(60, for_s=1.0)
                return await _told(server, deployment, variant, load)


async def _told(server: Server, deployment: str, variant: Variant, load: Load | None) -> Stop:
    began = time.monotonic()
    server.tree.refresh()
    server.send(signal.SIGTERM)
    ending = await server.wait_end(GIVE_UP_S)
    answered: float | None = None
    if load is not None:
        # A connection that breaks with the server's end is no answer.
        ends = [call.ended for call in load.calls if call.ended and not call.broken]
        if len(ends) == len(load.calls):
            answered = max(ends) - began
    return Stop(
        deployment,
        variant,
        loaded=load is not None,
        exit_s=None if ending is None else ending.at - began,
        status=None if ending is None else ending.status,
        answered_s=answered,
        left=len(await server.wait_processes_gone(1.0)),
    )


async def run(deployments: list[str], rounds: int, progress: Progress) -> list[Stop]:
    """Stop every deployment ``rounds`` times in every way."""
    stops = []
    with tempfile.TemporaryDirectory(prefix="bench-") as folder:
        for deployment in deployments:
            for turn in range(rounds):
                for loaded in (False, True):
                    for variant in Variant:
                        how = "loaded" if loaded else "idle"
                        progress(f"{deployment} {how}: {variant}, round {turn + 1}")
                        stops.append(await stop(deployment, variant, loaded, Path(folder)))
    return stops


def _median(stops: list[Stop], figure: str) -> float | None:
    """None as soon as it was not reached once."""
    values = [getattr(one, figure) for one in stops]
    return None if not values or None in values else statistics.median(values)


def _shown(seconds: float | None) -> str:
    return f"not in {GIVE_UP_S:g} s" if seconds is None else f"{seconds:.2f} s"


def rows(stops: list[Stop]) -> list[dict[str, Any]]:
    """One row for each deployment and way, with what was wanted and whether it was kept."""
    found = []
    for deployment in dict.fromkeys(one.deployment for one in stops):
        for loaded in (False, True):
            of = {
                variant: [
                    one
                    for one in stops
                    if (one.deployment, one.loaded, one.variant) == (deployment, loaded, variant)
                ]
                for variant in Variant
            }
            ours, theirs = (
                _median(of[variant], "exit_s") for variant in (Variant.LAYER, Variant.UPSTREAM)
            )
            bound = LOADED_AT_MOST_S if loaded else IDLE_AT_MOST_S
            kept = ours is not None and ours <= bound
            kept &= all(one.status == 0 and not one.left for one in of[Variant.LAYER])
            answered = {v: _median(of[v], "answered_s") for v in Variant} if loaded else {}
            if loaded:
                last = answered[Variant.LAYER]
                kept &= last is not None and last <= ANSWERED_AT_MOST_S
            elif deployment == "ar-3" and ours is not None and theirs is not None:
                kept &= ours <= RATIO_AT_MOST * theirs
            found.append(
                {
                    "deployment": deployment,
                    "loaded": loaded,
                    "upstream_exit_s": theirs,
                    "layer_exit_s": ours,
                    "upstream_answered_s": answered.get(Variant.UPSTREAM),
                    "layer_answered_s": answered.get(Variant.LAYER),
                    "kept": bool(kept),
                }
            )
    return found


def show(table_rows: list[dict[str, Any]], console: Console) -> None:
    """The rows as a table for people."""
    table = Table(
        *("deployment", "", "upstream: exit", "layer: exit", "ratio"),
        *("upstream: all answered", "layer: all answered", "as wanted"),
    )
    for row in table_rows:
        ours, theirs = row["layer_exit_s"], row["upstream_exit_s"]
        ratio = f"{ours / theirs:.2f}" if ours is not None and theirs else ""
        answers = [
            _shown(row[f"{variant}_answered_s"]) if row["loaded"] else "" for variant in Variant
        ]
        table.add_row(
            *(row["deployment"], "loaded" if row["loaded"] else "idle"),
            *(_shown(theirs), _shown(ours), ratio, *answers),
            "yes" if row["kept"] else "NO",
        )
    console.print(table)


def main() -> int:
    """Measure and show; status 1 when a wanted figure was missed."""
    parser = argparse.ArgumentParser(prog="python -m bench.shutdown", description=__doc__)
    parser.add_argument("--rounds", type=int, default=3, help="stops of each kind (default: 3)")
    parser.add_argument(
        *("--deployments", "-d"),
        nargs="+",
        choices=DEPLOYMENTS,
        default=list(DEPLOYMENTS),
        help="measure these only",
    )
    parser.add_argument("--json", type=Path, help="also write everything to this file")
    arguments = parser.parse_args()
    console = Console(width=None if sys.stdout.isatty() else 130)
    try:
        with shown_progress(console) as progress:
            stops = asyncio.run(run(arguments.deployments, arguments.rounds, progress))
    except ServerNotReady as exc:
        console.print(f"bench: {exc}", markup=False)
        return 1
    except KeyboardInterrupt:
        return 130
    found = rows(stops)
    show(found, console)
    if arguments.json is not None:
        data = {"rows": found, "stops": [asdict(one) for one in stops]}
        arguments.json.write_text(json.dumps(data, indent=1) + "\n")
    return 0 if all(row["kept"] for row in found) else 1


if __name__ == "__main__":
    raise SystemExit(main())
