# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-omni-health project
"""The supervisor: a thread that sees what no message can tell.

It waits on pidfds and last-words pipes, and looks at the server's event loops from time to time,
so no stuck loop keeps it from moving the health state. It also owns the list of what is ours to
end: one process group per replica.
"""

from __future__ import annotations

import collections
import logging
import os
import selectors
import threading
import time
from collections.abc import Callable
from pathlib import Path

from vllm_omni.health.faults.fault import Fault
from vllm_omni.health.processes.cgroups import OomKills
from vllm_omni.health.processes.judge import Judge
from vllm_omni.health.processes.last_words import LastWordsReader, Words
from vllm_omni.health.processes.pidfd import open_thread_pidfds, thread_exit_status
from vllm_omni.health.processes.process import (
    ExitStatus,
    ProcessIdentity,
    adopts_orphans,
    exit_under_way,
    peek_exit_status,
    reap_adopted,
)
from vllm_omni.health.processes.shared_memory import remove_names
from vllm_omni.health.processes.timers import Timers
from vllm_omni.health.processes.watched import (
    Replica,
    WatchedProcess,
    WatchedThread,
    WatchedWords,
    end_all,
    lost_fault,
    open_watch,
)
from vllm_omni.health.state.machine import HealthMachine
from vllm_omni.health.state.values import ReplicaKey

logger = logging.getLogger(__name__)

