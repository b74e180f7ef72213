"""Every place where the layer takes an upstream name and puts its own there. The only one.

A seam is a row: the upstream name, what replaces it, what we rely on, and why it is needed. All
rows of a table are checked before the first is installed: the layer is there as a whole or the
start stops with a message. Importing this module imports nothing of upstream; installing does.
"""

from __future__ import annotations

import importlib
import importlib.metadata
import inspect
from dataclasses import dataclass
from typing import Any

from vllm_omni_health.upstream import SUPPORTED, UpstreamError, check_version


class SeamError(UpstreamError):
    """Upstream is not as a seam expects it; the text names seam, found and supported version."""


@dataclass(frozen=True)
class Seam:
    """One rebinding. Names are ``module:attribute.path``."""

    target: str
    replacement: str
    why: str
    parameters: tuple[str, ...] | None = None
    """For a function: the names of its parameters, in order."""
    members: tuple[str, ...] = ()
    """For a class: the attributes that our subclass overrides or calls."""
    new: bool = False
    """Whether upstream must *not* have the attribute: it is assigned on instances there."""


COMMAND = (
    Seam(
        "vllm_omni.entrypoints.cli.serve:OmniServeCommand.cmd",
        "vllm_omni.entrypoints.health.server.serve:serve",
        why="settings and checks before anything starts, and the exit status of the process",
        parameters=("args",),
    ),
)

ORPHANS = (
    Seam(
        "multiprocessing.spawn:get_preparation_data",
        "vllm_omni_health.bootstrap:get_preparation_data",
        why="a child process ends with its parent, from before its first import on",
        parameters=("name",),
    ),
)
"""Taken in every process that starts others: the server's and the stages'."""

HTTP = (
    Seam(
        "vllm_omni.entrypoints.openai.api_server:serve_http",
        "vllm_omni.entrypoints.health.server.lifecycle:serve_http",
        why="probes and admission around the application, and an ordered end",
        parameters=("app", "sock", "enable_ssl_refresh", "uvicorn_kwargs"),
    ),
)

SERVER = (
    *ORPHANS,
    Seam(
        "vllm_omni.entrypoints.openai.serving_chat:OmniOpenAIServingChat._create_chat_completion",
        "vllm_omni.entrypoints.health.http.chat_checks:create_chat_completion",
        why="a chat that would block the server's loop or cannot be answered is refused",
        parameters=("self", "request", "raw_request"),
    ),
    Seam(
        "vllm_omni.engine.async_omni_engine:Orchestrator",
        "vllm_omni.engine.health.orchestrator:HealthOrchestrator",
        why="faults move the state machine and fail pending requests at once",
        members=(
            "run",
            "_dispatch_message",
            "_handle_processed_outputs",
            "_forward_to_next_stage",
            "_background_tasks",
            "_shutdown_extensions",
            "_handle_dead_replica",
            "_remove_stage_replica_waiting",
            "_cleanup_request_ids",
        ),
    ),
    Seam(
        "vllm_omni.engine.async_omni_engine:AsyncOmniEngine._build_add_request_message",
        "vllm_omni.engine.health.admission:build_add_request_message",
        why="a request that would end an engine core, or that cannot be sent to one, is refused",
        parameters=(
            "self",
            "request_id",
            "prompt",
            "prompt_text",
            "sampling_params_list",
            "final_stage_id",
            "final_output_stage_ids",
            "arrival_time",
            "lora_request",
            "tokenization_kwargs",
            "trace_headers",
            "priority",
            "data_parallel_rank",
            "reasoning_ended",
            "resumable",
            "message_type",
        ),
    ),
    Seam(
        "vllm_omni.engine.omni_engine_base:OmniEngineBase.get_output_blocking_async",
        "vllm_omni.engine.health.output_bell:get_output_blocking_async",
        why="the API server waits for output without polling and without a thread's help",
        parameters=("self", "timeout"),
    ),
    Seam(
        "vllm_omni.engine.duplex_orchestrator:DuplexOrchestrator",
        "vllm_omni.engine.health.orchestrator:HealthDuplexOrchestrator",
        why="the same for duplex sessions",
        members=("run", "_dispatch_message", "_background_tasks", "_shutdown_extensions"),
    ),
    Seam(
        "vllm_omni.engine.stage_engine_core_proc_manager:get_mp_context",
        "vllm_omni.engine.health.ar.start:get_mp_context",
        why="engine cores start through our target, with a last-words pipe and a watch",
        parameters=(),
    ),
    Seam(
        "vllm_omni.engine.stage_engine_core_client:StageEngineCoreClientBase.utility_results",
        "vllm_omni.engine.health.ar.channel:utility_results",
        why="the fatal-error message on an engine core's output queue has a receiver",
        new=True,
    ),
    Seam(
        "vllm_omni.engine.stage_runtime:StageRuntime._initialize_local_diffusion_replica",
        "vllm_omni.engine.health.diffusion.client:initialize_replica",
        why="a diffusion replica's process, engine and client know which replica they are, and "
        "the client does not block",
        parameters=("self", "plan", "stage_init_timeout"),
    ),
    Seam(
        "vllm_omni.diffusion.stage_diffusion_proc:get_mp_context",
        "vllm_omni.engine.health.diffusion.start:get_mp_context",
        why="diffusion processes start through our target, with a last-words pipe and a watch",
        parameters=(),
    ),
)

