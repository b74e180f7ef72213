# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-omni-health project
"""Chat requests, and a record of what became of each.

A request can be made to stay in one stage: the stages before it get a token to make, the one
it is to stay in as many as fit, so that it is surely in flight when something is broken.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any, ClassVar, Protocol

import httpx

MODEL = "tiny"
LONG = 1500
"""Tokens of a long answer: seconds of work for a tiny model on one core."""

_TEXT_KEPT = 400


class Request(Protocol):
    """What a drill can send. A :class:`ChatCall` records it, whatever the route."""

    @property
    def path(self) -> str:
        """The route."""

    @property
    def stream(self) -> bool:
        """Whether the answer is a stream of events."""

    @property
    def label(self) -> str:
        """For people: what it is there for."""

    def body(self) -> dict[str, Any]:
        """The JSON body."""


@dataclass(frozen=True)
class ChatRequest:
    """One chat request to send.

    ``stage_tokens``: how many tokens each stage makes, first stage first; None leaves it to the
    deployment, but for ``max_tokens``, which then goes to the stage that reads the prompt.
    """

    prompt: str = "Name a few things that one can see at the seaside."
    stream: bool = False
    max_tokens: int = LONG
    stage_tokens: Sequence[int] | None = None
    label: str = ""
    path: ClassVar[str] = "/v1/chat/completions"

    @classmethod
    def staying_in(cls, stage_id: int, stages: int, *, stream: bool = False) -> ChatRequest:
        """A request that passes the stages before ``stage_id`` quickly and then stays there."""
        tokens = [LONG if stage == stage_id else 2 for stage in range(stages)]
        return cls(stream=stream, stage_tokens=tokens, label=f"in stage {stage_id}")

    def body(self) -> dict[str, Any]:
        """The JSON body."""
        body: dict[str, Any] = {
            "model": MODEL,
            "messages": [{"role": "user", "content": self.prompt}],
            "stream": self.stream,
            "temperature": 0.0,
        }
        if self.stage_tokens is None:
            body |= {"max_tokens": self.max_tokens, "ignore_eos": True}
        else:
            body["sampling_params_list"] = [
                {"temperature": 0.0, "max_tokens": tokens, "ignore_eos": True}
                for tokens in self.stage_tokens
            ]
        return body


class Outcome(StrEnum):
    """What became of a request, from the client's point of view."""

    PENDING = "pending"
    ANSWERED = "answered"
    """The whole answer arrived."""
    FAILED = "failed"
    """The server said that it failed: an error body, or an error event in the stream."""
    REFUSED = "refused"
    """Not admitted: 503."""
    CUT_OFF = "cut off"
    """The connection broke, or the stream ended, before there was an answer."""
    UNREACHABLE = "unreachable"
    """Nobody was listening."""
    GIVEN_UP = "given up"
    """The client hung up."""


@dataclass
class ChatCall:
    """One request that was sent. Times are monotonic; None is "not yet" or "never"."""

    number: int
    stream: bool
    label: str
    request_id: str
    sent: float
    head: float | None = None
    """When status and headers were there."""
    first_byte: float | None = None
    last_byte: float | None = None
    ended: float | None = None
    status: int | None = None
    headers: Mapping[str, str] = field(default_factory=dict)
    body: Any = None
    """The JSON of a plain answer, error bodies included."""
    events: int = 0
    """Events of a stream that carry a piece of the answer."""
    error_events: list[Any] = field(default_factory=list)
    done_events: int = 0
    after_done: int = 0
    """Events after ``[DONE]``, of which there should be none."""
    text: str = ""
    broken: str | None = None
    """Class of the transport's error that ended the call."""
    outcome: Outcome = Outcome.PENDING

    @property
    def pending(self) -> bool:
        """Whether it has not ended yet."""
        return self.ended is None

    def in_flight_at(self, moment: float) -> bool:
        """Whether it had been sent by then and had not ended."""
        return self.sent < moment and (self.ended is None or self.ended > moment)

    @property
    def error(self) -> dict[str, Any] | None:
        """The ``error`` object the client was given, if it was given one."""
        source = self.error_events[0] if self.error_events else self.body
        found = source.get("error") if isinstance(source, dict) else None
        return found if isinstance(found, dict) else None

    def describe(self) -> str:
        """For people: ``plain 500 process_lost`` and the like."""
        words = ["stream" if self.stream else "plain"]
        if self.status is not None:
            words.append(str(self.status))
        words.append(str(self.outcome))
        fault = (self.error or {}).get("fault")
        if isinstance(fault, dict):
            words.append(f"({fault.get('kind')})")
        elif self.broken:
            words.append(f"({self.broken})")
        return " ".join(words)

    def as_data(self, zero: float) -> dict[str, Any]:
        """This call as plain data, its times counted from ``zero``."""
        data: dict[str, Any] = {
            "number": self.number,
            "stream": self.stream,
            "label": self.label,
            "request_id": self.request_id,
            "outcome": str(self.outcome),
            "status": self.status,
            "retry_after": self.headers.get("retry-after"),
            "error": self.error,
            "events": self.events,
            "error_events": len(self.error_events),
            "done_events": self.done_events,
            "broken": self.broken,
        }
        for name in ("sent", "head", "first_byte", "last_byte", "ended"):
            moment = getattr(self, name)
            data[name] = None if moment is None else round(moment - zero, 4)
        return data


