# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-omni-health project
"""What clients see of a fault, by upstream's real routes over a real connection.

A replica is lost while its stage has another, so that nobody but the failed request's own route
answers it: each makes an answer in its own way, and all must come out as the contract says.
"""

import asyncio
import contextlib
import json
import os
import struct
from socket import SO_LINGER, SOL_SOCKET
from types import SimpleNamespace

import httpx
import pytest
import websockets
from real_app import build_app, serving
from vllm_omni.entrypoints.health.http.bodies import SHUTTING_DOWN, TOO_MANY
from vllm_omni.health.faults.fault import REQUEST_SENTENCE, Fault, FaultKind

pytestmark = pytest.mark.timeout(120)

OOM = Fault(kind=FaultKind.OOM, stage_id=0, replica_id=1, message="secret prompt")
NAMED = {"kind": "oom", "stage_id": 0, "replica_id": 1}

SPEECH = {"input": "hello", "model": "tiny", "response_format": "pcm"}
AUDIO = {"data": {"model": "tiny"}, "files": {"file": b"RIFF"}}
PLAIN = {
    "speech": ("/v1/audio/speech", {"json": SPEECH}),
    "audio generation": ("/v1/audio/generate", {"json": {"input": "rain", "model": "tiny"}}),
    "images": ("/v1/images/generations", {"json": {"prompt": "a boat", "size": "64x64"}}),
    "video": ("/v1/videos/sync", {"data": {"prompt": "a boat"}}),
    "transcription": ("/v1/audio/transcriptions", AUDIO),
    "translation": ("/v1/audio/translations", AUDIO),
}


@pytest.fixture(scope="module")
def app():
    return build_app()


def run(scenario):
    asyncio.run(asyncio.wait_for(scenario(), 20))


def lose_a_replica(service):
    """As the orchestrator does it."""
    service.machine.replica_lost(0, 1, OOM)
    service.engine.fail(OOM.sentence, fatal=True, stage_id=0)


def check_error(error, fault=NAMED, sentence=OOM.sentence):
    assert error["fault"] == fault
    assert error["message"] == sentence
    assert (error["code"], error["type"]) == (500, "InternalServerError")
    assert error["request_id"]
    assert "secret" not in json.dumps(error)


@pytest.mark.parametrize("route", PLAIN)
def test_a_plain_request_of_a_lost_replica_is_answered_with_the_fault(app, route):
    async def scenario():
        path, request = PLAIN[route]
        async with serving(app, replicas=2) as service:
            call = asyncio.create_task(
                service.client.post(path, headers={"x-request-id": "mine"}, **request)
            )
            await service.engine.until_in_flight()
            lose_a_replica(service)
            answer = await call
            assert answer.status_code == 500, answer.text
            check_error(answer.json()["error"])
            # Some routes put something in front of it.
            assert answer.json()["error"]["request_id"].endswith("mine")

    run(scenario)


@pytest.mark.parametrize("route", PLAIN)
def test_a_request_that_fails_alone_is_a_server_error_with_a_message(app, route):
    """No replica is lost: upstream tells it by a text, perhaps an empty one, and at times as the
    client's mistake."""

    async def scenario():
        path, request = PLAIN[route]
        async with serving(app) as service:
            call = asyncio.create_task(service.client.post(path, **request))
            await service.engine.until_in_flight()
            service.engine.fail(" ", stage_id=0)
            answer = await call
            assert answer.status_code == 500, answer.text
            error = answer.json()["error"]
            assert error["message"] == REQUEST_SENTENCE
            assert error["fault"] == {"kind": "engine", "stage_id": 0, "replica_id": None}
            assert service.machine.snapshot.state.value == "HEALTHY"

    run(scenario)


@pytest.mark.parametrize("route", ["images", "video"])
def test_a_mistake_of_the_clients_stays_one(app, route):
    async def scenario():
        path, request = PLAIN[route]
        async with serving(app, replicas=2) as service:
            service.machine.replica_lost(0, 1, OOM)
            call = asyncio.create_task(service.client.post(path, **request))
            await service.engine.until_in_flight()
            service.engine.fail("no such size", status_code=400, error_type="BadRequestError")
            answer = await call
            assert answer.status_code == 400, answer.text
            assert "no such size" in answer.text
            assert "fault" not in answer.json()["error"]

    run(scenario)


