# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-omni-health project
"""A program that uses the engine itself: run by test_library_use.py, which reads what it prints."""

import asyncio
import json
import os
import signal
import sys
from pathlib import Path

from vllm import SamplingParams
from vllm.plugins import load_general_plugins
from vllm_omni.entrypoints.health.library import FaultError, install

SLOW = "One more. <|fault:slow@0|>"


def family() -> list[str]:
    """The command lines of this process's children."""
    tasks = Path(f"/proc/{os.getpid()}/task").iterdir()
    pids = [pid for task in tasks for pid in (task / "children").read_text().split()]
    return [Path(f"/proc/{pid}/cmdline").read_text().replace("\0", " ") for pid in pids]


async def ask(omni, prompt: str, tokens: int) -> str:
    try:
        async for _output in omni.generate(
            prompt, sampling_params_list=[SamplingParams(max_tokens=tokens, temperature=0.0)]
        ):
            pass
    except FaultError as error:
        return f"{error.fault.kind.value}: {error}"
    return "answered"


async def main(model: str, deploy: str) -> None:
    # The tiny models', before a deployment of them is looked up.
    load_general_plugins()
    health = install(hang_timeout_s=60)
    found: dict[str, object] = {"threads": []}
    states = [health.snapshot.state.value]
    health.observe(lambda move: states.append(move.to_state.value))
    environment = dict(os.environ)
    async with health.engine(model=model, deploy_config=deploy) as omni:
        found["first"] = await ask(omni, "Hello.", 2)
        pending = [asyncio.create_task(ask(omni, SLOW, 30)) for _ in range(2)]
        await asyncio.sleep(3)
        found["in flight"] = [task.done() for task in pending]
        (replica,) = health.snapshot.stages[0].replicas
        os.kill(replica.pid, signal.SIGKILL)
        found["pending"] = await asyncio.gather(*pending)
        found["state"] = health.snapshot.state.value
        found["after"] = await ask(omni, "Hello again.", 2)
    found["environment kept"] = dict(os.environ) == environment
    found["states"] = list(dict.fromkeys(states))
    found["children"] = family()
    try:
        install(no_such_setting=1)
    except ValueError as error:
        found["refused"] = str(error)
    print("FOUND " + json.dumps(found), flush=True)


if __name__ == "__main__":
    asyncio.run(main(*sys.argv[1:]))
