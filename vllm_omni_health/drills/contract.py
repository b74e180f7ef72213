# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-omni-health project
"""The promises of the health layer, checked against what was seen.

Every function returns the broken promises as sentences; an empty list means that all was kept.
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Any

from vllm_omni_health.drills.chat import ChatCall, Outcome
from vllm_omni_health.drills.faults import EXIT_STATUS
from vllm_omni_health.drills.survey import Answer, Survey

UP = (("STARTING", "HEALTHY"),)
DEGRADED = (*UP, ("HEALTHY", "DEGRADED"))
DEAD = (*DEGRADED, ("DEGRADED", "DEAD"))
"""The moves that ``/health/history`` is to show for a server that got so far."""


@dataclass(frozen=True)
class ExpectedFault:
    """The fault that a server is to report."""

    kind: str
    stage_id: int | None
    replica_id: int | None = 0

    @property
    def exit_status(self) -> int:
        """The exit status it is to lead to."""
        return EXIT_STATUS[self.kind]

    def matches(self, shown: Any) -> bool:
        """Whether ``shown``, from a body of the server, names this fault."""
        return isinstance(shown, Mapping) and (
            shown.get("kind"),
            shown.get("stage_id"),
            shown.get("replica_id"),
        ) == (self.kind, self.stage_id, self.replica_id)


def failed_call(call: ChatCall, fault: ExpectedFault) -> list[str]:
    """A request that was in flight when ``fault`` ended it."""
    name = f"request {call.number} ({'stream' if call.stream else 'plain'} {call.label})"
    if call.pending:
        return [f"{name} was never answered"]
    if call.outcome is not Outcome.FAILED:
        return [f"{name} was to fail with an answer, but: {call.describe()}"]
    broken = []
    if call.broken:
        broken.append(f"{name}: the connection broke with {call.broken}")
    if call.status == 200:
        if len(call.error_events) != 1:
            broken.append(f"{name}: {len(call.error_events)} error events, not one")
        if call.done_events != 1 or call.after_done:
            broken.append(f"{name}: the stream does not end with one [DONE]")
    elif call.stream and call.events:
        broken.append(f"{name}: status {call.status} in a stream that had begun")
    elif call.status != 500:
        broken.append(f"{name}: status {call.status}, not 500")
    return broken + [f"{name}: {what}" for what in _error_body(call.error, 500, fault, call)]


def refused_call(call: ChatCall, fault: ExpectedFault | None) -> list[str]:
    """A request that came while the server was not accepting."""
    name = f"new {'streaming' if call.stream else 'plain'} request"
    if call.outcome is not Outcome.REFUSED:
        return [f"{name} was to be refused with 503, but: {call.describe()}"]
    broken = []
    retry_after = call.headers.get("retry-after", "")
    if not (retry_after.isdigit() and int(retry_after) >= 1):
        broken.append(f"{name}: Retry-After is {retry_after!r}")
    return broken + [f"{name}: {what}" for what in _error_body(call.error, 503, fault, call)]


def healthy(survey: Survey, stages: Sequence[int]) -> list[str]:
    """A server with nothing wrong. ``stages``: the number of replicas of each."""
    broken = [*_statuses(survey, health=200, live=200)]
    broken += _health_body(survey.health, "healthy", "HEALTHY", accepting=True)
    broken += _stages(survey.health, stages, lost=())
    if survey.health.get("fault") is not None:
        broken.append(f"/health of a healthy server shows a fault: {survey.health['fault']}")
    return broken + history(survey.history, UP)


def degraded(survey: Survey, stages: Sequence[int], fault: ExpectedFault) -> list[str]:
    """A server that has lost one of several replicas and goes on with the others."""
    broken = [*_statuses(survey, health=200, live=200)]
    broken += _health_body(survey.health, "healthy", "DEGRADED", accepting=True)
    broken += _stages(survey.health, stages, lost=((fault.stage_id, fault.replica_id),))
    broken += _fault_shown(survey.health, fault)
    broken += [
        f"new request to a degraded server that accepts: {call.describe()}"
        for call in survey.newcomers
        if call.outcome is not Outcome.ANSWERED
    ]
    return broken + history(survey.history, DEGRADED, fault)


def dead(
    survey: Survey,
    stages: Sequence[int],
    fault: ExpectedFault,
    *,
    lost: Iterable[tuple[int, int]] = (),
) -> list[str]:
    """A server that can serve no more, still answering.

    ``lost``: stage and replica of those that were lost before.
    """
    broken = [*_statuses(survey, health=503, live=503)]
    broken += _health_body(survey.health, "unhealthy", "DEAD", accepting=False)
    all_lost = [*lost, (fault.stage_id, fault.replica_id)]
    broken += _stages(survey.health, stages, lost=all_lost)
    broken += _fault_shown(survey.health, fault)
    for call in survey.newcomers:
        broken += refused_call(call, fault)
    return broken + history(survey.history, DEAD, fault)


def history(
    entries: Sequence[Mapping[str, Any]],
    moves: Sequence[tuple[str, str]],
    fault: ExpectedFault | None = None,
) -> list[str]:
    """``/health/history``: exactly these moves, each beginning where the one before ended."""
    broken = []
    seen = tuple((e["from"], e["to"]) for e in entries if e["from"] != e["to"])
    if seen != tuple(moves):
        broken.append(f"the history shows the moves {_arrows(seen)}, not {_arrows(moves)}")
    for before, after in itertools.pairwise(entries):
        where = f"entry {after['seq']} of the history"
        if before["to"] != after["from"]:
            broken.append(f"{where} begins in {after['from']}, the one before ends elsewhere")
        if after["seq"] != before["seq"] + 1:
            broken.append(f"{where} follows entry {before['seq']}")
        if after["monotonic"] < before["monotonic"]:
            broken.append(f"{where} is earlier than the one before")
    if fault is not None and not any(fault.matches(e.get("fault")) for e in entries):
        broken.append(f"no entry of the history names the fault {fault}")
    return broken


def reason(text: str | None, stderr: str, fault: ExpectedFault) -> list[str]:
    """The termination log: one line of JSON, which is on stderr too."""
    if text is None:
        return ["there is no termination log"]
    lines = text.splitlines()
    if len(lines) != 1 or not text.endswith("\n"):
        return [f"the termination log is not one line: {text!r}"]
    broken = []
    if lines[0] not in stderr.splitlines():
        broken.append("the line of the termination log is not on stderr")
    try:
        shown = json.loads(lines[0])
    except ValueError:
        return [*broken, f"the termination log is not JSON: {lines[0]!r}"]
    if not fault.matches(shown):
        broken.append(f"the termination log does not name {fault}: {lines[0]}")
    if shown.get("exit_status") != fault.exit_status:
        broken.append(f"the termination log says exit status {shown.get('exit_status')}")
    return broken


def _error_body(
    error: Mapping[str, Any] | None, code: int, fault: ExpectedFault | None, call: ChatCall
) -> Iterable[str]:
    if error is None:
        yield f"no error object in {call.body!r:.200}"
        return
    if error.get("code") != code:
        yield f"error.code is {error.get('code')!r}, not {code}"
    for key in ("type", "message"):
        if not (isinstance(error.get(key), str) and error[key].strip()):
            yield f"error.{key} is {error.get(key)!r}"
    if fault is not None and not fault.matches(error.get("fault")):
        yield f"error.fault is {error.get('fault')}, not {fault}"
    if call.request_id not in str(error.get("request_id")):
        yield f"error.request_id is {error.get('request_id')!r}, not that of {call.request_id}"


def _statuses(survey: Survey, *, health: int, live: int) -> Iterable[str]:
    wanted = {"/health": health, "/readyz": health, "/ping": health, "/livez": live}
    wanted["/health/history"] = 200
    for answer in survey.answers.values():
        if answer.status != wanted[answer.path]:
            got = answer.error or answer.status
            yield f"{answer.method} {answer.path} is {got}, not {wanted[answer.path]}"
        elif answer.method == "HEAD" and answer.length:
            yield f"HEAD {answer.path} has a body"
        elif answer.method == "GET" and not isinstance(answer.body, dict):
            yield f"the body of {answer.path} is not a JSON object"
    yield from _same_body(survey.answer("/health"), survey.answer("/readyz"))


def _same_body(one: Answer, other: Answer) -> Iterable[str]:
    if one.body != other.body:
        yield f"{one.path} and {other.path} have different bodies"


def _health_body(
    body: Mapping[str, Any], status: str, state: str, *, accepting: bool
) -> Iterable[str]:
    wanted = {"status": status, "state": state, "accepting": accepting, "draining": False}
    for key, value in wanted.items():
        if body.get(key) != value:
            yield f"/health: {key} is {body.get(key)!r}, not {value!r}"
    try:
        datetime.fromisoformat(body["since"])
    except (KeyError, TypeError, ValueError):
        yield f"/health: since is {body.get('since')!r}, not a time"


def _stages(
    body: Mapping[str, Any],
    stages: Sequence[int],
    lost: Iterable[tuple[int | None, int | None]],
) -> Iterable[str]:
    shown = {
        (stage["stage_id"], replica["replica_id"]): replica
        for stage in body.get("stages") or ()
        for replica in stage["replicas"]
    }
    gone = set(lost)
    wanted = [(stage, replica) for stage, count in enumerate(stages) for replica in range(count)]
    if list(shown) != wanted:
        yield f"/health shows stages and replicas {list(shown)}, not {wanted}"
    for place, replica in shown.items():
        if not isinstance(replica.get("pid"), int):
            yield f"/health: replica {place} has pid {replica.get('pid')!r}"
        state = replica.get("state")
        if (state == "lost") is not (place in gone):
            yield f"/health: replica {place} is {state!r}"


def _fault_shown(body: Mapping[str, Any], fault: ExpectedFault) -> Iterable[str]:
    shown = body.get("fault")
    if not isinstance(shown, Mapping) or not fault.matches(shown):
        yield f"/health: fault is {shown}, not {fault}"
        return
    if not str(shown.get("message") or "").strip():
        yield "/health: the fault has no message"
    if extra := {"traceback", "exception", "path"} & set(shown):
        yield f"/health: the fault shows {', '.join(sorted(extra))}"


def _arrows(moves: Iterable[tuple[str, str]]) -> str:
    return ", ".join(f"{old}→{new}" for old, new in moves) or "none"
