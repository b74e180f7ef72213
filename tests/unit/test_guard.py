# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-omni-health project
"""Every request in flight gets an answer: over a real HTTP server and a real client."""

import asyncio
import contextlib
import json

import httpx
import pytest
import uvicorn
import websockets
from vllm_omni.entrypoints.health.http.guard import Cutoff, RequestGuard
from vllm_omni.health.faults.fault import Fault, FaultKind
from vllm_omni.health.runtime import HealthRuntime

from vllm_omni_health.settings.model import HealthSettings

pytestmark = pytest.mark.timeout(60)

FAULT = Fault(kind=FaultKind.OOM, stage_id=0, replica_id=0, message="secret prompt")


class App:
    """An application with one route for each way a response can be under way."""

    def __init__(self):
        self.entered = asyncio.Event()
        self.cancelled = 0

    async def __call__(self, scope, receive, send):
        path = scope["path"]
        try:
            if path == "/quick":
                await respond(send, b"text/plain", b"fine", more=False)
                return
            if path == "/raises":
                await respond(send, b"text/event-stream", b"data: 1\n\n")
                raise KeyError("secret")
            if path == "/stream":
                await respond(send, b"text/event-stream; charset=utf-8", b"data: 1\n\n")
            elif path == "/audio":
                await respond(send, b"audio/wav", b"RIFF")
            self.entered.set()
            await asyncio.sleep(60)
        except asyncio.CancelledError:
            self.cancelled += 1
            if path == "/stubborn":
                await asyncio.sleep(0.3)
                await respond(send, b"text/plain", b"too late", more=False)
            raise


async def respond(send, content_type, body, *, more=True):
    headers = [(b"content-type", content_type)]
    await send({"type": "http.response.start", "status": 200, "headers": headers})
    await send({"type": "http.response.body", "body": body, "more_body": more})


@contextlib.asynccontextmanager
async def serving(app=None, **settings):
    runtime = HealthRuntime(HealthSettings(retry_after_s=7, **settings))
    machine = runtime.machine
    machine.expect_stage(0, 1)
    machine.replica_ready(0, 0, pid=1)
    machine.started()
    app = app or App()
    guard = RequestGuard(app, runtime)
    config = uvicorn.Config(
        guard, port=0, log_level="critical", lifespan="off", timeout_graceful_shutdown=2
    )
    server = uvicorn.Server(config)
    server.capture_signals = contextlib.nullcontext
    task = asyncio.create_task(server.serve())
    while not server.started:
        await asyncio.sleep(0.01)
    port = server.servers[0].sockets[0].getsockname()[1]
    async with httpx.AsyncClient(base_url=f"http://127.0.0.1:{port}", timeout=20) as client:
        yield client, guard, machine, app
    server.should_exit = True
    await task


async def open_session(url):
    return await websockets.connect(url, proxy=None)


def run(scenario):
    asyncio.run(scenario())


def test_requests_that_end_by_themselves_pass_unchanged():
    async def scenario():
        async with serving() as (client, guard, _, _):
            answer = await client.post("/quick")
            assert (answer.status_code, answer.text) == (200, "fine")
            await asyncio.wait_for(guard.idle(), 5)

    run(scenario)


@pytest.mark.parametrize("path", ["/wait", "/stubborn"])
def test_a_waiting_request_is_answered_with_the_fault(path):
    async def scenario():
        async with serving() as (client, guard, machine, app):
            call = asyncio.create_task(client.post(path, headers={"x-request-id": "mine"}))
            await app.entered.wait()
            machine.replica_lost(0, 0, FAULT)
            await guard.fail_all_by_fault()
            answer = await call
            assert answer.status_code == 500
            error = answer.json()["error"]
            assert error["fault"] == {"kind": "oom", "stage_id": 0, "replica_id": 0}
            assert error["message"] == FaultKind.OOM.sentence
            assert error["code"] == 500
            assert error["request_id"] == "mine"
            assert "secret" not in answer.text
            await asyncio.wait_for(guard.idle(), 5)
            assert app.cancelled == 1

    run(scenario)


def test_a_stream_ends_with_one_error_event_and_done():
    async def scenario():
        async with serving() as (client, guard, machine, app):
            async with client.stream("POST", "/stream") as answer:
                lines = answer.aiter_lines()
                assert await anext(lines) == "data: 1"
                machine.replica_lost(0, 0, FAULT)
                await guard.fail_all_by_fault()
                events = [line async for line in lines if line]
            assert events[-1] == "data: [DONE]"
            (error,) = events[:-1]
            assert json.loads(error.removeprefix("data: "))["error"]["fault"]["kind"] == "oom"
            assert app.cancelled == 1

    run(scenario)


