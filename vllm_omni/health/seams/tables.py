# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-omni-health project
"""Every name of upstream's that the layer takes, by kind of process. Data alone.

A second release of upstream gets its rows here, with the release named on those that differ.
"""

from __future__ import annotations

from vllm_omni.health.seams.rows import Seam, Table
from vllm_omni.health.seams.uses_server import (
    USED_BY_API_SERVER,
    USED_BY_LIBRARY,
    USED_BY_ORCHESTRATOR,
)
from vllm_omni.health.seams.uses_stages import (
    USED_BY_AR_WORKER,
    USED_BY_CPU_DIFFUSION,
    USED_BY_DIFFUSION_ENGINE,
    USED_BY_DIFFUSION_PROCESS,
    USED_BY_DIFFUSION_WORKER,
    USED_BY_ENGINE_CORE,
)

_COMMAND = (
    Seam(
        "vllm_omni.entrypoints.cli.serve:OmniServeCommand.validate",
        "vllm_omni.entrypoints.health.server.serve:validate",
        why="our command takes the place of upstream's; what is wrong is told in one line",
        signature="(self, args)",
    ),
    Seam(
        "vllm_omni.utils.tracking_parser:TrackingArgumentParser.error",
        "vllm_omni.entrypoints.health.server.serve:error",
        why="a command line that makes no sense is in the termination log",
        signature="(self, message)",
    ),
)

_ORPHANS = (
    Seam(
        "multiprocessing.spawn:get_preparation_data",
        "vllm_omni_health.bootstrap:get_preparation_data",
        why="a child process ends with its parent, from before its first import on",
        signature="(name)",
    ),
)
"""Taken in every process that starts others: the server's and the stages'."""

_HTTP = (
    Seam(
        "vllm_omni.entrypoints.openai.api_server:serve_http",
        "vllm_omni.entrypoints.health.server.lifecycle:serve_http",
        why="probes and admission around the application, and an ordered end",
        signature="async (app, sock, enable_ssl_refresh, **uvicorn_kwargs)",
    ),
)

_SERVER = (
    *_ORPHANS,
    Seam(
        "vllm_omni.entrypoints.openai.serving_chat:OmniOpenAIServingChat._create_chat_completion",
        "vllm_omni.entrypoints.health.http.chat_checks:create_chat_completion",
        why="a chat that would block the server's loop or cannot be answered is refused",
        signature="async (self, request, raw_request)",
    ),
    Seam(
        "vllm_omni.engine.async_omni_engine:Orchestrator",
        "vllm_omni.engine.health.orchestrator:HealthOrchestrator",
        why="faults move the state machine and fail pending requests at once",
    ),
    Seam(
        "vllm_omni.engine.async_omni_engine:AsyncOmniEngine._build_add_request_message",
        "vllm_omni.engine.health.admission:build_add_request_message",
        why="a request that would end an engine core, or that cannot be sent to one, is refused",
        signature="(self, request_id, prompt, prompt_text, sampling_params_list, final_stage_id, "
        "final_output_stage_ids, arrival_time, lora_request, tokenization_kwargs, "
        "trace_headers, priority, data_parallel_rank, reasoning_ended, *, resumable, "
        "message_type)",
    ),
    Seam(
        "vllm_omni.engine.omni_engine_base:OmniEngineBase.get_output_blocking_async",
        "vllm_omni.engine.health.output_bell:get_output_blocking_async",
        why="the API server waits for output without polling and without a thread's help",
        signature="async (self, timeout)",
    ),
    Seam(
        "vllm_omni.engine.duplex_orchestrator:DuplexOrchestrator",
        "vllm_omni.engine.health.orchestrator:HealthDuplexOrchestrator",
        why="the same for duplex sessions",
    ),
    Seam(
        "vllm_omni.engine.stage_engine_core_proc_manager:get_mp_context",
        "vllm_omni.engine.health.ar.start:get_mp_context",
        why="engine cores start through our target, with a last-words pipe and a watch",
        signature="()",
    ),
    Seam(
        "vllm_omni.engine.stage_engine_core_client:StageEngineCoreClientBase.utility_results",
        "vllm_omni.engine.health.ar.channel:utility_results",
        why="the fatal-error message on an engine core's output queue has a receiver",
        new=True,
    ),
    Seam(
        "vllm_omni.engine.stage_runtime:StageRuntime._initialize_local_diffusion_replica",
        "vllm_omni.engine.health.diffusion.channel:initialize_replica",
        why="a diffusion replica's process, engine and client know which replica they are, and "
        "the client does not block",
        signature="(self, plan, stage_init_timeout)",
    ),
    Seam(
        "vllm_omni.distributed.omni_coordinator.runtime:run_omni_coordinator_proc",
        "vllm_omni.engine.health.coordinator:run_coordinator",
        why="the coordinator of stages on other hosts ends with its server, and not before it",
        signature="(router_zmq_addr, pub_zmq_addr, heartbeat_timeout, ready_pipe)",
    ),
    Seam(
        "vllm_omni.diffusion.stage_diffusion_proc:get_mp_context",
        "vllm_omni.engine.health.diffusion.start:get_mp_context",
        why="diffusion processes start through our target, with a last-words pipe and a watch",
        signature="()",
    ),
)

