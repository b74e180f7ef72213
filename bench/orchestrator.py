# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-omni-health project
"""``python -m bench.orchestrator``: the orchestrator's own cost, over stages that cost nothing.

Upstream's loop as it comes, upstream's event-driven loop, and the layer's, each on a thread and a
loop of its own, in turn, in one process. Stages are fakes with a queue; everything between their
output and the API server's queue is real.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import gc
import json
import logging
import statistics
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import janus
import uvloop
from rich.console import Console
from rich.table import Table

REPLICAS = (1, 8, 64)
PENDING = 10_000
OUTPUTS = 20_000
SINGLES = 200
"""Outputs sent one by one, each when the one before has arrived."""

ROUNDS = 3
FAIL_S = 1.0
STALL_S = 0.050
_TICK_S = 0.001
_GUARD_S = 120.0


class FakeStage:
    """A diffusion replica in the orchestrator's process that does nothing."""

    stage_type = "diffusion"
    final_output = True
    final_output_type = "image"

    def __init__(self) -> None:
        self._output_queue: asyncio.Queue[Any] = asyncio.Queue()

    def get_diffusion_output_nowait(self) -> Any:
        return None if self._output_queue.empty() else self._output_queue.get_nowait()

    async def abort_requests_async(self, request_ids: list[str]) -> None:
        """Nothing to abort."""

    def check_health(self) -> None:
        """Always well."""

    def shutdown(self) -> None:
        """Nothing to close."""


@dataclass(frozen=True)
class Variant:
    """An orchestrator and the loop it runs on."""

    name: str
    event_driven: bool
    layer: bool


UPSTREAM = Variant("upstream", event_driven=False, layer=False)
EVENT_DRIVEN = Variant("upstream, event-driven", event_driven=True, layer=False)
LAYER = Variant("layer", event_driven=True, layer=True)
VARIANTS = (UPSTREAM, EVENT_DRIVEN, LAYER)


class Service:
    """An orchestrator at work. As a context manager; entered and used on the main thread."""

    def __init__(self, variant: Variant, replicas: int) -> None:
        self._variant = variant
        self.stages = [FakeStage() for _ in range(replicas)]
        self.runtime: Any = None

    def __enter__(self) -> Service:
        if self._variant.layer:
            from vllm_omni.health.runtime import HealthRuntime, set_current

            from vllm_omni_health.settings.model import HealthSettings

            self.runtime = HealthRuntime(HealthSettings())
            set_current(self.runtime)
            self.runtime.start()
            self.runtime.machine.expect_stage(0, len(self.stages))
        ready: Future[None] = Future()
        self._thread = threading.Thread(target=self._run, args=(ready,), daemon=True)
        self._thread.start()
        ready.result(_GUARD_S)
        return self

    def __exit__(self, *_exc: object) -> None:
        from vllm_omni.engine.messages import ShutdownRequestMessage

        self._requests.sync_q.put(ShutdownRequestMessage())
        self._thread.join(_GUARD_S)
        if self.runtime is not None:
            from vllm_omni.health.runtime import set_current

            self.runtime.stop()
            set_current(None)

    def _run(self, ready: Future[None]) -> None:
        async def main() -> None:
            try:
                orchestrator = self._make()
            except Exception as exc:
                ready.set_exception(exc)
                raise
            ready.set_result(None)
            await orchestrator.run()

        # What the orchestrator's thread has: uvloop with the layer, asyncio's own without it.
        (uvloop.run if self._variant.layer else asyncio.run)(main())

    def _make(self) -> Any:
        from vllm_omni.engine.orchestrator import Orchestrator
        from vllm_omni.engine.stage_pool import StagePool

        self.loop = asyncio.get_running_loop()
        self._requests, self.outputs, rpcs = janus.Queue(), janus.Queue(), janus.Queue()
        self.pool = StagePool(0, list(self.stages))
        orchestrator_class: type[Any] = Orchestrator
        if self._variant.layer:
            from vllm_omni.engine.health.orchestrator import HealthOrchestrator

            orchestrator_class = HealthOrchestrator
        self.orchestrator = orchestrator_class(
            self._requests.async_q,
            self.outputs.async_q,
            rpcs.async_q,
            [self.pool],
            event_driven_orch_default=self._variant.event_driven,
        )
        return self.orchestrator

    def on_loop(self, work: Callable[[], Any]) -> Any:
        """Run ``work`` on the orchestrator's loop and wait for what it returns."""
        done: Future[Any] = Future()

        def run() -> None:
            try:
                done.set_result(work())
            except Exception as exc:
                done.set_exception(exc)

        self.loop.call_soon_threadsafe(run)
        return done.result(_GUARD_S)

    def admit(self, count: int) -> None:
        """Have ``count`` requests pending, spread over the replicas."""
        from vllm_omni.engine.orchestrator import OrchestratorRequestState

        def add() -> None:
            for number in range(count):
                name = f"r{number}"
                state = OrchestratorRequestState(name, final_stage_id=0)
                state.stage_submit_ts[0] = time.time()
                self.orchestrator.request_states[name] = state
                self.pool.select_replica_id(name)

        self.on_loop(add)

    def put(self, count: int, first: int = 0) -> None:
        """Let the replicas have ``count`` outputs, one each in turn. On the loop."""
        from vllm_omni.outputs import OmniRequestOutput

        replicas = len(self.stages)
        for number in range(first, first + count):
            output = OmniRequestOutput(request_id=f"r{number % PENDING}", finished=False)
            self.stages[number % replicas]._output_queue.put_nowait(output)

    def take(self, count: int) -> None:
        """Wait for ``count`` messages on the API server's queue."""
        for _ in range(count):
            self.outputs.sync_q.get(timeout=_GUARD_S)


