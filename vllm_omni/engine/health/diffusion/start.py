"""How the server spawns a diffusion replica's process: see ar/start.py."""

from __future__ import annotations

from typing import Any

from vllm.utils.system_utils import get_mp_context as upstream_get_mp_context
from vllm_omni.engine.health.diffusion.engine import replica_being_started
from vllm_omni.engine.health.diffusion.process import run_diffusion_stage
from vllm_omni.engine.health.spawn import StageContext
from vllm_omni.health.processes.watched import ReplicaKey


def get_mp_context() -> Any:
    """Replaces the name that upstream's diffusion process manager makes its process with."""
    return StageContext(upstream_get_mp_context(), run_diffusion_stage, _key_of)


def _key_of(arguments: dict[str, Any]) -> ReplicaKey:
    key = replica_being_started.get()
    if key is not None:
        return key
    # Started for another host's server, which gives the numbers.
    return int(arguments.get("omni_stage_id") or 0), int(arguments.get("omni_replica_id") or 0)
