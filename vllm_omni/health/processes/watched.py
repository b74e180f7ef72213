# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-omni-health project
"""What the supervisor has under watch: replicas, their processes, the threads of those.

Plain records; the supervisor serialises every access to them.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

from vllm_omni.health.faults.fault import Fault, FaultKind, process_lost
from vllm_omni.health.processes.cgroups import OomKills
from vllm_omni.health.processes.last_words import LastWordsReader
from vllm_omni.health.processes.pidfd import await_ends, kill_process, open_pidfd
from vllm_omni.health.processes.process import (
    ExitStatus,
    ProcessIdentity,
    group_members,
    kill_group,
    parent_pid,
    reap,
)
from vllm_omni.health.processes.shared_memory import remove_names
from vllm_omni.health.state.values import ReplicaKey


@dataclass
class WatchedProcess:
    """A process under watch. Touched on the supervisor's thread only."""

    identity: ProcessIdentity
    pidfd: int
    role: str
    key: ReplicaKey
    rank: int | None = None
    exit_status: Callable[[], ExitStatus] | None = None
    """How it ended, where somebody else has reaped it first."""
    threads: set[int] = field(default_factory=set)
    judged: bool = False
    oom_kills: OomKills | None = None
    """The counter of its cgroup, which others share; None where the kernel keeps none."""
    oom_kills_before: int = 0
    """What that counter stood at when the watch began."""

    def killed_for_memory(self, status: ExitStatus) -> bool:
        """Whether it ended by a kill that the kernel has counted in its cgroup; claims that."""
        killed = status.signal_number == signal.SIGKILL
        counter = self.oom_kills
        return killed and counter is not None and counter.claim(self.oom_kills_before)


def open_watch(
    key: ReplicaKey,
    pid: int,
    role: str,
    rank: int | None = None,
    exit_status: Callable[[], ExitStatus] | None = None,
    parent: int | None = None,
) -> WatchedProcess | None:
    """The process that has this pid now, with a pidfd; None when there is none.

    ``parent``: whose child it must be, if that is known.
    """
    identity = ProcessIdentity.of(pid)
    pidfd = None if identity is None else open_pidfd(identity)
    if identity is None or pidfd is None:
        return None
    if parent is not None and parent_pid(pid) != parent:
        os.close(pidfd)
        return None
    # Not later, on the supervisor's thread: it may have been killed by then.
    counter = OomKills.around(pid)
    return WatchedProcess(
        identity,
        pidfd,
        role,
        key,
        rank,
        exit_status,
        oom_kills=counter,
        oom_kills_before=0 if counter is None else counter.seen,
    )


@dataclass(frozen=True)
class WatchedThread:
    """A thread of a watched process: the first sign that the process is ending."""

    pidfd: int
    watched: WatchedProcess


@dataclass(frozen=True)
class WatchedWords:
    """A last-words pipe and the replica whose processes write to it."""

    key: ReplicaKey
    reader: LastWordsReader


@dataclass
class Replica:
    """One replica.

    ``core`` is its root process, which leads a process group of its own; of an inline replica
    it is the server's own process, and only ``workers`` are processes to end.
    """

    core: ProcessIdentity
    inline: bool = False
    closing: bool = False
    lost: bool = False
    progressed_at: float | None = None
    """When a process of it last said that it gets on; monotonic, in seconds."""
    faults: list[Fault] = field(default_factory=list)
    processes: list[WatchedProcess] = field(default_factory=list)
    words: list[WatchedWords] = field(default_factory=list)
    workers: list[ProcessIdentity] = field(default_factory=list)

    def knows(self, fault: Fault) -> bool:
        """Whether this very fault was stated before: on the queue, or as last words.

        Cut to the size of a pipe it is still the same one.
        """
        return any(
            (known.kind, known.pid, known.time) == (fault.kind, fault.pid, fault.time)
            for known in self.faults
        )

    def alive(self) -> list[int]:
        """Pids of its processes that are still alive."""
        if self.inline:
            return [worker.pid for worker in self.workers if worker.running()]
        return group_members(self.core.pid)

    def kill(self) -> None:
        """SIGKILL what is left of it; the server itself is never touched."""
        if not self.inline:
            kill_group(self.core)
            return
        for worker in self.workers:
            kill_process(worker, signal.SIGKILL)

    def roots(self) -> list[int]:
        """Pids of those that are the server's own children, to be reaped by it."""
        return [worker.pid for worker in self.workers] if self.inline else [self.core.pid]


def end_all(replicas: Iterable[Replica], wait_s: float) -> list[int]:
    """SIGKILL these and wait for up to ``wait_s`` seconds; the pids that were alive."""
    replicas = list(replicas)
    killed = [pid for replica in replicas for pid in replica.alive()]
    for pid in killed:
        remove_names(pid)
    for replica in replicas:
        replica.kill()
    await_ends(killed, wait_s)
    for replica in replicas:
        for pid in replica.roots():
            reap(pid)
    return killed


def lost_fault(
    key: ReplicaKey,
    pid: int,
    role: str,
    rank: int | None,
    status: ExitStatus,
    *,
    host_oom: bool = False,
) -> Fault:
    """The fault of a process that ended without having said why.

    ``host_oom``: the kernel's out-of-memory killer was at work in the process's cgroup.
    """
    killer = " by the out-of-memory killer" if host_oom else ""
    return process_lost(
        status.exit_code,
        host_oom=host_oom,
        message=f"{role} (pid {pid}) {status.describe()}{killer}",
        stage_id=key[0],
        replica_id=key[1],
        rank=rank,
        pid=pid,
        role=role,
        core_dumped=status.core_dumped,
    )


def worker_lost(fault: Fault, workers: Iterable[tuple[int, Any]]) -> Fault:
    """Return ``fault``, or the loss of a worker that explains it.

    ``workers``: rank and process object of each, whose parent this process is. What is raised for
    a dead worker says no more than that the executor has failed, or is closed.
    """
    if fault.kind is not FaultKind.ENGINE:
        return fault
    for rank, process in workers:
        if process.exitcode is not None:
            status = ExitStatus.from_exit_code(process.exitcode)
            return process_lost(
                process.exitcode,
                message=f"worker (rank {rank}, pid {process.pid}) {status.describe()}",
                exception=fault.exception,
                bases=fault.bases,
                rank=rank,
                pid=process.pid,
                role="worker",
                traceback=fault.traceback,
            )
    return fault
