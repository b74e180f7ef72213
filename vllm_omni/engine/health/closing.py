# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-omni-health project
"""Closing replicas: each client on a thread of its own, bounded, and then whatever is left."""

from __future__ import annotations

import asyncio
import logging
from functools import partial
from typing import Any

from vllm_omni.engine.health.off_loop import in_thread
from vllm_omni.health import seams
from vllm_omni.health.faults.fault import Fault
from vllm_omni.health.liveness import stacks
from vllm_omni.health.runtime import HealthRuntime
from vllm_omni.health.state.values import ReplicaKey

logger = logging.getLogger(__name__)

_CLIENT_CLOSE_S = 10.0
"""Bound for one stage client's own shutdown; after it the replica's process group is killed.
Upstream allows its processes 5 s after SIGTERM before it kills them itself."""


class ReplicaCloser:
    """Belongs to the orchestrator's loop. ``tasks`` is the group that owns what it begins."""

    tasks: asyncio.TaskGroup

    def __init__(self, health: HealthRuntime) -> None:
        self._supervisor = health.supervisor
        self._settle_s = health.settings.settle_s
        self._closing: set[asyncio.Task[None]] = set()
        self._stacks: dict[ReplicaKey, asyncio.Future[Any]] = {}

    def ask_for_stacks(self, fault: Fault) -> None:
        """A replica hangs: have it logged where its threads are, before it is killed."""
        assert fault.stage_id is not None
        assert fault.replica_id is not None
        key = (fault.stage_id, fault.replica_id)
        replica = self._supervisor.replica(*key)
        if replica is not None:
            name = f"health-stacks-stage{key[0]}-replica{key[1]}"
            self._stacks[key] = in_thread(partial(stacks.log_replica, replica), name)

    def close(self, client: Any, stage_id: int, replica_id: int, *, lost: bool) -> None:
        """Begin to close a replica that is out of its pool already.

        ``lost``: it is not trusted any more, and its process group is killed.
        """
        task = self.tasks.create_task(
            self._close(client, (stage_id, replica_id), lost=lost), name="health-close-client"
        )
        self._closing.add(task)
        task.add_done_callback(self._closing.discard)

    async def all_closed(self) -> None:
        """Wait for everything that has begun to close; each of it is bounded."""
        if self._closing:
            await asyncio.wait(set(self._closing))

    async def _close(self, client: Any, key: ReplicaKey, *, lost: bool) -> None:
        supervisor = self._supervisor
        supervisor.replica_closing(*key)
        # Tells upstream's own monitor threads that what they see now is wanted.
        if hasattr(client, "_shutting_down"):
            seams.assign(client, _shutting_down=True)
        if lost:
            # Not before the reason has settled: its processes may be stating it right now.
            await asyncio.sleep(self._settle_s)
            asked = self._stacks.pop(key, None)
            if asked is not None:
                await asyncio.wait({asked}, timeout=2 * stacks.TAKE_S)
            supervisor.kill_replica(*key)
        done = in_thread(client.shutdown, f"close-stage{key[0]}-replica{key[1]}")
        try:
            async with asyncio.timeout(_CLIENT_CLOSE_S):
                await done
        except TimeoutError:
            logger.error(
                "[health] stage %d replica %d did not close within %.0f s; killing it",
                *key,
                _CLIENT_CLOSE_S,
            )
        except Exception:
            logger.exception("[health] closing stage %d replica %d failed", *key)
        finally:
            supervisor.kill_replica(*key)