_DIFFUSION_ENGINE = (
    Seam(
        "vllm_omni.diffusion.diffusion_engine:DiffusionEngine.resolve_engine_class",
        "vllm_omni.engine.health.diffusion.engine:resolve_engine_class",
        why="a diffusion engine ends with its first fatal fault and refuses bad requests",
        signature="(config)",
    ),
    Seam(
        "vllm_omni.diffusion.executor.multiproc_executor:mp",
        "vllm_omni.engine.health.diffusion.start:worker_context",
        why="diffusion workers start through our target, with last words and a watch",
    ),
)
"""Needed wherever a diffusion engine runs: in the server (inline) or a process of its own."""

_DIFFUSION_WORKER = (
    Seam(
        "vllm_omni.diffusion.worker.diffusion_worker:WorkerProc",
        "vllm_omni.engine.health.diffusion.worker:HealthDiffusionWorkerProc",
        why="a diffusion worker's exception reaches its engine with its class",
    ),
)

_STAGE_PROCESS = (
    *_ORPHANS,
    Seam(
        "vllm_omni.engine.stage_engine_core_proc:set_death_signal",
        "vllm_omni_health.bootstrap:set_death_signal",
        why="upstream would weaken the parent-death signal to SIGTERM",
        signature="(sig)",
    ),
    Seam(
        "vllm_omni.engine.stage_engine_core_proc:StageEngineCoreProc",
        "vllm_omni.engine.health.ar.process:HealthStageEngineCoreProc",
        why="an engine core that fails states a typed fault before ENGINE_CORE_DEAD",
    ),
    Seam(
        "vllm.v1.executor.multiproc_executor:get_mp_context",
        "vllm_omni.engine.health.ar.start:get_worker_context",
        why="worker processes start through our target, with last words",
        signature="()",
    ),
    Seam(
        "vllm.v1.executor.multiproc_executor:MultiprocExecutor.response_mqs",
        "vllm_omni.engine.health.ar.channel:response_mqs",
        why="a worker's typed exception is what the engine core raises",
        new=True,
    ),
)

_WORKER = (
    Seam(
        "vllm.v1.executor.multiproc_executor:WorkerProc",
        "vllm_omni.engine.health.ar.worker:HealthWorkerProc",
        why="a worker's exception reaches its engine core, or the server, with its class",
    ),
)

COMMAND = Table(_COMMAND)
SERVER = Table(
    _HTTP + _SERVER + _DIFFUSION_ENGINE,
    USED_BY_ORCHESTRATOR + USED_BY_API_SERVER + USED_BY_DIFFUSION_ENGINE,
)
LIBRARY = Table(_SERVER + _DIFFUSION_ENGINE, SERVER.uses + USED_BY_LIBRARY)
STAGE_PROCESS = Table(_STAGE_PROCESS, USED_BY_ENGINE_CORE)
WORKER = Table(_WORKER, USED_BY_AR_WORKER)
DIFFUSION_PROCESS = Table(
    _ORPHANS + _DIFFUSION_ENGINE, USED_BY_DIFFUSION_ENGINE + USED_BY_DIFFUSION_PROCESS
)
DIFFUSION_WORKER = Table(_DIFFUSION_WORKER, USED_BY_DIFFUSION_WORKER)
CPU_DIFFUSION = Table(
    (
        Seam(
            "vllm_omni.diffusion.worker.diffusion_worker:WorkerProc._async_output_loop",
            "vllm_omni.platforms.cpu.diffusion:send_outputs",
            why="outputs are not copied on a stream where there is none",
            signature="(self)",
        ),
    ),
    USED_BY_CPU_DIFFUSION,
)
