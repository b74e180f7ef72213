# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-omni-health project
"""What systemd is told of the server's state, by the protocol of sd_notify(3).

One datagram a message, to a socket whose name is in the environment. Done here rather than by a
library: those there are block when nobody reads the socket, and the caller is the supervisor's
thread, or whoever moved the state.
"""

from __future__ import annotations

import os
import socket
import threading
from collections.abc import Callable, MutableMapping
from typing import Any

from vllm_omni.health.faults.fault import one_line
from vllm_omni.health.state.machine import HealthMachine
from vllm_omni.health.state.values import Snapshot

_SOCKET = "NOTIFY_SOCKET"
_WATCHDOG_USEC = "WATCHDOG_USEC"
_WATCHDOG_PID = "WATCHDOG_PID"

_FLUSH_S = 0.5
"""How often what did not fit into the socket is tried again. Linux lets ten messages wait in one
(net.unix.max_dgram_qlen, unix(7)); one that was lost, such as READY, would end the server."""

_KEPT = 32
"""Messages that may wait here."""


class ServiceManager:
    """The service manager that waits for news of this process. Thread-safe, never blocks.

    ``address``: of its socket; ``@`` stands for the zero byte of Linux's abstract names.
    ``watchdog_s``: the time within which it wants to hear that all is well; None if it does not.
    """

    def __init__(self, address: str, watchdog_s: float | None = None) -> None:
        self.watchdog_s = watchdog_s
        self._address = "\0" + address[1:] if address.startswith("@") else address
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_CLOEXEC)
        self._socket.setblocking(False)
        self._lock = threading.Lock()
        self._unsent: list[str] = []
        self._ready = False
        self._stopping = False
        self._status = ""

    @classmethod
    def of_this_process(
        cls, environ: MutableMapping[str, str] = os.environ
    ) -> ServiceManager | None:
        """The one that the environment names; None where there is none.

        Takes its variables out of the environment: child processes are not what it waits for.
        """
        address = environ.pop(_SOCKET, "")
        usec, pid = environ.pop(_WATCHDOG_USEC, ""), environ.pop(_WATCHDOG_PID, "")
        if address[:1] not in ("/", "@"):
            return None
        mine = not pid or pid == str(os.getpid())
        watchdog_s = int(usec) / 1e6 if usec.isdigit() and int(usec) > 0 and mine else None
        return cls(address, watchdog_s)

    def follow(
        self,
        machine: HealthMachine,
        every: Callable[[float, Callable[[], object]], object],
        well: Callable[[], bool],
    ) -> None:
        """Tell of every move of the machine, and, while all is ``well``, that it is.

        ``every``: has something called periodically, on a thread that no event loop can block.
        """

        def tell_status(_move: Any = None) -> None:
            self._tell_status(machine.snapshot)

        def beat() -> None:
            if well():
                self._send("WATCHDOG=1", keep=False)

        def flush() -> None:
            with self._lock:
                self._flush()

        machine.observe(tell_status)
        tell_status()
        every(_FLUSH_S, flush)
        if self.watchdog_s is not None:
            # Half of the time is what sd_watchdog_enabled(3) recommends.
            every(self.watchdog_s / 2, beat)

    def ready(self) -> None:
        """The server listens; said once, however often this is called."""
        if not self._ready:
            self._ready = True
            self._send("READY=1")

    def _tell_status(self, snapshot: Snapshot) -> None:
        words = [snapshot.state.value]
        if snapshot.draining:
            words.append("draining")
        if snapshot.fault is not None:
            stage = snapshot.fault.stage_id
            words += [f"stage {stage}"] if stage is not None else []
            words.append(snapshot.fault.kind.sentence)
        status = one_line(": ".join(words))
        if status != self._status:
            self._status = status
            self._send(f"STATUS={status}")
        if snapshot.draining and not self._stopping:
            self._stopping = True
            self._send("STOPPING=1")

    def _send(self, message: str, *, keep: bool = True) -> None:
        """Send now, or, when it is to be kept, as soon as there is room for it."""
        with self._lock:
            if not self._flush() or not self._sent(message):
                self._unsent += [message] if keep else []
                del self._unsent[:-_KEPT]

    def _flush(self) -> bool:
        """Send what was left; whether all of it is sent. The lock is held."""
        while self._unsent and self._sent(self._unsent[0]):
            self._unsent.pop(0)
        return not self._unsent

    def _sent(self, message: str) -> bool:
        try:
            self._socket.sendto(message.encode(), self._address)
        except BlockingIOError:
            return False
        except OSError:
            # Nobody is there: no reason to do anything else than serve.
            pass
        return True
