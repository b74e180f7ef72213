# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-omni-health project
"""Settings: two sources, one winner, and a clear line for whatever is wrong."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from vllm_omni_health.settings.floor import ALLOWED as FLOOR_ALLOWED
from vllm_omni_health.settings.model import PREFIX, HealthSettings, variable
from vllm_omni_health.settings.sources import SettingsError, enabled, load
from vllm_omni_health.settings.words import describe

FIELDS = list(HealthSettings.model_fields)


def refused(argument: Any, environ: dict[str, str] | None = None) -> str:
    with pytest.raises(SettingsError) as caught:
        load(argument, environ or {})
    line = str(caught.value)
    assert "\n" not in line
    return line


# ---- where values come from ----------------------------------------------------------------


def test_the_defaults() -> None:
    assert load(None, {}).model_dump() == {
        "policy": "exit",
        "exit_grace_s": 5.0,
        "retry_after_s": 10,
        "degraded_is_unhealthy": False,
        "termination_log": None,
        "drain_timeout_s": 0.0,
        "shutdown_timeout_s": 30.0,
        "hang_timeout_s": 300.0,
        "remote_timeout_s": 30.0,
        "loop_stall_s": 10.0,
        "error_budget": 0,
        "error_budget_window_s": 60.0,
        "fault_classes": {},
        "settle_s": 0.1,
        "min_free_memory": "0",
        "memory_interval_s": 1.0,
        "memory_recover_s": 5.0,
        "memory_discrepancy_pct": 5.0,
        "memory_window_s": 30.0,
        "preflight": "warn",
        "simulated_device": None,
    }


def test_the_environment_sets_values(tmp_path: Path) -> None:
    log = tmp_path / "log"
    loaded = load(
        None,
        {
            "VLLM_OMNI_HEALTH_POLICY": "hold",
            "VLLM_OMNI_HEALTH_EXIT_GRACE_S": " 2.5 ",
            "VLLM_OMNI_HEALTH_RETRY_AFTER_S": "3",
            "VLLM_OMNI_HEALTH_DEGRADED_IS_UNHEALTHY": "on",
            "VLLM_OMNI_HEALTH_TERMINATION_LOG": str(log),
        },
    )
    assert (loaded.policy, loaded.exit_grace_s, loaded.retry_after_s) == ("hold", 2.5, 3)
    assert loaded.degraded_is_unhealthy is True
    assert loaded.termination_log == log


def test_the_argument_wins(tmp_path: Path) -> None:
    loaded = load({"exit_grace_s": 1}, {variable("exit_grace_s"): "2", variable("settle_s"): "1"})
    assert (loaded.exit_grace_s, loaded.settle_s) == (1.0, 1.0)


def test_the_argument_can_take_the_termination_log_back(tmp_path: Path) -> None:
    environ = {variable("termination_log"): str(tmp_path / "log")}
    assert load({"termination_log": None}, environ).termination_log is None


def test_only_the_given_environment_is_read(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(variable("policy"), "hold")
    monkeypatch.setenv(variable("settle_s"), "wrong")
    assert load(None, {}).policy == "exit"


def test_the_processs_environment_is_the_default(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(variable("policy"), "hold")
    assert load().policy == "hold"


def test_an_empty_variable_counts_as_not_set() -> None:
    assert load(None, {variable(name): "" for name in FIELDS}) == load(None, {})


def test_settings_cannot_be_changed() -> None:
    with pytest.raises(ValueError, match="frozen"):
        load(None, {}).policy = "hold"  # type: ignore[misc]


def test_a_relative_termination_log_is_made_absolute(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert load({"termination_log": "log"}, {}).termination_log == tmp_path / "log"


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None)
@given(
    st.fixed_dictionaries(
        {},
        optional={
            "policy": st.sampled_from(["exit", "hold"]),
            "exit_grace_s": st.floats(0, 3600) | st.integers(0, 3600),
            "retry_after_s": st.integers(0, 86400),
            "degraded_is_unhealthy": st.booleans(),
            "termination_log": st.none() | st.just("log"),
            "drain_timeout_s": st.floats(0, 0.9),
            "shutdown_timeout_s": st.floats(1, 86400),
            "loop_stall_s": st.floats(1, 3600),
            "settle_s": st.floats(0, 5),
            "error_budget": st.integers(0, 1000),
            "fault_classes": st.dictionaries(
                st.sampled_from(["a.B", "builtins.ValueError", "pkg.mod.Outer.Inner"]),
                st.sampled_from(["oom", "engine:request", "collective:fatal"]),
            ),
            "min_free_memory": st.sampled_from(["0", "2GiB", "5%", "gpu=2GiB,host=1%"]),
            "memory_interval_s": st.floats(0.1, 3600),
            "memory_discrepancy_pct": st.floats(0, 1000),
            "preflight": st.sampled_from(["fail", "warn", "off"]),
        },
    )
)
def test_child_processes_get_the_same_settings(tmp_path: Path, argument: dict[str, Any]) -> None:
    if argument.get("termination_log"):
        argument["termination_log"] = str(tmp_path / "log")
    loaded = load(argument, {})
    environ = {variable(name): "overwritten" for name in FIELDS} | loaded.to_environ()
    assert load(None, environ) == loaded
    assert all(isinstance(value, str) for value in environ.values())


# ---- what is wrong -------------------------------------------------------------------------


def test_an_unknown_key_is_named_with_its_place_and_a_suggestion() -> None:
    line = refused({"exit_grce_s": 1})
    assert line.startswith(
        "--additional-config: health.exit_grce_s: no such setting; did you mean exit_grace_s? "
    )
    assert all(name in line for name in FIELDS)


def test_an_unknown_variable_is_named_with_a_suggestion() -> None:
    line = refused(None, {"VLLM_OMNI_HEALTH_POLCY": "exit"})
    assert line.startswith(
        "environment variable VLLM_OMNI_HEALTH_POLCY: no such setting; "
        "did you mean VLLM_OMNI_HEALTH_POLICY? "
    )


def test_what_looks_like_nothing_known_gets_no_suggestion() -> None:
    assert "did you mean" not in refused({"zzz": 1})


def test_variables_of_others_are_none_of_our_business() -> None:
    load(None, {"VLLM_OMNI_HEALTH": "on", "VLLM_OMNI_X": "1", "OTHER": "1"})


@pytest.mark.parametrize(
    ("key", "value", "allowed"),
    [
        ("policy", "restart", "exit or hold"),
        ("policy", 1, "exit or hold"),
        ("exit_grace_s", -1, "a number of seconds from 0 to 3600"),
        ("exit_grace_s", "5", "a number of seconds from 0 to 3600"),
        ("exit_grace_s", True, "a number of seconds from 0 to 3600"),
        ("exit_grace_s", None, "a number of seconds from 0 to 3600"),
        ("exit_grace_s", [5], "a number of seconds from 0 to 3600"),
        ("settle_s", 5.1, "a number of seconds from 0 to 5"),
        ("settle_s", float("nan"), "a number of seconds from 0 to 5"),
        ("loop_stall_s", float("inf"), "a number of seconds from 1 to 3600"),
        ("shutdown_timeout_s", 0, "a number of seconds from 1 to 86400"),
        ("retry_after_s", 1.5, "a whole number of seconds from 0 to 86400"),
        ("degraded_is_unhealthy", "yes", "true or false"),
        ("degraded_is_unhealthy", 1, "true or false"),
        ("termination_log", 3, "the path of a file"),
        ("termination_log", "/no/such/folder/log", "a file in a folder that exists"),
        ("termination_log", "/", "a file in a folder that exists"),
        ("min_free_memory", "much", FLOOR_ALLOWED),
        ("min_free_memory", 5, FLOOR_ALLOWED),
        ("preflight", "maybe", "fail or warn or off"),
        ("memory_discrepancy_pct", -1, "a number of percent from 0 to 1000"),
    ],
)
def test_a_wrong_argument_is_named_with_its_value_and_what_is_allowed(
    key: str, value: Any, allowed: str
) -> None:
    line = refused({key: value})
    assert line == f"--additional-config: health.{key}={json.dumps(value)}: must be {allowed}"


@pytest.mark.parametrize(
    ("key", "value", "allowed"),
    [
        ("policy", "restart", "exit or hold"),
        ("exit_grace_s", "five", "a number of seconds from 0 to 3600"),
        ("exit_grace_s", "nan", "a number of seconds from 0 to 3600"),
        ("exit_grace_s", "-1", "a number of seconds from 0 to 3600"),
        ("retry_after_s", "1.5", "a whole number of seconds from 0 to 86400"),
        ("degraded_is_unhealthy", "maybe", "true or false"),
        ("termination_log", "/no/such/folder/log", "a file in a folder that exists"),
    ],
)
def test_a_wrong_variable_is_named_with_its_value_and_what_is_allowed(
    key: str, value: str, allowed: str
) -> None:
    line = refused(None, {variable(key): value})
    assert line == f'environment variable {variable(key)}="{value}": must be {allowed}'


def test_a_wrong_variable_is_refused_even_if_the_argument_would_win() -> None:
    assert variable("settle_s") in refused({"settle_s": 1}, {variable("settle_s"): "soon"})


def test_draining_must_end_before_the_shutdown_does() -> None:
    assert refused({"drain_timeout_s": 30}) == (
        "--additional-config: health.drain_timeout_s=30: must be below "
        "shutdown_timeout_s (default)=30, which includes draining"
    )
    line = refused({"shutdown_timeout_s": 5}, {variable("drain_timeout_s"): "6"})
    assert "VLLM_OMNI_HEALTH_DRAIN_TIMEOUT_S=6" in line
    assert "health.shutdown_timeout_s=5" in line


@pytest.mark.parametrize("argument", [3, "policy", ["policy"], True, 0, "", []])
def test_the_argument_must_be_an_object(argument: Any) -> None:
    assert "must be an object of settings" in refused(argument)


def test_a_value_is_shown_cut_and_on_one_line() -> None:
    line = refused({"policy": "a\nb" * 10_000})
    assert len(line) < 300


def test_a_value_that_json_does_not_know_is_refused() -> None:
    assert "must be exit or hold" in refused({"policy": object()})


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(),
    lambda children: st.lists(children) | st.dictionaries(st.text(), children),
    max_leaves=5,
)


@settings(deadline=None)
@given(st.dictionaries(st.sampled_from([*FIELDS, "x"]) | st.text(), json_values, max_size=4))
def test_any_argument_is_taken_or_refused_in_one_line(argument: dict[str, Any]) -> None:
    try:
        load(argument, {})
    except SettingsError as error:
        assert str(error).isprintable()  # noqa: PT017 - it may also be right


@settings(deadline=None)
@given(st.sampled_from(FIELDS), st.text())
def test_any_variable_is_taken_or_refused_in_one_line(name: str, value: str) -> None:
    try:
        load(None, {variable(name): value})
    except SettingsError as error:
        assert str(error).isprintable()  # noqa: PT017 - it may also be right


# ---- on and off ----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("value", "expected"),
    [("on", True), ("1", True), ("TRUE", True), ("", True), (" off ", False), ("0", False)],
)
def test_the_layer_can_be_switched_off(value: str, expected: bool) -> None:
    assert enabled({"VLLM_OMNI_HEALTH": value}) is expected


def test_the_layer_is_on_by_default() -> None:
    assert enabled({})


def test_neither_on_nor_off_is_refused() -> None:
    with pytest.raises(SettingsError, match=r'^environment variable VLLM_OMNI_HEALTH="maybe": '):
        enabled({"VLLM_OMNI_HEALTH": "maybe"})


def test_a_floor_that_nobody_watches_is_refused() -> None:
    line = refused({"min_free_memory": "2GiB"}, {variable("memory_interval_s"): "0"})
    assert line == (
        "environment variable VLLM_OMNI_HEALTH_MEMORY_INTERVAL_S=0: must be above 0 for "
        "min_free_memory to have an effect"
    )


# ---- documentation -------------------------------------------------------------------------


def test_every_setting_is_described() -> None:
    rows = {row.name: row for row in describe()}
    assert list(rows) == FIELDS
    for row in rows.values():
        assert row.variable == PREFIX + row.name.upper()
        assert row.description
        assert row.allowed
        units = {"s": "seconds", "pct": "percent"}
        units["budget"] = "failed requests"
        assert row.unit == units.get(row.name.rpartition("_")[2], "")
    assert rows["exit_grace_s"].default == "5"
    assert rows["degraded_is_unhealthy"].default == "false"
    assert rows["termination_log"].default == ""


def test_every_default_is_allowed() -> None:
    loaded = load(None, {})
    assert load(json.loads(loaded.model_dump_json()), {}) == loaded
