# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-omni-health project
"""The API server's loop hears of every message, without looking and without a thread."""

import asyncio
import threading
import time
from types import SimpleNamespace

import janus
import pytest
from vllm_omni.engine.health.output_bell import OutputBell, get_output_blocking_async
from vllm_omni.engine.health.told_queue import ToldQueue
from vllm_omni.health.runtime import HealthRuntime, set_current

from vllm_omni_health.settings.model import HealthSettings

WAIT_S = 20


@pytest.fixture
def runtime():
    runtime = HealthRuntime(HealthSettings())
    runtime.output_bell = OutputBell()
    set_current(runtime)
    yield runtime
    set_current(None)


class Producer:
    """An orchestrator's thread that puts ``count`` messages, now and then with a pause."""

    def __init__(self, bell, count, pause_s=0.0):
        self.messages = janus.Queue()
        self.output_queue = self.messages
        self.ended = threading.Event()
        self._thread = threading.Thread(target=self._run, args=(bell, count, pause_s))
        self._thread.start()

    def _run(self, bell, count, pause_s):
        async def put():
            ringing = ToldQueue(self.messages.async_q, after=bell.ring)
            for number in range(count):
                await ringing.put(number)
                if pause_s and number % 10 == 0:
                    await asyncio.sleep(pause_s)

        asyncio.run(put())
        self.ended.wait(WAIT_S)

    def is_alive(self):
        return self._thread.is_alive()

    def join(self):
        self.ended.set()
        self._thread.join(WAIT_S)
        self.messages.close()


@pytest.mark.parametrize("pause_s", [0.0, 0.002])
def test_no_message_is_missed_and_none_waits_for_the_timeout(runtime, pause_s):
    async def scenario():
        producer = Producer(runtime.output_bell, 500, pause_s)
        got = []
        async with asyncio.timeout(WAIT_S):
            while len(got) < 500:
                message = await get_output_blocking_async(producer, timeout=WAIT_S)
                assert message is not None
                got.append(message)
        assert got == list(range(500))
        producer.join()

    asyncio.run(scenario())


def test_silence_is_none_after_the_timeout(runtime):
    async def scenario():
        producer = Producer(runtime.output_bell, 0)
        began = time.monotonic()
        assert await get_output_blocking_async(producer, timeout=0.05) is None
        assert time.monotonic() - began >= 0.05
        producer.join()

    asyncio.run(scenario())


def test_what_was_put_before_the_end_is_read_and_then_the_end_is_told(runtime):
    async def scenario():
        producer = Producer(runtime.output_bell, 1)
        producer.ended.set()
        await asyncio.to_thread(producer._thread.join, WAIT_S)
        assert await get_output_blocking_async(producer) == 0
        with pytest.raises(RuntimeError, match="has ended"):
            await get_output_blocking_async(producer)
        producer.join()

    asyncio.run(scenario())


def test_a_flood_lets_other_tasks_run(runtime):
    async def scenario():
        queue = janus.Queue()
        engine = SimpleNamespace(output_queue=queue, is_alive=lambda: True)
        for number in range(1000):
            queue.sync_q.put(number)
        turns = 0

        async def other():
            nonlocal turns
            while True:
                turns += 1
                await asyncio.sleep(0)

        task = asyncio.create_task(other())
        for _ in range(1000):
            await get_output_blocking_async(engine)
        task.cancel()
        assert turns > 5
        queue.close()

    asyncio.run(scenario())
