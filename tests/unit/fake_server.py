# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-omni-health project
"""A server that keeps the contract, or breaks one promise of it on purpose, in two seconds.

``python fake_server.py PORT [FLAW]``. It has one stage: a child process as its engine core, and
a child of that as its worker. When the engine core ends, the server does what the real one
promises. FLAW is one of:

  silent     requests in flight are never answered
  empty      error messages are empty
  deaf       /health stays 200
  status     the exit status is 1
  orphan     the worker is left behind
  no-log     there is no termination log
"""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import sys
import time
from datetime import UTC, datetime

PORT = int(sys.argv[1])
FLAW = sys.argv[2] if len(sys.argv) > 2 else ""
GRACE_S = 0.5
SENTENCE = "A process of the server ended unexpectedly."
SLEEP = "import time; time.sleep(60)"
# A parent that dies leaves its worker behind; the real one has a watch against that.
CORE = f"""
import ctypes, os, signal, subprocess, sys, time
subprocess.Popen([sys.executable, "-c", {SLEEP!r}],
    preexec_fn=(None if {FLAW == "orphan"} else lambda: ctypes.CDLL(None).prctl(1, signal.SIGKILL)))
time.sleep(60)
"""

core = subprocess.Popen([sys.executable, "-c", CORE])
dead = asyncio.Event()
since = time.time()
moves = [("STARTING", "HEALTHY")]


def iso(seconds: float) -> str:
    return datetime.fromtimestamp(seconds, UTC).isoformat()


def fault() -> dict | None:
    if not dead.is_set():
        return None
    return {"kind": "process_lost", "stage_id": 0, "replica_id": 0, "message": SENTENCE}


def health() -> dict:
    up = not dead.is_set() or FLAW == "deaf"
    replica = {"replica_id": 0, "state": "live" if up else "lost", "pid": core.pid}
    return {
        "status": "healthy" if up else "unhealthy",
        "state": "HEALTHY" if up else "DEAD",
        "accepting": up,
        "draining": False,
        "since": iso(since),
        "stages": [{"stage_id": 0, "replicas": [replica]}],
        "fault": fault(),
    }


def history() -> dict:
    return {
        "transitions": [
            {"seq": i, "from": a, "to": b, "time": iso(since), "monotonic": i, "fault": fault()}
            for i, (a, b) in enumerate(moves)
        ]
    }


def error(code: int, request_id: str) -> bytes:
    body = {
        "message": "" if FLAW == "empty" else SENTENCE,
        "type": "InternalServerError",
        "code": code,
        "fault": fault(),
        "request_id": request_id,
    }
    return json.dumps({"error": body}).encode()


class Connection:
    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.reader, self.writer = reader, writer

    async def serve(self) -> None:
        try:
            while True:
                head = (await self.reader.readuntil(b"\r\n\r\n")).decode()
                await self.answer(head)
        except (asyncio.IncompleteReadError, OSError):
            self.writer.close()

    async def answer(self, head: str) -> None:
        method, path = head.split(" ", 2)[:2]
        lines = [line.split(": ", 1) for line in head.split("\r\n")[1:] if line]
        fields = {name.lower(): value for name, value in lines}
        body = await self.reader.readexactly(int(fields.get("content-length", 0)))
        request_id = fields.get("x-request-id", "")
        bad = 503 if dead.is_set() and FLAW != "deaf" else 200
        if path == "/health/history":
            self.send(200, json.dumps(history()).encode(), method)
        elif method != "POST":
            self.send(bad, json.dumps(health()).encode(), method)
        elif dead.is_set():
            self.send(503, error(503, request_id), method)
        elif json.loads(body)["stream"]:
            await self.stream(request_id)
        else:
            await dead.wait()
            if FLAW != "silent":
                self.send(500, error(500, request_id), method)

    def send(self, status: int, body: bytes, method: str) -> None:
        head = f"HTTP/1.1 {status} X\r\ncontent-length: {len(body)}\r\nretry-after: 1\r\n"
        head += "content-type: application/json\r\n\r\n"
        self.writer.write(head.encode() + (b"" if method == "HEAD" else body))

    async def stream(self, request_id: str) -> None:
        self.writer.write(
            b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\n"
            b"transfer-encoding: chunked\r\n\r\n"
        )
        while not dead.is_set():
            self.chunk(b'data: {"choices": [{"delta": {"content": "word "}}]}\n\n')
            await asyncio.sleep(0.05)
        if FLAW != "silent":
            self.chunk(b"data: " + error(500, request_id) + b"\n\ndata: [DONE]\n\n")
            self.writer.write(b"0\r\n\r\n")

    def chunk(self, data: bytes) -> None:
        self.writer.write(b"%x\r\n%s\r\n" % (len(data), data))


def reason() -> None:
    line = json.dumps({**(fault() or {}), "exit_status": 85})
    print(line, file=sys.stderr, flush=True)
    if FLAW != "no-log":
        with open(os.environ["VLLM_OMNI_HEALTH_TERMINATION_LOG"], "w") as file:
            file.write(line + "\n")


async def main() -> None:
    server = await asyncio.start_server(lambda r, w: Connection(r, w).serve(), "127.0.0.1", PORT)
    async with server:
        while core.poll() is None:
            await asyncio.sleep(0.01)
        moves.extend([("HEALTHY", "DEGRADED"), ("DEGRADED", "DEAD")])
        dead.set()
        await asyncio.sleep(GRACE_S)
        reason()
        os._exit(1 if FLAW == "status" else 85)


signal.signal(signal.SIGTERM, signal.SIG_DFL)
asyncio.run(main())
