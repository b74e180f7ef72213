"""A stage that is alive and does nothing is noticed, named and ended; a slow one is left alone."""

from __future__ import annotations

import signal
from pathlib import Path

import pytest
from checks import ended_with_the_reason, everyone_was_told, run_until_valid

from vllm_omni_health.drills.contract import ExpectedFault
from vllm_omni_health.drills.drill import Drill, Findings, fatal_drill, told
from vllm_omni_health.drills.faults import Injection, Mark, Signal
from vllm_omni_health.drills.server import Server
from vllm_omni_health.drills.tree import Role

STOP = signal.SIGSTOP

CASES = [
    pytest.param(Signal(0, Role.WORKER, signum=STOP, kind="hang"), id="worker stopped"),
    pytest.param(
        Signal(0, Role.ENGINE_CORE, signum=STOP, kind="hang"),
        id="engine core stopped",
        marks=pytest.mark.slow,
    ),
    pytest.param(Mark(0, "hang"), id="forward pass never returns", marks=pytest.mark.slow),
]


@pytest.mark.parametrize("injection", CASES)
def test_a_hang_ends_the_server_with_its_own_status(
    serve, termination_log: Path, injection: Injection
) -> None:
    async def drill() -> tuple[Server, Findings]:
        async with serve("ar-1", exit_grace_s=2, hang_timeout_s=5) as server:
            return server, await fatal_drill(server, (1,), injection)

    server, findings = run_until_valid(drill)
    fault = ExpectedFault("hang", 0)
    promises = everyone_was_told(findings, fault, plain=1, streams=1)
    promises += ended_with_the_reason(server, findings, fault, termination_log)
    assert promises == [], told(findings)


@pytest.mark.slow
def test_steps_slower_than_pings_are_no_hang(serve) -> None:
    """Two seconds a step, a ping every 1.25 s: late answers, and no alarm."""

    async def drill() -> tuple[int, Findings]:
        async with serve("ar-1", hang_timeout_s=5) as server, Drill(server, (1,)) as drill:
            findings = await drill.inject(Mark(0, "slow"))
            alarm = await drill.until(lambda view: view.state != "HEALTHY", findings, 30)
            drill.collect(findings)
            return alarm, findings

    alarm, findings = run_until_valid(drill)
    assert alarm is None, told(findings)
