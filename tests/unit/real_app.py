# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-omni-health project
"""Upstream's real application and route handlers on a real HTTP server, over a fake engine.

The fake does what upstream's engine client does with a request: keeps it in ``request_states``
while it lasts, yields what the engine puts out, and raises what a failure message makes it raise.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
from types import SimpleNamespace
from uuid import uuid4

import httpx
import numpy as np
import uvicorn
from vllm.entrypoints.launchers.cli_args import make_arg_parser
from vllm.entrypoints.speech_to_text.transcription.serving import OpenAIServingTranscription
from vllm.entrypoints.speech_to_text.translation.serving import OpenAIServingTranslation
from vllm_omni.engine.health.admission import refusing
from vllm_omni.engine.health.failed_messages import note
from vllm_omni.engine.messages import ErrorMessage
from vllm_omni.entrypoints.health.http import client_errors
from vllm_omni.entrypoints.health.http.guard import RequestGuard
from vllm_omni.entrypoints.omni_base import OmniEngineDeadError
from vllm_omni.entrypoints.openai import api_server
from vllm_omni.entrypoints.openai.serving_audio_generate import OmniOpenAIServingAudioGenerate
from vllm_omni.entrypoints.openai.serving_speech import OmniOpenAIServingSpeech
from vllm_omni.entrypoints.openai.serving_speech_stream import OmniStreamingSpeechHandler
from vllm_omni.entrypoints.openai.serving_video import OmniOpenAIServingVideo
from vllm_omni.errors import client_error_from_metadata
from vllm_omni.health.runtime import HealthRuntime, set_current
from vllm_omni.utils.tracking_parser import TrackingArgumentParser

from vllm_omni_health.settings.model import HealthSettings


def build_app(tasks=("generate", "transcription")):
    """The application as upstream's server composes it, with every optional router."""
    args = make_arg_parser(TrackingArgumentParser()).parse_args(["--model", "tiny"])
    with _environment(VLLM_SERVER_DEV_MODE="1", VLLM_ALLOW_RUNTIME_LORA_UPDATING="True"):
        app = api_server.build_openai_app(args, tasks)
    # As omni_run_server_worker() does.
    api_server.remove_route_from_app(app, "/v1/chat/completions", {"POST"})
    api_server.remove_route_from_app(app, "/v1/chat/completions/batch", {"POST"})
    api_server.remove_route_from_app(app, "/v1/models", {"GET"})
    api_server.remove_route_from_app(app, "/health", {"GET"})
    app.include_router(api_server.router)
    app.include_router(api_server.profiler_router)
    api_server._register_omni_exception_handlers(app)
    client_errors.observe(app)
    return app


@contextlib.contextmanager
def _environment(**values):
    before = {name: os.environ.get(name) for name in values}
    os.environ.update(values)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value


class FakeEngine:
    """What the handlers take for upstream's engine client."""

    errored = False
    is_running = True
    model_type = "StableAudioPipeline"
    default_sampling_params_list = ()
    stage_configs = (
        SimpleNamespace(
            stage_type="diffusion",
            final_output=True,
            final_output_type="video",
            engine_args=SimpleNamespace(),
        ),
    )
    vllm_config = None
    tts_batch_max_items = 8

    def __init__(self, runtime):
        self.runtime = runtime
        self.request_states = {}
        self._handles = {}
        self.aborted = []
        self.swallow = False
        self.unfit = None
        """What upstream's preparation of every request raises from now on."""

    async def generate(self, prompt=None, sampling_params=None, request_id="", **__):
        internal = f"{request_id}-{uuid4().hex[:8]}"
        queue = asyncio.Queue()
        self.request_states[internal] = SimpleNamespace(queue=queue, external_request_id=request_id)
        try:
            if self.unfit is not None:
                with refusing(internal):
                    raise self.unfit
            while (item := await queue.get()) is not None:
                if isinstance(item, BaseException):
                    raise item
                yield item
        finally:
            self.request_states.pop(internal, None)

    async def abort(self, request_id, **_):
        self.aborted.append(request_id)

    async def until_in_flight(self, count=1):
        while len(self.request_states) < count:
            await asyncio.sleep(0.01)

    def put_audio(self):
        """A piece of audio for every request."""
        for state in self.request_states.values():
            audio = {"audio": np.zeros(2400, dtype=np.float32), "sr": 24000}
            state.queue.put_nowait(
                SimpleNamespace(multimodal_output=audio, outputs=[], stage_id=0, finished=False)
            )

    def finish(self):
        """The end of every request."""
        for state in self.request_states.values():
            state.queue.put_nowait(None)

    def fail(self, message=None, **fields):
        """Fail every request by a message of the orchestrator's, and deliver that."""
        for request_id, state in list(self.request_states.items()):
            error = ErrorMessage(error=message or "it failed", request_id=request_id, **fields)
            note(error, self.runtime)
            if not self.swallow:
                state.queue.put_nowait(_raised_for(error))


