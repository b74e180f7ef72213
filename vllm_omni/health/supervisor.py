"""The supervisor: a thread that sees what no message can tell.

It waits on pidfds and last-words pipes of the stage processes and on nothing else, so neither
a stuck orchestrator nor a busy event loop keeps it from moving the health state. It also owns
the list of what is ours to end: one process group per replica.
"""

from __future__ import annotations

import collections
import logging
import os
import selectors
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field

from vllm_omni.health.faults import Fault, process_lost
from vllm_omni.health.last_words import LastWordsReader, Words
from vllm_omni.health.machine import HealthMachine
from vllm_omni.health.processes import (
    ExitStatus,
    ProcessIdentity,
    await_ends,
    exit_under_way,
    group_members,
    kill_group,
    open_pidfd,
    open_thread_pidfds,
    parent_pid,
    peek_exit_status,
    reap,
)

logger = logging.getLogger(__name__)

ReplicaKey = tuple[int, int]
"""(stage_id, replica_id)"""

_MESSAGE_GRACE_S = 0.05
"""How long an engine core that exited by itself may still have a message under way.

Its last message was handed to the socket before it exited, so only our own reading is awaited.
"""


@dataclass
class _Watched:
    """A process under watch. Touched on the supervisor's thread only."""

    identity: ProcessIdentity
    pidfd: int
    role: str
    key: ReplicaKey
    rank: int | None = None
    exit_status: Callable[[], ExitStatus] | None = None
    threads: set[int] = field(default_factory=set)
    judged: bool = False


@dataclass(frozen=True)
class _Thread:
    """A thread of a watched process: the first sign that the process is ending."""

    pidfd: int
    watched: _Watched


@dataclass
class _Replica:
    """What the supervisor knows of one replica."""

    core: ProcessIdentity
    words: LastWordsReader | None = None
    closing: bool = False
    lost: bool = False
    faults: list[Fault] = field(default_factory=list)
    processes: list[_Watched] = field(default_factory=list)


