# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-omni-health project
"""Which failures of a diffusion request are the request's own, and which are the replica's.

A diffusion engine runs one request, or one batch, at a time and keeps nothing of it. So it can
outlive a failure as long as the device can, and type and place tell whether that is so:

- Before a request is admitted (preprocessing, validation) only the host has worked on it. What
  fails there is the request's own, unless the table knows the class as a device's or a host's.
- In a forward pass Python's own errors also come from the host: pipelines check their input
  there, with ValueError and NotImplementedError, and what a bug does to one request (a missing
  key, an attribute of None) it does not do to the device. Whoever sends such a request again
  and again must not end the server again and again.
- What torch reports of a device, a kernel or a peer is a RuntimeError or a class of its own:
  nothing that the replica does after it can be trusted. The same goes for every class that is
  not listed.

The client is at fault, and gets a 4xx, only where the class says that input was refused.
"""

from __future__ import annotations

import functools
from typing import Any

import msgspec
from vllm_omni.engine.health.envelope import FaultText, WorkerError
from vllm_omni.errors import OmniClientError
from vllm_omni.health.faults.classify import (
    ClassificationTable,
    classify,
    fault_from_exception,
    walk,
)
from vllm_omni.health.faults.fault import Fault, FaultError, FaultKind, Severity
from vllm_omni.health.faults.table import in_force

_HARMLESS = (
    "builtins.ValueError",
    # A RuntimeError by inheritance; the nearest class decides.
    "builtins.NotImplementedError",
    "builtins.TypeError",
    "builtins.LookupError",
    "builtins.AttributeError",
    "builtins.ArithmeticError",
    "builtins.AssertionError",
)


def table() -> ClassificationTable:
    """The table in force, and what a diffusion forward pass may raise without harm to the
    replica. A class that a setting or plugin names keeps what is said there."""
    return _with_harmless(in_force())


@functools.cache
def _with_harmless(base: ClassificationTable) -> ClassificationTable:
    harmless = (FaultKind.ENGINE, Severity.REQUEST)
    return base.extended({name: harmless for name in _HARMLESS if name not in base.classes})


_REFUSALS = (ValueError, NotImplementedError)
"""What pipelines and schedulers raise for input that they do not take."""


class RefusalText(str):
    """The text of a refused request on its way from a worker, with what the client is told."""

    status_code: int
    error_type: str

    def __new__(cls, text: str, status_code: int, error_type: str) -> RefusalText:
        self = super().__new__(cls, text)
        self.status_code = status_code
        self.error_type = error_type
        return self

    def __reduce__(self) -> tuple[Any, ...]:
        return RefusalText, (str.__str__(self), self.status_code, self.error_type)


def fault_of(exc: BaseException, **context: Any) -> Fault:
    """The fault of an exception in a forward pass, by its envelope or by its class."""
    fault = _carried(exc) or fault_from_exception(exc, table=table())
    return fault.with_context(**context)


def host_fault_of(exc: BaseException) -> Fault:
    """The fault of an exception outside of a forward pass, in work for one request.

    Fatal only if the table names the class, or the worker that it comes from said so.
    """
    carried = _carried(exc)
    if carried is not None:
        return carried
    fault = fault_from_exception(exc, table=table())
    if fault.kind is FaultKind.ENGINE:
        return msgspec.structs.replace(fault, severity=Severity.REQUEST)
    return fault


def _carried(exc: BaseException) -> Fault | None:
    for found in walk(exc):
        for text in getattr(found, "args", ()):
            if isinstance(text, FaultText):
                return text.fault
            if isinstance(text, RefusalText):
                return Fault(kind=FaultKind.ENGINE, severity=Severity.REQUEST, message=text)
    return None


def refusal(exc: BaseException) -> OmniClientError | None:
    """What the client of a refused request is told; None where input was not the trouble.

    ``exc`` is request-scoped, by :func:`fault_of`.
    """
    for found in walk(exc):
        if isinstance(found, OmniClientError):
            return found
        for text in getattr(found, "args", ()):
            if isinstance(text, RefusalText):
                return OmniClientError(
                    str.__str__(text), status_code=text.status_code, error_type=text.error_type
                )
    telling = classify(exc, table()).exception
    if isinstance(telling, _REFUSALS):
        return OmniClientError(str(telling) or type(telling).__name__)
    return None


def envelope(exc: BaseException, fault: Fault) -> WorkerError:
    """An exception in the form that carries what we know of it through upstream's texts."""
    client_error = None if fault.fatal else refusal(exc)
    if client_error is not None:
        return WorkerError(
            RefusalText(client_error.message, client_error.status_code, client_error.error_type)
        )
    return WorkerError(FaultText(fault.message, fault))


def raise_envelope(answer: Any) -> None:
    """Raise what a worker's answer to a call carries, if it carries a failure of ours."""
    if not isinstance(answer, dict):
        return
    texts = [answer.get("error")]
    texts += [status.get("error") for status in answer.get("rank_statuses") or ()]
    for text in texts:
        if isinstance(text, FaultText):
            raise FaultError(text.fault)
        if isinstance(text, RefusalText):
            raise RuntimeError(text)
