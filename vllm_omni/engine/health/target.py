# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-omni-health project
"""What every process of a stage runs: an entry of upstream's with the health layer around it."""

from __future__ import annotations

import os
import traceback
from collections.abc import Callable
from functools import partial
from multiprocessing.connection import Connection
from typing import NoReturn

from vllm_omni.engine.health.process_exit import end_process_groups, exit_now
from vllm_omni.health.faults.fault import Fault
from vllm_omni.health.liveness import stacks
from vllm_omni.health.processes import stop_signals
from vllm_omni.health.processes.last_words import LastWordsWriter, own_words, say, speak_through


def run(
    entry: Callable[[], object],
    fault_of: Callable[[BaseException], Fault],
    *,
    last_words: Connection | None,
    order: Connection | None,
    leads: bool = False,
) -> NoReturn:
    """Run ``entry`` on the main thread, state what ends it, and end this process.

    ``last_words`` is the writing end of the replica's pipe, which its processes share, ``order``
    the reading end of the pipe for the order to end; both None where no server listens. With
    ``leads`` the process leads a process group of its own. It ends with the status that ``entry``
    would have ended it with; the process groups of torch are ended first, bounded.
    """
    if leads:
        # So that a replica can be killed whole without touching the server, and so that a Ctrl-C
        # at the terminal reaches the server alone, which ends stages in order.
        os.setpgid(0, 0)
    stacks.offer()
    if last_words is not None and order is not None:
        words = LastWordsWriter(last_words.fileno(), shared=True)
        speak_through(words)
        stop_signals.listen(partial(stop_signals.given, order), words.told_to_stop)
    status = 1
    try:
        entry()
        status = 0
    except SystemExit as exc:
        status = exc.code if isinstance(exc.code, int) else 0 if exc.code is None else 1
    except BaseException as exc:
        # Covers model load, when there is no output queue yet.
        stated = own_words()
        if stated is None or not stated.stated:
            say(fault_of(exc).as_fatal())
        traceback.print_exc()
    end_process_groups(failed=status != 0)
    exit_now(status)
