# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-omni-health project
"""Ports for servers under drill, each for one drill at a time.

A server takes seconds from its start until it listens. What is free now may be taken by then,
and the drill would talk to another drill's server without noticing.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import socket
import tempfile
from collections.abc import Iterator
from pathlib import Path

# Below what the kernel gives to outgoing connections by default (32768 and up).
FIRST, LAST = 8200, 8299


@contextlib.contextmanager
def reserved_port() -> Iterator[int]:
    """A port on which nobody listens, kept from every other drill of this user meanwhile.

    Raises OSError when all of them are taken.
    """
    folder = Path(tempfile.gettempdir()) / f"vllm-omni-drill-ports-{os.getuid()}"
    folder.mkdir(mode=0o700, exist_ok=True)
    for port in range(FIRST, LAST + 1):
        # The lock goes with this process, however it ends; the file stays.
        with open(folder / str(port), "w") as file:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                continue
            if _nobody_listens(port):
                yield port
                return
    raise OSError(f"no free port between {FIRST} and {LAST}")


def _nobody_listens(port: int) -> bool:
    with socket.socket() as sock:
        # Connections of a server that has ended linger; they do not matter.
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            sock.bind(("127.0.0.1", port))
        except OSError:
            return False
    return True
