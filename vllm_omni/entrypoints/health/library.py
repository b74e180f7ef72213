# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-omni-health project
"""The health layer in a program that uses the engine itself, without the HTTP server.

.. code-block:: python

    health = install(hang_timeout_s=60)
    async with health.engine(model="MODEL") as omni:  # an AsyncOmni
        try:
            async for output in omni.generate("Hello"):
                ...
        except FaultError as error:
            print(error.fault.kind, health.snapshot.state)

What is moved, failed and closed is as in a server; what ends a process is not: the program is the
caller's. Stages are spawned, so the program's main module is guarded by ``__name__`` as for
multiprocessing.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
from collections.abc import AsyncGenerator, AsyncIterator, Callable
from typing import Any

from vllm.v1.engine.exceptions import EngineDeadError
from vllm_omni.engine.health.off_loop import call_soon, in_thread
from vllm_omni.entrypoints.async_omni import AsyncOmni
from vllm_omni.entrypoints.health.server.exit import make_socket_folder, remove_socket_folder
from vllm_omni.health import seams
from vllm_omni.health.faults import table as fault_table
from vllm_omni.health.faults.fault import Fault, FaultKind
from vllm_omni.health.faults.plugins import from_plugins
from vllm_omni.health.runtime import HealthRuntime, current, set_current
from vllm_omni.health.state.machine import State
from vllm_omni.health.state.values import Snapshot

from vllm_omni_health.settings.sources import load

logger = logging.getLogger(__name__)

_UNWIND_S = 5.0
"""How long upstream may take to give up a start whose stages are gone. Measured: 0.2 s."""

_SWITCHES = {"VLLM_OMNI_EVENT_DRIVEN_ORCH": "1"}
"""Upstream's own, set to what the layer needs where they are not set."""


class FaultError(EngineDeadError):
    """The engine cannot serve this request, nor another one; ``fault`` says why."""

    def __init__(self, fault: Fault) -> None:
        Exception.__init__(self, fault.sentence)
        self.fault = fault


def install(**settings: Any) -> Health:
    """Put the layer around the engine that is made next; before that is made.

    ``settings``: as in :class:`HealthSettings`, on top of the environment's. Raises SettingsError
    for one that is wrong, UpstreamError for an upstream that is not known, and RuntimeError while
    an earlier engine's layer is still there.
    """
    if current() is not None:
        raise RuntimeError("the health layer is installed already; close its engine first")
    chosen = load(settings)
    named = from_plugins()
    chosen = chosen.model_copy(update={"fault_classes": {**named, **chosen.fault_classes}})
    fault_table.use(fault_table.table_with(chosen.fault_classes))
    seams.install_library()
    health = Health(HealthRuntime(chosen))
    set_current(health.runtime)
    return health


