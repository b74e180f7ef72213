# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-omni-health project
"""Where the figures come from: a running server's ``/health/memory``, or this machine itself."""

from __future__ import annotations

import time
from datetime import UTC, datetime
from typing import Any, Protocol

import httpx

from vllm_omni_health.devices.survey import Devices

PATH = "/health/memory"

_TIMEOUT_S = 5.0
"""A server answers this from memory, in milliseconds; its loop may be busy for some time."""


class NoFigures(Exception):
    """There are no figures to be had. Its text is one line for a person."""


class Source(Protocol):
    """Something that has figures."""

    name: str

    def fetch(self) -> dict[str, Any]:
        """``{"time", "devices": […], "stages": […]}``. Raises NoFigures."""

    def close(self) -> None:
        """No more figures are wanted."""


class ServerSource:
    """A running server at ``url``."""

    def __init__(self, url: str) -> None:
        self.name = url.rstrip("/")
        self._client = httpx.Client(base_url=self.name, timeout=_TIMEOUT_S)

    def fetch(self) -> dict[str, Any]:
        """The latest figures of the server. Raises NoFigures."""
        try:
            return read(self.name, self._client.get(PATH))
        except httpx.HTTPError as exc:
            raise NoFigures(unreachable(self.name, exc)) from None

    def close(self) -> None:
        """Close the connection."""
        self._client.close()


def read(name: str, response: httpx.Response) -> dict[str, Any]:
    """The figures in an answer of ``/health/memory``. Raises NoFigures."""
    if response.status_code != httpx.codes.OK:
        raise NoFigures(
            f"{name}{PATH} answers {response.status_code}: that is no server with the health "
            "layer, or the layer is off"
        )
    try:
        body = response.json()
    except ValueError:
        body = None
    if not isinstance(body, dict) or not isinstance(body.get("devices"), list):
        raise NoFigures(f"{name}{PATH} answers something else than figures of memory")
    if body.get("time") is None:
        raise NoFigures(f"{name} does not watch memory: memory_interval_s is 0")
    return body


def unreachable(name: str, exc: httpx.HTTPError) -> str:
    """Why there was no answer, in a line."""
    if isinstance(exc, httpx.ConnectError):
        return f"no server at {name}: {exc}"
    if isinstance(exc, httpx.TimeoutException):
        return f"{name} did not answer within {_TIMEOUT_S:g} s"
    return f"no answer from {name}: {exc or type(exc).__name__}"


class LocalSource:
    """The devices of this machine, without any server: nobody reports, so nothing is compared."""

    name = "this machine"

    def __init__(self, devices: Devices | None = None) -> None:
        self._devices = devices or Devices()

    def fetch(self) -> dict[str, Any]:
        """Figures now, from the drivers and the kernel."""
        rows = [
            {
                "device": sample.device,
                "name": sample.name,
                "total": sample.total,
                "used": sample.used,
                "free": sample.free,
                "processes": None
                if sample.processes is None
                else {str(pid): size for pid, size in sample.processes.items()},
                "unknown": sample.unknown,
            }
            for sample in self._devices.sample()
        ]
        moment = datetime.fromtimestamp(time.time(), UTC).isoformat(timespec="milliseconds")
        return {"time": moment.replace("+00:00", "Z"), "devices": rows, "stages": []}

    def close(self) -> None:
        """Let the queries' threads end."""
        self._devices.close()
