"""Real servers for the end-to-end tests: tiny models, real engine cores, one server at a time."""

from __future__ import annotations

import contextlib
import os
import socket
import subprocess
import tempfile
from collections.abc import AsyncIterator, Callable, Iterator
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
    """What a server started from here on tells its service manager."""

    def __init__(self, address: Path) -> None:
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        self._socket.bind(str(address))
        self._socket.setblocking(False)
        self.told: list[str] = []

    def read(self) -> list[str]:
        """What has come since the last call; all of it is in ``told``."""
        new = []
        with contextlib.suppress(BlockingIOError):
            while True:
                new.append(self._socket.recv(4096).decode())
        self.told += new
        return new

    def close(self) -> None:
        """Nobody listens any more."""
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

    Keywords are settings, further arguments options of ``vllm serve``. Logs are in a folder of
    their own for each server.
    """

    @contextlib.asynccontextmanager
    async def start(
        deployment: str, *options: str, ready: bool = True, **settings: object
    ) -> AsyncIterator[Server]:
        env = {f"VLLM_OMNI_HEALTH_{name.upper()}": str(v) for name, v in settings.items()}
        env["VLLM_OMNI_HEALTH_TERMINATION_LOG"] = str(termination_log)
        with reserved_port() as port:
            command = [str(SERVE), deployment, "--port", str(port), *options]
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
