# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-omni-health project
"""Which requests failed for a reason of the server's, and why: a lookup by request id.

The orchestrator writes it down before it sends a failure on its way. Upstream then makes an
exception, a text and at last an HTTP answer of that failure, each route in a way of its own;
whoever holds the answer finds the fault here, whatever became of it in between.
"""

from __future__ import annotations

import re
from collections import OrderedDict
from collections.abc import Callable

from vllm_omni.health.faults.fault import Fault

Observer = Callable[[str, Fault], None]
"""Called with a request's id and its fault, on the thread that wrote it down."""

_KEPT = 4096
"""Requests remembered: more than a server has in flight, and than jobs that are looked up late."""

_ENGINES_ID = re.compile(r"(?P<job>.+?)(?:_\d{1,4})?-[^-]{8}")
"""Upstream's engine adds a hyphen and eight characters to the id that a route gives a request;
vLLM's route for responses numbers the requests of one response."""


class RequestFaults:
    """One per server. Written by the orchestrator's thread, read by the API server's loop.

    Each method is one operation on a dict or a few, safe under the GIL without a lock as there
    is one writer.
    """

    def __init__(self) -> None:
        self._faults: OrderedDict[str, Fault] = OrderedDict()
        self._by_job: dict[str, Fault] = {}
        self._observers: list[Observer] = []

    def failed(self, request_id: str, fault: Fault) -> bool:
        """Write down why a request failed; False if that is known already, and kept."""
        if request_id in self._faults:
            return False
        self._faults[request_id] = fault
        self._by_job[_job_of(request_id)] = fault
        while len(self._faults) > _KEPT:
            forgotten, _ = self._faults.popitem(last=False)
            self._by_job.pop(_job_of(forgotten), None)
        for observer in tuple(self._observers):
            observer(request_id, fault)
        return True

    def of(self, request_id: str) -> Fault | None:
        """Why the engine's request of this id failed, if it did."""
        return self._faults.get(request_id)

    def of_job(self, job_id: str) -> Fault | None:
        """Why a job failed, by the id that its client knows."""
        return self._by_job.get(job_id)

    def observe(self, observer: Observer) -> Callable[[], None]:
        """Call ``observer`` for each failure from now on; the result ends that."""
        self._observers.append(observer)
        return lambda: self._observers.remove(observer)


def is_request_of(request_id: str, job_id: str) -> bool:
    """Whether the engine's request of this id is the work for that job."""
    return _job_of(request_id) == job_id


def _job_of(request_id: str) -> str:
    found = _ENGINES_ID.fullmatch(request_id)
    return found["job"] if found else request_id
