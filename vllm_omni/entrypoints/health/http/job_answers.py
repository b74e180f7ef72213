# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-omni-health project
"""What is told of jobs: work that goes on after the request that began it was answered.

Upstream keeps a video's or a background response's record itself. A failure reaches that record
as a text, as a mistake of the client's (``/content``), or not at all (background responses).
"""

from __future__ import annotations

from http import HTTPStatus
from typing import Any

from starlette.types import Message, Scope, Send
from vllm_omni.entrypoints.health.http.bodies import fault_body, fault_summary
from vllm_omni.entrypoints.health.http.held_answers import HeldAnswer, content_type
from vllm_omni.entrypoints.health.http.probes import send_json
from vllm_omni.health.faults.fault import Fault
from vllm_omni.health.runtime import HealthRuntime
from vllm_omni.health.state.machine import State

_UNDER_WAY = ("queued", "in_progress")


class JobAnswer:
    """An application's ``send`` for the answer about a job, or a list of jobs."""

    def __init__(
        self, scope: Scope, send: Send, runtime: HealthRuntime, job_id: str | None
    ) -> None:
        self._scope = scope
        self._send = send
        self._runtime = runtime
        self._job_id = job_id
        self._held: HeldAnswer | None = None

    async def send(self, message: Message) -> None:
        """Pass a message on; JSON is held until it is whole."""
        if message["type"] == "http.response.start":
            if content_type(message) == b"application/json":
                self._held = HeldAnswer(message)
                return
        elif self._held is not None and message["type"] == "http.response.body":
            if self._held.add(message):
                await self._release(self._held)
            return
        await self._send(message)

    async def _release(self, held: HeldAnswer) -> None:
        answer = held.content()
        if answer is not None:
            if self._job_id is None and isinstance(answer.get("data"), list):
                faults = [self._put_right(job) for job in answer["data"]]
                if any(faults):
                    await send_json(self._scope, self._send, held.status, answer)
                    return
            elif (fault := self._put_right(answer)) is not None:
                if "status" not in answer:
                    # Not the job itself: its output is asked for.
                    answer = fault_body(fault, request_id=self._job_id)
                status = HTTPStatus.INTERNAL_SERVER_ERROR
                await send_json(self._scope, self._send, status, answer)
                return
        await held.release(self._send)

    def _put_right(self, job: Any) -> Fault | None:
        """Make a job that the server failed say so; the fault, or None for any other job."""
        if not isinstance(job, dict):
            return None
        job_id = self._job_id or str(job.get("id"))
        fault = self._runtime.request_faults.of_job(job_id)
        status = job.get("status")
        if fault is None and status in _UNDER_WAY:
            machine = self._runtime.machine
            # Nothing is any more, whatever the record says.
            fault = machine.reason if machine.snapshot.state is State.DEAD else None
        if fault is None or status in ("completed", "cancelled"):
            return None
        if status is not None:
            job["status"] = "failed"
            job["error"] = {
                "code": HTTPStatus.INTERNAL_SERVER_ERROR.value,
                "message": fault.sentence,
                "fault": fault_summary(fault),
                "request_id": job_id,
            }
        return fault
