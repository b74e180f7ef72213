# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-omni-health project
"""A server under drill: started here, watched here, and surely ended here."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import subprocess
import time
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx

from vllm_omni_health.drills.chat import new_client
from vllm_omni_health.drills.tree import Member, ProcessId, ProcessTree, Role

READY_POLL_S = 0.25
GONE_POLL_S = 0.02

_CLEANED_UP_S = 3.0
"""How long Python's resource tracker may take to remove what the killed processes have left."""

_KILLED_S = 10.0
"""How long the kernel may take to end a process that got SIGKILL, memory of gigabytes freed."""


class ServerNotReady(Exception):
    """The server ended before it was ready, or was not ready in time; says how the log ends."""


@dataclass(frozen=True)
class Ending:
    """How the server's process ended: minus the signal's number for a death by signal."""

    status: int
    at: float


class Server:
    """One server process in a session of its own, so that all of its processes can be found.

    Create it with :meth:`start` inside a running event loop, and end it with :meth:`close`, or
    use :func:`running`.
    """

    started = 0
    """How many servers this process has started; they are what makes drills slow."""

    def __init__(self, process: subprocess.Popen[bytes], url: str, folder: Path) -> None:
        self.url = url
        self.folder = folder
        self.started_at = time.monotonic()
        self.ready_at: float | None = None
        self.ending: Ending | None = None
        self._process = process
        identity = ProcessId.of(process.pid)
        assert identity is not None, "our own child exists until we reap it"
        self.tree = ProcessTree(identity, own_session=True)
        self.client = new_client(url)
        self._ended = asyncio.Event()
        self._pidfd = os.pidfd_open(process.pid)
        asyncio.get_running_loop().add_reader(self._pidfd, self._on_end)

    @classmethod
    def start(
        cls,
        command: Sequence[str],
        *,
        url: str,
        folder: Path,
        env: Mapping[str, str] | None = None,
    ) -> Server:
        """Start ``command``, whose process is the server, with its output in files in ``folder``.

        ``env`` is put on top of this process's environment.
        """
        folder.mkdir(parents=True, exist_ok=True)
        with (
            open(folder / "stdout.log", "wb") as stdout,
            open(folder / "stderr.log", "wb") as stderr,
        ):
            process = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=stdout,
                stderr=stderr,
                env={**os.environ, **(env or {})},
                start_new_session=True,
            )
        cls.started += 1
        return cls(process, url, folder)

    @property
    def pid(self) -> int:
        """The server process's pid."""
        return self._process.pid

    @property
    def stdout(self) -> str:
        """What the server has written to its standard output so far."""
        return (self.folder / "stdout.log").read_text(errors="replace")

    @property
    def stderr(self) -> str:
        """What the server has written to its standard error so far."""
        return (self.folder / "stderr.log").read_text(errors="replace")

    async def wait_ready(
        self, timeout_s: float = 600.0, progress: Callable[[float], None] | None = None
    ) -> float:
        """Wait for 200 from ``/health``; the seconds since the start.

        ``progress`` is called with the seconds so far, about four times a second. Raises
        ServerNotReady when the server ends first or is not ready in time.
        """
        while True:
            waited = time.monotonic() - self.started_at
            if self.ending is not None:
                raise ServerNotReady(self._story(f"the server ended ({self.ending.status})"))
            if waited > timeout_s:
                raise ServerNotReady(self._story(f"the server was not ready in {timeout_s:g} s"))
            if progress is not None:
                progress(waited)
            with contextlib.suppress(httpx.HTTPError):
                response = await self.client.get("/health", timeout=5.0)
                if response.status_code == httpx.codes.OK:
                    self.ready_at = time.monotonic()
                    self.tree.refresh(_json_of(response))
                    return self.ready_at - self.started_at
            await asyncio.sleep(READY_POLL_S)

    async def wait_end(self, timeout_s: float) -> Ending | None:
        """Wait for the server process to end; None when it has not in time."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(timeout_s):
                await self._ended.wait()
        return self.ending

    async def wait_processes_gone(
        self, timeout_s: float, which: Callable[[Member], bool] = lambda _member: True
    ) -> list[Member]:
        """Wait until none of ``which`` is left, the server's own process aside.

        Who is still left after ``timeout_s``. Looks every GONE_POLL_S.
        """
        deadline = time.monotonic() + timeout_s
        while True:
            left = [member for member in self.tree.left() if which(member)]
            if not left or time.monotonic() >= deadline:
                return left
            await asyncio.sleep(GONE_POLL_S)

    def send(self, signum: int) -> bool:
        """Send the server process a signal; False when it has ended."""
        return self.tree.root.send(signum)

    def kill(self) -> None:
        """SIGKILL the server and its stages' processes. Does not wait; safe at any time.

        Python's own helpers end when they see that, having cleaned up after the others.
        """
        self.tree.kill(role for role in Role if role is not Role.HELPER)

    async def close(self) -> None:
        """Make sure that nothing of the server is left."""
        self.kill()
        await self.wait_end(_KILLED_S)
        # Twice: a process may have been started while the first list was gone through.
        self.kill()
        await self.wait_processes_gone(_CLEANED_UP_S)
        self.tree.kill()
        await self.wait_processes_gone(_KILLED_S)
        await self.client.aclose()
        if self._pidfd >= 0:
            asyncio.get_running_loop().remove_reader(self._pidfd)
            os.close(self._pidfd)
            self._pidfd = -1

    def tail(self, lines: int = 15) -> str:
        """The last lines of both logs."""
        parts = []
        for name, text in (("stdout", self.stdout), ("stderr", self.stderr)):
            if text.strip():
                last = "\n".join(f"  {line}" for line in text.splitlines()[-lines:])
                parts.append(f"{name} ends:\n{last}")
        return "\n".join(parts)

    def _story(self, what: str) -> str:
        return f"{what}\n{self.tail()}"

    def _on_end(self) -> None:
        if self.ending is None:
            at = time.monotonic()
            self.ending = Ending(self._process.wait(), at)
            asyncio.get_running_loop().remove_reader(self._pidfd)
            self._ended.set()


@contextlib.asynccontextmanager
async def running(
    command: Sequence[str],
    *,
    url: str,
    folder: Path,
    env: Mapping[str, str] | None = None,
) -> AsyncIterator[Server]:
    """A server for as long as the block runs; nothing of it is left afterwards."""
    server = Server.start(command, url=url, folder=folder, env=env)
    try:
        yield server
    finally:
        # Also when this task is cancelled: the processes go first, waiting comes after.
        server.kill()
        await asyncio.shield(asyncio.ensure_future(server.close()))


def describe_status(status: int) -> str:
    """An exit status for people: ``85``, or ``SIGKILL`` for a death by signal."""
    if status >= 0:
        return str(status)
    try:
        return signal.Signals(-status).name
    except ValueError:
        return f"signal {-status}"


def _json_of(response: httpx.Response) -> dict[str, Any] | None:
    try:
        body = response.json()
    except ValueError:
        return None
    return body if isinstance(body, dict) else None
