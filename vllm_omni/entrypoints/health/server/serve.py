# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-omni-health project
"""``vllm serve MODEL --omni`` with the health layer: checks first, then upstream's command,
then an exit status that says why.
"""

from __future__ import annotations

import asyncio
import errno
import logging
import os
import traceback
from functools import partial
from typing import Any, NoReturn

import uvloop
from vllm_omni.entrypoints.health.server import deployment, signals
from vllm_omni.entrypoints.health.server.arguments import BadInput, BadUsage, checked_settings
from vllm_omni.entrypoints.health.server.exit import (
    end_now,
    leave,
    make_socket_folder,
    remove_socket_folder,
)
from vllm_omni.entrypoints.health.server.start import START_FAILED, StartGuard, describe
from vllm_omni.entrypoints.health.server.systemd import ServiceManager
from vllm_omni.health import __version__, seams
from vllm_omni.health.faults import table as fault_table
from vllm_omni.health.faults.classify import fault_from_exception, walk
from vllm_omni.health.memory.preflight import PreflightError, before_start
from vllm_omni.health.runtime import HealthRuntime, set_current
from vllm_omni.health.state.causes import FAILED_START
from vllm_omni.health.state.machine import State

from vllm_omni_health.console import complain
from vllm_omni_health.exit_line import line_without_fault, write_line
from vllm_omni_health.refusal import note_refusal, refuse
from vllm_omni_health.settings.sources import SettingsError
from vllm_omni_health.text import one_line
from vllm_omni_health.upstream import UpstreamError

logger = logging.getLogger(__name__)


def serve(args: Any) -> NoReturn:
    """Takes the place of upstream's ``serve`` command. Always ends by SystemExit."""
    try:
        settings = checked_settings(args)
        deployment.check(args)
        # Child processes have no command line of ours.
        os.environ.update(settings.to_environ())
        fault_table.use(fault_table.table_with(settings.fault_classes))
        seams.install_server()
        make_socket_folder()
    except (SettingsError, UpstreamError, BadInput) as exc:
        refuse(exc, getattr(exc, "exit_status", START_FAILED))
    _set_upstream_switches()
    signals.start_resource_tracker()
    # The orchestrator's thread makes a loop of its own; the API server's is uvloop's already.
    asyncio.set_event_loop_policy(uvloop.EventLoopPolicy())
    if getattr(args, "headless", False):
        _serve_headless(args)
    logger.info("[health] vllm-omni-health %s: policy %s", __version__, settings.policy)
    runtime = HealthRuntime(settings, ServiceManager.of_this_process())
    try:
        before_start(runtime.memory, settings.preflight)
    except PreflightError as exc:
        complain(exc)
        remove_socket_folder()
        write_line(line_without_fault(START_FAILED), settings.termination_log, None)
        raise SystemExit(START_FAILED) from None
    set_current(runtime)
    runtime.end_by_force = partial(end_now, runtime)
    runtime.start()
    status = START_FAILED
    try:
        with StartGuard(runtime):
            status = _run(args, runtime)
    finally:
        leave(runtime, status)
    raise SystemExit(status)


def validate(self: Any, args: Any) -> None:
    """Replaces upstream's look at the options, which ends in a traceback for what it refuses.

    It is the last thing that upstream does before it calls the command.
    """
    original = seams.original("vllm_omni.entrypoints.cli.serve:OmniServeCommand.validate")
    try:
        deployment.check_model(args)
        original(self, args)
        args.dispatch_function = serve
    except BadInput as exc:
        refuse(exc, exc.exit_status)
    except ValueError as exc:
        refuse(one_line(str(exc)), BadUsage.exit_status)


def error(self: Any, message: str) -> NoReturn:
    """Replaces what the argument parser does with an option that makes no sense."""
    note_refusal(BadUsage.exit_status)
    seams.original("vllm_omni.utils.tracking_parser:TrackingArgumentParser.error")(self, message)
    raise SystemExit(BadUsage.exit_status)  # never: the original ends the process


def _serve_headless(args: Any) -> NoReturn:
    """A host with stages alone: its server is elsewhere, and with it the health state."""
    signals.hang_up_as_sigterm()
    try:
        _original_command()(args)
    finally:
        remove_socket_folder()
    raise SystemExit(0)


def _original_command() -> Any:
    from vllm_omni.entrypoints.cli.serve import OmniServeCommand

    return OmniServeCommand.cmd


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
        complain(f"cannot listen on {where}: the address is in use; choose another --port")
        runtime.machine.arise(FAILED_START, fault_from_exception(exc, role="server"))
        return START_FAILED
    wrong = (SettingsError, PreflightError, BadInput)
    told: object = next((found for found in walk(exc) if isinstance(found, wrong)), None)
    if told is None and state is State.STARTING and not runtime.machine.snapshot.stages:
        # Before there was a stage, upstream was busy with what it is to serve.
        told = deployment.explain(exc, args)
    if told is not None:
        # Not known before upstream has resolved the deployment, or started its stages.
        complain(told)
        runtime.machine.arise(FAILED_START, fault_from_exception(exc, role="server"))
        return START_FAILED
    traceback.print_exception(exc)
    if not runtime.machine.snapshot.started:
        fault = reason or fault_from_exception(exc, role="server")
        if state is State.STARTING:
            runtime.machine.arise(FAILED_START, fault)
        complain(f"start-up failed: {describe(fault)}")
        return START_FAILED
    if state is State.DEAD and reason is not None:
        return reason.kind.exit_status
    return START_FAILED


def _set_upstream_switches() -> None:
    """Upstream's own switches, set to what the layer needs; a value that is set stays."""
    # Upstream's loops then wait for data instead of looking every millisecond.
    os.environ.setdefault("VLLM_OMNI_EVENT_DRIVEN_ORCH", "1")
    # Upstream would stop the HTTP server by itself as soon as the orchestrator has ended, in
    # the middle of the grace in which the reason is to be read. The end is ours to conduct.
    os.environ.setdefault("VLLM_KEEP_ALIVE_ON_ENGINE_DEATH", "1")
