# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-omni-health project
"""Plain answers of the application that are held until they are whole, and perhaps put right."""

from __future__ import annotations

import json
from http import HTTPStatus
from typing import Any

from starlette.types import Message, Send


def content_type(message: Message) -> bytes:
    """The media type of the answer that begins with ``message``, without its parameters."""
    for name, value in message.get("headers", ()):
        if name.lower() == b"content-type":
            return bytes(value).partition(b";")[0].strip().lower()
    return b""


def is_error(message: Message) -> bool:
    """Whether the answer that begins with ``message`` is a plain error."""
    failed = message["status"] >= HTTPStatus.BAD_REQUEST
    return failed and content_type(message) != b"text/event-stream"


class HeldAnswer:
    """An answer that began with ``start``. Beyond ``longest`` bytes it is held no more."""

    def __init__(self, start: Message, longest: float = float("inf")) -> None:
        self._start = start
        self._longest = longest
        self._body = b""
        self._more = True

    @property
    def status(self) -> int:
        """The status that the application gave it."""
        return int(self._start["status"])

    @property
    def whole(self) -> bool:
        """Whether nothing of it is to come."""
        return not self._more

    def add(self, message: Message) -> bool:
        """Take a piece of the body; whether the answer can be sent now."""
        self._body += message.get("body", b"")
        self._more = bool(message.get("more_body", False))
        return self.whole or len(self._body) > self._longest

    def content(self) -> dict[str, Any] | None:
        """The body, if it is a JSON object."""
        try:
            content = json.loads(self._body)
        except (ValueError, RecursionError):
            return None
        return content if isinstance(content, dict) else None

    async def release(self, send: Send) -> None:
        """Send it as the application made it."""
        await send(self._start)
        await send({"type": "http.response.body", "body": self._body, "more_body": self._more})
