# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-omni-health project
"""What the end-to-end tests check alike."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path

from vllm_omni_health.drills import contract
from vllm_omni_health.drills.contract import ExpectedFault
from vllm_omni_health.drills.drill import Findings, InvalidDrill
from vllm_omni_health.drills.server import Server


def run_until_valid(drill):
    """Run a drill; once more if its load was not in flight at the injection."""
    try:
        return asyncio.run(drill())
    except InvalidDrill:
        return asyncio.run(drill())


def everyone_was_told(
    findings: Findings, fault: ExpectedFault, *, plain: int, streams: int
) -> list[str]:
    """Every request in flight has failed with an answer; there were as many as meant."""
    streaming = sum(call.stream for call in findings.struck)
    assert (len(findings.struck) - streaming, streaming) == (plain, streams)
    promises = [what for call in findings.struck for what in contract.failed_call(call, fault)]
    hung = [call for call in findings.calls if call.outcome == "given up"]
    return promises + [f"request {call.number} was never answered" for call in hung]


def ended_with_the_reason(
    server: Server, findings: Findings, fault: ExpectedFault, termination_log: Path
) -> list[str]:
    """The exit status, the reason, and nothing left."""
    text = termination_log.read_text() if termination_log.exists() else None
    promises = contract.reason(text, server.stderr, fault)
    status = None if findings.ending is None else findings.ending.status
    if status != fault.exit_status:
        promises.append(f"exit status {status}, not {fault.exit_status}")
    promises += [f"left: {member.describe()}" for member in findings.processes_left]
    promises += [f"left: {path}" for path in findings.traces_left]
    if "destroy_process_group() was not called" in server.stdout + server.stderr:
        promises.append("the log warns about destroy_process_group()")
    for prompt in ("seaside", "Please fail"):
        if text is not None and prompt in json.dumps(text):
            promises.append("the termination log shows a prompt")
    return promises
