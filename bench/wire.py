# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-omni-health project
"""A very cheap HTTP client: it shares two cores with the servers that it measures.

One keep-alive connection per client, requests made beforehand, and only as much parsing of the
answer as is needed to know that it is whole and right.
"""

from __future__ import annotations

import asyncio
import json
import time
from dataclasses import dataclass
from typing import Any

_PATH = "/v1/chat/completions"
_CHUNK = 65536
_LAST_CHUNK = b"0\r\n\r\n"


class BadAnswer(Exception):
    """The answer is not what a measurement may count: an error, or cut off."""


@dataclass(frozen=True)
class Reply:
    """One whole answer: when its last byte was there (monotonic), its status and its bytes."""

    at: float
    status: int
    body: bytes

    @property
    def good(self) -> bool:
        """Whether a request was answered in full."""
        return self.status == 200 and b'"error"' not in self.body


def request_bytes(host: str, port: int, body: dict[str, Any]) -> bytes:
    """A chat request as it goes over the wire."""
    payload = json.dumps(body).encode()
    head = (
        f"POST {_PATH} HTTP/1.1\r\nHost: {host}:{port}\r\nContent-Type: application/json\r\n"
        f"Content-Length: {len(payload)}\r\n\r\n"
    )
    return head.encode() + payload


class Connection:
    """One client's connection. Opens itself when first used, and again after it was closed."""

    def __init__(self, host: str, port: int) -> None:
        self._host, self._port = host, port
        self._reader: asyncio.StreamReader | None = None
        self._writer: asyncio.StreamWriter | None = None

    async def ask(self, request: bytes) -> Reply:
        """Send and wait for the whole answer; BadAnswer when the connection ends before it."""
        if self._reader is None or self._writer is None:
            self._reader, self._writer = await asyncio.open_connection(self._host, self._port)
        try:
            self._writer.write(request)
            head = await self._reader.readuntil(b"\r\n\r\n")
            body = await self._body(self._reader, head.lower())
        except (OSError, asyncio.IncompleteReadError) as exc:
            self.close()
            raise BadAnswer(type(exc).__name__) from None
        reply = Reply(time.monotonic(), int(head.split(b" ", 2)[1]), body)
        if b"connection: close" in head.lower():
            self.close()
        return reply

    def close(self) -> None:
        """Hang up."""
        if self._writer is not None:
            self._writer.close()
        self._reader = self._writer = None

    async def _body(self, reader: asyncio.StreamReader, head: bytes) -> bytes:
        if b"transfer-encoding: chunked" in head:
            # Chunk sizes stay in: nobody here reads more of the text than whether it holds an
            # error. Nothing follows the last chunk, so it ends a read.
            body = bytearray()
            while not body.endswith(_LAST_CHUNK):
                data = await reader.read(_CHUNK)
                if not data:
                    raise asyncio.IncompleteReadError(bytes(body), None)
                body += data
            return bytes(body)
        length = int(head.split(b"content-length:", 1)[1].split(b"\r\n", 1)[0])
        return await reader.readexactly(length)
