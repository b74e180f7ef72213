# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-omni-health project
"""What is looked at on the command line before anything is started."""

from __future__ import annotations

import os
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from vllm_omni.entrypoints.health.server.arguments import BadInput, BadUsage, checked_settings

from vllm_omni_health.settings.model import HealthSettings, variable
from vllm_omni_health.settings.sources import SettingsError


@pytest.fixture(autouse=True)
def _no_settings_from_outside(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in list(os.environ):
        if name.startswith("VLLM_OMNI_HEALTH"):
            monkeypatch.delenv(name)


def checked(**arguments: Any) -> HealthSettings:
    return checked_settings(SimpleNamespace(**arguments))


def test_a_limit_of_requests_is_none_below_zero_and_one_of_tokens_nobody_would_keep() -> None:
    checked(max_num_queued_reqs=0)
    with pytest.raises(BadUsage, match="--max-num-queued-reqs -1: must be 0 or more"):
        checked(max_num_queued_reqs=-1)
    with pytest.raises(BadInput, match="--max-num-queued-tokens 5: nobody counts tokens"):
        checked(max_num_queued_tokens=5)


def test_vllms_own_option_is_the_time_to_drain() -> None:
    settings = checked(shutdown_timeout=100)
    assert (settings.drain_timeout_s, settings.shutdown_timeout_s) == (100, 130)


@pytest.mark.parametrize("health", [{}, {"policy": "hold"}])
def test_it_is_so_also_beside_other_settings(health: dict[str, Any]) -> None:
    assert checked(shutdown_timeout=5, additional_config={"health": health}).drain_timeout_s == 5


@pytest.mark.parametrize("where", ["environment", "argument"])
def test_a_setting_of_ours_wins(where: str, monkeypatch: pytest.MonkeyPatch) -> None:
    additional: dict[str, Any] = {}
    if where == "environment":
        monkeypatch.setenv(variable("drain_timeout_s"), "7")
    else:
        additional = {"health": {"drain_timeout_s": 7}}
    assert checked(shutdown_timeout=5, additional_config=additional).drain_timeout_s == 7


def test_it_does_not_reach_upstream_which_knows_no_stage_for_it() -> None:
    args = SimpleNamespace(shutdown_timeout=5)
    checked_settings(args)
    assert args.shutdown_timeout is None


@pytest.mark.parametrize("seconds", [-1, 86400])
def test_a_time_to_drain_out_of_range(seconds: int) -> None:
    with pytest.raises(BadUsage, match=f"--shutdown-timeout {seconds}: must be from 0 to 86370"):
        checked(shutdown_timeout=seconds)


def test_a_time_to_drain_that_leaves_none_to_close(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(variable("shutdown_timeout_s"), "30")
    with pytest.raises(BadInput, match="--shutdown-timeout 100: must be below shutdown_timeout_s"):
        checked(shutdown_timeout=100)


@pytest.mark.parametrize("text", ["[1]", "5", '"health"'])
def test_additional_config_that_is_no_object(text: str) -> None:
    with pytest.raises(BadUsage, match=r"--additional-config .* must be a JSON object"):
        checked(additional_config=text)


def test_a_host_that_nobody_knows() -> None:
    with pytest.raises(BadInput, match=r"--host 300\.1\.1\.1: cannot be resolved"):
        checked(host="300.1.1.1")
    checked(host="127.0.0.1")
    checked(host=None)


def test_a_pipe_without_a_reader_may_be_the_termination_log(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    monkeypatch.setenv(variable("termination_log"), str(pipe))
    assert checked().termination_log == pipe


@pytest.mark.parametrize("name", ["a" * 300, "no\0name"])
def test_a_termination_log_that_no_file_can_be(tmp_path: Path, name: str) -> None:
    with pytest.raises(SettingsError, match="must be a file in a folder that exists"):
        checked(additional_config={"health": {"termination_log": str(tmp_path / name)}})
