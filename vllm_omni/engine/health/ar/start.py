"""How the server spawns an engine-core process: with our target, a last-words pipe and a watch.

Upstream's process manager asks vLLM for a multiprocessing context and makes its processes from
that. It gets the same context here, whose processes are ones that the supervisor knows.
"""

from __future__ import annotations

from typing import Any

from vllm.utils.system_utils import get_mp_context as upstream_get_mp_context
from vllm_omni.engine.health.ar.core import run_stage_core
from vllm_omni.engine.health.spawn import StageContext
from vllm_omni.health.processes.watched import ReplicaKey


def get_mp_context() -> Any:
    """Replaces the name that upstream's stage process manager makes its processes with."""
    return StageContext(upstream_get_mp_context(), run_stage_core, _key_of)


def _key_of(arguments: dict[str, Any]) -> ReplicaKey:
    return int(arguments["omni_stage_id"]), int(arguments["omni_replica_id"])
