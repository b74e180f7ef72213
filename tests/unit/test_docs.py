# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-omni-health project
"""What the documentation says of settings and exit statuses is what the code does."""

from pathlib import Path

import pytest
from vllm_omni.health.faults.fault import FaultKind

from vllm_omni_health.settings.words import describe

OPERATING = (Path(__file__).parents[2] / "docs" / "operating.md").read_text()


@pytest.mark.parametrize("row", describe(), ids=lambda row: row.name)
def test_every_setting_is_in_the_table_with_its_default(row):
    allowed = row.allowed.replace("|", "/")
    cells = [f"`{row.name}`", f"`{row.variable}`", row.default or "none", allowed]
    assert "| " + " | ".join([*cells, row.description]) + " |" in OPERATING


@pytest.mark.parametrize("kind", FaultKind)
def test_every_kind_of_fault_is_in_the_table_with_its_status(kind):
    assert f"| {kind.exit_status} | `{kind.value}` |" in OPERATING
