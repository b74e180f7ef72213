# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-omni-health project
"""How an AR stage's processes are spawned: the server its engine core, and that its workers.

Upstream asks vLLM for a multiprocessing context and makes its processes from that. It gets the
same context here, whose processes are ones that the supervisor knows.
"""

from __future__ import annotations

from typing import Any

from vllm.utils.system_utils import get_mp_context as upstream_get_mp_context
from vllm_omni.engine.health.ar.process import run_stage_core
from vllm_omni.engine.health.ar.worker import run_worker
from vllm_omni.engine.health.spawn import WatchedContext
from vllm_omni.health.state.values import ReplicaKey


def get_mp_context() -> Any:
    """Replaces the name that upstream's stage process manager makes its processes with."""
    return WatchedContext(upstream_get_mp_context(), run_stage_core, _replica)


def get_worker_context() -> Any:
    """Replaces the name that vLLM's executor makes its workers with."""
    return WatchedContext(upstream_get_mp_context(), run_worker, _worker)


def _replica(*, omni_stage_id: Any, omni_replica_id: Any, **_: Any) -> tuple[ReplicaKey, None]:
    return (int(omni_stage_id), int(omni_replica_id)), None


def _worker(*, rank: int, **_: Any) -> tuple[None, int]:
    # Which replica this is the server knows, who reads the pipe.
    return None, rank