def test_a_stream_of_events_ends_with_the_fault_and_done(app):
    async def scenario():
        async with serving(app, replicas=2) as service:
            body = {**SPEECH, "stream": True, "stream_format": "sse"}
            async with service.client.stream("POST", "/v1/audio/speech", json=body) as answer:
                assert answer.headers["content-type"].startswith("text/event-stream")
                lines = answer.aiter_lines()
                await service.engine.until_in_flight()
                service.engine.put_audio()
                assert await anext(lines) == "event: speech.audio.delta"
                lose_a_replica(service)
                events = [line async for line in lines if line.startswith("data:")]
            assert events[-1] == "data: [DONE]"
            check_error(json.loads(events[-2].removeprefix("data: "))["error"])
            assert not any("error" in event for event in events[:-2])

    run(scenario)


@pytest.mark.parametrize("route", ["transcriptions", "translations"])
@pytest.mark.parametrize("how", ["a lost replica", "alone", "the service is dead"])
def test_a_stream_of_text_for_speech_ends_so_as_well(app, route, how):
    """Upstream makes an event of it that has a message alone, or none at all."""

    async def scenario():
        async with serving(app, replicas=2) as service:
            request = {**AUDIO, "data": {"model": "tiny", "stream": "true"}}
            async with service.client.stream("POST", f"/v1/audio/{route}", **request) as answer:
                assert answer.headers["content-type"].startswith("text/event-stream")
                await service.engine.until_in_flight()
                if how == "a lost replica":
                    lose_a_replica(service)
                elif how == "alone":
                    service.engine.fail(" ", stage_id=0)
                else:
                    for replica_id in range(2):
                        service.machine.replica_lost(0, replica_id, OOM)
                    await service.guard.fail_all_by_fault()
                lines = [line async for line in answer.aiter_lines()]
            events = [line for line in lines if line.startswith("data:")]
            assert len(events) == 2
            assert events[1] == "data: [DONE]"
            error = json.loads(events[0].removeprefix("data:"))["error"]
            if how == "alone":
                assert error["message"] == REQUEST_SENTENCE
                assert error["fault"]["kind"] == "engine"
            else:
                assert error["fault"]["kind"] == "oom"
                assert error["message"] == OOM.sentence

    run(scenario)


def test_raw_audio_breaks_off(app):
    async def scenario():
        async with serving(app, replicas=2) as service:
            body = {**SPEECH, "stream": True, "stream_format": "audio"}
            async with service.client.stream("POST", "/v1/audio/speech", json=body) as answer:
                chunks = answer.aiter_bytes()
                await service.engine.until_in_flight()
                service.engine.put_audio()
                assert len(await anext(chunks)) == 4800
                lose_a_replica(service)
                with pytest.raises(httpx.RemoteProtocolError):
                    [chunk async for chunk in chunks]

    run(scenario)


def test_a_stream_that_a_route_does_not_end_is_ended(app, monkeypatch):
    """A route that swallows the failure and waits on."""
    monkeypatch.setattr("vllm_omni.entrypoints.health.http.guard._REACT_S", 0.2)

    async def scenario():
        async with serving(app, replicas=2) as service:
            service.engine.swallow = True
            call = asyncio.create_task(service.client.post("/v1/audio/speech", json=SPEECH))
            await service.engine.until_in_flight()
            lose_a_replica(service)
            # As long as a request of its own is at work the route may still come to an answer.
            await asyncio.sleep(0.5)
            assert not call.done()
            service.engine.request_states.clear()
            check_error((await call).json()["error"])

    run(scenario)


def test_a_route_that_raises_leaves_the_connection_in_order(app):
    """Nothing of upstream's catches it: Starlette answers and raises again."""

    async def scenario():
        async with serving(app) as service:
            for _ in range(3):
                # It is not served here, which this route of vLLM's does not expect.
                body = {"prompt": "tell me", "model": "tiny"}
                answer = await service.client.post("/v1/completions", json=body)
                assert answer.status_code == 500, answer.text
                assert answer.json()["error"]["message"]
            assert len(service.client._transport._pool.connections) == 1

    run(scenario)


def test_a_batch_tells_of_each_item(app):
    """Upstream's answer to a batch has an error per item; the others' audio is not lost."""

    async def scenario():
        async with serving(app, replicas=2) as service:
            body = {"items": [{"input": "one"}, {"input": "two"}], "response_format": "pcm"}
            call = asyncio.create_task(service.client.post("/v1/audio/speech/batch", json=body))
            await service.engine.until_in_flight(2)
            lose_a_replica(service)
            answer = await call
            results = answer.json()["results"]
            assert [item["error"] for item in results] == [OOM.sentence] * 2

    run(scenario)


