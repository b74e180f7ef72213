# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-omni-health project
"""What the layer overrides and uses of upstream's objects in the processes of stages and workers,
and of a diffusion engine's wherever it runs; see ``uses_server.py``.
"""

from __future__ import annotations

from vllm_omni.health.seams.rows import Use

_ENGINE = "vllm_omni.engine.health"
_DIFFUSION = "vllm_omni.diffusion"
_CPU = "vllm_omni.platforms.cpu"

USED_BY_ENGINE_CORE = (
    Use(
        ("vllm_omni.engine.stage_engine_core_proc:StageEngineCoreProc",),
        """
        _process_engine_step(self)
        _send_engine_dead(self)
        addresses
        model_executor
        output_queue
        process_input_sockets(self, input_addresses, coord_input_address, identity, ready_event)
        process_output_sockets(self, output_paths, coord_output_path, engine_index)
        run_busy_loop(self)
        run_stage_core(*args, dp_rank, local_dp_rank, omni_coordinator_address,
            omni_stage_id, omni_replica_id, omni_parallel_stage_init, **kwargs)
        scheduler
        """,
        subclass=f"{_ENGINE}.ar.process:HealthStageEngineCoreProc",
        seen_as=(
            f"{_ENGINE}.ar.process: engine_core, StageEngineCoreProc",
            f"{_ENGINE}.stage_memory: engine_core",
        ),
    ),
    Use(
        ("vllm.v1.executor.multiproc_executor:MultiprocExecutor",),
        """
        collective_rpc(self, method, timeout, args, kwargs, non_block, unique_reply_rank,
            kv_output_aggregator, ec_output_aggregator)
        workers
        """,
        seen_as=(
            f"{_ENGINE}.ar.process: engine_core.model_executor",
            f"{_ENGINE}.stage_memory: engine_core.model_executor",
        ),
    ),
    Use(
        ("vllm.v1.executor.multiproc_executor:WorkerProcHandle",),
        """
        proc
        rank
        """,
        seen_as=(f"{_ENGINE}.ar.process: handle",),
    ),
    Use(
        ("vllm.v1.core.sched.scheduler:Scheduler",),
        """
        has_requests(self)
        kv_cache_config
        kv_cache_manager
        """,
        seen_as=(
            f"{_ENGINE}.ar.process: self.scheduler",
            f"{_ENGINE}.stage_memory: scheduler",
        ),
    ),
    Use(
        ("vllm.distributed.device_communicators.shm_broadcast:MessageQueue",),
        """
        dequeue(self, timeout, indefinite)
        """,
        seen_as=(f"{_ENGINE}.ar.channel: self._queue",),
    ),
)

USED_BY_AR_WORKER = (
    Use(
        ("vllm.v1.executor.multiproc_executor:WorkerProc",),
        """
        __init__(self, vllm_config, local_rank, rank, distributed_init_method, input_shm_handle,
            shared_worker_lock, is_driver_worker)
        _execute_worker_rpc(self, rpc_request)
        async_output_busy_loop(self)
        enqueue_output(self, output)
        handle_output(self, output)
        monitor_death_pipe(self, death_pipe, shutdown_requested)
        rank
        shutdown(self)
        worker
        worker_busy_loop(self)
        worker_main(*args, **kwargs)
        """,
        subclass=f"{_ENGINE}.ar.worker:HealthWorkerProc",
        seen_as=(f"{_ENGINE}.ar.worker: WorkerProc",),
    ),
)

USED_BY_DIFFUSION_ENGINE = (
    Use(
        (f"{_DIFFUSION}.diffusion_engine:DiffusionEngine",),
        """
        __init__(self, od_config, scheduler)
        _busy_loop(self)
        _cv
        _fail_engine(self, exc)
        _fail_pending_rpcs(self, exc)
        _init_execute_fn(self)
        _init_executor(self, od_config)
        _loop_started
        _prepare_request_for_admission(self, request)
        _process_aborts_queue(self)
        _scheduling_paused
        close(self)
        execute_fn
        executor
        scheduler
        async iterator step_streaming(self, request)
        stop_event
        worker_thread
        """,
        subclass=f"{_ENGINE}.diffusion.engine:HealthEngineMixin",
    ),
    Use(
        (f"{_DIFFUSION}.sched.base_scheduler:BaseScheduler",),
        """
        has_requests(self)
        """,
        seen_as=(f"{_ENGINE}.diffusion.engine: self.scheduler",),
    ),
    Use(
        (
            f"{_DIFFUSION}.executor.multiproc_executor:MultiprocDiffusionExecutor",
            f"{_DIFFUSION}.executor.uniproc_executor:UniProcDiffusionExecutor",
        ),
        """
        _closed
        _dequeue_one_with_failure_polling
        _processes
        collective_rpc
        driver_worker
        register_failure_callback(self, callback)
        shutdown(self)
        """,
        seen_as=(f"{_ENGINE}.diffusion.engine: executor, self.executor",),
    ),
    Use(
        (
            f"{_DIFFUSION}.worker.utils:RunnerOutput",
            f"{_DIFFUSION}.worker.utils:BatchRunnerOutput",
            f"{_DIFFUSION}.data:DiffusionOutput",
        ),
        """
        error
        error_status_code
        error_type
        result
        runner_outputs
        """,
        seen_as=(f"{_ENGINE}.diffusion.steps: output, one, result",),
    ),
    Use(
        (f"{_DIFFUSION}.models.interface:SupportsComponentDiscovery",),
        """
        _dit_modules
        """,
        seen_as=(f"{_ENGINE}.diffusion.progress: pipeline",),
    ),
    Use(
        (f"{_DIFFUSION}.worker.diffusion_model_runner:DiffusionModelRunner",),
        """
        od_config
        pipeline
        """,
        seen_as=(
            f"{_ENGINE}.diffusion.progress: runner",
            f"{_ENGINE}.diffusion.steps: runner",
        ),
    ),
)