@dataclass(frozen=True)
class Cost:
    """Medians over the rounds of one variant with one number of replicas."""

    variant: str
    replicas: int
    cpu_us: float
    """CPU time of the orchestrator's thread for an output, in a burst."""
    single_us: float
    """From a lone output to its arrival on the API server's queue."""
    idle_percent: float
    """CPU time of the orchestrator's thread when nothing happens, in percent of a core."""


def cost(variant: Variant, replicas: int) -> Cost:
    """Measure one variant."""
    bursts, singles, idles = [], [], []
    for _ in range(ROUNDS):
        with Service(variant, replicas) as service:
            service.admit(PENDING)
            service.on_loop(lambda: service.put(1000))
            service.take(1000)
            began = service.on_loop(time.thread_time)
            time.sleep(1.0)
            idles.append(service.on_loop(time.thread_time) - began)
            singles += [_single(service, number) for number in range(SINGLES)]
            service.on_loop(lambda: service.put(OUTPUTS))
            # Making the outputs is no work of the orchestrator's.
            began = service.on_loop(time.thread_time)
            service.take(OUTPUTS)
            bursts.append((service.on_loop(time.thread_time) - began) / OUTPUTS)
    return Cost(
        variant.name,
        replicas,
        cpu_us=round(1e6 * statistics.median(bursts), 1),
        single_us=round(1e6 * statistics.median(singles), 1),
        idle_percent=round(100 * statistics.median(idles), 2),
    )


def _single(service: Service, number: int) -> float:
    began = time.perf_counter()
    service.loop.call_soon_threadsafe(service.put, 1, number)
    service.take(1)
    return time.perf_counter() - began


@dataclass(frozen=True)
class Sweep:
    """A fault with PENDING requests under way; the worst of the rounds."""

    replicas: int
    fail_s: float
    """From the fault to the last of the failures on the API server's queue."""
    stall_s: float
    """The longest that another loop of the process stood still meanwhile: ``/livez`` is answered
    there."""


def sweep(replicas: int) -> Sweep:
    """Fail everything that is pending, by the loss of every replica."""
    rounds = [asyncio.run(_sweep(replicas)) for _ in range(ROUNDS)]
    return Sweep(replicas, max(fail for fail, _ in rounds), max(stall for _, stall in rounds))


async def _sweep(replicas: int) -> tuple[float, float]:
    from vllm_omni.health.faults.fault import Fault, FaultKind

    with Service(LAYER, replicas) as service:
        service.admit(PENDING)
        taken = asyncio.get_running_loop().run_in_executor(None, service.take, PENDING)
        with _watched_loop() as gaps:
            await asyncio.sleep(0.1)
            gaps.clear()
            began = time.perf_counter()
            for replica_id in range(replicas):
                fault = Fault(kind=FaultKind.OOM, stage_id=0, replica_id=replica_id)
                service.runtime.supervisor.report(fault)
            await taken
            return time.perf_counter() - began, max(gaps, default=0.0)


@contextlib.contextmanager
def _watched_loop() -> Iterator[list[float]]:
    """The times by which the running loop was late, one entry a tick."""
    loop = asyncio.get_running_loop()
    gaps: list[float] = []
    handle: asyncio.TimerHandle

    def tick(due: float) -> None:
        nonlocal handle
        gaps.append(max(0.0, loop.time() - due))
        following = loop.time() + _TICK_S
        handle = loop.call_at(following, tick, following)

    handle = loop.call_later(0, tick, loop.time())
    try:
        yield gaps
    finally:
        handle.cancel()


def main() -> int:
    """Measure, show, and say by the status whether the wanted figures were kept."""
    parser = argparse.ArgumentParser(prog="python -m bench.orchestrator", description=__doc__)
    parser.add_argument("--json", type=Path, help="also write the figures to this file")
    arguments = parser.parse_args()
    console = Console()
    logging.disable(logging.ERROR)
    with console.status("loading vllm_omni"):
        import vllm_omni.engine.health.orchestrator  # noqa: F401
    # As vLLM's API server does once it is up: a full collection of everything that was imported
    # stands in nobody's way then.
    gc.collect()
    gc.freeze()
    table = Table("replicas", "variant", "CPU an output", "a lone output", "idle")
    costs, sweeps = [], []
    with console.status("measuring") as status:
        for replicas in REPLICAS:
            for variant in VARIANTS:
                status.update(f"{replicas} replicas, {variant.name}")
                one = cost(variant, replicas)
                costs.append(one)
                table.add_row(
                    *(str(replicas), one.variant, f"{one.cpu_us:.1f} us"),
                    *(f"{one.single_us:.0f} us", f"{one.idle_percent:.2f} %"),
                )
        for replicas in REPLICAS:
            status.update(f"failing {PENDING} requests on {replicas} replicas")
            sweeps.append(sweep(replicas))
    console.print(table)
    for swept in sweeps:
        console.print(
            f"{PENDING} pending on {swept.replicas} replicas: all failed after "
            f"{swept.fail_s:.3f} s (wanted {FAIL_S:g}), another loop stood still for at most "
            f"{swept.stall_s * 1000:.0f} ms (wanted {STALL_S * 1000:.0f})"
        )
    if arguments.json is not None:
        figures = {
            "costs": [asdict(one) for one in costs],
            "sweeps": [asdict(one) for one in sweeps],
        }
        arguments.json.write_text(json.dumps(figures, indent=2) + "\n")
    kept = all(one.fail_s <= FAIL_S and one.stall_s <= STALL_S for one in sweeps)
    return 0 if kept else 1


if __name__ == "__main__":
    raise SystemExit(main())
