# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-omni-health project
"""What is told of jobs whose records upstream keeps, and at times does not keep up to date."""

import asyncio
import json

import pytest
from vllm_omni.entrypoints.health.http.job_answers import JobAnswer
from vllm_omni.health.faults.by_request import RequestFaults, is_request_of
from vllm_omni.health.faults.fault import Fault, FaultKind
from vllm_omni.health.runtime import HealthRuntime

from vllm_omni_health.settings.model import HealthSettings

OOM = Fault(kind=FaultKind.OOM, stage_id=0, replica_id=0)
JOB = "resp_1f"


@pytest.fixture
def runtime():
    runtime = HealthRuntime(HealthSettings())
    runtime.machine.expect_stage(0, 1)
    runtime.machine.replica_ready(0, 0)
    runtime.machine.started()
    return runtime


def told(runtime, answer, *, job_id=JOB, status=200):
    """Status and JSON that come of the application's answer."""
    sent = []

    async def send(message):
        sent.append(message)

    async def scenario():
        answering = JobAnswer({"type": "http"}, send, runtime, job_id)
        headers = [(b"content-type", b"application/json")]
        await answering.send({"type": "http.response.start", "status": status, "headers": headers})
        payload = json.dumps(answer).encode()
        for piece, more in ((payload[:5], True), (payload[5:], False)):
            await answering.send({"type": "http.response.body", "body": piece, "more_body": more})

    asyncio.run(scenario())
    body = b"".join(message.get("body", b"") for message in sent[1:])
    return sent[0]["status"], json.loads(body)


@pytest.mark.parametrize("status", ["queued", "in_progress", "failed"])
def test_a_job_whose_request_failed_has_failed(runtime, status):
    runtime.request_failed(f"{JOB}-12345678", OOM)
    code, answer = told(runtime, {"id": JOB, "status": status, "error": None})
    assert (code, answer["status"]) == (500, "failed")
    assert answer["error"]["fault"]["kind"] == "oom"
    assert answer["error"]["request_id"] == JOB


@pytest.mark.parametrize("status", ["completed", "cancelled"])
def test_a_job_that_came_to_an_end_is_left_alone(runtime, status):
    runtime.request_failed(f"{JOB}-12345678", OOM)
    answer = {"id": JOB, "status": status}
    assert told(runtime, answer) == (200, answer)


def test_in_a_dead_server_no_job_is_under_way(runtime):
    answer = {"id": JOB, "status": "in_progress"}
    assert told(runtime, answer) == (200, answer)
    runtime.machine.replica_lost(0, 0, OOM)
    code, answer = told(runtime, answer)
    assert (code, answer["status"], answer["error"]["fault"]["kind"]) == (500, "failed", "oom")


def test_another_job_and_a_failure_of_the_clients_are_left_alone(runtime):
    runtime.request_failed(f"{JOB}0-12345678", OOM)
    for answer in (
        {"id": JOB, "status": "in_progress"},
        {"id": JOB, "status": "failed", "error": {"code": 400, "message": "no such size"}},
        {"error": {"code": 404, "message": "Video not found"}},
    ):
        assert told(runtime, answer, status=400) == (400, answer)


def test_in_a_list_each_job_is_put_right_and_the_list_is_fine(runtime):
    runtime.request_failed("video_gen_a1-12345678", OOM)
    jobs = [
        {"id": "video_gen_a1", "status": "failed"},
        {"id": "video_gen_a2", "status": "completed"},
    ]
    code, answer = told(runtime, {"object": "list", "data": jobs}, job_id=None)
    assert code == 200
    assert answer["data"][0]["error"]["message"] == OOM.sentence
    assert answer["data"][1] == jobs[1]


@pytest.mark.parametrize(
    ("request_id", "job_id"),
    [
        ("video_gen_0a1b-12345678", "video_gen_0a1b"),
        ("resp_0a1b_0-12345678", "resp_0a1b"),
        ("resp_0a1b_12-12345678", "resp_0a1b"),
        ("chatcmpl-mine-12345678", "chatcmpl-mine"),
        ("short", "short"),
    ],
)
def test_the_id_that_a_client_knows_a_request_of_the_engines_by(request_id, job_id):
    assert is_request_of(request_id, job_id)
    assert not is_request_of(request_id, job_id + "0")


def test_only_so_many_failures_are_remembered():
    faults = RequestFaults()
    for number in range(5000):
        faults.failed(f"job{number}-12345678", OOM)
    assert faults.of("job0-12345678") is None
    assert faults.of_job("job0") is None
    assert faults.of_job("job4999") is OOM
    assert not faults.failed("job4999-12345678", OOM)
