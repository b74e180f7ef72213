"""Error answers of routes that lose the reason are given it back; all others pass unchanged."""

import asyncio
import json

import pytest
from vllm_omni.entrypoints.held_errors import HeldError, fault_behind, holds_errors
from vllm_omni.health.faults import Fault, FaultKind
from vllm_omni.health.runtime import HealthRuntime
from vllm_omni.health.settings import HealthSettings

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


WRAPPED = body(f"Image generation failed: {OOM.kind.sentence}", type="BadRequestError")


def test_in_a_healthy_server_nothing_is_behind_an_error(runtime):
    assert fault_behind(runtime, 500, WRAPPED) is None


@pytest.mark.parametrize("lost", [(0,), (0, 1)])
def test_the_sentence_of_a_fault_tells_whose_error_it_is(runtime, lost):
    lose(runtime, *lost)
    assert fault_behind(runtime, 500, WRAPPED).kind is FaultKind.OOM
    # Also where a route makes a client's mistake of it.
    assert fault_behind(runtime, 400, WRAPPED).kind is FaultKind.OOM


def test_with_a_survivor_other_errors_are_their_own(runtime):
    lose(runtime, 0)
    assert fault_behind(runtime, 500, body("something else")) is None
    assert fault_behind(runtime, 400, body("size 7x7")) is None


def test_in_a_dead_server_every_error_of_the_servers_is_the_faults(runtime):
    lose(runtime, 0, 1)
    assert fault_behind(runtime, 500, b"Internal Server Error").kind is FaultKind.OOM
    assert fault_behind(runtime, 500, b'["no error object"]').kind is FaultKind.OOM
    assert fault_behind(runtime, 400, body("size 7x7")) is None


def test_an_answer_that_names_its_fault_is_left_alone(runtime):
    lose(runtime, 0, 1)
    assert fault_behind(runtime, 500, body(OOM.kind.sentence, fault={"kind": "oom"})) is None


def start(status, content_type=b"application/json"):
    headers = [(b"content-type", content_type)]
    return {"type": "http.response.start", "status": status, "headers": headers}


def test_only_plain_errors_are_held():
    assert holds_errors(start(500))
    assert holds_errors(start(400))
    assert not holds_errors(start(200))
    assert not holds_errors(start(500, b"text/event-stream"))


def released(runtime, status, *pieces):
    sent = []

    async def send(message):
        sent.append(message)

    held = HeldError(start(status))
    for number, piece in enumerate(pieces, 1):
        more = number < len(pieces)
        whole = held.add({"type": "http.response.body", "body": piece, "more_body": more})
        assert whole is not more
    asyncio.run(held.release(send, runtime, "req-1"))
    return sent


def test_an_error_in_pieces_is_passed_on_whole(runtime):
    sent = released(runtime, 404, b"no such ", b"thing")
    assert sent[0] == start(404)
    assert (sent[1]["body"], sent[1]["more_body"]) == (b"no such thing", False)


def test_a_corrected_error_has_the_contracts_body(runtime):
    lose(runtime, 0, 1)
    sent = released(runtime, 400, WRAPPED)
    assert sent[0]["status"] == 500
    error = json.loads(sent[1]["body"])["error"]
    assert error["fault"]["kind"] == "oom"
    assert (error["code"], error["request_id"]) == (500, "req-1")
    assert dict(sent[0]["headers"])[b"content-length"] == str(len(sent[1]["body"])).encode()
