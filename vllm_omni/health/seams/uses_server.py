# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-omni-health project
"""What the layer overrides and uses of upstream's objects in the server process, by class.

A test derives the same from our sources, and fails for what is missing here as for what nobody
uses any more.
"""

from __future__ import annotations

from vllm_omni.health.seams.rows import Use

_ENGINE = "vllm_omni.engine.health"
_DIFFUSION = "vllm_omni.diffusion"

USED_BY_ORCHESTRATOR = (
    Use(
        (
            "vllm_omni.engine.orchestrator:Orchestrator",
            "vllm_omni.engine.duplex_orchestrator:DuplexOrchestrator",
        ),
        """
        __init__
        _absorb_diffusion_metrics(self, stage_id, replica_id, diffusion_output)
        _background_tasks(self)
        _cfg_tracker
        async _cleanup_request_ids(self, request_ids, *, abort, release_owners)
        async _dispatch_message(self, msg)
        async _finish_raw_terminal_requests(self, stage_id, replica_id, request_ids)
        async _forward_to_next_stage(self, req_id, src_stage_id, output, req_state, *,
            src_replica_id, is_streaming_session, is_final_update)
        async _handle_dead_replica(self, stage_id, replica_id, error)
        async _handle_processed_outputs(self, stage_id, replica_id, outputs)
        _membership
        _orch_monitor
        async _orchestration_loop_event_driven(self)
        async _process_llm_stage_outputs(self, stage_id, replica_id, raw_outputs,
            raw_terminal_request_ids)
        _remove_stage_replica_waiting(self, stage_id, replica_id)
        _shutdown_event
        async _shutdown_extensions(self)
        _stages_shutdown
        output_async_queue
        request_states
        async run(self)
        stage_pools
        """,
        subclass=f"{_ENGINE}.orchestrator:HealthOrchestrator",
    ),
    Use(
        ("vllm_omni.engine.membership_controller:MembershipController",),
        """
        _shutdown_event
        """,
        seen_as=(f"{_ENGINE}.orchestrator: self._membership",),
    ),
    Use(
        ("vllm_omni.engine.stage_pool:StagePool",),
        """
        _addr_to_replica_id
        _hub
        available_replica_ids(self)
        clients
        live_replica_ids(self)
        poll_diffusion_output(self, replica_id)
        release_replica_bindings(self, replica_id)
        record_output_timestamps(self, request_outputs, *, output_ts)
        """,
        seen_as=(
            f"{_ENGINE}.orchestrator: pool",
            f"{_ENGINE}.output_readers: pool, self.stage_pools[stage_id], self._pools[stage_id]",
            f"{_ENGINE}.remote: pool",
        ),
    ),
    Use(
        (
            "vllm_omni.engine.stage_engine_core_client:StageEngineCoreClient",
            f"{_DIFFUSION}.stage_diffusion_client:StageDiffusionClient",
            f"{_DIFFUSION}.inline_stage_diffusion_client:InlineStageDiffusionClient",
        ),
        """
        _decoder
        _engine
        _output_queue
        _request_socket
        _response_socket
        _shutting_down
        async abort_requests_async(self, request_ids)
        async call_utility_async(self, method, *args)
        async collective_rpc_async(self, method, timeout, args, kwargs)
        async get_output_async(self)
        replica_id
        shutdown
        stage_id
        stage_type
        """,
        seen_as=(
            f"{_ENGINE}.closing: client",
            f"{_ENGINE}.orchestrator: client",
            f"{_ENGINE}.output_readers: client",
            f"{_ENGINE}.ar.channel: client",
            f"{_ENGINE}.diffusion.channel: client",
        ),
    ),
    Use(
        ("vllm_omni.engine.cfg_companion_tracker:CfgCompanionTracker",),
        """
        cleanup_parent(self, parent_id)
        get_parent_id(self, req_id)
        """,
        seen_as=(f"{_ENGINE}.orchestrator: self._cfg_tracker",),
    ),
    Use(
        ("vllm_omni.engine.orchestrator_monitor:OrchestratorMonitor",),
        """
        note_loop(self, *, idle)
        set_dispatch_queue_size(self, size)
        """,
        seen_as=(f"{_ENGINE}.output_readers: self._orch_monitor",),
    ),
    Use(
        (
            "vllm_omni.engine.messages:ErrorMessage",
            "vllm_omni.engine.messages:OutputMessage",
            "vllm_omni.engine.messages:AddCompanionRequestMessage",
        ),
        """
        engine_outputs
        error
        error_type
        event_id
        fatal
        finished
        parent_id
        replica_id
        request_id
        stage_id
        status_code
        type
        """,
        seen_as=(
            f"{_ENGINE}.failed_messages: message",
            f"{_ENGINE}.orchestrator: msg",
        ),
    ),
    Use(
        ("vllm_omni.outputs:OmniRequestOutput", "vllm.v1.engine:EngineCoreOutputs"),
        """
        error
        error_status_code
        error_type
        finished_requests
        outputs
        scheduler_stats
        """,
        seen_as=(
            f"{_ENGINE}.failed_messages: output",
            f"{_ENGINE}.output_readers: batch",
        ),
    ),
    Use(
        (
            "vllm_omni.distributed.omni_coordinator.omni_coord_client_for_hub:OmniCoordClientForHub",
            "vllm_omni.distributed.omni_coordinator.messages:ReplicaInfo",
        ),
        """
        get_replicas_for_stage(self, stage_id)
        input_addr
        last_heartbeat
        status
        """,
        seen_as=(f"{_ENGINE}.remote: hub, info",),
    ),
)

USED_BY_API_SERVER = (
    Use(
        ("vllm_omni.engine.omni_engine_base:OmniEngineBase",),
        """
        is_alive(self)
        output_queue
        """,
        seen_as=(f"{_ENGINE}.output_bell: engine",),
    ),
    Use(
        (
            "vllm_omni.entrypoints.async_omni:AsyncOmni",
            "vllm_omni.entrypoints.duplex_omni:DuplexOmni",
            "vllm_omni.entrypoints.utils:PureDiffusionLauncherAdapter",
        ),
        """
        _handles
        _wrapped
        request_states
        """,
        seen_as=("vllm_omni.entrypoints.health.http.request_book: client, engine_client",),
    ),
    Use(
        ("vllm_omni.engine.stage_init_utils:ReplicaInitPlan",),
        """
        metadata
        replica_id
        """,
        seen_as=(f"{_ENGINE}.diffusion.channel: plan",),
    ),
)

USED_BY_LIBRARY = (
    Use(
        ("vllm_omni.entrypoints.async_omni:AsyncOmni",),
        """
        async iterator generate(self, prompt, sampling_params, request_id, *, prompt_text,
            lora_request, tokenization_kwargs, sampling_params_list, output_modalities,
            trace_headers, priority, data_parallel_rank, session_id, reasoning_ended,
            reasoning_parser_kwargs, arrival_time)
        """,
        subclass="vllm_omni.entrypoints.health.library:_Engine",
    ),
)