# ---- jobs ----------------------------------------------------------------------------------


async def begin_video(service):
    answer = await service.client.post("/v1/videos", data={"prompt": "a boat"})
    assert answer.status_code == 200, answer.text
    await service.engine.until_in_flight()
    return answer.json()["id"]


@pytest.mark.parametrize("how", ["with a survivor", "the service is dead"])
def test_a_video_job_ends_as_failed_and_names_the_fault(app, how):
    async def scenario():
        async with serving(app, replicas=2) as service:
            job = await begin_video(service)
            assert (await service.client.get(f"/v1/videos/{job}")).json()["status"] != "failed"
            if how == "with a survivor":
                lose_a_replica(service)
            else:
                # Nobody tells the job: the orchestrator's thread may be stuck.
                for replica_id in range(2):
                    service.machine.replica_lost(0, replica_id, OOM)
                await service.guard.fail_all_by_fault()
            answer = await service.client.get(f"/v1/videos/{job}")
            assert answer.status_code == 500
            # While upstream is noting the failure it answers with an error instead of the job.
            if "id" in answer.json():
                assert answer.json()["status"] == "failed"
            error = answer.json()["error"]
            assert (error["message"], error["fault"]["kind"]) == (OOM.sentence, "oom")
            assert error["request_id"] == job
            listed = (await service.client.get("/v1/videos")).json()["data"]
            (mine,) = [entry for entry in listed if entry["id"] == job]
            assert (mine["status"], mine["error"]["fault"]["kind"]) == ("failed", "oom")
            content = await service.client.get(f"/v1/videos/{job}/content")
            if how == "with a survivor":
                assert content.status_code == 500
                assert content.json()["error"]["fault"] == NAMED
            assert (await service.client.get("/v1/videos/none")).status_code == 404

    run(scenario)


def test_a_drain_waits_for_jobs(app):
    async def scenario():
        async with serving(app) as service:
            await begin_video(service)
            await asyncio.wait_for(service.guard.idle(), 5)
            done = asyncio.create_task(service.guard.all_done())
            await asyncio.sleep(0.1)
            assert not done.done()
            service.engine.fail("gone")
            await asyncio.wait_for(done, 5)

    run(scenario)


# ---- websockets ----------------------------------------------------------------------------


def connect(service, path):
    return websockets.connect(f"ws://127.0.0.1:{service.port}{path}", proxy=None)


async def speak(socket):
    """Begin a session of streaming speech and ask for something."""
    await socket.send(json.dumps({"type": "session.config", "response_format": "pcm"}))
    await socket.send(json.dumps({"type": "input.text", "text": "hello there"}))
    await socket.send(json.dumps({"type": "input.done"}))


async def talk(socket):
    """Begin a realtime session and ask for something."""
    assert json.loads(await socket.recv())["type"] == "session.created"
    await socket.send(json.dumps({"type": "session.update", "model": "tiny"}))
    await socket.send(json.dumps({"type": "input_audio_buffer.commit"}))


async def drained(socket):
    """Read until the connection is closed."""
    with contextlib.suppress(websockets.ConnectionClosed):
        while True:
            await socket.recv()


SESSIONS = {"/v1/audio/speech/stream": speak, "/v1/realtime": talk}


@pytest.mark.parametrize("path", SESSIONS)
@pytest.mark.parametrize("how", ["with a survivor", "the service is dead"])
def test_a_websocket_closes_with_1011_and_the_reason(app, path, how):
    async def scenario():
        async with serving(app, replicas=2) as service, connect(service, path) as socket:
            await SESSIONS[path](socket)
            await service.engine.until_in_flight()
            if how == "with a survivor":
                lose_a_replica(service)
            else:
                for replica_id in range(2):
                    service.machine.replica_lost(0, replica_id, OOM)
                await service.guard.fail_all_by_fault()
            await asyncio.wait_for(drained(socket), 10)
            assert (socket.close_code, socket.close_reason) == (1011, OOM.sentence)

    run(scenario)


