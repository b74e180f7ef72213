"""On the PYTHONPATH of a server under test: blocks one of its event loops when told to.

A line ``LOOP SECONDS`` in the named pipe that BLOCKER_PIPE names blocks that loop.
"""

import os
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


_pipe = os.environ.get("BLOCKER_PIPE")
if _pipe and "serve" in sys.argv:
    threading.Thread(target=_obey, args=(_pipe,), daemon=True).start()
