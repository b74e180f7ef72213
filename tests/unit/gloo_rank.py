# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-omni-health project
"""One of two gloo ranks, as a program: ``gloo_rank.py RANK PORT``.

Commands come on stdin, answers go to stdout. What vLLM logs there is sent to stderr.
"""

from __future__ import annotations

import os
import sys
import threading

_answers = os.fdopen(os.dup(1), "w")
os.dup2(2, 1)

import torch  # noqa: E402
import torch.distributed  # noqa: E402
from vllm_omni.engine.health import process_exit  # noqa: E402


def main() -> None:
    rank, port = int(sys.argv[1]), int(sys.argv[2])
    torch.distributed.init_process_group(
        "gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=2
    )
    group = torch.distributed.new_group([0, 1])
    torch.distributed.all_reduce(torch.ones(1), group=group)
    say("ready")
    for command in map(str.strip, sys.stdin):
        if command == "collective":
            started = threading.Event()

            def wait(started: threading.Event = started) -> None:
                started.set()
                torch.distributed.all_reduce(torch.ones(1), group=group)

            threading.Thread(target=wait, daemon=True).start()
            started.wait()
            say("waiting")
        elif command in ("destroy", "abort"):
            say(process_exit.end_process_groups(failed=command == "abort"))
        elif command == "destroy-for-ever":
            process_exit._destroy = threading.Event().wait  # type: ignore[assignment]
            say(process_exit.end_process_groups(failed=False))
        elif command == "initialized":
            say(torch.distributed.is_initialized())
        elif command == "clean-up-for-ever":
            with process_exit.leaving_in_time(failed=False):
                threading.Event().wait()
        elif command == "leave":
            process_exit.exit_now(0)


def say(what: object) -> None:
    print(what, file=_answers, flush=True)


if __name__ == "__main__":
    main()
