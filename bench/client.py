# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-omni-health project
"""The load client: a process of its own, told what to do by lines of JSON.

``python -m bench.client`` reads one order a line from standard input and answers each with one
line. Every time is a difference of this process's monotonic clock.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import json
import os
import signal
import sys
import time
from collections.abc import Callable, Coroutine, Iterable
from typing import Any

from bench.wire import BadAnswer, Connection, Reply, request_bytes
from vllm_omni_health.drills.chat import ChatRequest
from vllm_omni_health.drills.precedence import precedence
from vllm_omni_health.drills.probe import HealthProbe

HOST = "127.0.0.1"


async def load(port: int, clients: int, seconds: float, tokens: int, stages: int) -> dict[str, Any]:
    """Keep ``clients`` requests in flight for ``seconds``, every other one streaming.

    A request counts when it ends within that time; its latency is from first to last byte of
    the whole exchange, as a client sees it.
    """
    plain, stream = (
        request_bytes(HOST, port, ChatRequest(stream=stream, stage_tokens=[tokens] * stages).body())
        for stream in (False, True)
    )
    latencies: list[float] = []
    bad = 0
    began = time.monotonic()
    until = began + seconds

    async def be_client(number: int) -> None:
        nonlocal bad
        connection = Connection(HOST, port)
        for turn in itertools.count(number):
            sent = time.monotonic()
            if sent >= until:
                break
            try:
                reply = await connection.ask(stream if turn % 2 else plain)
            except BadAnswer:
                bad += 1
                continue
            if not reply.good:
                bad += 1
            elif reply.at <= until:
                latencies.append(reply.at - sent)
        connection.close()

    async with asyncio.TaskGroup() as group:
        for number in range(clients):
            group.create_task(be_client(number))
    return {
        "latencies": [round(latency, 6) for latency in latencies],
        "seconds": seconds,
        "bad": bad,
    }


async def strike(
    port: int, pid: int, in_flight: int, stages: int, poll_s: float, guard_s: float
) -> dict[str, Any]:
    """SIGKILL ``pid`` with ``in_flight`` requests spread over the stages; times from there.

    ``in_flight`` is how many there were at that moment: others had ended before it.
    """
    requests = [
        ChatRequest.staying_in(stage, stages, stream=stream).body()
        for stage, stream in itertools.islice(_places(stages), in_flight)
    ]
    ended: list[tuple[float, bool]] = []

    async def be_client(body: dict[str, Any]) -> None:
        connection = Connection(HOST, port)
        try:
            reply: Reply | None = await connection.ask(request_bytes(HOST, port, body))
        except BadAnswer:
            reply = None
        ended.append((time.monotonic() if reply is None else reply.at, bool(reply and reply.good)))
        connection.close()

    tasks = [asyncio.create_task(be_client(body)) for body in requests]
    with HealthProbe(f"http://{HOST}:{port}", interval_s=poll_s) as probe:
        # All are sent at once; this long for the server to take them in and get to work.
        await asyncio.sleep(2.0)
        before = len(ended)
        zero = time.monotonic()
        os.kill(pid, signal.SIGKILL)
        deadline = zero + guard_s
        view = await asyncio.to_thread(
            probe.wait_for, lambda view: view.status != 200, since=zero, timeout_s=guard_s
        )
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(deadline - time.monotonic()):
                await asyncio.gather(*tasks)
    struck = ended[before:]
    for task in tasks:
        task.cancel()
    failed = [at - zero for at, good in struck if not good]
    return {
        "in_flight": in_flight - before,
        "to_503": None if view is None else view.at - zero,
        "to_last_failure": max(failed, default=None),
        "failed": len(failed),
        "answered": sum(good for _, good in struck),
        "unanswered": in_flight - len(ended),
        "poll_s": poll_s,
    }


def _places(stages: int) -> Iterable[tuple[int, bool]]:
    """Stage after stage, plain and streaming in turn."""
    for number in itertools.count():
        yield number % stages, bool(number // stages % 2)


ORDERS: dict[str, Callable[..., Coroutine[Any, Any, dict[str, Any]]]] = {
    "load": load,
    "strike": strike,
}


def main() -> None:
    """Carry out orders until there are no more."""
    # The probe's thread must not wait long for the clients' thread.
    sys.setswitchinterval(0.001)
    with contextlib.suppress(ImportError):
        import uvloop

        asyncio.set_event_loop_policy(uvloop.EventLoopPolicy())
    with precedence():
        for line in sys.stdin:
            order = json.loads(line)
            result = asyncio.run(ORDERS[order.pop("order")](**order))
            print(json.dumps(result), flush=True)


if __name__ == "__main__":
    main()