def new_client(url: str) -> httpx.AsyncClient:
    """A client without limits of its own: how long an answer takes is for the drill to judge."""
    return httpx.AsyncClient(
        base_url=url,
        timeout=httpx.Timeout(None, connect=10.0),
        limits=httpx.Limits(max_connections=None, max_keepalive_connections=None),
        # Proxy settings of the environment are not meant for a server on this machine.
        trust_env=False,
        # Loading certificates takes a tenth of a second, for connections that have no TLS.
        verify=False,
    )


async def carry_out(
    client: httpx.AsyncClient,
    request: Request,
    call: ChatCall,
    on_text: Callable[[str], None] = lambda _text: None,
) -> None:
    """Send ``request`` and write into ``call`` what happens; raises nothing but cancellation.

    ``on_text`` is called with each piece of a streamed answer.
    """
    try:
        async with client.stream(
            "POST", request.path, json=request.body(), headers={"X-Request-Id": call.request_id}
        ) as response:
            call.head = time.monotonic()
            call.status = response.status_code
            call.headers = dict(response.headers)
            if response.headers.get("content-type", "").startswith("text/event-stream"):
                await _read_events(response, call, on_text)
            else:
                await _read_body(response, call)
        call.outcome = _outcome(call)
    except httpx.ConnectError as exc:
        call.broken, call.outcome = type(exc).__name__, Outcome.UNREACHABLE
    except httpx.HTTPError as exc:
        call.broken = type(exc).__name__
        # An answer that was whole stays one, however the connection ended after it.
        whole = call.done_events and _outcome(call)
        call.outcome = whole or Outcome.CUT_OFF
    finally:
        call.ended = time.monotonic()
        if call.outcome is Outcome.PENDING:
            call.outcome = Outcome.GIVEN_UP


async def _read_body(response: httpx.Response, call: ChatCall) -> None:
    chunks = []
    async for chunk in response.aiter_raw():
        call.last_byte = time.monotonic()
        call.first_byte = call.first_byte or call.last_byte
        chunks.append(chunk)
    payload = b"".join(chunks)
    try:
        call.body = json.loads(payload)
    except ValueError:
        call.body = payload.decode(errors="replace")
        return
    call.text = _text_of(call.body, "message")


async def _read_events(
    response: httpx.Response, call: ChatCall, on_text: Callable[[str], None]
) -> None:
    async for line in response.aiter_lines():
        if not line:
            continue
        call.last_byte = time.monotonic()
        call.first_byte = call.first_byte or call.last_byte
        if call.done_events:
            call.after_done += 1
        data = line.removeprefix("data:").strip()
        if data == "[DONE]":
            call.done_events += 1
            continue
        try:
            event = json.loads(data)
        except ValueError:
            event = {"error": {"message": f"not JSON: {data[:200]}"}}
        if isinstance(event, dict) and "error" in event:
            call.error_events.append(event)
            continue
        call.events += 1
        text = _text_of(event, "delta")
        on_text(text)
        if len(call.text) < _TEXT_KEPT:
            call.text += text


def _outcome(call: ChatCall) -> Outcome:
    if call.status == httpx.codes.SERVICE_UNAVAILABLE:
        return Outcome.REFUSED
    if call.error_events or call.status != httpx.codes.OK:
        return Outcome.FAILED
    if "text/event-stream" in call.headers.get("content-type", "") and not call.done_events:
        return Outcome.CUT_OFF
    return Outcome.ANSWERED


def _text_of(body: Any, part: str) -> str:
    try:
        return str(body["choices"][0][part].get("content") or "")
    except (KeyError, IndexError, TypeError, AttributeError):
        return ""
