"""What is told of jobs: work that goes on after the request that began it was answered.

Upstream keeps a video's or a background response's record itself. A failure reaches that record
as a text, as a mistake of the client's (``/content``), or not at all (background responses).
"""

from __future__ import annotations

import json
from http import HTTPStatus
from typing import Any

from vllm_omni.entrypoints.health.http.bodies import fault_body, fault_summary
from vllm_omni.entrypoints.health.http.held_errors import content_type
from vllm_omni.entrypoints.health.http.probes import Message, Send, send_json
from vllm_omni.health.faults.fault import Fault
from vllm_omni.health.runtime import HealthRuntime
from vllm_omni.health.state.machine import State

_UNDER_WAY = ("queued", "in_progress")


class JobAnswer:
    """An application's ``send`` for the answer about a job, or a list of jobs."""

    def __init__(self, send: Send, runtime: HealthRuntime, job_id: str | None) -> None:
        self._send = send
        self._runtime = runtime
        self._job_id = job_id
        self._start: Message | None = None
        self._body = b""

    async def send(self, message: Message) -> None:
        """Pass a message on; JSON is held until it is whole."""
        if message["type"] == "http.response.start":
            if content_type(message) == b"application/json":
                self._start = message
                return
        elif self._start is not None and message["type"] == "http.response.body":
            self._body += message.get("body", b"")
            if not message.get("more_body", False):
                await self._release(self._start)
            return
        await self._send(message)

    async def _release(self, start: Message) -> None:
        try:
            answer = json.loads(self._body)
        except ValueError:
            answer = None
        if isinstance(answer, dict):
            if self._job_id is None and isinstance(answer.get("data"), list):
                faults = [self._put_right(job) for job in answer["data"]]
                if any(faults):
                    await send_json(self._send, HTTPStatus(start["status"]), answer)
                    return
            elif (fault := self._put_right(answer)) is not None:
                if "status" not in answer:
                    # Not the job itself: its output is asked for.
                    answer = fault_body(fault, request_id=self._job_id)
                await send_json(self._send, HTTPStatus.INTERNAL_SERVER_ERROR, answer)
                return
        await self._send(start)
        await self._send({"type": "http.response.body", "body": self._body})

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
