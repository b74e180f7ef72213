# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-omni-health project
"""Answers of routes that lose the reason are given it back; all others pass unchanged."""

import asyncio
import json

import pytest
from vllm_omni.entrypoints.health.http.held_answers import HeldAnswer, content_type, is_error
from vllm_omni.entrypoints.health.http.held_errors import LONGEST, in_place_of
from vllm_omni.health.faults.fault import REQUEST_SENTENCE, Fault, FaultKind
from vllm_omni.health.runtime import HealthRuntime

from vllm_omni_health.settings.model import HealthSettings

OOM = Fault(kind=FaultKind.OOM, stage_id=0, replica_id=0)


def body(message, **more):
    return json.dumps({"error": {"message": message, "code": 500, **more}}).encode()


@pytest.fixture
def runtime():
    runtime = HealthRuntime(HealthSettings())
    runtime.machine.expect_stage(0, 2)
    for replica_id in range(2):
        runtime.machine.replica_ready(0, replica_id, pid=1)
    runtime.machine.started()
    return runtime


def lose(runtime, *replica_ids):
    for replica_id in replica_ids:
        runtime.machine.replica_lost(0, replica_id, OOM.with_context(replica_id=replica_id))


def start(status, content_type=b"application/json"):
    headers = [(b"Content-Type", content_type)]
    return {"type": "http.response.start", "status": status, "headers": headers}


def released(runtime, status, *pieces, fault=None, refusal=None):
    """Status and body that come of an answer in these pieces."""
    sent = []

    async def send(message):
        sent.append(message)

    held = HeldAnswer(start(status), LONGEST)
    for number, piece in enumerate(pieces, 1):
        more = number < len(pieces)
        whole = held.add({"type": "http.response.body", "body": piece, "more_body": more})
        assert whole is not more
    instead = in_place_of(held, runtime, "req-1", fault, refusal)
    if instead is not None:
        return instead["error"]["code"], json.dumps(instead).encode()
    asyncio.run(held.release(send))
    assert sent[0] == start(status)
    return sent[0]["status"], sent[1]["body"]


def error_of(answer):
    status, payload = answer
    error = json.loads(payload)["error"]
    assert (status, error["code"], error["request_id"]) == (500, 500, "req-1")
    return error


@pytest.mark.parametrize("status", [400, 404, 422, 500, 502])
def test_a_failure_of_the_calls_own_request_is_the_answer_whatever_the_route_made_of_it(
    runtime, status
):
    wrapped = body("Image generation failed: it", type="BadRequestError")
    error = error_of(released(runtime, status, wrapped, fault=OOM))
    assert error["fault"] == {"kind": "oom", "stage_id": 0, "replica_id": 0}
    assert error["message"] == OOM.sentence


@pytest.mark.parametrize(
    "answer",
    [
        {"error": {"code": "engine", "message": "it"}},
        {"error": "it"},
        {"choices": [{"finish_reason": "stop"}, {"finish_reason": "error"}]},
    ],
)
def test_an_error_in_a_successful_answer_is_one(runtime, answer):
    payload = json.dumps(answer).encode()
    assert error_of(released(runtime, 200, payload, fault=OOM))["fault"]["kind"] == "oom"


@pytest.mark.parametrize("answer", [b'{"results": [{"error": "one item"}]}', b"[]", b"RIFF"])
def test_an_answer_that_came_about_in_spite_of_a_failure_is_passed_on(runtime, answer):
    assert released(runtime, 200, answer, fault=OOM) == (200, answer)


@pytest.mark.parametrize("lost", [(), (0,)])
def test_errors_of_other_calls_are_their_own(runtime, lost):
    lose(runtime, *lost)
    for status in (400, 404, 500, 503):
        assert released(runtime, status, body(OOM.sentence)) == (status, body(OOM.sentence))


def test_in_a_dead_server_every_error_of_the_servers_is_the_faults(runtime):
    lose(runtime, 0, 1)
    for payload in (b"Internal Server Error", b'["no error object"]', body("it")):
        assert error_of(released(runtime, 500, payload))["fault"]["kind"] == "oom"
    assert released(runtime, 400, body("size 7x7")) == (400, body("size 7x7"))


@pytest.mark.parametrize("payload", [b"", b"Internal Server Error", body(""), body(None)])
def test_a_server_error_is_never_without_a_message(runtime, payload):
    error = error_of(released(runtime, 500, payload))
    assert (error["message"], error["fault"]) == (REQUEST_SENTENCE, None)


def test_an_answer_that_names_its_fault_is_left_alone(runtime):
    lose(runtime, 0, 1)
    named = body(OOM.sentence, fault={"kind": "oom"})
    assert released(runtime, 500, named, fault=OOM) == (500, named)


def test_an_error_in_pieces_is_passed_on_whole(runtime):
    assert released(runtime, 404, b"no such ", b"thing") == (404, b"no such thing")


def test_only_plain_errors_are_errors():
    assert is_error(start(500))
    assert is_error(start(400))
    assert not is_error(start(200))
    assert not is_error(start(500, b"text/event-stream; charset=utf-8"))
    assert content_type(start(200, b"Audio/WAV; rate=1")) == b"audio/wav"