class Supervisor:
    """Watches stage processes, reports their loss, and can end them.

    Public methods may be called from any thread. Faults are handed to the machine on the thread
    that learnt of them; observers of the machine must therefore be quick.
    """

    def __init__(self, machine: HealthMachine) -> None:
        self._machine = machine
        self._selector = selectors.DefaultSelector()
        self._wake_fd = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._selector.register(self._wake_fd, selectors.EVENT_READ, None)
        self._commands: collections.deque[Callable[[], None]] = collections.deque()
        self._lock = threading.Lock()
        self._replicas: dict[ReplicaKey, _Replica] = {}
        self._closing_all = False
        self._stopped = False
        self._judgements: list[tuple[float, _Watched, ExitStatus]] = []
        self._thread = threading.Thread(target=self._run, name="health-supervisor", daemon=True)

    # ---- lifecycle -------------------------------------------------------------------------

    def start(self) -> None:
        """Start the thread. Call once."""
        self._thread.start()

    def stop(self, timeout_s: float = 1.0) -> None:
        """End the thread and close every descriptor; processes are left as they are."""
        self._do(self._request_stop)
        if self._thread.is_alive() and self._thread is not threading.current_thread():
            self._thread.join(timeout_s)

    # ---- what is watched -------------------------------------------------------------------

    def watch_engine_core(
        self,
        stage_id: int,
        replica_id: int,
        pid: int,
        *,
        words: LastWordsReader | None = None,
        exit_status: Callable[[], ExitStatus] | None = None,
    ) -> None:
        """Watch the root process of a replica, just spawned.

        ``exit_status`` tells how it ended when somebody else has reaped it first.
        """
        key = (stage_id, replica_id)
        self._machine.expect_replica(stage_id, replica_id, pid)
        identity = ProcessIdentity.of(pid)
        pidfd = None if identity is None else open_pidfd(identity)
        if identity is None or pidfd is None:
            status = exit_status() if exit_status is not None else ExitStatus()
            self.report(self._lost_fault(key, pid, "engine core", None, status))
            if words is not None:
                words.close()
            return
        with self._lock:
            self._replicas[key] = _Replica(core=identity, words=words)
        watched = _Watched(identity, pidfd, "engine core", key, exit_status=exit_status)

        def register() -> None:
            self._watch(watched)
            if words is not None:
                self._selector.register(words.fd, selectors.EVENT_READ, key)

        self._do(register)

    def replica_ready(self, stage_id: int, replica_id: int) -> None:
        """A replica serves from now on, so its processes have the threads that they will have.

        Watches those as well: they end long before a process with much memory does.
        """
        key = (stage_id, replica_id)
        self._machine.replica_ready(stage_id, replica_id)

        def watch_threads() -> None:
            replica = self._replicas.get(key)
            for watched in replica.processes if replica is not None else ():
                for fd in open_thread_pidfds(watched.identity):
                    watched.threads.add(fd)
                    self._selector.register(fd, selectors.EVENT_READ, _Thread(fd, watched))

        self._do(watch_threads)

    def replica_closing(self, stage_id: int, replica_id: int) -> None:
        """From now on the end of this replica's processes is wanted, not a fault."""
        with self._lock:
            replica = self._replicas.get((stage_id, replica_id))
            if replica is not None:
                replica.closing = True

    def all_closing(self) -> None:
        """From now on the end of any stage process is wanted, not a fault."""
        with self._lock:
            self._closing_all = True

    @property
    def closing(self) -> bool:
        """Whether the service is being closed, so that nothing that ends is a fault any more."""
        return self._closing_all

    # ---- faults ----------------------------------------------------------------------------

    def report(self, fault: Fault) -> None:
        """Hand in the fault of a replica, from whoever learnt of it first.

        The first one loses the replica; later ones of the same replica go to the history, where
        a more telling one may still become the reason.
        """
        if fault.stage_id is None or fault.replica_id is None:
            self._machine.fault_noted(fault)
            return
        key = (fault.stage_id, fault.replica_id)
        with self._lock:
            replica = self._replicas.get(key)
            if replica is not None and fault in replica.faults:
                return  # stated on the queue and as last words: the same one
            if replica is not None:
                replica.faults.append(fault)
            known = replica is not None and replica.lost
            wanted = self._closing_all or (replica is not None and replica.closing and not known)
            if replica is not None and not wanted:
                replica.lost = True
        logger.error("[health] %s", fault.log_line())
        if fault.traceback:
            logger.error("[health] traceback of the fault above:\n%s", fault.traceback)
        if known or wanted:
            self._machine.fault_noted(fault)
        else:
            self._machine.replica_lost(key[0], key[1], fault)

    # ---- ending processes ------------------------------------------------------------------

    def kill_replica(self, stage_id: int, replica_id: int) -> None:
        """SIGKILL the process group of one replica; a no-op when nothing of it is left."""
        with self._lock:
            replica = self._replicas.get((stage_id, replica_id))
        if replica is not None:
            kill_group(replica.core)

    def kill_all(self, wait_s: float = 2.0) -> list[int]:
        """SIGKILL every replica's process group and wait for up to ``wait_s`` for their ends.

        Returns the pids that were alive. Blocks; not for an event loop's thread unless the
        process is ending anyway.
        """
        self.all_closing()
        killed = self.leftovers()
        with self._lock:
            cores = [replica.core for replica in self._replicas.values()]
        for core in cores:
            kill_group(core)
        await_ends(killed, wait_s)
        for core in cores:
            reap(core.pid)
        return killed

    def leftovers(self) -> list[int]:
        """Pids of stage processes that are still alive."""
        with self._lock:
            cores = [replica.core for replica in self._replicas.values()]
        alive: list[int] = []
        for core in cores:
            alive.extend(group_members(core.pid))
        return alive

    # ---- the thread ------------------------------------------------------------------------

    def _do(self, command: Callable[[], None]) -> None:
        self._commands.append(command)
        try:
            os.eventfd_write(self._wake_fd, 1)
        except OSError:
            # The thread has stopped and closed its descriptors.
            pass

    def _request_stop(self) -> None:
        self._stopped = True

    def _run(self) -> None:
        try:
            while not self._stopped:
                self._turn()
        except Exception:
            logger.exception("[health] the supervisor thread failed")
        finally:
            self._close()

    def _turn(self) -> None:
        timeout = None
        if self._judgements:
            timeout = max(0.0, min(due for due, _, _ in self._judgements) - time.monotonic())
        ready = self._selector.select(timeout)
        try:
            os.eventfd_read(self._wake_fd)
        except BlockingIOError:
            pass
        while self._commands:
            self._commands.popleft()()
        # What a process said comes before the fact that it has ended.
        for event, _ in ready:
            if isinstance(event.data, tuple):
                self._read_words(event.data)
        for event, _ in ready:
            if isinstance(event.data, _Thread):
                self._thread_ended(event.data)
        for event, _ in ready:
            if isinstance(event.data, _Watched):
                self._process_ended(event.data)
        now = time.monotonic()
        due = [entry for entry in self._judgements if entry[0] <= now]
        self._judgements = [entry for entry in self._judgements if entry[0] > now]
        for _, watched, status in due:
            self._judge(watched, status)

    def _read_words(self, key: ReplicaKey) -> None:
        replica = self._replicas.get(key)
        if replica is None or replica.words is None:
            return
        for words in replica.words.read():
            self._heard(key, replica, words)
        if replica.words.closed and replica.words.fd >= 0:
            self._selector.unregister(replica.words.fd)
            replica.words.close()

    def _heard(self, key: ReplicaKey, replica: _Replica, words: Words) -> None:
        if words.fault is not None:
            self.report(words.fault.with_context(stage_id=key[0], replica_id=key[1]))
        for worker in words.workers or ():
            identity = ProcessIdentity.of(worker.pid)
            pidfd = None if identity is None else open_pidfd(identity)
            if identity is None or pidfd is None or parent_pid(worker.pid) != replica.core.pid:
                # Ended before we looked: the engine core, its parent, tells why.
                if pidfd is not None:
                    os.close(pidfd)
                continue
            self._watch(_Watched(identity, pidfd, "worker", key, rank=worker.rank))

    def _watch(self, watched: _Watched) -> None:
        self._replicas[watched.key].processes.append(watched)
        self._selector.register(watched.pidfd, selectors.EVENT_READ, watched)

    def _unwatch(self, watched: _Watched) -> None:
        for fd in (watched.pidfd, *watched.threads):
            self._selector.unregister(fd)
            os.close(fd)
        watched.threads.clear()
        self._replicas[watched.key].processes.remove(watched)

    def _thread_ended(self, thread: _Thread) -> None:
        watched = thread.watched
        if thread.pidfd not in watched.threads:
            return  # closed by an event before this one
        self._selector.unregister(thread.pidfd)
        os.close(thread.pidfd)
        watched.threads.discard(thread.pidfd)
        status = exit_under_way(watched.identity)
        # Threads also end in processes that go on, and then there is no status.
        if status is not None:
            self._ending(watched, status)

    def _process_ended(self, watched: _Watched) -> None:
        status = peek_exit_status(watched.identity.pid)
        if status == ExitStatus() and watched.exit_status is not None:
            status = watched.exit_status()
        self._unwatch(watched)
        self._ending(watched, status)

    def _ending(self, watched: _Watched, status: ExitStatus) -> None:
        if watched.judged:
            return
        watched.judged = True
        self._read_words(watched.key)
        if watched.role == "engine core" and status.signal_number is None:
            # It ended by itself, so it may have said why, on a queue that is still being read.
            self._judgements.append((time.monotonic() + _MESSAGE_GRACE_S, watched, status))
            return
        self._judge(watched, status)

    def _judge(self, watched: _Watched, status: ExitStatus) -> None:
        with self._lock:
            replica = self._replicas.get(watched.key)
            expected = self._closing_all or replica is None or replica.closing or replica.lost
        if expected:
            logger.debug("[health] %s %s", watched.role, status.describe())
            return
        self.report(
            self._lost_fault(watched.key, watched.identity.pid, watched.role, watched.rank, status)
        )

    @staticmethod
    def _lost_fault(
        key: ReplicaKey, pid: int, role: str, rank: int | None, status: ExitStatus
    ) -> Fault:
        return process_lost(
            status.exit_code,
            message=f"{role} (pid {pid}) {status.describe()}",
            stage_id=key[0],
            replica_id=key[1],
            rank=rank,
            pid=pid,
            role=role,
        )

    def _close(self) -> None:
        for event in list(self._selector.get_map().values()):
            if isinstance(event.data, (_Watched, _Thread)):
                os.close(event.data.pidfd)
        for replica in self._replicas.values():
            if replica.words is not None:
                replica.words.close()
        self._selector.close()
        os.close(self._wake_fd)
