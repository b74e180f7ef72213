# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-omni-health project
"""What is measured, and how: short rounds, upstream and layer in turn."""

from __future__ import annotations

import asyncio
import contextlib
import signal
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import psutil

from bench.servers import LoadClient, Pair, Progress, Variant, port_of
from vllm_omni_health.drills.server import Server
from vllm_omni_health.drills.tree import Member, Role

CLIENTS = (1, 8, 32)
TOKENS = 32
"""Tokens that each stage makes for a request: as many as leave the overhead per request and the
one per token both their share."""

IN_FLIGHT = 64
POLL_S = 0.005
GUARD_S = 120.0
"""A hang guard for what upstream alone takes to fail the last request."""

_WARM_UP_S = 3.0


class InvalidMeasurement(Exception):
    """A figure that would mislead: requests failed where none was to."""


@dataclass(frozen=True)
class Plan:
    """How long everything is to take."""

    rounds: int
    round_s: float
    idle_s: float
    faults: int
    """Engine cores to kill for each deployment and variant."""
    faults_only: bool = False
    """Whether nothing else is measured."""


FULL = Plan(rounds=8, round_s=8.0, idle_s=20.0, faults=3)
QUICK = Plan(rounds=4, round_s=3.0, idle_s=10.0, faults=1)


@dataclass(frozen=True)
class Round:
    """One round on one server."""

    latencies: list[float]
    """Of every request that was answered within the round, in seconds."""
    server_cpu_s: float
    """CPU time of the server process."""
    all_cpu_s: float
    """CPU time of all of the server's processes."""


@dataclass
class Cell:
    """All rounds of one number of clients on one deployment, upstream and layer in pairs."""

    stages: int
    clients: int
    round_s: float
    rounds: list[tuple[Round, Round]] = field(default_factory=list)


@dataclass(frozen=True)
class Idle:
    """CPU time per second while nobody asks for anything, in percent of a core."""

    stages: int
    seconds: float
    server: dict[Variant, float]
    everything: dict[Variant, float]
    """All of a server's processes together."""


@dataclass(frozen=True)
class Fault:
    """One engine core killed under load; see ``bench.client.strike`` for the figures."""

    stages: int
    stage_hit: int
    variant: Variant
    figures: dict[str, Any]


@contextlib.contextmanager
def alone(servers: Pair, measured: Variant) -> Iterator[None]:
    """Stop every process of the other variants meanwhile.

    An idle upstream server polls, at up to a tenth of a core, which the one under measurement
    would have to do without.
    """
    members = [
        member
        for variant, server in servers.items()
        if variant is not measured and server.ending is None
        for member in server.tree.refresh()
    ]
    for member in members:
        member.id.send(signal.SIGSTOP)
    try:
        yield
    finally:
        for member in members:
            member.id.send(signal.SIGCONT)


async def throughput(
    servers: Pair, client: LoadClient, stages: int, plan: Plan, progress: Progress
) -> list[Cell]:
    """Requests a second and their latencies, for every number of clients."""
    for variant, server in servers.items():
        progress(f"{stages} stage(s): warming up {variant}")
        await _load(client, server, 8, _WARM_UP_S, stages)
    cells = [Cell(stages, clients, plan.round_s) for clients in CLIENTS]
    for number in range(plan.rounds):
        for cell in cells:
            progress(
                f"{stages} stage(s), {cell.clients} client(s): round {number + 1} of {plan.rounds}"
            )
            samples = {}
            # ABBA: what changes steadily meanwhile cancels out.
            for variant in Variant if number % 2 == 0 else reversed(Variant):
                with alone(servers, variant):
                    samples[variant] = await _load(
                        client, servers[variant], cell.clients, plan.round_s, stages
                    )
            cell.rounds.append((samples[Variant.UPSTREAM], samples[Variant.LAYER]))
    return cells


async def idle(servers: Pair, stages: int, plan: Plan, progress: Progress) -> Idle:
    """Both at the same time: neither takes anything from the other."""
    progress(f"{stages} stage(s): idle for {plan.idle_s:g} s")
    # The last connections are closed and the log is written.
    await asyncio.sleep(2.0)
    members = {variant: server.tree.refresh() for variant, server in servers.items()}
    began, before = time.monotonic(), {v: _cpu_times(m) for v, m in members.items()}
    await asyncio.sleep(plan.idle_s)
    seconds, after = time.monotonic() - began, {v: _cpu_times(m) for v, m in members.items()}

    def share(variant: Variant, pids: Sequence[int]) -> float:
        spent = sum(after[variant][pid] - before[variant][pid] for pid in pids)
        return 100 * spent / seconds

    return Idle(
        stages,
        seconds,
        server={v: share(v, [servers[v].pid]) for v in members},
        everything={v: share(v, [m.pid for m in members[v]]) for v in members},
    )


async def faults(
    servers: Pair, client: LoadClient, stages: int, turn: int, progress: Progress
) -> list[Fault]:
    """Kill an engine core of both, one after the other: the last stage's, of three the middle's.

    Requests in the stages before it are the ones that are easily forgotten.
    """
    hit = stages // 2
    found = []
    for variant in Variant if turn % 2 == 0 else reversed(Variant):
        progress(f"{stages} stage(s): killing an engine core of {variant}, {IN_FLIGHT} in flight")
        server = servers[variant]
        server.tree.refresh()
        (target,) = server.tree.find(Role.ENGINE_CORE, hit)
        with alone(servers, variant):
            figures = await client.carry_out(
                "strike",
                port=port_of(server),
                pid=target.pid,
                in_flight=IN_FLIGHT,
                stages=stages,
                poll_s=POLL_S,
                guard_s=GUARD_S,
            )
        if figures["in_flight"] < IN_FLIGHT:
            raise InvalidMeasurement(
                f"only {figures['in_flight']} requests were in flight at the kill"
            )
        found.append(Fault(stages, hit, variant, figures))
    return found


async def _load(
    client: LoadClient, server: Server, clients: int, seconds: float, stages: int
) -> Round:
    members = server.tree.refresh()
    before = _cpu_times(members)
    result = await client.carry_out(
        "load",
        port=port_of(server),
        clients=clients,
        seconds=seconds,
        tokens=TOKENS,
        stages=stages,
    )
    if result["bad"]:
        raise InvalidMeasurement(f"{result['bad']} requests failed on {server.url}")
    spent = {pid: after - before[pid] for pid, after in _cpu_times(members).items()}
    return Round(result["latencies"], spent[server.pid], sum(spent.values()))


def _cpu_times(members: Sequence[Member]) -> dict[int, float]:
    spent = {}
    for member in members:
        times = psutil.Process(member.pid).cpu_times()
        spent[member.pid] = times.user + times.system
    return spent
