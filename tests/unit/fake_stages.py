# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-omni-health project
"""Stage clients whose every move a test decides, and upstream's real orchestrator over them."""

import asyncio
import threading
import time
from concurrent.futures import Future
from types import SimpleNamespace

import janus
from vllm_omni.engine.health.orchestrator import HealthOrchestrator
from vllm_omni.engine.messages import ErrorMessage, ShutdownRequestMessage
from vllm_omni.engine.orchestrator import OrchestratorRequestState
from vllm_omni.engine.stage_pool import StagePool
from vllm_omni.health.faults.fault import Fault, FaultKind
from vllm_omni.health.runtime import HealthRuntime, set_current

from vllm_omni_health.settings.model import HealthSettings

WAIT_S = 20


class Client:
    """A stage client whose outputs, failures and shutdown the test decides."""

    stage_type = "llm"
    final_output = True
    final_output_type = "text"

    def __init__(self, on_shutdown=lambda: None):
        self.outputs = asyncio.Queue()
        self.on_shutdown = on_shutdown
        self.shutdowns = 0
        self.aborted = []

    async def get_output_async(self):
        output = await self.outputs.get()
        if isinstance(output, Exception):
            raise output
        return output

    async def abort_requests_async(self, request_ids):
        self.aborted += request_ids

    def check_health(self):
        pass

    def shutdown(self):
        self.shutdowns += 1
        self.on_shutdown()


class DiffusionClient(Client):
    """One of a diffusion replica in the server's process."""

    stage_type = "diffusion"
    final_output_type = "image"

    def __init__(self, on_shutdown=lambda: None):
        super().__init__(on_shutdown)
        self._output_queue = asyncio.Queue()

    def get_diffusion_output_nowait(self):
        if self._output_queue.empty():
            return None
        output = self._output_queue.get_nowait()
        if isinstance(output, Exception):
            raise output
        return output


class Service:
    """A running orchestrator with its queues, machine and clients.

    On a thread and a loop of its own, as in a server: upstream ends by cancelling whatever else
    runs on that loop.
    """

    make_orchestrator = HealthOrchestrator

    def __init__(self, *stages, **settings):
        self.stages = stages
        self.runtime = HealthRuntime(HealthSettings(**{"settle_s": 0.05, **settings}))
        self.machine = self.runtime.machine
        self.error = None

    def __enter__(self):
        set_current(self.runtime)
        self.runtime.start()
        for stage_id, clients in enumerate(self.stages):
            self.machine.expect_stage(stage_id, len(clients))
        ready = threading.Event()
        self.thread = threading.Thread(target=self._run, args=(ready,))
        self.thread.start()
        assert ready.wait(WAIT_S)
        return self

    def _run(self, ready):
        async def main():
            self.loop = asyncio.get_running_loop()
            self.requests, self.outputs, self.rpcs = janus.Queue(), janus.Queue(), janus.Queue()
            self.pools = [StagePool(i, list(clients)) for i, clients in enumerate(self.stages)]
            self.orchestrator = self.make_orchestrator(
                self.requests.async_q,
                self.outputs.async_q,
                self.rpcs.async_q,
                self.pools,
                event_driven_orch_default=True,
            )
            ready.set()
            await self.orchestrator.run()

        try:
            asyncio.run(main())
        except Exception as exc:
            self.error = exc

    def __exit__(self, *exc):
        self.stop()
        for queue in (self.requests, self.outputs, self.rpcs):
            queue.close()
        self.runtime.stop()
        set_current(None)

    def stop(self):
        self.requests.sync_q.put(ShutdownRequestMessage())
        self.thread.join(WAIT_S)
        assert not self.thread.is_alive()

    def on_loop(self, work):
        """Run ``work`` on the orchestrator's loop and wait for it."""
        done = Future()
        self.loop.call_soon_threadsafe(lambda: done.set_result(work()))
        return done.result(WAIT_S)

    def request(self, request_id, stage_id=0, replica_id=0):
        """A request that is in ``stage_id`` now, on its way to the last stage."""

        def add():
            stages = len(self.pools)
            state = OrchestratorRequestState(
                request_id,
                sampling_params_list=[SimpleNamespace()] * stages,
                final_stage_id=stages - 1,
            )
            state.stage_submit_ts[stage_id] = 1.0
            self.orchestrator.request_states[request_id] = state
            pool = self.pools[stage_id]
            while pool.select_replica_id(request_id) != replica_id:
                pool.release_binding(request_id)

        self.on_loop(add)

    def output(self, client, output):
        """Let a client hand this to the orchestrator, or raise it there."""
        self.on_loop(lambda: client.outputs.put_nowait(output))

    def failures(self, count):
        """The next ``count`` failure messages, by request."""
        messages = [self.outputs.sync_q.get(timeout=WAIT_S) for _ in range(count)]
        assert all(isinstance(m, ErrorMessage) and m.fatal and m.error for m in messages)
        return {message.request_id: message for message in messages}


def until(condition):
    deadline = time.monotonic() + WAIT_S
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.005)


def fault(stage_id=0, replica_id=0, kind=FaultKind.OOM):
    return Fault(kind=kind, stage_id=stage_id, replica_id=replica_id)