def test_a_duplex_session_of_a_lost_replica_closes_with_1011(app):
    """Upstream would end it in order, as if the client had asked for it."""

    class Duplex:
        async def handle_realtime_session(self, websocket):
            await websocket.accept()
            # As upstream's client does when it opens a session.
            app.state.engine_client._handles["duplex-1"] = object()
            await websocket.receive_text()

    async def scenario():
        async with serving(app, replicas=2) as service:
            app.state.openai_serving_duplex = Duplex()
            async with connect(service, "/v1/duplex") as socket:
                while not service.engine._handles:
                    await asyncio.sleep(0.01)
                service.machine.replica_lost(0, 1, OOM)
                service.runtime.request_failed("duplex-1", OOM)
                await asyncio.wait_for(drained(socket), 10)
                assert (socket.close_code, socket.close_reason) == (1011, OOM.sentence)

    run(scenario)


@pytest.mark.parametrize("path", SESSIONS)
def test_a_request_of_a_session_that_fails_alone_is_told_and_the_session_goes_on(app, path):
    async def scenario():
        async with serving(app) as service, connect(service, path) as socket:
            await SESSIONS[path](socket)
            await service.engine.until_in_flight()
            service.engine.fail(REQUEST_SENTENCE)
            message = {"type": None}
            while message["type"] != "error":
                message = json.loads(await socket.recv())
            assert REQUEST_SENTENCE in (message.get("message") or message.get("error"))
            await socket.send(json.dumps({"type": "unheard of"}))
            while "nknown" not in json.dumps(message):
                message = json.loads(await socket.recv())

    run(scenario)


@pytest.mark.parametrize("path", SESSIONS)
def test_a_drain_closes_idle_sessions_at_once_and_others_when_they_are_done(app, path):
    async def scenario():
        async with (
            serving(app) as service,
            connect(service, path) as idle,
            connect(service, path) as busy,
        ):
            await SESSIONS[path](busy)
            await service.engine.until_in_flight()
            if path == "/v1/realtime":
                await idle.recv()
            await asyncio.sleep(0.6)
            service.machine.drain()
            service.guard.dismiss_sessions()
            await asyncio.wait_for(drained(idle), 5)
            assert (idle.close_code, idle.close_reason) == (1001, SHUTTING_DOWN[:120])
            with pytest.raises(TimeoutError):
                await asyncio.wait_for(service.guard.all_done(), 1)
            assert busy.close_code is None
            service.engine.finish()
            await asyncio.wait_for(drained(busy), 5)
            assert busy.close_code == 1001
            await asyncio.wait_for(service.guard.all_done(), 5)
            assert (len(service.guard.book), service.guard.in_flight) == (0, 0)

    run(scenario)


def test_a_duplex_session_is_at_work_while_it_says_something(app):
    """A drain neither cuts it off in the middle of an answer nor waits for a silent one."""

    class Duplex:
        async def handle_realtime_session(self, websocket):
            await websocket.accept()
            app.state.engine_client._handles["duplex-1"] = object()
            for _ in range(8):
                await asyncio.sleep(0.2)
                await websocket.send_json({"type": "response.output_audio.delta"})
            await websocket.receive_text()

    async def scenario():
        async with serving(app) as service:
            app.state.openai_serving_duplex = Duplex()
            async with connect(service, "/v1/duplex") as socket:
                await socket.recv()
                service.machine.drain()
                service.guard.dismiss_sessions()
                for _ in range(7):
                    await socket.recv()
                await asyncio.wait_for(drained(socket), 5)
                assert socket.close_code == 1001
            # The session itself outlives its connection, with nothing to do.
            assert len(service.guard.book) == 1
            await asyncio.wait_for(service.guard.all_done(), 5)

    run(scenario)


async def rude(service, number):
    """One of several ways to begin a realtime session and not to behave."""
    socket = await connect(service, "/v1/realtime")
    await socket.recv()
    if number % 4 == 0:
        raw = socket.transport.get_extra_info("socket")
        raw.setsockopt(SOL_SOCKET, SO_LINGER, struct.pack("ii", 1, 0))
        socket.transport.abort()
        return
    with contextlib.suppress(websockets.ConnectionClosed):
        await socket.send(("{", b"\xff", "x" * 20_000_000)[number % 4 - 1])
        await socket.recv()
    await socket.close()


