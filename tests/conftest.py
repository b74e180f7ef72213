# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-omni-health project
"""What all tests share: how many servers the suite has started, since they take the time."""

import pytest

from vllm_omni_health.drills.server import Server


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    if Server.started:
        terminalreporter.write_line(f"servers started: {Server.started}")