def test_a_stream_whose_application_raises_ends_with_an_error_event_and_done():
    async def scenario():
        async with serving() as (client, _, _, _), client.stream("POST", "/raises") as answer:
            events = [line async for line in answer.aiter_lines() if line]
        assert events[0] == "data: 1"
        assert events[-1] == "data: [DONE]"
        (error,) = events[1:-1]
        error = json.loads(error.removeprefix("data: "))["error"]
        assert (error["code"], error["fault"]) == (500, None)
        assert error["message"]
        assert "secret" not in json.dumps(error)

    run(scenario)


def test_a_handshake_under_way_is_answered_with_the_fault():
    async def scenario():
        async with serving() as (client, guard, machine, app):
            url = f"ws://{client.base_url.host}:{client.base_url.port}/session"
            opening = asyncio.ensure_future(open_session(url))
            await app.entered.wait()
            machine.replica_lost(0, 0, FAULT)
            await guard.fail_all_by_fault()
            with pytest.raises(websockets.InvalidStatus) as refused:
                await opening
            response = refused.value.response
            assert response.status_code == 500
            assert json.loads(response.body)["error"]["fault"]["kind"] == "oom"
            await asyncio.wait_for(guard.idle(), 5)

    run(scenario)


def test_raw_audio_is_cut_off_so_that_the_client_sees_an_error():
    async def scenario():
        async with (
            serving() as (client, guard, machine, _),
            client.stream("POST", "/audio") as answer,
        ):
            chunks = answer.aiter_bytes()
            assert await anext(chunks) == b"RIFF"
            machine.replica_lost(0, 0, FAULT)
            await guard.fail_all_by_fault()
            with pytest.raises(httpx.RemoteProtocolError):
                await anext(chunks)

    run(scenario)


def test_while_not_accepting_requests_are_refused_and_probes_answer():
    async def scenario():
        async with serving() as (client, guard, machine, _):
            machine.drain()
            answer = await client.post("/quick")
            assert answer.status_code == 503
            assert answer.headers["retry-after"] == "7"
            assert answer.json()["error"]["code"] == 503
            assert (await client.get("/livez")).status_code == 200
            health = await client.get("/health")
            assert health.status_code == 503
            assert health.json()["draining"] is True
            head = await client.head("/health")
            assert (head.status_code, head.content) == (503, b"")
            assert guard.in_flight == 0

    run(scenario)


def test_shutdown_answers_with_503():
    async def scenario():
        async with serving() as (client, guard, machine, app):
            call = asyncio.create_task(client.post("/wait"))
            await app.entered.wait()
            machine.drain()
            await guard.fail_all_by_shutdown()
            answer = await call
            assert answer.status_code == 503
            assert answer.json()["error"]["fault"] is None

    run(scenario)


def test_many_requests_are_failed_together_and_the_client_that_is_gone_holds_nobody_up():
    async def scenario():
        async with serving() as (client, guard, machine, _):
            calls = [asyncio.create_task(client.post("/wait")) for _ in range(20)]
            while guard.in_flight < 20:
                await asyncio.sleep(0.01)
            calls.pop().cancel()
            machine.replica_lost(0, 0, FAULT)
            await guard.fail_all_by_fault()
            answers = await asyncio.gather(*calls)
            assert {answer.status_code for answer in answers} == {500}
            await asyncio.wait_for(guard.idle(), 5)

    run(scenario)


def test_a_connection_that_breaks_in_its_own_way_keeps_nobody_from_an_answer():
    async def scenario():
        async with serving() as (client, guard, machine, _):

            async def broken_send(message):
                raise RuntimeError("no such connection")

            scope = {"type": "http", "method": "POST", "path": "/wait", "headers": []}
            broken = asyncio.create_task(guard(scope, None, broken_send))
            call = asyncio.create_task(client.post("/wait"))
            while guard.in_flight < 2:
                await asyncio.sleep(0.01)
            machine.replica_lost(0, 0, FAULT)
            await guard.fail_all_by_fault()
            assert (await call).status_code == 500
            with pytest.raises(Cutoff):
                await broken

    run(scenario)
