# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-omni-health project
"""Replicas on other hosts (upstream's headless stages): their heartbeats, and their silence.

There is no process to watch and no signal to send. A thread in each stage process there sends a
heartbeat to upstream's coordinator here, every five seconds, however busy the stage is; a host
that vanishes closes no connection and sends nothing. What the coordinator publishes is read from
the hub that upstream's stage pools have. Lives on the orchestrator's loop.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from typing import Any

from vllm_omni.distributed.omni_coordinator.messages import ReplicaStatus
from vllm_omni.health.faults.fault import Fault, process_lost
from vllm_omni.health.state.values import ReplicaKey


class RemoteWatch:
    """Reports replicas on other hosts as lost; :meth:`look` is called about once a second.

    ``timeout_s``: seconds without a new heartbeat. ``is_local``: whether a replica has a process
    on this host, which others watch better. ``report``: takes the fault, once for each loss.
    """

    def __init__(
        self,
        pools: Iterable[Any],
        timeout_s: float,
        is_local: Callable[[int, int], bool],
        report: Callable[[Fault], object],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._pools = pools
        self._timeout_s = timeout_s
        self._is_local = is_local
        self._report = report
        self._clock = clock
        # The coordinator's time of the last heartbeat, and when it was first seen here.
        self._heard: dict[ReplicaKey, tuple[float, float]] = {}
        self._lost: set[ReplicaKey] = set()

    def look(self) -> None:
        """Look at what the coordinator has last published."""
        now = self._clock()
        for stage_id, pool in enumerate(self._pools):
            hub = getattr(pool, "_hub", None)
            if hub is None:
                continue
            for info in hub.get_replicas_for_stage(stage_id).replicas:
                replica_id = getattr(pool, "_addr_to_replica_id", {}).get(info.input_addr)
                if replica_id is not None and not self._is_local(stage_id, replica_id):
                    self._judge((stage_id, replica_id), info, now)

    def _judge(self, key: ReplicaKey, info: Any, now: float) -> None:
        beat, since = self._heard.get(key, (None, now))
        if info.last_heartbeat != beat:
            since = now
            self._heard[key] = (info.last_heartbeat, now)
        if info.status == ReplicaStatus.UP and now - since <= self._timeout_s:
            self._lost.discard(key)
        elif key not in self._lost:
            self._lost.add(key)
            self._report(
                process_lost(
                    None,
                    stage_id=key[0],
                    replica_id=key[1],
                    role="stage on another host",
                    message=f"status {info.status.value}, no heartbeat for {now - since:.0f} s "
                    f"(remote_timeout_s={self._timeout_s:g})",
                )
            )
