"""Admission by cost in front of the application: the body is looked at, then passed on whole."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass

from vllm_omni.entrypoints.health.http.probes import Message, Receive, Scope
from vllm_omni.entrypoints.health.http.request_cost import BODY_LIMIT, cost_of
from vllm_omni.health.memory.cost import Admission, Ticket


@dataclass
class Entry:
    """The outcome. ``receive`` takes the place of the server's; ``ticket`` is to be handed back."""

    receive: Receive
    ticket: Ticket | None
    refused: bool


async def enter(admission: Admission, scope: Scope, path: str, receive: Receive) -> Entry:
    """Read the body, if it is JSON of a bounded size, and admit the request or not."""
    if not _readable(scope):
        return Entry(receive, None, refused=False)
    messages: deque[Message] = deque()
    body = bytearray()
    more = True
    while more:
        message = await receive()
        messages.append(message)
        if message["type"] != "http.request":
            break
        body += message.get("body", b"")
        more = message.get("more_body", False)
        if len(body) > BODY_LIMIT:
            return Entry(_replay(messages, receive), None, refused=False)
    cost = cost_of(path, bytes(body))
    if cost is None:
        return Entry(_replay(messages, receive), None, refused=False)
    ticket = admission.enter(cost)
    return Entry(_replay(messages, receive), ticket, refused=ticket is None)


def _readable(scope: Scope) -> bool:
    headers = {bytes(name).lower(): bytes(value) for name, value in scope.get("headers", ())}
    if not headers.get(b"content-type", b"").startswith(b"application/json"):
        return False
    length = headers.get(b"content-length", b"0")
    return length.isdigit() and int(length) <= BODY_LIMIT


def _replay(messages: deque[Message], receive: Receive) -> Receive:
    async def replayed() -> Message:
        return messages.popleft() if messages else await receive()

    return replayed