USED_BY_DIFFUSION_PROCESS = (
    Use(
        (f"{_DIFFUSION}.stage_diffusion_proc:StageDiffusionProc",),
        """
        _engine
        async _handle_collective_rpc(self, method, timeout, args, kwargs)
        _signal_fatal_engine_failure(self, reason)
        initialize(self)
        run_diffusion_proc
        async run_loop(self, request_address, response_address)
        """,
        subclass=f"{_ENGINE}.diffusion.process:HealthStageDiffusionProc",
        seen_as=(f"{_ENGINE}.diffusion.process: HealthStageDiffusionProc",),
    ),
)

USED_BY_DIFFUSION_WORKER = (
    Use(
        (f"{_DIFFUSION}.worker.diffusion_worker:WorkerProc",),
        """
        _create_worker(self, gpu_id, od_config, worker_extension_cls, custom_pipeline_args)
        _enqueue_result(self, msg)
        gpu_id
        shutdown(self)
        worker
        worker_main
        """,
        subclass=f"{_ENGINE}.diffusion.worker:HealthDiffusionWorkerProc",
        seen_as=(f"{_ENGINE}.diffusion.worker: WorkerProc",),
    ),
    Use(
        (
            f"{_DIFFUSION}.worker.diffusion_worker:WorkerWrapperBase",
            f"{_DIFFUSION}.data:AsyncDiffusionOutput",
        ),
        """
        error
        execute_method(self, method, *args, **kwargs)
        """,
        seen_as=(f"{_ENGINE}.diffusion.worker: wrapper, msg",),
    ),
)

USED_BY_CPU_DIFFUSION = (
    Use(
        (f"{_DIFFUSION}.worker.diffusion_worker:WorkerProc",),
        """
        _async_output_done
        _async_output_pending
        _async_output_queue
        _enqueue_result(self, msg)
        """,
        seen_as=(f"{_CPU}.diffusion: worker",),
    ),
    Use(
        (f"{_DIFFUSION}.data:AsyncDiffusionOutput",),
        """
        error
        output
        """,
        seen_as=(f"{_CPU}.diffusion: message",),
    ),
    Use(
        (f"{_DIFFUSION}.attention.backends.sdpa:SDPAImpl",),
        """
        _forward_impl(self, query, key, value, attn_metadata, mask_mode)
        forward(self, query, key, value, attn_metadata)
        """,
        subclass=f"{_CPU}.diffusion:CpuSDPAImpl",
    ),
    Use(
        (f"{_DIFFUSION}.attention.backends.sdpa:SDPABackend",),
        """
        get_impl_cls()
        """,
        subclass=f"{_CPU}.diffusion:CpuSDPABackend",
    ),
)

USED_BY_CPU_PLATFORM = (
    Use(
        ("vllm_omni.platforms.interface:OmniPlatform",),
        """
        _omni_enum
        device_control_env_var
        get_default_stage_config_path()
        get_device_count()
        get_device_memory(device)
        get_device_total_memory(device_id)
        get_device_version()
        get_diffusion_attn_backend_cls(selected_backend, head_size, allow_trtllm_default)
        get_diffusion_worker_cls()
        get_free_memory(device)
        get_omni_ar_worker_cls()
        get_omni_generation_worker_cls()
        get_torch_device(local_rank)
        supports_torch_inductor()
        synchronize()
        """,
        subclass=f"{_CPU}.platform:CpuOmniPlatform",
    ),
    Use(
        ("vllm.v1.worker.cpu_worker:CPUWorker",),
        """
        device
        init_device(self)
        model_runner
        use_v2_model_runner
        vllm_config
        """,
        subclass=f"{_CPU}.worker:CPUARWorker",
    ),
)
"""Checked by a test alone: this platform is for development."""
