# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-omni-health project
"""Which processes are this service's, and which of them belong to which replica: by ancestry."""

from __future__ import annotations

import os
from collections import defaultdict

from vllm_omni.health.processes.process import parent_pid
from vllm_omni.health.state.values import ReplicaKey, Snapshot


def owned(snapshot: Snapshot, root: int | None = None) -> dict[int, ReplicaKey | None]:
    """Every process of this service: its replica by pid, None for those of the server itself.

    Walks down from ``root``, this process by default. A replica's processes are its engine core
    and all below it. Of an inline replica the server's own process is the engine core; it counts
    as that replica's.
    """
    root = os.getpid() if root is None else root
    children: defaultdict[int, list[int]] = defaultdict(list)
    for entry in os.scandir("/proc"):
        if entry.name.isdigit():
            parent = parent_pid(int(entry.name))
            if parent is not None:
                children[parent].append(int(entry.name))
    cores = {
        replica.pid: (stage.stage_id, replica.replica_id)
        for stage in snapshot.stages
        for replica in stage.replicas
        if replica.pid is not None
    }
    found: dict[int, ReplicaKey | None] = {}
    todo: list[tuple[int, ReplicaKey | None]] = [(root, None)]
    while todo:
        pid, key = todo.pop()
        if pid in found:
            continue
        key = cores.get(pid, key)
        found[pid] = key
        todo += [(child, key) for child in children[pid]]
    return found
