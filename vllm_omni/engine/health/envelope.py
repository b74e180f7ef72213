# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-omni-health project
"""Faults inside the texts that upstream passes on: a worker's exception in a typed envelope, and
a fault as the text of a message.

vLLM's workers answer a failed call with ``str(exception)``, and the engine core raises a
RuntimeError around that text: the class is gone one process away from where it arose. Here the
text still is what it was, for whoever reads it, and carries the fault; on the other side the
fault is what is raised.
"""

from __future__ import annotations

import base64
import logging
from typing import Any

from vllm_omni.health.faults.fault import Fault, FaultDecodeError
from vllm_omni.health.runtime import current

logger = logging.getLogger(__name__)


class FaultText(str):
    """An exception's text with the fault that was made of the exception."""

    fault: Fault

    def __new__(cls, text: str, fault: Fault) -> FaultText:
        self = super().__new__(cls, text)
        self.fault = fault
        return self

    def __reduce__(self) -> tuple[Any, ...]:
        return _unpack, (str(self), self.fault.encode())


def _unpack(text: str, payload: bytes) -> FaultText:
    return FaultText(text, Fault.decode(payload))


class WorkerError(Exception):
    """Stands in for a worker's exception: ``str()`` of it is an envelope, and stays one.

    Upstream's workers answer with ``str(exception)``. CPython keeps the subclass.
    """

    def __init__(self, text: str) -> None:
        super().__init__(text)
        self.text = text

    def __str__(self) -> str:
        return self.text


def to_text(fault: Fault) -> str:
    """A fault as the text of a message for which upstream's serializers know no better type."""
    return base64.b64encode(fault.encode()).decode("ascii")


def report_text(text: str, stage_id: int, replica_id: int) -> None:
    """Hand the supervisor the fault that a message of this replica's carried; any thread.

    Text that is none is logged. Does nothing where the layer is off.
    """
    runtime = current()
    if runtime is None:
        return
    try:
        fault = Fault.decode(base64.b64decode(text))
    except (FaultDecodeError, ValueError) as exc:
        logger.error("[health] unreadable fault from stage %s: %s", stage_id, exc)
        return
    runtime.supervisor.report(fault.with_context(stage_id=stage_id, replica_id=replica_id))
