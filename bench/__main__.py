# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-omni-health project
"""``python -m bench``: upstream alone and with the health layer, side by side, in one run."""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path

import psutil
from rich.console import Console

from bench.measure import FULL, QUICK, InvalidMeasurement, Plan, faults, idle, throughput
from bench.report import Results, as_data, as_markdown, missed, sections, show
from bench.servers import LoadClient, Progress, pair
from vllm_omni_health.drills.server import Server, ServerNotReady

DEPLOYMENTS = {1: "ar-1", 2: "ar-2", 3: "ar-3"}
_SERVER_BYTES = 2**30
_STAGE_BYTES = 3 * 2**30
"""What a server needs, and each of its stages; two servers run at a time."""


async def run(plan: Plan, chosen: Sequence[int], progress: Progress) -> Results:
    """Measure everything on the deployments with these numbers of stages."""
    results = Results(plan)
    with tempfile.TemporaryDirectory(prefix="bench-") as folder:
        async with LoadClient.started() as client:
            for stages in chosen:
                for turn in range(plan.faults):
                    async with pair(DEPLOYMENTS[stages], Path(folder), progress) as servers:
                        if turn == 0 and not plan.faults_only:
                            results.idles.append(await idle(servers, stages, plan, progress))
                            results.cells += await throughput(
                                servers, client, stages, plan, progress
                            )
                        results.faults += await faults(servers, client, stages, turn, progress)
    return results


@contextlib.contextmanager
def shown_progress(console: Console) -> Iterator[Progress]:
    """Progress for people: one line that changes, or, when piped, a line for each new step."""
    began = time.monotonic()
    if console.is_terminal:
        with console.status("starting") as status:
            yield lambda what: status.update(f"{time.monotonic() - began:4.0f} s  {what}")
        return
    last = ""

    def note(what: str) -> None:
        nonlocal last
        # Without what changes all the time: a start's seconds.
        step = what.partition(", ")[0] if "starting" in what else what
        if step != last:
            last = step
            console.print(f"{time.monotonic() - began:4.0f} s  {step}")

    yield note


def _positive(text: str) -> int:
    if not text.isdigit() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number from 1 on")
    return int(text)


def arguments() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(
        prog="python -m bench",
        description="Compares vllm-omni alone with vllm-omni under the health layer: throughput, "
        "latency, idle CPU, and how quickly a killed engine core is told to everyone.",
    )
    parser.add_argument(
        "--quick", action="store_true", help="fewer and shorter rounds, one kill each"
    )
    parser.add_argument(
        "--faults-only", action="store_true", help="no load and no idling, only the kills"
    )
    parser.add_argument(
        "--kills", type=_positive, metavar="N", help="engine cores to kill for each row"
    )
    parser.add_argument(
        "--stages",
        type=int,
        nargs="+",
        choices=DEPLOYMENTS,
        default=[1, 2],
        help="measure deployments with this many stages (default: 1 2)",
    )
    parser.add_argument(
        "--out",
        type=Path,
        default=Path(__file__).parent / "results",
        help="folder for the results as JSON and Markdown (default: bench/results)",
    )
    parser.add_argument("--json", action="store_true", help="print the results as JSON")
    parser.add_argument("--markdown", action="store_true", help="print the report as Markdown")
    parser.add_argument(
        "--check", action="store_true", help="end with status 1 when a wanted figure is missed"
    )
    return parser.parse_args()


def main() -> int:
    """Run the benchmarks; the exit status."""
    args = arguments()
    quiet = args.json or args.markdown
    console = Console(stderr=quiet, width=None if sys.stdout.isatty() else 130)
    available = psutil.virtual_memory().available
    needed = 2 * (_SERVER_BYTES + max(args.stages) * _STAGE_BYTES)
    if available < needed:
        console.print(
            f"bench: {available / 2**30:.0f} GiB of memory are free, two servers of "
            f"{max(args.stages)} stage(s) need {needed / 2**30:.0f}"
        )
        return 1
    plan = replace(QUICK if args.quick else FULL, faults_only=args.faults_only)
    if args.kills is not None:
        plan = replace(plan, faults=args.kills)
    began = time.monotonic()
    try:
        with shown_progress(console) as progress:
            results = asyncio.run(run(plan, args.stages, progress))
    except (InvalidMeasurement, ServerNotReady) as exc:
        console.print(f"bench: {exc}", markup=False)
        return 1
    except KeyboardInterrupt:
        return 130
    report = sections(results)
    data, markdown = as_data(results, report), as_markdown(results, report)
    kind = "-faults" if args.faults_only else "-quick" if args.quick else ""
    name = f"{results.date:%Y-%m-%d}{kind}"
    args.out.mkdir(parents=True, exist_ok=True)
    (args.out / f"{name}.json").write_text(json.dumps(data, indent=1) + "\n")
    (args.out / f"{name}.md").write_text(markdown)
    if args.json:
        print(json.dumps(data, indent=1))
    elif args.markdown:
        print(markdown)
    else:
        show(report, console)
        console.print(
            f"{Server.started} servers, {(time.monotonic() - began) / 60:.0f} minutes; "
            f"written to {args.out / name}.md and .json"
        )
    return 1 if args.check and missed(report) else 0


if __name__ == "__main__":
    sys.exit(main())