def _raised_for(error):
    if error.fatal:
        return OmniEngineDeadError(error.error, error_stage_id=error.stage_id)
    if error.status_code is not None:
        return client_error_from_metadata(
            error.error, status_code=error.status_code, error_type=error.error_type
        )
    return RuntimeError(error.error)


class Speech(OmniOpenAIServingSpeech):
    """Upstream's speech routes with a model for which there is nothing to prepare."""

    forced_aligner_enabled = False
    _tts_model_type = None

    def __init__(self, engine):
        self.engine_client = engine
        self._batch_max_items = 8
        self._speech_output_policies = {}

    async def _check_model(self, _request):
        return None

    def _get_tts_adapter(self):
        return None

    def _validate_speech_streaming_request(self, *_, **__):
        return "pcm", None

    def _validate_tts_request(self, _request):
        return None

    async def _prepare_speech_generation(self, _request, *, request_id=None, **_):
        request_id = request_id or f"speech-{uuid4().hex}"
        return request_id, self.engine_client.generate(request_id=request_id), {}

    def _discard_ref_audio_artifact_warmup(self, _request_id):
        pass

    def _observe_speech_audio_ttfp(self, **_):
        return None, None, True


class AudioGenerate(OmniOpenAIServingAudioGenerate):
    def __init__(self, engine):
        self.engine_client = engine

    async def _check_model(self, _request):
        return None


class SpeechToText:
    """What vLLM's transcriptions and translations need of a model and of the audio."""

    model_cls = SimpleNamespace(no_space_languages=frozenset(), post_process_output=str)
    streaming_post_processor_cls = object

    def __init__(self, engine, task):
        self.engine_client = engine
        self.task_type = task
        self.models = SimpleNamespace(model_name=lambda *_: "tiny")
        self.model_config = SimpleNamespace(max_model_len=64)
        self.asr_config = SimpleNamespace(max_audio_clip_s=30)
        self.default_sampling_params = {}
        self.request_logger = None
        self.enable_force_include_usage = False

    async def _check_model(self, _request):
        return None

    def _preflight(self):
        pass

    def _maybe_get_adapters(self, _request):
        return None

    async def _preprocess_speech_to_text(self, **_):
        return [{"prompt_token_ids": [1]}], 1.0, [0.0]

    def _log_inputs(self, *_, **__):
        pass

    async def _get_trace_headers(self, _headers):
        return None


class Transcription(SpeechToText, OpenAIServingTranscription):
    pass


class Translation(SpeechToText, OpenAIServingTranslation):
    pass


class Realtime:
    """What a realtime connection asks of its serving object."""

    def __init__(self, engine):
        self.engine_client = engine

    def _is_model_supported(self, _model):
        return True

    def transcribe_realtime(self, *_):
        return None


class Service:
    """A server in this process: everything a test needs to break it and look at it."""

    def __init__(self, app, replicas, max_requests=None):
        self.runtime = HealthRuntime(HealthSettings(retry_after_s=7))
        self.machine = self.runtime.machine
        self.machine.expect_stage(0, replicas)
        for replica_id in range(replicas):
            self.machine.replica_ready(0, replica_id, pid=1)
        self.machine.started()
        self.engine = FakeEngine(self.runtime)
        set_current(self.runtime)
        self.app_state = app.state
        self._set_state(app.state)
        self.guard = RequestGuard(app, self.runtime, max_requests=max_requests)
        self.guard.book.keep(self.engine)

    def _set_state(self, state):
        engine = self.engine
        models = SimpleNamespace(base_model_paths=[SimpleNamespace(name="tiny")])
        state.engine_client = engine
        state.server = SimpleNamespace(should_exit=False)
        state.api_server_count = 1
        state.stage_configs = list(engine.stage_configs)
        state.openai_serving_models = models
        state.openai_serving_speech = Speech(engine)
        state.openai_serving_audio_generate = AudioGenerate(engine)
        state.openai_serving_transcription = Transcription(engine, "transcribe")
        state.openai_serving_translation = Translation(engine, "translate")
        state.openai_streaming_speech = OmniStreamingSpeechHandler(state.openai_serving_speech)
        state.openai_serving_video = OmniOpenAIServingVideo(engine, "tiny", [])
        state.openai_serving_realtime = Realtime(engine)
        state.openai_serving_duplex = None
        state.openai_streaming_video = None


@contextlib.asynccontextmanager
async def serving(app, *, replicas=1, max_requests=None):
    """The application behind the guard, on a port of its own."""
    service = Service(app, replicas, max_requests)
    config = uvicorn.Config(
        service.guard, port=0, log_level="critical", lifespan="off", timeout_graceful_shutdown=2
    )
    server = uvicorn.Server(config)
    server.capture_signals = contextlib.nullcontext
    task = asyncio.create_task(server.serve())
    while not server.started:
        await asyncio.sleep(0.01)
    service.port = server.servers[0].sockets[0].getsockname()[1]
    url = f"http://127.0.0.1:{service.port}"
    async with httpx.AsyncClient(base_url=url, timeout=20, trust_env=False) as client:
        service.client = client
        try:
            yield service
        finally:
            service.engine.finish()
    server.should_exit = True
    await task
    set_current(None)