_ADOPTED_S = (0.5, 5.0)
"""How many seconds after the end of a stage's process its children are reaped, where this process
adopts orphans, as pid 1 of a container does. They are killed when their parent ends: at the first
time they are gone as a rule, at the second so are those that end slowly."""


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
        self._replicas: dict[ReplicaKey, Replica] = {}
        self._closing_all = False
        self._stopped = False
        self._timers = Timers()
        self._next_s: float | None = None
        self._judge = Judge(
            self._timers,
            self.report,
            stopping=self._is_stopping,
            closing=self._is_closing,
            listen=self._listen,
        )
        self._adopts = adopts_orphans()
        # Touched on the thread only, as is what it holds.
        self._oom_kills: dict[Path, OomKills] = {}
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

    def every(self, period_s: float, call: Callable[[], object]) -> None:
        """Call ``call`` on the thread every ``period_s`` seconds; it must be quick."""
        self._do(lambda: self._timers.every(period_s, call))

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
        watched = self._find(key, pid, "engine core", None, exit_status, words)
        if watched is not None:
            with self._lock:
                self._replicas[key] = Replica(core=watched.identity)
            self._do(lambda: self._register(watched, words))

    def watch_inline(self, stage_id: int, replica_id: int) -> None:
        """A replica without a process of its own: it runs in this one, and is never killed."""
        own = ProcessIdentity.of(os.getpid())
        assert own is not None, "this process exists"
        self._machine.expect_replica(stage_id, replica_id, own.pid)
        with self._lock:
            self._replicas[(stage_id, replica_id)] = Replica(core=own, inline=True)

    def watch_worker(
        self,
        stage_id: int,
        replica_id: int,
        rank: int,
        pid: int,
        *,
        words: LastWordsReader | None = None,
        exit_status: Callable[[], ExitStatus] | None = None,
    ) -> None:
        """Watch a worker of an inline replica: a child of this process, just spawned."""
        watched = self._find((stage_id, replica_id), pid, "worker", rank, exit_status, words)
        if watched is not None:
            with self._lock:
                self._replicas[watched.key].workers.append(watched.identity)
            self._do(lambda: self._register(watched, words))

    def _find(
        self,
        key: ReplicaKey,
        pid: int,
        role: str,
        rank: int | None,
        exit_status: Callable[[], ExitStatus] | None,
        words: LastWordsReader | None,
    ) -> WatchedProcess | None:
        """The process to watch; None, and its loss reported, when it has ended already."""
        watched = open_watch(key, pid, role, rank, exit_status)
        if watched is not None:
            return watched
        status = exit_status() if exit_status is not None else ExitStatus()
        self.report(lost_fault(key, pid, role, rank, status))
        if words is not None:
            words.close()
        return None

    def replica_ready(self, stage_id: int, replica_id: int) -> None:
        """A replica serves from now on, so its processes have the threads that they will have.

        Watches those as well: they end long before a process with much memory does. Shared memory
        is mapped by all who will use it, so its names can go.
        """
        key = (stage_id, replica_id)
        self._machine.replica_ready(stage_id, replica_id)

        def watch_threads() -> None:
            replica = self._replicas.get(key)
            for watched in replica.processes if replica is not None else ():
                remove_names(watched.identity.pid)
                for fd in open_thread_pidfds(watched.identity):
                    watched.threads.add(fd)
                    self._selector.register(fd, selectors.EVENT_READ, WatchedThread(fd, watched))

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
            if replica is not None and replica.knows(fault):
                return  # stated on the queue and as last words: the same one
            if replica is not None:
                replica.faults.append(fault)
            known = replica is not None and replica.lost
            wanted = self._closing_all or (replica is not None and replica.closing and not known)
            if replica is not None and not wanted:
                replica.lost = True
        # The machine first: whoever reads the log may be slow.
        if known or wanted:
            self._machine.fault_noted(fault)
        else:
            self._machine.replica_lost(key[0], key[1], fault)
        logger.error("[health] %s", fault.log_line())
        if fault.traceback:
            logger.error("[health] traceback of the fault above:\n%s", fault.traceback)

    # ---- ending processes ------------------------------------------------------------------

    def kill_replica(self, stage_id: int, replica_id: int) -> None:
        """SIGKILL all processes of one replica; a no-op when nothing of it is left."""
        replica = self.replica(stage_id, replica_id)
        if replica is not None:
            replica.kill()

    def kill_all(self, wait_s: float = 2.0) -> list[int]:
        """SIGKILL every replica's processes and wait for up to ``wait_s`` for their ends.

        Returns the pids that were alive. Blocks; not for an event loop's thread unless the
        process is ending anyway.
        """
        self.all_closing()
        return end_all(self._all(), wait_s)

    def _all(self) -> list[Replica]:
        with self._lock:
            return list(self._replicas.values())

    def replica(self, stage_id: int, replica_id: int) -> Replica | None:
        """What is known of one replica, to be read only; None when it was never started here."""
        with self._lock:
            return self._replicas.get((stage_id, replica_id))

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
        ready = self._selector.select(self._next_s)
        if any(event.data is None for event, _ in ready):
            os.eventfd_read(self._wake_fd)
        while self._commands:
            self._commands.popleft()()
        # What a process said comes before the fact that it has ended.
        for event, _ in ready:
            if isinstance(event.data, WatchedWords):
                self._read_words(event.data)
        for event, _ in ready:
            if isinstance(event.data, WatchedThread):
                self._thread_ended(event.data)
        for event, _ in ready:
            if isinstance(event.data, WatchedProcess):
                self._process_ended(event.data)
        self._next_s = self._timers.run()

    def _register(self, watched: WatchedProcess, words: LastWordsReader | None) -> None:
        self._watch(watched)
        if words is not None:
            pipe = WatchedWords(watched.key, words)
            self._replicas[watched.key].words.append(pipe)
            self._selector.register(words.fd, selectors.EVENT_READ, pipe)

    def _read_words(self, pipe: WatchedWords) -> None:
        replica = self._replicas.get(pipe.key)
        if replica is None or pipe not in replica.words:
            return
        for words in pipe.reader.read():
            self._heard(pipe.key, replica, words)
        if pipe.reader.closed:
            replica.words.remove(pipe)
            self._selector.unregister(pipe.reader.fd)
            pipe.reader.close()

    def _heard(self, key: ReplicaKey, replica: Replica, words: Words) -> None:
        if words.progress:
            replica.progressed_at = time.monotonic()
        if words.fault is not None:
            self.report(words.fault.with_context(stage_id=key[0], replica_id=key[1]))
        if words.told is not None:
            for process in list(replica.processes):
                if process.identity.pid == words.told.pid:
                    self._judge.told_to_stop(replica, process, words.told.signum)
        for worker in words.workers or ():
            # One that has ended before we look: the engine core, its parent, tells why.
            watched = open_watch(key, worker.pid, "worker", worker.rank, parent=replica.core.pid)
            if watched is not None:
                self._watch(watched)

    def _is_stopping(self) -> bool:
        return self._closing_all or self._machine.snapshot.draining

    def _is_closing(self, replica: Replica) -> bool:
        with self._lock:
            return self._closing_all or replica.closing

    def _listen(self, replica: Replica, ending: WatchedProcess) -> None:
        # Dozens end now, one after another, and the loops need the interpreter to answer.
        self._unwatch_threads(ending)
        for pipe in list(replica.words):
            self._read_words(pipe)

    def _watch(self, watched: WatchedProcess) -> None:
        counter = watched.oom_kills
        if counter is not None:
            watched.oom_kills = self._oom_kills.setdefault(counter.file, counter)
        self._replicas[watched.key].processes.append(watched)
        self._selector.register(watched.pidfd, selectors.EVENT_READ, watched)

    def _unwatch(self, watched: WatchedProcess) -> None:
        self._unwatch_threads(watched)
        self._selector.unregister(watched.pidfd)
        os.close(watched.pidfd)
        self._replicas[watched.key].processes.remove(watched)

    def _unwatch_threads(self, watched: WatchedProcess) -> None:
        while watched.threads:
            fd = watched.threads.pop()
            self._selector.unregister(fd)
            os.close(fd)

    def _thread_ended(self, thread: WatchedThread) -> None:
        watched = thread.watched
        if thread.pidfd not in watched.threads:
            return  # closed by an event before this one
        status = thread_exit_status(thread.pidfd)
        self._selector.unregister(thread.pidfd)
        os.close(thread.pidfd)
        watched.threads.discard(thread.pidfd)
        # A signal ends all threads of a process. Otherwise they also end in processes that go
        # on, with 0, and the process has the last word.
        if status is None or status.code:
            status = exit_under_way(watched.identity)
        if status is not None and status != ExitStatus(code=0):
            self._judge.ending(self._replicas[watched.key], watched, status)

    def _process_ended(self, watched: WatchedProcess) -> None:
        status = peek_exit_status(watched.identity.pid)
        if status == ExitStatus() and watched.exit_status is not None:
            status = watched.exit_status()
        self._unwatch(watched)
        if self._adopts:
            # What it leaves behind is a child of ours by now, or soon will be.
            for seconds in _ADOPTED_S:
                self._timers.after(seconds, self._reap_adopted)
        self._judge.ending(self._replicas[watched.key], watched, status)

    def _reap_adopted(self) -> None:
        reap_adopted({one.core.pid for one in self._all() if not one.inline})

    def _close(self) -> None:
        for event in list(self._selector.get_map().values()):
            if isinstance(event.data, (WatchedProcess, WatchedThread)):
                os.close(event.data.pidfd)
            elif isinstance(event.data, WatchedWords):
                event.data.reader.close()
        self._selector.close()
        os.close(self._wake_fd)
