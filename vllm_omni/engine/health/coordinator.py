# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-omni-health project
"""Upstream's coordinator of stages on several hosts: a process forked from the server's.

Forked, it inherits the server's signal handlers, and nothing ends it with the server. Without it
every remote stage counts as lost, so a signal that everybody gets must not end it either.
"""

from __future__ import annotations

import os
import signal
import threading
from typing import Any

from vllm_omni.health import seams

from vllm_omni_health.bootstrap import set_death_signal

_TARGET = "vllm_omni.distributed.omni_coordinator.runtime:run_omni_coordinator_proc"


def run_coordinator(
    router_zmq_addr: str, pub_zmq_addr: str, heartbeat_timeout: float, ready_pipe: Any
) -> None:
    """Process target: upstream's, which ends by its server's SIGTERM, or with the server."""
    set_death_signal()
    server = os.getppid()
    for signum in (signal.SIGINT, signal.SIGHUP):
        signal.signal(signum, signal.SIG_IGN)
    # In all threads, so that it waits for the one that can see who sent it.
    signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGTERM])
    threading.Thread(target=_obey, args=(server,), name="health-obey", daemon=True).start()
    seams.original(_TARGET)(router_zmq_addr, pub_zmq_addr, heartbeat_timeout, ready_pipe)


def _obey(server: int) -> None:
    while signal.sigwaitinfo([signal.SIGTERM]).si_pid != server:
        pass
    os._exit(0)
