# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-omni-health project
"""``vllm-omni-memory watch`` and ``vllm-omni-memory check``."""

from __future__ import annotations

import asyncio
import json
import os
import sys
import threading
from pathlib import Path
from typing import Annotated, Any, NoReturn

import typer
from rich.console import Console
from rich.live import Live

from vllm_omni_health.memory_tool.client import LocalSource, NoFigures, ServerSource, Source
from vllm_omni_health.memory_tool.gate import Verdict, describe
from vllm_omni_health.memory_tool.load import Plan, Run, drive
from vllm_omni_health.memory_tool.table import History, table

PASSED_THRESHOLD = 1
NOTHING_TO_JUDGE = 2
INTERRUPTED = 130

app = typer.Typer(
    help="What the memory of a vllm-omni server does.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)

Url = Annotated[str, typer.Option(help="where the server is")]
_URL = "http://127.0.0.1:8000"


def main() -> None:
    """Entry point."""
    try:
        app()
    except KeyboardInterrupt:
        raise SystemExit(INTERRUPTED) from None


def _complain(what: object) -> NoReturn:
    print(f"vllm-omni-memory: {what}", file=sys.stderr)
    raise typer.Exit(NOTHING_TO_JUDGE)


@app.command()
def watch(
    url: Url = _URL,
    local: Annotated[
        bool, typer.Option("--local", help="this machine's devices, without a server")
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="one line of JSON a look")] = False,
    interval: Annotated[float, typer.Option(min=0.1, max=3600, help="seconds between looks")] = 1.0,
    count: Annotated[int, typer.Option(min=0, help="looks to take; 0: until Ctrl-C")] = 0,
) -> None:
    """Show the devices and stages of a server, as a table that follows, or as lines of JSON."""
    source: Source = LocalSource() if local else ServerSource(url)
    try:
        body = source.fetch()
        if as_json:
            _print_lines(source, body, interval, count)
        else:
            _show_table(source, body, interval, count)
    except NoFigures as exc:
        _complain(exc)
    except KeyboardInterrupt:
        # How one ends it.
        pass
    finally:
        source.close()


def _looks(source: Source, interval: float, count: int) -> Any:
    """Figures over and over after the first, or a NoFigures in their place."""
    pause = threading.Event()
    taken = 1
    while count == 0 or taken < count:
        pause.wait(interval)
        taken += 1
        try:
            yield source.fetch()
        except NoFigures as exc:
            yield exc


def _print_lines(source: Source, body: dict[str, Any], interval: float, count: int) -> None:
    print(json.dumps(body), flush=True)
    for found in _looks(source, interval, count):
        line = {"error": str(found)} if isinstance(found, NoFigures) else found
        try:
            print(json.dumps(line), flush=True)
        except BrokenPipeError:
            # Whoever read them has had enough.
            sys.stdout = open(os.devnull, "w")  # noqa: SIM115
            return


def _show_table(source: Source, body: dict[str, Any], interval: float, count: int) -> None:
    history = History()
    history.add(body)
    console = Console()
    with Live(table(source.name, body, history), console=console, auto_refresh=False) as live:
        for found in _looks(source, interval, count):
            if isinstance(found, NoFigures):
                shown = table(source.name, body, history)
                shown.caption = str(found)
            else:
                body = found
                history.add(body)
                shown = table(source.name, body, history)
            live.update(shown, refresh=True)


@app.command()
def check(
    url: Url = _URL,
    threshold: Annotated[
        float, typer.Option(min=0, help="percent of unaccounted growth that is too much")
    ] = 3.0,
    requests: Annotated[int, typer.Option(min=1, help="requests to send")] = 100,
    concurrency: Annotated[int, typer.Option(min=1, help="how many at a time")] = 8,
    prompt_words: Annotated[
        int, typer.Option(min=1, help="length of the longest prompt; they grow up to it")
    ] = 256,
    max_tokens: Annotated[int, typer.Option(min=1, help="tokens of an answer")] = 64,
    model: Annotated[str | None, typer.Option(help="default: the first that is served")] = None,
    path: Annotated[str, typer.Option(help="route of --body")] = "/v1/chat/completions",
    body: Annotated[
        Path | None, typer.Option(help="JSON file: a request to send as it is, every time")
    ] = None,
    for_s: Annotated[
        float, typer.Option("--for", min=0, help="seconds for which it has to be too much")
    ] = 10.0,
    as_json: Annotated[bool, typer.Option("--json", help="the result as JSON")] = False,
) -> None:
    """Drive load against a server, and judge its memory: a gate for a pipeline.

    Ends with 0 if no device or stage had more than THRESHOLD percent that nobody accounts for,
    1 if one had, and 2 if that cannot be told: no server, nothing reported, requests that failed.
    """
    plan = Plan(
        url.rstrip("/"), requests, concurrency, prompt_words, max_tokens, model, path, _read(body)
    )
    console = Console(stderr=True)
    try:
        with console.status("asking the server") as status:

            def progress(run: Run) -> None:
                done = run.answers.total()
                status.update(f"{done} of {requests} requests answered, {run.failed} failed")

            run = asyncio.run(drive(plan, Verdict(threshold, for_s), progress))
    except NoFigures as exc:
        _complain(exc)
    except BaseExceptionGroup as group:
        found, _ = group.split(NoFigures)
        if found is None:
            raise
        _complain(found.exceptions[0])
    _judge(run, threshold, as_json)


def _read(body: Path | None) -> dict[str, Any] | None:
    if body is None:
        return None
    try:
        content = json.loads(body.read_text())
    except OSError as exc:
        _complain(f"--body {body}: {exc.strerror}")
    except ValueError as exc:
        _complain(f"--body {body}: not JSON: {exc}")
    if not isinstance(content, dict):
        _complain(f"--body {body}: must be a JSON object")
    return content


def _judge(run: Run, threshold: float, as_json: bool) -> None:
    verdict = run.verdict
    answered = run.answers.total() - run.failed
    statuses = ", ".join(f"{count} with {code or 'no answer'}" for code, count in _bad(run))
    if verdict.passed:
        status, what = PASSED_THRESHOLD, f"more than {threshold:g} % that nobody accounts for"
    elif not verdict.compared:
        status, what = NOTHING_TO_JUDGE, "no stage reports its memory, so nothing can be compared"
    elif run.failed:
        status, what = NOTHING_TO_JUDGE, f"{run.failed} requests failed: {statuses}"
    else:
        status, what = 0, f"never more than {threshold:g} % that nobody accounts for"
    if as_json:
        result = {
            "status": status,
            "what": what,
            "threshold_pct": threshold,
            "requests": run.answers.total(),
            "answers": {str(code): count for code, count in sorted(run.answers.items())},
            "seconds": round(run.seconds, 1),
            "rows": verdict.rows(),
        }
        print(json.dumps(result))
    else:
        for row in verdict.rows():
            print(("! " if row["passed_threshold"] else "  ") + describe(row))
        print(f"{'FAIL' if status else 'PASS'}: {what} ({answered} requests answered)")
    raise typer.Exit(status)


def _bad(run: Run) -> list[tuple[int, int]]:
    return [(code, n) for code, n in sorted(run.answers.items()) if not 200 <= code < 300]
