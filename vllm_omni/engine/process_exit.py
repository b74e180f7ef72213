"""The last steps of a stage process: destroy its process groups, then leave without ceremony."""

from __future__ import annotations

import contextlib
import logging
import os
import sys
import threading
from multiprocessing import util
from typing import NoReturn

import torch.distributed
from vllm.distributed.parallel_state import (
    destroy_distributed_environment,
    destroy_model_parallel,
)

logger = logging.getLogger(__name__)

DESTROY_S = 2.0
"""Bound for destroying process groups. ``ncclCommDestroy`` waits for every rank, and so for
ever when one is gone; gloo takes a millisecond."""


def destroy_process_groups(timeout_s: float = DESTROY_S) -> bool:
    """Destroy the model-parallel groups and the world, within ``timeout_s``; whether it worked.

    Runs on a thread of its own, which is left behind when it does not return: the process is
    about to end, and a communicator whose peer is gone cannot be waited for.
    """
    if not torch.distributed.is_available() or not torch.distributed.is_initialized():
        return True
    done = threading.Event()

    def destroy() -> None:
        try:
            destroy_model_parallel()
            destroy_distributed_environment()
        except Exception:
            logger.exception("[health] destroying the process groups failed")
        done.set()

    threading.Thread(target=destroy, name="health-destroy-groups", daemon=True).start()
    if done.wait(timeout_s):
        return True
    logger.error("[health] process groups not destroyed within %g s; a peer is gone", timeout_s)
    return False


def leave(status: int) -> NoReturn:
    """End this process as multiprocessing ends a forked child: finalizers, flush, ``_exit``.

    A spawned child would go through the interpreter's finalization, which takes seconds with
    torch and vLLM loaded and gives back nothing that the kernel does not.
    """
    with contextlib.suppress(Exception):
        util._exit_function()  # type: ignore[attr-defined]
    logging.shutdown()
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(Exception):
            stream.flush()
    os._exit(status)
