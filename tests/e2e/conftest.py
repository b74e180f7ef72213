# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-omni-health project
"""Real servers for the end-to-end tests: tiny models, real engine cores, one server at a time."""

from __future__ import annotations

import contextlib
import os
import socket
import subprocess
import tempfile
import threading
import time
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import AbstractAsyncContextManager
from pathlib import Path

import pytest
from deployments import SERVE

from vllm_omni_health.drills.ports import reserved_port
from vllm_omni_health.drills.server import Server, running

START_S = 300.0
"""A hang guard; a start takes half a minute on two cores that have nothing else to do."""

Serve = Callable[..., AbstractAsyncContextManager[Server]]


@pytest.fixture(autouse=True)
def _no_settings_from_outside(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in list(os.environ):
        if name.startswith("VLLM_OMNI_HEALTH"):
            monkeypatch.delenv(name)


@pytest.fixture
def termination_log(tmp_path: Path) -> Path:
    """The file in which the server is to leave its reason."""
    return tmp_path / "termination.log"


@pytest.fixture
def short_folder() -> Iterator[Path]:
    """A folder with a name short enough for socket files, unlike ``tmp_path``."""
    with tempfile.TemporaryDirectory(prefix="t-") as folder:
        yield Path(folder)


class Notifications:
    """What a server started from here on tells its service manager, which reads all the time."""

    def __init__(self, address: Path) -> None:
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        self._socket.bind(str(address))
        self._socket.settimeout(0.1)
        self._closed = False
        self.told: list[tuple[float, str]] = []
        """With the monotonic time of each message."""
        self._thread = threading.Thread(target=self._read, daemon=True)
        self._thread.start()

    def _read(self) -> None:
        while not self._closed:
            with contextlib.suppress(TimeoutError):
                self.told.append((time.monotonic(), self._socket.recv(4096).decode()))

    def news(self) -> list[str]:
        """All but the watchdog's."""
        return [message for _, message in self.told if message != "WATCHDOG=1"]

    def watchdog_fed(self) -> float | None:
        """When the watchdog was last kept quiet."""
        return max((at for at, message in self.told if message == "WATCHDOG=1"), default=None)

    def close(self) -> None:
        """Nobody listens any more."""
        self._closed = True
        self._thread.join()
        self._socket.close()


@pytest.fixture
def notifications(short_folder: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Notifications]:
    """The other end of ``NOTIFY_SOCKET``, with a watchdog that wants to hear every second."""
    address = short_folder / "notify"
    monkeypatch.setenv("NOTIFY_SOCKET", str(address))
    monkeypatch.setenv("WATCHDOG_USEC", "1000000")
    notifications = Notifications(address)
    yield notifications
    notifications.close()


@pytest.fixture
def serve(tmp_path: Path, termination_log: Path) -> Serve:
    """``async with serve("ar-1", policy="hold") as server``: ready on entering, gone on leaving.

    Keywords are settings, further arguments options of ``vllm serve``; ``wrapper`` is a command
    that runs another one. Logs are in a folder of
    their own for each server.
    """

    @contextlib.asynccontextmanager
    async def start(
        deployment: str,
        *options: str,
        ready: bool = True,
        wrapper: Sequence[str] = (),
        **settings: object,
    ) -> AsyncIterator[Server]:
        env = {f"VLLM_OMNI_HEALTH_{name.upper()}": str(v) for name, v in settings.items()}
        env["VLLM_OMNI_HEALTH_TERMINATION_LOG"] = str(termination_log)
        with reserved_port() as port:
            command = [*wrapper, str(SERVE), deployment, "--port", str(port), *options]
            folder = tmp_path / f"server-{Server.started + 1}"
            url = f"http://127.0.0.1:{port}"
            async with running(command, url=url, folder=folder, env=env) as server:
                if ready:
                    await server.wait_ready(START_S)
                yield server

    return start


@pytest.fixture(scope="session", autouse=True)
def _environment_is_there() -> None:
    done = subprocess.run([SERVE, "--list"], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
