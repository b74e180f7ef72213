"""``vllm serve MODEL --omni`` with the health layer: checks first, then upstream's command,
then an exit status that says why.
"""

from __future__ import annotations

import errno
import logging
import os
import shutil
import tempfile
import threading
import time
import traceback
from pathlib import Path
from typing import Any, NoReturn

from vllm_omni.entrypoints.health_server import end_process
from vllm_omni.health import __version__, seams
from vllm_omni.health.classify import fault_from_exception, walk
from vllm_omni.health.faults import Fault
from vllm_omni.health.machine import State
from vllm_omni.health.reason import write_reason
from vllm_omni.health.runtime import HealthRuntime, set_current
from vllm_omni.health.settings import HealthSettings, SettingsError, load, variable

logger = logging.getLogger(__name__)

_PLAIN_STDERR = open(2, "w", encoding="utf-8", closefd=False)  # noqa: SIM115
"""Stderr without the process prefix that upstream writes in front of every line: what machines
read must be a whole line of JSON."""

_START_FAILED = 1
_UPSTREAM_UNWIND_S = 5.0
"""How long upstream may take to give up after a stage was lost during start-up and the others
were killed. Measured: 0.2 s."""


class BadInput(Exception):
    """Something the person who started the server can put right, in one line."""


def serve(args: Any) -> NoReturn:
    """Replaces upstream's ``serve`` command. Always ends by SystemExit."""
    try:
        settings = _settings(args)
        _check_deploy_file(args)
        _check_api_server_count(args)
        _check_fault_tolerance(args)
        seams.install_server()
    except (SettingsError, seams.SeamError, BadInput) as exc:
        _complain(exc)
        raise SystemExit(_START_FAILED) from None
    _prepare_environment()
    if getattr(args, "headless", False):
        _original_command()(args)
        raise SystemExit(0)
    logger.info("[health] vllm-omni-health %s: policy %s", __version__, settings.policy)
    runtime = HealthRuntime(settings)
    set_current(runtime)
    runtime.start()
    unwatch = runtime.machine.observe(lambda _move: _start_watch(runtime))
    status = _START_FAILED
    try:
        status = _run(args, runtime)
    finally:
        unwatch()
        _leave(runtime, status)
    raise SystemExit(status)


def _original_command() -> Any:
    return seams.original("vllm_omni.entrypoints.cli.serve:OmniServeCommand.cmd")


def _run(args: Any, runtime: HealthRuntime) -> int:
    """Run the server to its end; the exit status."""
    try:
        _original_command()(args)
    except SystemExit as exc:
        code = exc.code
        upstream_status = code if isinstance(code, int) else 0 if code is None else 1
    except KeyboardInterrupt:
        upstream_status = 130
    except BaseException as exc:
        return _failed(exc, args, runtime)
    else:
        upstream_status = 0
    fault = runtime.machine.reason
    if runtime.machine.snapshot.state is State.DEAD and fault is not None:
        return fault.kind.exit_status
    return upstream_status


def _failed(exc: BaseException, args: Any, runtime: HealthRuntime) -> int:
    """An exception ended upstream's command: before it served, or on its way out."""
    state = runtime.machine.snapshot.state
    reason = runtime.machine.reason
    if state is State.STARTING and isinstance(exc, OSError) and exc.errno == errno.EADDRINUSE:
        where = f"{getattr(args, 'host', None) or '0.0.0.0'}:{getattr(args, 'port', '?')}"
        _complain(f"cannot listen on {where}: the address is in use; choose another --port")
        runtime.machine.start_failed(fault_from_exception(exc, role="server"))
        return _START_FAILED
    settings_error = next((found for found in walk(exc) if isinstance(found, SettingsError)), None)
    if settings_error is not None:
        # Not known before upstream has resolved the deployment.
        _complain(settings_error)
        runtime.machine.start_failed(fault_from_exception(exc, role="server"))
        return _START_FAILED
    traceback.print_exception(exc)
    if not runtime.machine.snapshot.started:
        fault = reason or fault_from_exception(exc, role="server")
        if state is State.STARTING:
            runtime.machine.start_failed(fault)
        _complain(f"start-up failed: {_describe(fault)}")
        return _START_FAILED
    if state is State.DEAD and reason is not None:
        return reason.kind.exit_status
    return _START_FAILED


def _describe(fault: Fault) -> str:
    where = "" if fault.stage_id is None else f"stage {fault.stage_id} "
    where += "" if fault.replica_id is None else f"replica {fault.replica_id}: "
    return f"{where}{fault.kind.value}: {fault.message.splitlines()[0] if fault.message else ''}"


