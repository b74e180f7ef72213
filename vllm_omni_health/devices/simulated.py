# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-omni-health project
"""A device that exists in a file alone. For drills and tests: it says what it is told to say.

The file is JSON, replaced as a whole by every change, and changed under a lock, so that a hog
and a drill can both write::

    {"device": "sim:0", "total": 1000, "service": 700, "others": 0,
     "processes": {"4711": 50}, "reported": {"0": 690}, "error": null}

``service`` is what the service under drill uses, ``others`` what everybody else does,
``processes`` holds more by pid, ``reported`` what stages report. ``error`` makes queries fail.
A file that is a pipe without a writer makes them hang.
"""

from __future__ import annotations

import fcntl
import json
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from vllm_omni_health.devices.figures import DeviceSample, Nonsense, checked

DEVICE = "sim:0"


class SimulatedError(Exception):
    """The file says that queries are to fail, as for a device that is lost."""


class SimulatedDevice:
    """The device in ``path``."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.device = DEVICE

    def sample(self) -> DeviceSample:
        """What the file says. Raises SimulatedError, Nonsense or OSError."""
        content = self._read()
        if content.get("error"):
            raise SimulatedError(str(content["error"]))
        try:
            total = content["total"]
            processes = {int(pid): size for pid, size in content.get("processes", {}).items()}
            reported = {int(stage): size for stage, size in content.get("reported", {}).items()}
            service, others = content.get("service", 0), content.get("others", 0)
            used = min(total, service + others + sum(processes.values()))
        except (KeyError, TypeError, ValueError, AttributeError) as exc:
            raise Nonsense(f"{self.device}: {type(exc).__name__} in its file") from None
        return checked(
            DeviceSample(
                self.device,
                total=total,
                used=used,
                free=total - used,
                processes=processes,
                name="simulated device (drill)",
                reported=reported or None,
                service=service,
            )
        )

    def _read(self) -> dict[str, Any]:
        content = json.loads(self.path.read_text())
        if not isinstance(content, dict):
            raise Nonsense(f"{self.device}: no object in its file")
        return content

    # ---- for whoever drills ------------------------------------------------------------------

    def set(self, **fields: Any) -> None:
        """Set fields of the file, which is made if it is not there."""
        self.change(lambda content: content.update(fields))

    def hold(self, pid: int, size: int) -> bool:
        """Let process ``pid`` use ``size`` bytes in all; False, and no change, without room."""
        fits = False

        def take(content: dict[str, Any]) -> None:
            nonlocal fits
            processes = content.setdefault("processes", {})
            rest = sum(bytes_ for other, bytes_ in processes.items() if other != str(pid))
            used = content.get("service", 0) + content.get("others", 0) + rest
            fits = used + size <= content["total"]
            if fits and size:
                processes[str(pid)] = size
            elif fits:
                processes.pop(str(pid), None)

        self.change(take)
        return fits

    def change(self, edit: Callable[[dict[str, Any]], None]) -> None:
        """Read, edit and replace the file, with every other writer kept out."""
        with self._locked():
            content = self._read() if self.path.exists() else {"device": DEVICE}
            edit(content)
            scratch = self.path.with_name(f"{self.path.name}.{os.getpid()}")
            scratch.write_text(json.dumps(content))
            scratch.replace(self.path)

    @contextmanager
    def _locked(self) -> Iterator[None]:
        with open(self.path.with_name(self.path.name + ".lock"), "w", encoding="utf-8") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            yield