def test_rude_clients_leave_nothing_behind(app):
    async def scenario():
        async with serving(app) as service:
            path, request = PLAIN["transcription"]
            call = asyncio.create_task(service.client.post(path, **request))
            await service.engine.until_in_flight()
            await rude(service, 0)
            await asyncio.sleep(0.2)
            tasks, files = len(asyncio.all_tasks()), len(os.listdir("/proc/self/fd"))
            for number in range(50):
                await rude(service, number)
            while service.guard.in_flight > 1:
                await asyncio.sleep(0.01)
            assert len(service.guard.book) == 1
            for state in service.engine.request_states.values():
                state.queue.put_nowait(SimpleNamespace(outputs=[SimpleNamespace(text="a boat")]))
            service.engine.finish()
            answer = await call
            assert (answer.status_code, answer.json()["text"]) == (200, "a boat")
            while len(asyncio.all_tasks()) > tasks or len(os.listdir("/proc/self/fd")) > files:
                await asyncio.sleep(0.01)
            assert (len(service.guard.book), service.guard.in_flight) == (0, 0)

    run(scenario)


def test_no_more_requests_at_a_time_than_may_be(app):
    async def scenario():
        async with serving(app, max_requests=2) as service, connect(service, "/v1/realtime"):
            calls = [
                asyncio.create_task(service.client.post("/v1/audio/speech", json=SPEECH))
                for _ in range(2)
            ]
            await service.engine.until_in_flight(2)
            refused = await service.client.post("/v1/audio/speech", json=SPEECH)
            assert (refused.status_code, refused.headers["retry-after"]) == (503, "7")
            error = refused.json()["error"]
            assert (error["code"], error["type"]) == (503, "ServiceUnavailableError")
            assert error["message"] == TOO_MANY
            assert error["fault"] is None
            with pytest.raises(websockets.InvalidStatus):
                await connect(service, "/v1/audio/speech/stream")
            for path in ("/health", "/v1/videos", "/metrics"):
                assert (await service.client.get(path)).status_code == 200
            assert service.machine.snapshot.state.value == "HEALTHY"
            service.engine.finish()
            await asyncio.gather(*calls)
            again = asyncio.create_task(service.client.post("/v1/audio/speech", json=SPEECH))
            await service.engine.until_in_flight(1)
            service.engine.finish()
            await again

    run(scenario)


def test_a_job_counts_as_long_as_it_lasts(app):
    async def scenario():
        async with serving(app, max_requests=1) as service:
            await begin_video(service)
            refused = await service.client.post("/v1/audio/speech", json=SPEECH)
            assert refused.status_code == 503

    run(scenario)


def test_with_a_limit_of_none_none_is_admitted(app):
    async def scenario():
        async with serving(app, max_requests=0) as service:
            refused = await service.client.post("/v1/audio/speech", json=SPEECH)
            assert refused.status_code == 503

    run(scenario)


@pytest.mark.parametrize("path", [*SESSIONS, "/v1/duplex", "/v1/realtime/video"])
def test_while_not_accepting_a_handshake_is_refused_as_a_request_is(app, path):
    async def scenario():
        async with serving(app) as service:
            service.machine.drain()
            with pytest.raises(websockets.InvalidStatus) as refused:
                await connect(service, path)
            response = refused.value.response
            assert response.status_code == 503
            assert response.headers["retry-after"] == "7"
            assert json.loads(response.body)["error"]["code"] == 503

    run(scenario)


@pytest.mark.parametrize("path", ["/v1/audio/speech", "/v1/videos", "/inference/v1/generate"])
def test_while_not_accepting_requests_are_refused(app, path):
    async def scenario():
        async with serving(app) as service:
            service.machine.drain()
            answer = await service.client.post(path, json={})
            assert answer.status_code == 503
            assert answer.headers["retry-after"] == "7"
            assert answer.json()["error"]["message"]

    run(scenario)


def test_a_client_that_is_gone_holds_nobody_up(app):
    async def scenario():
        async with serving(app, replicas=2) as service:
            gone = asyncio.create_task(service.client.post("/v1/audio/speech", json=SPEECH))
            await service.engine.until_in_flight(1)
            gone.cancel()
            body = {**SPEECH, "stream": True, "stream_format": "sse"}
            async with service.client.stream("POST", "/v1/audio/speech", json=body):
                await service.engine.until_in_flight(1)
            stays = asyncio.create_task(service.client.post("/v1/audio/speech", json=SPEECH))
            await asyncio.sleep(0.1)
            await service.engine.until_in_flight(1)
            lose_a_replica(service)
            assert (await stays).status_code == 500
            await asyncio.wait_for(service.guard.all_done(), 10)

    run(scenario)