def _start_watch(runtime: HealthRuntime) -> None:
    """A stage died before the server was up: make sure that the start ends, whatever waits.

    Runs as an observer of the machine. The main loop is blocked by the start, and upstream can
    wait for minutes for a process that is gone.
    """
    snapshot = runtime.machine.snapshot
    if snapshot.state is not State.DEAD or snapshot.started:
        return

    def enforce() -> None:
        # What upstream waits for while it unwinds is gone then, and so is what would be left.
        runtime.supervisor.kill_all()
        if _LEAVING.wait(_UPSTREAM_UNWIND_S):
            return
        fault = runtime.machine.reason
        _complain(f"start-up failed: {_describe(fault) if fault else 'a stage is gone'}")
        _leave(runtime, _START_FAILED)
        end_process(_START_FAILED)

    threading.Thread(target=enforce, name="health-start-watch", daemon=True).start()


_LEAVING = threading.Event()


def _leave(runtime: HealthRuntime, status: int) -> None:
    """State the reason, end what is left, and make sure that the interpreter does end."""
    if _LEAVING.is_set():
        return
    _LEAVING.set()
    left = runtime.supervisor.kill_all()
    if left:
        logger.error("[health] killed stage processes that were left: %s", left)
    runtime.stop()
    if _socket_folder is not None:
        shutil.rmtree(_socket_folder, ignore_errors=True)
    fault = runtime.machine.reason if status != 0 else None
    write_reason(fault, status, runtime.settings.termination_log, _PLAIN_STDERR)

    runtime.begin_shutdown()

    def enforce() -> None:
        time.sleep(min(_INTERPRETER_EXIT_S, runtime.shutdown_left()))
        end_process(status)

    threading.Thread(target=enforce, name="health-exit-watch", daemon=True).start()


_INTERPRETER_EXIT_S = 5.0
"""How long the interpreter may take to end after the last of our work: stuck executor threads
and child processes that are joined at exit can hold it up for ever."""


_SOCKET_BASE = "VLLM_RPC_BASE_PATH"
"""vLLM's variable for the folder in which ZMQ's socket files are made."""

_socket_folder: str | None = None


def _prepare_environment() -> None:
    """Upstream's own switches, set to what the layer needs; a value that is set stays."""
    # Upstream's loops then wait for data instead of looking every millisecond.
    os.environ.setdefault("VLLM_OMNI_EVENT_DRIVEN_ORCH", "1")
    # Upstream would stop the HTTP server by itself as soon as the orchestrator has ended, in
    # the middle of the grace in which the reason is to be read. The end is ours to conduct.
    os.environ.setdefault("VLLM_KEEP_ALIVE_ON_ENGINE_DEATH", "1")
    # Socket files of processes that were killed stay behind. In a folder of this server's own
    # they can be removed with it.
    global _socket_folder
    _socket_folder = tempfile.mkdtemp(prefix="vllm-omni-", dir=os.environ.get(_SOCKET_BASE))
    os.environ[_SOCKET_BASE] = _socket_folder


# ---- checks before anything is started -----------------------------------------------------


_CLOSING_S = 30
"""Seconds for closing everything after a drain whose length vLLM's option sets."""


def _settings(args: Any) -> HealthSettings:
    """The settings; takes the ``health`` key out of ``--additional-config``, because what stays
    in there enters the stages' compile-cache hash."""
    additional = getattr(args, "additional_config", None)
    argument = additional.pop("health", None) if isinstance(additional, dict) else None
    drain = getattr(args, "shutdown_timeout", None)
    if drain and argument is None and not os.environ.get(variable("drain_timeout_s")):
        # vLLM's own option for the same thing, where nothing of ours says otherwise.
        argument = {"drain_timeout_s": drain}
        if not os.environ.get(variable("shutdown_timeout_s")):
            argument["shutdown_timeout_s"] = drain + _CLOSING_S
    return load(argument)


def _check_deploy_file(args: Any) -> None:
    name = getattr(args, "deploy_config", None)
    if not name:
        return
    from vllm_omni.config.stage_config import _DEPLOY_DIR

    candidates = [Path(name), Path(_DEPLOY_DIR) / name]
    if not any(path.is_file() for path in candidates):
        raise BadInput(f"--deploy-config {name}: no such file (also not in {_DEPLOY_DIR})")


def _check_fault_tolerance(args: Any) -> None:
    if getattr(args, "enable_fault_tolerance", False):
        raise BadInput(
            "--enable-fault-tolerance: vLLM then holds faults back for a recovery of its own, so "
            "they would not reach the health layer; drop the option, or use "
            "VLLM_OMNI_HEALTH=off to run without the layer"
        )


def _check_api_server_count(args: Any) -> None:
    count = getattr(args, "api_server_count", None) or 1
    if count > 1:
        raise BadInput(
            f"--api-server-count {count}: the health layer supports one API server process so "
            "far; use 1, or VLLM_OMNI_HEALTH=off to run without the layer"
        )


def _complain(what: object) -> None:
    print(f"vllm serve --omni: {what}", file=_PLAIN_STDERR, flush=True)