class Health:
    """The layer of one engine. Made by :func:`install`."""

    def __init__(self, runtime: HealthRuntime) -> None:
        self.runtime = runtime
        self._making: asyncio.Future[None] | None = None

    @property
    def snapshot(self) -> Snapshot:
        """State, fault and stages as they are now. Any thread."""
        return self.runtime.machine.snapshot

    def observe(self, observer: Callable[[Any], object]) -> Callable[[], None]:
        """Call ``observer`` with every move of the state machine, on whichever thread makes it;
        it must be quick. The result ends that."""
        return self.runtime.machine.observe(observer)

    @contextlib.asynccontextmanager
    async def engine(self, **arguments: Any) -> AsyncIterator[AsyncOmni]:
        """An engine for as long as the block runs; nothing of it is left afterwards.

        ``arguments`` are AsyncOmni's. Its start does not block the loop. Raises FaultError when a
        stage is lost while it starts, else what AsyncOmni raises.
        """
        with self._environment():
            self.runtime.start()
            omni: AsyncOmni | None = None
            try:
                omni = await self._started(arguments)
                yield omni
            finally:
                # Also when this task is cancelled: the processes are not left for that.
                await asyncio.shield(asyncio.ensure_future(self._close(omni)))

    @contextlib.contextmanager
    def _environment(self) -> Any:
        """What child processes are to find there, and the caller's own afterwards."""
        before = dict(os.environ)
        os.environ.update(self.runtime.settings.to_environ())
        for name, value in _SWITCHES.items():
            os.environ.setdefault(name, value)
        try:
            make_socket_folder()
            yield
        finally:
            remove_socket_folder()
            for name in set(os.environ) - set(before):
                del os.environ[name]
            os.environ.update(before)

    async def _started(self, arguments: dict[str, Any]) -> AsyncOmni:
        made: list[AsyncOmni] = []
        making = in_thread(lambda: made.append(_Engine(**arguments)), "health-start-engine")
        self._making = making
        dead = asyncio.Event()
        loop = asyncio.get_running_loop()

        def look(_move: Any = None) -> None:
            if self.snapshot.state is State.DEAD:
                call_soon(loop, dead.set)

        unsubscribe = self.observe(look)
        look()
        gone = asyncio.ensure_future(dead.wait())
        try:
            either: set[asyncio.Future[Any]] = {making, gone}
            await asyncio.wait(either, return_when=asyncio.FIRST_COMPLETED)
            if not making.done():
                # What upstream waits for is gone.
                self.runtime.supervisor.kill_all()
                await asyncio.wait({making}, timeout=_UNWIND_S)
        finally:
            gone.cancel()
            unsubscribe()
        failure = making.exception() if making.done() else None
        if made and failure is None and self.snapshot.state is not State.DEAD:
            return made[0]
        reason = self.runtime.machine.reason
        if reason is not None:
            raise FaultError(reason) from failure
        raise failure or RuntimeError("the engine did not start")

    async def _close(self, omni: AsyncOmni | None) -> None:
        """Close the engine; whatever of it does not close in time is killed."""
        runtime = self.runtime
        runtime.begin_shutdown()
        runtime.machine.drain()
        runtime.supervisor.all_closing()
        if omni is not None and not runtime.thread_stuck():
            closing = in_thread(omni.shutdown, "health-stop-engine")
            done, _ = await asyncio.wait({closing}, timeout=runtime.shutdown_left())
            if not done:
                logger.error("[health] the engine did not close in time")
            elif closing.exception() is not None:
                logger.error("[health] closing the engine failed", exc_info=closing.exception())
        left = await asyncio.to_thread(runtime.supervisor.kill_all)
        if self._making is not None and not self._making.done():
            # Left in the middle of its start. Upstream gives up when the stages are gone.
            await asyncio.wait({self._making}, timeout=_UNWIND_S)
            left += await asyncio.to_thread(runtime.supervisor.kill_all)
        if left:
            logger.error("[health] killed stage processes that were left: %s", left)
        await asyncio.to_thread(runtime.stop)
        set_current(None)

    def fault_of(self, error: BaseException) -> Fault:
        """The fault that an exception of the engine stands for."""
        stage_id = getattr(error, "error_stage_id", None)
        return self.runtime.fault_of_stage(stage_id) or Fault(kind=FaultKind.ENGINE)


class _Engine(AsyncOmni):
    """Upstream's, whose dead engines say why they are."""

    async def generate(self, *args: Any, **kwargs: Any) -> AsyncGenerator[Any, None]:
        """Upstream's. Raises FaultError where the service is dead, or dies."""
        health = Health(_of_this_process())
        if health.snapshot.state is State.DEAD:
            raise FaultError(health.fault_of(EngineDeadError()))
        try:
            async with contextlib.aclosing(super().generate(*args, **kwargs)) as outputs:
                async for output in outputs:
                    yield output
        except FaultError:
            raise
        except EngineDeadError as exc:
            raise FaultError(health.fault_of(exc)) from exc


def _of_this_process() -> HealthRuntime:
    runtime = current()
    if runtime is None:
        raise RuntimeError("the engine is closed")
    return runtime
