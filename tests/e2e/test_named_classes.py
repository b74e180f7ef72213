# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-omni-health project
"""An exception class that the operator names reaches the worker process in which it arises."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path

import pytest

from vllm_omni_health.drills.chat import ChatRequest

pytestmark = pytest.mark.slow


def test_the_kind_that_a_setting_gives_a_class_is_the_kind_of_the_fault(
    serve, termination_log: Path
) -> None:
    async def drill() -> None:
        named = "builtins.RuntimeError=collective"
        async with serve("ar-1", exit_grace_s=1, fault_classes=named) as server:
            # A bare RuntimeError, in a worker's forward pass.
            request = ChatRequest(prompt="Please fail. <|fault:error@0|>", max_tokens=2)
            answer = await server.client.post(request.path, json=request.body(), timeout=60)
            assert answer.status_code == 500, answer.text
            assert answer.json()["error"]["fault"]["kind"] == "collective"
            await server.wait_end(60)
            assert server.ending is not None
            assert server.ending.status == 84, server.tail()

    asyncio.run(drill())
    reason = json.loads(termination_log.read_text())
    assert (reason["kind"], reason["exception"]) == ("collective", "builtins.RuntimeError")