DIFFUSION_ENGINE = (
    Seam(
        "vllm_omni.diffusion.diffusion_engine:DiffusionEngine.resolve_engine_class",
        "vllm_omni.engine.health.diffusion.engine:resolve_engine_class",
        why="a diffusion engine ends with its first fatal fault and refuses bad requests",
        parameters=("config",),
    ),
    Seam(
        "vllm_omni.diffusion.executor.multiproc_executor:mp",
        "vllm_omni.engine.health.diffusion.worker:worker_context",
        why="diffusion workers start through our target, with last words and a watch",
        members=("Process", "Pipe", "Event", "set_start_method"),
    ),
)
"""Needed wherever a diffusion engine runs: in the server (inline) or a process of its own."""

DIFFUSION_WORKER = (
    Seam(
        "vllm_omni.diffusion.worker.diffusion_worker:WorkerProc",
        "vllm_omni.engine.health.diffusion.worker:HealthDiffusionWorkerProc",
        why="a diffusion worker's exception reaches its engine with its class",
        members=("worker_main", "shutdown", "_create_worker", "_enqueue_result"),
    ),
)

STAGE_PROCESS = (
    *ORPHANS,
    Seam(
        "vllm_omni.engine.stage_engine_core_proc:set_death_signal",
        "vllm_omni_health.bootstrap:set_death_signal",
        why="upstream would weaken the parent-death signal to SIGTERM",
        parameters=("sig",),
    ),
    Seam(
        "vllm_omni.engine.stage_engine_core_proc:StageEngineCoreProc",
        "vllm_omni.engine.health.ar.core:HealthStageEngineCoreProc",
        why="an engine core that fails states a typed fault before ENGINE_CORE_DEAD",
        members=("_send_engine_dead", "run_stage_core", "run_busy_loop", "_process_engine_step"),
    ),
    Seam(
        "vllm.v1.executor.multiproc_executor:WorkerProc.worker_main",
        "vllm_omni.engine.health.ar.worker:worker_main",
        why="worker processes start through our target, which installs what they need",
        parameters=("args", "kwargs"),
    ),
    Seam(
        "vllm.v1.executor.multiproc_executor:MultiprocExecutor.response_mqs",
        "vllm_omni.engine.health.ar.envelope:response_mqs",
        why="a worker's typed exception is what the engine core raises",
        new=True,
    ),
)

WORKER = (
    Seam(
        "vllm.v1.executor.multiproc_executor:WorkerProc",
        "vllm_omni.engine.health.ar.worker:HealthWorkerProc",
        why="a worker's exception reaches its engine core, or the server, with its class",
        members=(
            "worker_main",
            "shutdown",
            "monitor_death_pipe",
            "worker_busy_loop",
            "async_output_busy_loop",
            "_execute_worker_rpc",
            "handle_output",
            "enqueue_output",
        ),
    ),
)

_originals: dict[str, Any] = {}


def install_command() -> None:
    """Take the ``serve`` command. Done while upstream builds its argument parser."""
    _install(COMMAND)


def install_server() -> None:
    """Take everything else that a server process needs."""
    _install(HTTP + SERVER + DIFFUSION_ENGINE)


def install_library() -> None:
    """Take what a process needs that uses the engine without the HTTP server."""
    _install(SERVER + DIFFUSION_ENGINE)


def install_stage_process() -> None:
    """Take what an engine-core process needs."""
    _install(STAGE_PROCESS)


def install_worker() -> None:
    """Take what a worker process needs."""
    _install(WORKER)


def install_diffusion_process() -> None:
    """Take what a diffusion replica's own process needs."""
    _install(ORPHANS + DIFFUSION_ENGINE)


def install_diffusion_worker() -> None:
    """Take what a diffusion worker process needs."""
    _install(DIFFUSION_WORKER)


def original(target: str) -> Any:
    """What stood at ``target`` before it was taken. KeyError when it was not."""
    return _originals[target]


def _install(table: tuple[Seam, ...]) -> None:
    version = check_version()
    places = [(seam, *_check(seam, version)) for seam in table if seam.target not in _originals]
    for seam, owner, name, found in places:
        _originals[seam.target] = found
        replacement: Any = _resolve(seam.replacement)[2]
        if isinstance(owner, type) and isinstance(owner.__dict__.get(name), staticmethod):
            replacement = staticmethod(replacement)
        setattr(owner, name, replacement)


def _check(seam: Seam, version: str) -> tuple[Any, str, Any]:
    """The owner, the attribute's name and what is there now; SeamError on a mismatch."""
    try:
        owner, name, found = _resolve(seam.target, missing=seam.new)
    except (ImportError, AttributeError) as exc:
        raise _mismatch(seam, version, f"cannot be found ({exc})") from None
    if seam.new:
        if found is not None:
            raise _mismatch(seam, version, "exists, where none was expected")
        return owner, name, found
    if seam.parameters is not None:
        names = tuple(inspect.signature(found).parameters)
        if names != seam.parameters:
            raise _mismatch(seam, version, f"takes {names}, not {seam.parameters}")
    absent = [member for member in seam.members if not hasattr(found, member)]
    if absent:
        raise _mismatch(seam, version, f"has no {', '.join(absent)}")
    return owner, name, found


def _resolve(dotted: str, *, missing: bool = False) -> tuple[Any, str, Any]:
    module_name, _, path = dotted.partition(":")
    owner: Any = importlib.import_module(module_name)
    *parents, name = path.split(".")
    for parent in parents:
        owner = getattr(owner, parent)
    return owner, name, getattr(owner, name, None) if missing else getattr(owner, name)


def _mismatch(seam: Seam, version: str, problem: str) -> SeamError:
    return SeamError(
        f"vllm-omni {version} does not fit this health layer: {seam.target} {problem}; the "
        f"layer knows {', '.join(s + '.x' for s in SUPPORTED)} (needed because: {seam.why})"
    )
