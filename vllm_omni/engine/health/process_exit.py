# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-omni-health project
"""The last steps of a stage process or a worker: end its process groups, then leave.

A communicator is destroyed by all of its ranks together. ``ncclCommDestroy`` waits for every
peer, and so for ever when one is gone; after a fault communicators are therefore aborted, which
asks nobody. Whatever is done here is bounded: the process is about to end in any case.
"""

from __future__ import annotations

import contextlib
import logging
import os
import sys
import threading
from collections.abc import Callable, Iterator
from multiprocessing import util
from typing import NoReturn

import torch.distributed
from torch.distributed import distributed_c10d
from vllm.distributed.parallel_state import (
    destroy_distributed_environment,
    destroy_model_parallel,
)

logger = logging.getLogger(__name__)

DESTROY_S = 2.0
"""Bound for destroying process groups; gloo takes a millisecond. Half of the time that vLLM's
executor gives its workers before it terminates them."""
ABORT_S = 1.0
"""Bound for aborting them: long enough for a driver to answer, and half of the other bound."""


def end_process_groups(*, failed: bool) -> bool:
    """Destroy this process's groups in order, or abort them if it ``failed``.

    Not destroyed within ``DESTROY_S``, they are aborted. Whether they are gone without that.
    """
    if failed:
        return abort_process_groups()
    if _within(DESTROY_S, _destroy, "health-destroy-groups"):
        return True
    logger.error("[health] process groups not destroyed within %g s; a peer is gone", DESTROY_S)
    abort_process_groups()
    return False


def abort_process_groups() -> bool:
    """Abort every communicator of this process, within ``ABORT_S``; whether that worked.

    What waits in a collective on another thread gets an error, where the backend can do that.
    """
    if _within(ABORT_S, _abort, "health-abort-groups"):
        return True
    logger.error("[health] process groups not aborted within %g s", ABORT_S)
    return False


@contextlib.contextmanager
def leaving_in_time(*, failed: bool) -> Iterator[None]:
    """Around a clean-up of upstream's that destroys process groups and waits for its peers.

    After ``DESTROY_S`` the groups are aborted, which frees a thread that waits for a peer; a
    process that hangs all the same leaves ``ABORT_S`` later, with status 1. Of a process that
    ``failed`` they are aborted at once, and what the clean-up then misses is no error.
    """
    over = threading.Event()

    def watch() -> None:
        if over.wait(DESTROY_S):
            return
        logger.error("[health] not cleaned up within %g s; a peer is gone", DESTROY_S)
        abort_process_groups()
        if not over.wait(ABORT_S):
            exit_now(1)

    if failed:
        abort_process_groups()
    threading.Thread(target=watch, name="health-leave-in-time", daemon=True).start()
    try:
        yield
    except Exception:
        if not failed:
            raise
        logger.debug("[health] clean-up after a fault", exc_info=True)
    finally:
        over.set()


def exit_now(status: int) -> NoReturn:
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


def _within(timeout_s: float, end: Callable[[], None], name: str) -> bool:
    """Run ``end`` on a thread that is left behind when it does not return; whether it did."""
    if not torch.distributed.is_available() or not torch.distributed.is_initialized():
        return True
    done = threading.Event()

    def run() -> None:
        try:
            end()
        except Exception:
            logger.exception("[health] ending the process groups failed")
        done.set()

    threading.Thread(target=run, name=name, daemon=True).start()
    return done.wait(timeout_s)


def _destroy() -> None:
    destroy_model_parallel()
    destroy_distributed_environment()


def _abort() -> None:
    # The world stands for all groups: NCCL's are aborted together, without which one abort
    # could wait for another. torch has no public name for it yet.
    distributed_c10d._abort_process_group()
