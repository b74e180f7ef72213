# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-omni-health project
"""A systemd of the test's own: pid 1 of a namespace, with nothing to do but our units."""

from __future__ import annotations

import contextlib
import os
import subprocess
import time
from collections.abc import Iterator, Mapping
from pathlib import Path

SYSTEMD = Path("/lib/systemd/systemd")
BOOT_S = 60.0
NAMESPACES = ["unshare", "--pid", "--fork", "--mount", "--mount-proc", "--cgroup", "--kill-child"]

# Units of the machine's own lie in the same folders: none of them is wanted by this target.
BOOT = f"""
mount --make-rprivate / && mount -t tmpfs tmpfs /run && mkdir -p /run/systemd/system || exit 1
printf '[Unit]\\nDefaultDependencies=no\\n' > /run/systemd/system/drill.target
exec env -i container=drill PATH="$PATH" {SYSTEMD} --system --unit=drill.target
"""


class Systemd:
    """The manager; ``pid`` is its pid out here."""

    def __init__(self, pid: int) -> None:
        self.pid = pid

    def inside(self, *command: str, stdin: str = "") -> str:
        """Run a command beside it; what it prints."""
        enter = ["nsenter", "-t", str(self.pid), "-m", "-p", "-C"]
        done = subprocess.run(
            [*enter, *command],
            check=False,
            input=stdin,
            capture_output=True,
            text=True,
            timeout=BOOT_S,
        )
        return done.stdout + done.stderr

    def write_unit(self, name: str, text: str) -> None:
        """Make a unit and have the manager read it."""
        self.inside("tee", f"/run/systemd/system/{name}", stdin=text)
        self.inside("systemctl", "daemon-reload")

    def show(self, name: str) -> Mapping[str, str]:
        """The unit's properties."""
        lines = self.inside("systemctl", "show", name).splitlines()
        return dict(line.split("=", 1) for line in lines if "=" in line)


@contextlib.contextmanager
def booted() -> Iterator[Systemd | None]:
    """A systemd for as long as the block runs; None where there can be none."""
    if os.geteuid() != 0 or not SYSTEMD.exists():
        yield None
        return
    before = _control_groups()
    process = subprocess.Popen(
        [*NAMESPACES, "sh", "-c", BOOT], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
    )
    try:
        yield _when_up(process)
    finally:
        # With unshare its child ends, and with pid 1 everything in the namespace.
        process.kill()
        process.wait()
        _remove(_control_groups() - before)


def _control_groups() -> set[Path]:
    """Those right below this process's own and the roots, where the manager makes its own."""
    found: set[Path] = set()
    for line in Path("/proc/self/cgroup").read_text().splitlines():
        _, controllers, path = line.split(":", 2)
        for mount in {controllers.removeprefix("name="), "unified", "."}:
            root = Path("/sys/fs/cgroup") / mount
            for parent in (root, root / path.lstrip("/")):
                if (parent / "cgroup.procs").exists():
                    found |= {entry for entry in parent.iterdir() if entry.is_dir()}
    return found


def _remove(groups: set[Path]) -> None:
    deadline = time.monotonic() + BOOT_S
    for group in groups:
        # Processes that were killed take a moment to leave.
        while time.monotonic() < deadline:
            try:
                for folder, _, _ in os.walk(group, topdown=False):
                    Path(folder).rmdir()
            except OSError:
                time.sleep(0.2)
            else:
                break


def _when_up(process: subprocess.Popen[bytes]) -> Systemd | None:
    deadline = time.monotonic() + BOOT_S
    children = Path(f"/proc/{process.pid}/task/{process.pid}/children")
    while time.monotonic() < deadline and process.poll() is None:
        with contextlib.suppress(OSError, ValueError):
            manager = Systemd(int(children.read_text()))
            if "running" in manager.inside("systemctl", "is-system-running").split():
                return manager
        time.sleep(0.2)
    return None
