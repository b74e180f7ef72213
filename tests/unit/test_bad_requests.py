# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-omni-health project
"""Requests that only their client can put right: 4xx from every route, whatever upstream makes
of them, and nothing of them counts.
"""

import asyncio
import json

import msgspec
import pytest
from real_app import build_app, serving
from vllm.exceptions import VLLMNotFoundError, VLLMValidationError
from vllm_omni.errors import OmniClientError

pytestmark = pytest.mark.timeout(120)

SPEECH = {"input": "hello", "model": "tiny", "response_format": "pcm"}
ROUTES = {
    "speech": ("/v1/audio/speech", {"json": SPEECH}),
    "speech, events": (
        "/v1/audio/speech",
        {"json": {**SPEECH, "stream": True, "stream_format": "sse"}},
    ),
    "audio generation": ("/v1/audio/generate", {"json": {"input": "rain", "model": "tiny"}}),
    "images": ("/v1/images/generations", {"json": {"prompt": "a boat", "size": "64x64"}}),
    "video": ("/v1/videos/sync", {"data": {"prompt": "a boat"}}),
    "transcription": (
        "/v1/audio/transcriptions",
        {"data": {"model": "tiny"}, "files": {"file": b"RIFF"}},
    ),
}

UNFIT = {
    "vLLM's validation": VLLMValidationError("no such value", parameter="top_k", value=-5),
    "upstream's": OmniClientError("no such value"),
    "a value": ValueError("no such value"),
    "a type": TypeError("no such value"),
    "a size": OverflowError("no such value"),
    "half a character": UnicodeEncodeError("utf-8", "\ud800", 0, 1, "no such value"),
    "a depth": RecursionError("no such value"),
    "another shape": msgspec.ValidationError("no such value"),
}


@pytest.fixture(scope="module")
def app():
    return build_app()


def run(scenario):
    asyncio.run(asyncio.wait_for(scenario(), 20))


def check_error(status, error):
    assert status == error["code"] == 400
    assert error["type"] in ("BadRequestError", "Bad Request")
    assert "no such value" in error["message"]
    assert "fault" not in error


@pytest.mark.parametrize(
    ("route", "why"),
    [
        *((route, why) for route in ROUTES for why in ("vLLM's validation", "a type")),
        *(("images", why) for why in UNFIT if why not in ("vLLM's validation", "a type")),
    ],
)
def test_what_the_engine_cannot_take_is_the_clients_mistake(app, route, why):
    async def scenario():
        path, request = ROUTES[route]
        async with serving(app) as service:
            service.engine.unfit = UNFIT[why]
            answer = await service.client.post(path, **request)
            status, payload = answer.status_code, answer.text
            if answer.headers["content-type"].startswith("text/event-stream"):
                *_, last, done = [line for line in payload.splitlines() if line.startswith("data:")]
                assert done == "data: [DONE]"
                payload = last.removeprefix("data:")
                status = json.loads(payload)["error"]["code"]
            check_error(status, json.loads(payload)["error"])
            assert service.runtime.request_faults.of("x") is None
            assert service.machine.snapshot.state.value == "HEALTHY"
            assert len(service.guard.book) == service.guard.in_flight == 0

    run(scenario)


@pytest.mark.parametrize("why", ["vLLM's validation", "a type", "a depth"])
def test_what_a_route_cannot_prepare_is_the_clients_mistake(app, why):
    """Before the engine hears of it, in code of the route's own."""

    async def scenario():
        async with serving(app) as service:

            async def raising(*_):
                raise UNFIT[why]

            service.app_state.openai_serving_audio_generate._check_model = raising
            path, request = ROUTES["audio generation"]
            answer = await service.client.post(path, **request)
            check_error(answer.status_code, answer.json()["error"])

    run(scenario)


def test_the_status_that_the_clients_mistake_has_is_kept(app):
    async def scenario():
        async with serving(app) as service:
            service.engine.unfit = VLLMNotFoundError("no such adapter")
            answer = await service.client.post(
                "/v1/images/generations", json={"prompt": "a boat", "size": "64x64"}
            )
            assert (answer.status_code, answer.json()["error"]["code"]) == (404, 404)

    run(scenario)


def test_a_body_that_trips_up_its_own_validation_is_the_clients_mistake(app):
    """A validator of upstream's takes a string for a dict."""

    async def scenario():
        async with serving(app) as service:
            messages = [{"role": "user", "content": "a boat"}]
            body = {"model": "tiny", "messages": messages, "structured_outputs": "x"}
            for path in ("/v1/chat/completions", "/v1/completions"):
                answer = await service.client.post(path, json={**body, "prompt": "a boat"})
                assert answer.status_code == 400, answer.text
                assert answer.json()["error"]["message"]

    run(scenario)


def test_the_same_in_the_route_itself_is_the_servers(app):
    """It is not served here, which this route of vLLM's does not expect."""

    async def scenario():
        async with serving(app) as service:
            body = {"prompt": "a boat", "model": "tiny"}
            answer = await service.client.post("/v1/completions", json=body)
            assert answer.status_code == 500

    run(scenario)


def test_what_is_raised_once_the_engine_is_at_work_is_the_servers(app):
    """A bug in the making of an answer, say; the class alone says nothing then."""

    async def scenario():
        async with serving(app) as service:
            path, request = ROUTES["images"]
            call = asyncio.create_task(service.client.post(path, **request))
            await service.engine.until_in_flight()
            for state in service.engine.request_states.values():
                state.queue.put_nowait(TypeError("a bug"))
            assert (await call).status_code == 500

    run(scenario)
