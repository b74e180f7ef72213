# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-omni-health project
"""The server process's last steps: end what is left, state the reason, end for sure."""

from __future__ import annotations

import contextlib
import logging
import os
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import NoReturn

import zmq
from vllm_omni.entrypoints.health.server.arguments import BadInput
from vllm_omni.health.faults.exit_line import write_exit_line
from vllm_omni.health.faults.fault import Fault
from vllm_omni.health.processes import left_behind
from vllm_omni.health.runtime import HealthRuntime
from vllm_omni.health.state.machine import State

from vllm_omni_health.console import plain_stderr

logger = logging.getLogger(__name__)

_INTERPRETER_EXIT_S = 5.0
"""How long the interpreter may take to end after the last of our work: stuck executor threads
and child processes that are joined at exit can hold it up for ever."""

_SOCKET_BASE = "VLLM_RPC_BASE_PATH"
"""vLLM's variable for the folder in which ZMQ's socket files are made."""

_LONGEST_SOCKET_NAME = "x" * 36
"""As long as a UUID, which is what vLLM names its socket files with."""

_leaving = threading.Event()
_socket_folder: str | None = None


def make_socket_folder() -> None:
    """Have socket files made in a folder of this server's own, and remove those of dead servers.

    Those of processes that were killed stay behind, and nothing else says whose they were.
    A base folder so long that a name in ours would not fit, while vLLM's own still do, is left as
    it is. Raises BadInput when nothing can be made there, or no name would fit.
    """
    global _socket_folder
    variable, base = _socket_base()
    if not _fits(base):
        raise BadInput(
            f"{variable}: sockets cannot be made in {base}: with {len(_LONGEST_SOCKET_NAME)} for "
            f"the name of a file, the path has more than {zmq.IPC_PATH_MAX_LEN} bytes; set "
            f"{_SOCKET_BASE} to a folder with a shorter name"
        )
    swept = left_behind.sweep(Path(base))
    if swept:
        logger.warning("[health] removed what dead servers have left: %s", ", ".join(swept))
    try:
        folder = tempfile.mkdtemp(prefix=left_behind.SERVERS_FOLDER, dir=base)
        if _fits(folder):
            left_behind.hold(Path(folder))
    except OSError as exc:
        raise BadInput(
            f"{variable}: no folder for socket files can be made in {base}: {exc.strerror}",
        ) from None
    if not _fits(folder):
        os.rmdir(folder)
        logger.warning(
            "[health] %s is too long a folder for socket files of this server's own; those of "
            "processes that are killed will stay behind there (set %s to a shorter one)",
            base,
            _SOCKET_BASE,
        )
        return
    _socket_folder = folder
    os.environ[_SOCKET_BASE] = folder


def _socket_base() -> tuple[str, str]:
    """The folder for socket files, and the variable that says so. Raises BadInput."""
    base = os.environ.get(_SOCKET_BASE)
    if base:
        return _SOCKET_BASE, base
    try:
        base = tempfile.gettempdir()
    except OSError as exc:  # its text names all the folders that were tried
        raise BadInput(f"TMPDIR: {exc.strerror}") from None
    # In the order in which tempfile asks for them.
    named = (name for name in ("TMPDIR", "TEMP", "TMP") if os.environ.get(name))
    return next(named, "TMPDIR"), base


def _fits(folder: str) -> bool:
    path = os.path.join(folder, _LONGEST_SOCKET_NAME)
    return len(os.fsencode(path)) <= zmq.IPC_PATH_MAX_LEN


def remove_socket_folder() -> None:
    """Remove the folder with all that is in it; harmless when there is none."""
    if _socket_folder is not None:
        left_behind.remove_folder(Path(_socket_folder))


def wait_leaving(timeout_s: float) -> bool:
    """Wait until the process is on its last steps; whether it is."""
    return _leaving.wait(timeout_s)


def leave(runtime: HealthRuntime, status: int) -> None:
    """State the reason, end what is left, and make sure that the interpreter does end.

    Only the first call does anything. Blocks for up to two seconds.
    """
    if _leaving.is_set():
        return
    _leaving.set()
    runtime.begin_shutdown()
    left = runtime.supervisor.kill_all()
    if left:
        logger.error("[health] killed stage processes that were left: %s", left)
    runtime.stop()
    remove_socket_folder()
    state_exit(runtime, status)

    def enforce() -> None:
        time.sleep(min(_INTERPRETER_EXIT_S, runtime.shutdown_left()))
        end_process(status)

    threading.Thread(target=enforce, name="health-exit-watch", daemon=True).start()


def state_exit(runtime: HealthRuntime, status: int) -> None:
    """Write why the server ends with ``status``, to stderr and to the termination log."""
    fault = _stated_fault(runtime, status)
    write_exit_line(fault, status, runtime.settings.termination_log, plain_stderr())


def note_exit(runtime: HealthRuntime) -> None:
    """Write the fault of a service that is dead to the termination log, before the end.

    Whoever kills the server in its grace, or while it holds, has the reason then.
    """
    fault = runtime.machine.reason
    if fault is not None:
        write_exit_line(fault, fault.kind.exit_status, runtime.settings.termination_log, None)


def _stated_fault(runtime: HealthRuntime, status: int) -> Fault | None:
    """The fault that explains this status. A start that fails for want of a free port, say, is
    nothing that an engine did, and only its own line can tell."""
    fault = runtime.machine.reason
    started = runtime.machine.snapshot.started
    if status == 0 or fault is None or (not started and fault.stage_id is None):
        return None
    return fault


def end_now(runtime: HealthRuntime) -> NoReturn:
    """End this process with all that belongs to its end, and wait for no thread of it.

    On any thread. The status is the fault's, or 0 where there is none.
    """
    fault = runtime.machine.reason
    dead = runtime.machine.snapshot.state is State.DEAD
    status = fault.kind.exit_status if dead and fault is not None else 0
    leave(runtime, status)
    end_process(status)


def end_process(status: int) -> NoReturn:
    """End this process now, with its output flushed and nothing else run."""
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(Exception):
            stream.flush()
    logging.shutdown()
    os._exit(status)
