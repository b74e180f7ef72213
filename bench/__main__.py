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
from pathlib import Path

import psutil
from rich.console import Console

from bench.measure import FULL, QUICK, InvalidMeasurement, Plan, faults, idle, throughput
from bench.report import Results, as_data, as_markdown, missed, sections, show
from bench.servers import LoadClient, Progress, pair
from vllm_omni_health.drills.server import Server, ServerNotReady

DEPLOYMENTS = {1: "ar-1", 2: "ar-2"}
_MEMORY_BYTES = 14 * 2**30
"""What two servers of two stages need."""


async def run(plan: Plan, chosen: Sequence[int], progress: Progress) -> Results:
    """Measure everything on the deployments with these numbers of stages."""
    results = Results(plan)
    with tempfile.TemporaryDirectory(prefix="bench-") as folder:
        async with LoadClient.started() as client:
            for stages in chosen:
                for turn in range(plan.faults):
                    async with pair(DEPLOYMENTS[stages], Path(folder), progress) as servers:
                        if turn == 0:
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
        "--stages",
        type=int,
        nargs="+",
        choices=DEPLOYMENTS,
        default=list(DEPLOYMENTS),
        help="measure deployments with this many stages only",
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
    if available < _MEMORY_BYTES:
        console.print(
            f"bench: {available / 2**30:.0f} GiB of memory are free, two servers need "
            f"{_MEMORY_BYTES / 2**30:.0f}"
        )
        return 1
    plan = QUICK if args.quick else FULL
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
    name = f"{results.date:%Y-%m-%d}{'-quick' if args.quick else ''}"
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
