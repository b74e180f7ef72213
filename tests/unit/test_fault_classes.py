# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-omni-health project
"""Exception classes that an operator or a plugin names, in this process and in its children."""

import os
import subprocess
import sys
from types import SimpleNamespace

import pytest
from vllm_omni.engine.health.diffusion import faults as diffusion_faults
from vllm_omni.entrypoints.health.server.arguments import BadInput, checked_settings
from vllm_omni.health.faults import plugins, table
from vllm_omni.health.faults.classify import classify, fault_from_exception
from vllm_omni.health.faults.fault import FaultKind, Severity

from vllm_omni_health.settings.fault_classes import checked
from vllm_omni_health.settings.model import variable
from vllm_omni_health.settings.sources import SettingsError, load

NAME = f"{__name__}.VendorError"


class VendorError(RuntimeError):
    pass


class DerivedError(VendorError):
    pass


@pytest.fixture(autouse=True)
def _own_table():
    yield
    table.use(None)


def use(**entries):
    table.use(table.table_with(checked(entries)))


# ---- what an entry does --------------------------------------------------------------------


def test_a_named_class_and_its_subclasses_are_known():
    assert classify(DerivedError()).kind is FaultKind.ENGINE
    use(**{NAME: "accelerator"})
    for exc in (VendorError("xid 79"), DerivedError()):
        fault = fault_from_exception(exc)
        assert (fault.kind, fault.severity) == (FaultKind.ACCELERATOR, Severity.FATAL)
    wrapped = RuntimeError("Worker failed")
    wrapped.__cause__ = VendorError()
    assert classify(wrapped).kind is FaultKind.ACCELERATOR


def test_an_entry_takes_the_place_of_a_built_in_one():
    use(**{"builtins.MemoryError": "engine:request"})
    finding = classify(MemoryError())
    assert (finding.kind, finding.severity) == (FaultKind.ENGINE, Severity.REQUEST)


def test_diffusion_stages_follow_an_entry_before_what_is_harmless_there():
    assert not diffusion_faults.fault_of(ValueError()).fatal
    use(**{"builtins.ValueError": "engine:fatal", NAME: "oom:request"})
    assert diffusion_faults.fault_of(ValueError()).fatal
    fault = diffusion_faults.fault_of(VendorError())
    assert (fault.kind, fault.fatal) == (FaultKind.OOM, False)
    assert not diffusion_faults.fault_of(KeyError()).fatal


def test_the_message_decides_nothing():
    use(**{NAME: "oom"})
    assert classify(RuntimeError(f"{NAME}: out of memory")).kind is FaultKind.ENGINE


# ---- the setting ---------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("argument", "environ"),
    [
        ({"fault_classes": {"a.B": "oom", "c.D": "engine:request"}}, {}),
        ({"fault_classes": "a.B=oom, c.D=engine:request"}, {}),
        (None, {variable("fault_classes"): " a.B = oom ,c.D=engine:request,"}),
    ],
)
def test_it_is_given_as_text_or_as_json(argument, environ):
    loaded = load(argument, environ).fault_classes
    assert loaded == {"a.B": "oom:fatal", "c.D": "engine:request"}


@pytest.mark.parametrize(
    ("text", "what"),
    [
        ("a.B", "a.B=: no kind ''"),
        ("ValueError=oom", "write builtins.ValueError"),
        ("a.B=ooom", "no kind 'ooom'"),
        ("a.B=oom:deadly", "no severity 'deadly'"),
        ("a b.C=oom", "not the dotted name of a class"),
        ("=oom", "not the dotted name of a class"),
        ("a.B=", "no kind ''"),
    ],
)
def test_a_bad_entry_is_told_in_one_line(text, what):
    with pytest.raises(SettingsError) as caught:
        load(None, {variable("fault_classes"): text})
    line = str(caught.value)
    assert line.startswith("environment variable VLLM_OMNI_HEALTH_FAULT_CLASSES")
    assert what in line
    assert "\n" not in line
    assert "process_lost" in line


def test_json_of_another_shape_is_told_in_one_line():
    for value in (["a.B"], {"a.B": 3}, 7):
        with pytest.raises(SettingsError, match="must be CLASS=KIND"):
            load({"fault_classes": value}, {})


def test_child_processes_classify_by_their_environment():
    code = (
        "from vllm_omni.health.faults.classify import fault_from_exception\n"
        "class VendorError(RuntimeError): pass\n"
        "print(fault_from_exception(VendorError()).kind.value)\n"
    )
    script = f"import sys; sys.path[:0] = {sys.path!r}\nimport vllm_omni.health\n{code}"
    settings = load({"fault_classes": {"__main__.VendorError": "collective"}}, {})
    done = subprocess.run(
        [sys.executable, "-c", script],
        env={**os.environ, **settings.to_environ()},
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )
    assert done.stdout.split()[-1:] == ["collective"], done.stderr


def test_nonsense_in_the_environment_of_a_child_is_ignored(monkeypatch):
    monkeypatch.setenv(table.VARIABLE, "what=ever=")
    table.use(None)
    assert classify(MemoryError()).kind is FaultKind.HOST_OOM


# ---- plugins -------------------------------------------------------------------------------


def installed(monkeypatch, **found):
    """Let these be installed: name → what its entry point stands for, or raises."""

    def load_one(value):
        if isinstance(value, Exception):
            raise value
        return value

    points = [
        SimpleNamespace(name=name, load=lambda value=value: load_one(value))
        for name, value in found.items()
    ]
    monkeypatch.setattr("importlib.metadata.entry_points", lambda *, group: points)


def test_plugins_add_classes_and_a_setting_wins(monkeypatch):
    installed(
        monkeypatch, npu={"npu.Error": "oom", "npu.Other": "engine"}, fun=lambda: {NAME: "hang"}
    )
    monkeypatch.setenv(table.VARIABLE, "npu.Other=collective")
    settings = checked_settings(SimpleNamespace())
    assert settings.fault_classes == {
        "npu.Error": "oom:fatal",
        "npu.Other": "collective:fatal",
        NAME: "hang:fatal",
    }


@pytest.mark.parametrize(
    ("value", "what"),
    [
        ({"npu.Error": "broken"}, "no kind 'broken'"),
        (["npu.Error"], "gives list, not a mapping"),
        (ImportError("no module\nnamed npu"), "cannot be loaded: ImportError"),
    ],
)
def test_a_bad_plugin_stops_the_start_with_one_line(monkeypatch, value, what):
    installed(monkeypatch, npu=value)
    with pytest.raises(BadInput) as caught:
        checked_settings(SimpleNamespace())
    line = str(caught.value)
    assert line.startswith("plugin npu (vllm_omni_health.fault_classes): ")
    assert what in line
    assert "\n" not in line


def test_an_installed_package_is_found_by_its_entry_point(tmp_path, monkeypatch):
    (tmp_path / "npu_faults.py").write_text("CLASSES = {'npu.DeviceLost': 'accelerator'}\n")
    info = tmp_path / "npu_faults-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: npu-faults\nVersion: 1.0\n")
    group = f"[{plugins.GROUP}]\nnpu = npu_faults:CLASSES\n"
    (info / "entry_points.txt").write_text(group)
    assert plugins.from_plugins() == {}
    monkeypatch.syspath_prepend(tmp_path)
    assert plugins.from_plugins() == {"npu.DeviceLost": "accelerator:fatal"}
