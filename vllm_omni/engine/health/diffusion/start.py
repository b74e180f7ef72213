# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-omni-health project
"""How a diffusion stage's processes are spawned: the replica's own and its workers; see
ar/start.py. A worker's parent is the server (inline) or the replica's own process.
"""

from __future__ import annotations

import multiprocessing
from typing import Any

from vllm.utils.system_utils import get_mp_context as upstream_get_mp_context
from vllm_omni.engine.health.diffusion.engine import replica_being_started
from vllm_omni.engine.health.diffusion.process import run_diffusion_stage
from vllm_omni.engine.health.diffusion.worker import run_diffusion_worker
from vllm_omni.engine.health.spawn import WatchedContext
from vllm_omni.health.state.values import ReplicaKey


def get_mp_context() -> Any:
    """Replaces the name that upstream's diffusion process manager makes its process with."""
    return WatchedContext(upstream_get_mp_context(), run_diffusion_stage, _replica)


def _replica(
    *_: Any, omni_stage_id: Any = None, omni_replica_id: Any = None, **__: Any
) -> tuple[ReplicaKey, None]:
    key = replica_being_started.get()
    # Started for another host's server, that gives the numbers.
    return key or (int(omni_stage_id or 0), int(omni_replica_id or 0)), None


def _worker(rank: int, *_: Any, **__: Any) -> tuple[ReplicaKey | None, int]:
    return replica_being_started.get(), rank


worker_context = WatchedContext(multiprocessing, run_diffusion_worker, _worker)
"""Replaces the multiprocessing module, as upstream's executor uses it."""
