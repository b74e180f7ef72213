"""An exception keeps its class from a worker's forward pass to the exit status."""

from __future__ import annotations

from pathlib import Path

import pytest
from checks import ended_with_the_reason, everyone_was_told, run_until_valid

from vllm_omni_health.drills import contract
from vllm_omni_health.drills.contract import ExpectedFault
from vllm_omni_health.drills.drill import Findings, fatal_drill, told
from vllm_omni_health.drills.faults import Mark
from vllm_omni_health.drills.server import Server


def case(deployment, stages, stage_id, word, *, slow=True):
    marks = [pytest.mark.slow] if slow else []
    name = f"{deployment}-{word}-in-stage-{stage_id}"
    return pytest.param(deployment, stages, Mark(stage_id, word), marks=marks, id=name)


WORDS = ("accelerator", "collective", "oom", "exit", "kill")

CASES = [
    case("ar-1", (1,), 0, "oom", slow=False),
    *[case("ar-1", (1,), 0, word) for word in WORDS if word != "oom"],
    # The worker inside the engine core, as on a single device.
    *[case("ar-inproc", (1,), 0, word) for word in ("error", *WORDS)],
    *[case("ar-3", (1, 1, 1), stage, "oom") for stage in range(3)],
]


@pytest.mark.parametrize(("deployment", "stages", "mark"), CASES)
def test_the_kind_survives(
    serve, termination_log: Path, deployment: str, stages: tuple[int, ...], mark: Mark
) -> None:
    async def drill() -> tuple[Server, Findings]:
        async with serve(deployment, exit_grace_s=2) as server:
            return server, await fatal_drill(server, stages, mark)

    server, findings = run_until_valid(drill)
    fault = ExpectedFault(mark.kind, mark.stage_id)
    promises = everyone_was_told(findings, fault, plain=len(stages), streams=len(stages))
    if findings.after is None:
        promises.append("/health never changed")
    else:
        promises += contract.dead(findings.after, stages, fault)
    promises += ended_with_the_reason(server, findings, fault, termination_log)
    assert promises == [], told(findings)
