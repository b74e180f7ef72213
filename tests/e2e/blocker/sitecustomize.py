# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-omni-health project
"""On the PYTHONPATH of a server under test: blocks one of its threads when told to.

A line ``LOOP SECONDS`` in the named pipe that BLOCKER_PIPE names blocks that event loop of the
server. With BLOCKER_DEADLOCK, SIGUSR2 deadlocks the output thread of an engine core.
"""

import os
import signal
import sys
import threading
import time


def _obey(path):
    with open(path) as orders:
        for order in orders:
            name, seconds = order.split()
            from vllm_omni.health.runtime import require

            beat = getattr(require(), f"{name}_beat")
            beat._loop.call_soon_threadsafe(time.sleep, float(seconds))


class _Poison:
    """An output on whose way out the thread that sends it waits for itself."""

    def __setattr__(self, name, value):
        lock = threading.Lock()
        lock.acquire()
        lock.acquire()


def _deadlock_output_thread(_signum, frame):
    # On the main thread, which runs the busy loop.
    while frame is not None:
        queue = getattr(frame.f_locals.get("self"), "output_queue", None)
        if queue is not None:
            queue.put_nowait((0, _Poison()))
            return
        frame = frame.f_back


if os.environ.get("BLOCKER_DEADLOCK"):
    signal.signal(signal.SIGUSR2, _deadlock_output_thread)

_pipe = os.environ.get("BLOCKER_PIPE")
if _pipe and "serve" in sys.argv:
    threading.Thread(target=_obey, args=(_pipe,), daemon=True).start()
