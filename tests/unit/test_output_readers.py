# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-omni-health project
"""Readers of stage outputs sleep until there is something, and stop when nobody takes it."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable, Coroutine
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import uvloop
import zmq
from vllm_omni.engine.health.output_readers import Output, OutputReaders
from vllm_omni.engine.stage_pool import StagePool

WAIT_S = 20
IDLE_S = 0.3


class LLMClient:
    stage_type = "llm"

    def __init__(self) -> None:
        self.outputs: asyncio.Queue[Any] = asyncio.Queue()
        self.taken = 0

    async def get_output_async(self) -> Any:
        output = await self.outputs.get()
        self.taken += 1
        if isinstance(output, Exception):
            raise output
        return output


class DiffusionClient:
    """As upstream's: everything that a socket has is moved into a queue, by whoever looks."""

    stage_type = "diffusion"

    def __init__(self, socket: zmq.Socket[bytes] | None = None) -> None:
        self._output_queue: asyncio.Queue[Any] = asyncio.Queue()
        if socket is not None:
            self._response_socket = socket
        self.looks = 0

    def drain(self) -> None:
        with contextlib.suppress(zmq.Again):
            while hasattr(self, "_response_socket"):
                self._output_queue.put_nowait(self._response_socket.recv(zmq.NOBLOCK))

    def get_diffusion_output_nowait(self) -> Any:
        self.looks += 1
        self.drain()
        return None if self._output_queue.empty() else self._output_queue.get_nowait()


def batch(name: str) -> Any:
    return SimpleNamespace(outputs=[name], scheduler_stats=None, finished_requests=None)


@contextlib.asynccontextmanager
async def reading(
    clients: list[Any], limit: int = 100
) -> AsyncIterator[tuple[OutputReaders, StagePool, asyncio.Queue[Output]]]:
    pool = StagePool(0, list(clients))
    ready: asyncio.Queue[Output] = asyncio.Queue(limit)
    async with asyncio.TaskGroup() as group:
        readers = OutputReaders([pool], ready, group)
        readers.reconcile()
        await asyncio.sleep(0)
        yield readers, pool, ready
        readers.close()


async def taken_from(ready: asyncio.Queue[Output]) -> Output:
    async with asyncio.timeout(WAIT_S):
        return await ready.get()


@pytest.fixture(params=[asyncio.run, uvloop.run], ids=["asyncio", "uvloop"])
def run(request: pytest.FixtureRequest) -> Callable[[Coroutine[Any, Any, None]], None]:
    return request.param


@pytest.fixture
def context() -> Any:
    with zmq.Context() as context:
        yield context


def test_a_diffusion_replica_is_looked_at_only_when_it_has_sent_something(
    run: Any, context: Any, tmp_path: Path
) -> None:
    async def scenario() -> None:
        address = f"ipc://{tmp_path}/r"
        with context.socket(zmq.PULL) as pull, context.socket(zmq.PUSH) as push:
            pull.bind(address)
            push.connect(address)
            client = DiffusionClient(pull)
            async with reading([client]) as (_, _, ready):
                for _ in range(3):
                    for name in (b"a", b"b", b"c"):
                        push.send(name)
                    assert [(await taken_from(ready)).payload for _ in range(3)] == [
                        *(b"a", b"b", b"c"),
                    ]
                    await asyncio.sleep(0.05)
                    before = client.looks
                    await asyncio.sleep(IDLE_S)
                    assert client.looks - before <= 1

    run(scenario())


def test_what_another_call_has_read_from_the_socket_is_not_overlooked(
    run: Any, context: Any, tmp_path: Path
) -> None:
    async def scenario() -> None:
        address = f"ipc://{tmp_path}/r"
        with context.socket(zmq.PULL) as pull, context.socket(zmq.PUSH) as push:
            pull.bind(address)
            push.connect(address)
            client = DiffusionClient(pull)
            async with reading([client]) as (_, _, ready):
                push.send(b"answer")
                pull.poll(1000 * WAIT_S)
                client.drain()
                assert (await taken_from(ready)).payload == b"answer"

    run(scenario())


def test_an_inline_replica_wakes_its_reader_and_loses_nothing_put_before(run: Any) -> None:
    async def scenario() -> None:
        client = DiffusionClient()
        client._output_queue.put_nowait("before")
        async with reading([client]) as (_, _, ready):
            assert await taken_from(ready) == Output("diffusion", (0, 0), "before")
            client._output_queue.put_nowait("after")
            assert await taken_from(ready) == Output("diffusion", (0, 0), "after")
            before = client.looks
            await asyncio.sleep(IDLE_S)
            assert client.looks - before <= 1

    run(scenario())


def test_a_reader_stops_when_nobody_takes_what_it_reads(run: Any) -> None:
    async def scenario() -> None:
        client = LLMClient()
        async with reading([client], limit=2) as (_, _, ready):
            for number in range(10):
                client.outputs.put_nowait(batch(str(number)))
            await asyncio.sleep(0.05)
            assert client.taken == 3, "two wait, and one is in its reader's hand"
            names = [(await taken_from(ready)).payload.outputs[0] for _ in range(10)]
            assert names == [str(number) for number in range(10)]

    run(scenario())


def test_an_error_is_handed_on_once_and_its_replica_left_alone_until_it_is_replaced(
    run: Any,
) -> None:
    async def scenario() -> None:
        failing, following = LLMClient(), LLMClient()
        async with reading([failing]) as (readers, pool, ready):
            failing.outputs.put_nowait(RuntimeError("broken"))
            output = await taken_from(ready)
            assert (output.kind, output.key, str(output.payload)) == ("error", (0, 0), "broken")
            readers.reconcile()
            await asyncio.sleep(0.02)
            assert ready.empty()
            pool.clients[0] = following
            readers.reconcile()
            following.outputs.put_nowait(batch("again"))
            assert (await taken_from(ready)).payload.outputs == ["again"]

    run(scenario())


def test_replicas_that_come_and_go(run: Any) -> None:
    async def scenario() -> None:
        first, second = LLMClient(), LLMClient()
        async with reading([first]) as (readers, pool, ready):
            pool.clients.append(second)
            pool.clients[0] = None
            readers.reconcile()
            await asyncio.sleep(0)
            first.outputs.put_nowait(batch("late"))
            second.outputs.put_nowait(batch("new"))
            assert await taken_from(ready) == Output("llm", (0, 1), batch("new"))
            await asyncio.sleep(0.02)
            assert ready.empty()

    run(scenario())
