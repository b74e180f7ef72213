# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-omni-health project
"""What is looked at before anything is started: settings, and options that cannot work."""

from __future__ import annotations

import errno
import json
import os
import socket
from typing import Any

from vllm_omni.health.faults.plugins import from_plugins

from vllm_omni_health.settings.fault_classes import FaultClassError
from vllm_omni_health.settings.model import HealthSettings, variable
from vllm_omni_health.settings.sources import load

_CLOSING_S = 30
"""Seconds for closing everything after a drain whose length vLLM's option sets."""

_LONGEST_DRAIN_S = 86400 - _CLOSING_S
"""What leaves ``shutdown_timeout_s`` within its own bounds."""


class BadInput(Exception):
    """Something the person who started the server can put right, in one line."""

    exit_status = 1


class BadUsage(BadInput):
    """An option of the command line that makes no sense, as argparse would have found it."""

    exit_status = 2


def checked_settings(args: Any) -> HealthSettings:
    """The settings in force, with every check on the command line passed.

    Raises BadInput or SettingsError for the first thing that is wrong.
    """
    settings = _with_plugins(_settings(args))
    _check_termination_log(settings)
    _check_port(args)
    _check_host(args)
    _check_api_server_count(args)
    _check_fault_tolerance(args)
    _check_queue(args)
    return settings


def _settings(args: Any) -> HealthSettings:
    """Takes the ``health`` key out of ``--additional-config``, because what stays in there enters
    the stages' compile-cache hash."""
    additional = getattr(args, "additional_config", None)
    if isinstance(additional, str):
        try:
            additional = args.additional_config = json.loads(additional)
        except ValueError as exc:
            raise BadUsage(f"--additional-config {additional}: not JSON: {exc}") from None
    if additional is not None and not isinstance(additional, dict):
        raise BadUsage(f"--additional-config {json.dumps(additional)}: must be a JSON object")
    argument = additional.pop("health", None) if isinstance(additional, dict) else None
    if argument is not None and not isinstance(argument, dict):
        raise BadInput(f"--additional-config: health must be a JSON object, not {argument!r}")
    return load(_with_vllms_drain(args, argument))


def _with_vllms_drain(args: Any, argument: dict[str, Any] | None) -> dict[str, Any] | None:
    """vLLM's own option for the time to drain, where nothing of ours says otherwise.

    Taken out of the command line: upstream knows no stage that it could be for.
    """
    drain = getattr(args, "shutdown_timeout", None)
    if not drain:
        return argument
    args.shutdown_timeout = None
    given = argument or {}
    if "drain_timeout_s" in given or os.environ.get(variable("drain_timeout_s")):
        return argument
    if not 0 < drain <= _LONGEST_DRAIN_S:
        raise BadUsage(f"--shutdown-timeout {drain}: must be from 0 to {_LONGEST_DRAIN_S}")
    if "shutdown_timeout_s" in given or os.environ.get(variable("shutdown_timeout_s")):
        allowed = load(argument).shutdown_timeout_s
        if drain >= allowed:
            raise BadInput(
                f"--shutdown-timeout {drain}: must be below shutdown_timeout_s={allowed:g}, "
                "which includes draining"
            )
        return {**given, "drain_timeout_s": drain}
    return {**given, "drain_timeout_s": drain, "shutdown_timeout_s": drain + _CLOSING_S}


def _with_plugins(settings: HealthSettings) -> HealthSettings:
    """The same settings with the exception classes that plugins name; a setting's own win."""
    try:
        named = from_plugins()
    except FaultClassError as exc:
        raise BadInput(exc) from None
    return settings.model_copy(update={"fault_classes": {**named, **settings.fault_classes}})


def _check_termination_log(settings: HealthSettings) -> None:
    path = settings.termination_log
    if path is None:
        return
    try:
        # Not blocking: it may be a pipe, whose reader has yet to come.
        os.close(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_NONBLOCK, 0o644))
    except OSError as exc:
        if exc.errno == errno.ENXIO:
            return
        raise BadInput(f"termination_log {path}: cannot be written: {exc.strerror}") from None


def _check_port(args: Any) -> None:
    port = getattr(args, "port", None)
    if isinstance(port, int) and not 0 <= port <= 65535:
        raise BadUsage(f"--port {port}: must be from 0 to 65535")


def _check_host(args: Any) -> None:
    host = getattr(args, "host", None)
    if not host:
        return
    try:
        socket.getaddrinfo(host, None, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
    except (OSError, UnicodeError) as exc:
        raise BadInput(f"--host {host}: cannot be resolved: {exc}") from None


def _check_queue(args: Any) -> None:
    requests = getattr(args, "max_num_queued_reqs", None)
    if requests is not None and requests < 0:
        raise BadUsage(f"--max-num-queued-reqs {requests}: must be 0 or more")
    tokens = getattr(args, "max_num_queued_tokens", None)
    if tokens is not None:
        raise BadInput(
            f"--max-num-queued-tokens {tokens}: nobody counts tokens under --omni, so it would do "
            "nothing; --max-num-queued-reqs limits requests"
        )


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
            f"--api-server-count {count}: each API server process would have an orchestrator and "
            "a health state of its own; use 1, and more servers behind a load balancer where one "
            "is not enough, or VLLM_OMNI_HEALTH=off to run without the layer"
        )
