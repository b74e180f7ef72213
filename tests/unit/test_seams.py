# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-omni-health project
"""The seams fit the installed upstream, and one that does not stops the start with one line."""

import importlib.metadata
import json
import subprocess
import sys

import pytest
from vllm_omni.health import seams
from vllm_omni.health.seams import check, install, tables
from vllm_omni.health.seams.rows import Seam, Table, Use
from vllm_omni.health.seams.uses_stages import USED_BY_CPU_PLATFORM

from vllm_omni_health.upstream import UpstreamError

TABLES = [one for one in vars(tables).values() if isinstance(one, Table)]
SEAMS = tuple(dict.fromkeys(seam for table in TABLES for seam in table.seams))
USES = tuple(dict.fromkeys(use for table in TABLES for use in table.uses)) + USED_BY_CPU_PLATFORM


class Here:
    value = 1

    def __init__(self):
        self.assigned = 2

    def method(self, a):
        return a

    async def coroutine(self, a, *, b=None):
        return a, b


class Fits(Here):
    def method(self, *args, **kwargs):
        return args, kwargs

    async def coroutine(self, a, *, b=None, c=None):
        return a, b, c


class TakesLess(Here):
    def method(self):
        return None


class WantsMore(Here):
    def method(self, a, further):
        return a, further


class IsNotAsync(Here):
    def coroutine(self, a, *, b=None):
        return a, b


here = Here


def function(first, second):
    return first, second


def other(first, second):
    return second, first


@pytest.fixture(autouse=True)
def forget_installs(monkeypatch):
    monkeypatch.setattr(install, "_originals", {})


@pytest.mark.parametrize("seam", SEAMS, ids=lambda seam: seam.target)
def test_every_seam_fits_the_installed_upstream(seam):
    replacement = check.checked_seam(seam)[3]
    assert replacement is not None
    assert seam.why


@pytest.mark.parametrize("use", USES, ids=lambda use: use.upstream[0])
def test_everything_used_is_there_and_ours_fits_it(use):
    assert use.declared()
    check.check_use(use)


def test_there_are_few():
    assert len({seam.target for seam in SEAMS}) == len(SEAMS) <= 23


def row(target, replacement="other", **expected):
    return Seam(f"{__name__}:{target}", f"{__name__}:{replacement}", why="to test", **expected)


def used(members, subclass=""):
    ours = f"{__name__}:{subclass}" if subclass else ""
    return Use((f"{__name__}:Here",), members, subclass=ours)


@pytest.mark.parametrize(
    ("table", "problem"),
    [
        (Table((row("gone"),)), "gone cannot be found"),
        (Table((Seam("no.such.module:x", "x:y", why="to test"),)), "no.such.module:x cannot be"),
        (Table((row("here.value", "gone"),)), "gone cannot be found"),
        (
            Table((row("function", signature="(first)"),)),
            "function is (first, second), not (first)",
        ),
        (
            Table((row("function", "Here.method", signature="(first, second)"),)),
            "function is (first, second), and ours is (self, a)",
        ),
        (Table((row("here.value", new=True),)), "exists, where none was expected"),
        (Table((), (used("value\n nothing"),)), "has no nothing"),
        (Table((), (used("method(self, b)"),)), "Here.method is (self, a), not (self, b)"),
        (
            Table((), (used("coroutine(self, a, *, b)"),)),
            "Here.coroutine is async (self, a, *, b), not (self, a, *, b)",
        ),
    ],
)
def test_a_mismatch_is_one_line_with_versions_and_what_is_supported(table, problem):
    version = importlib.metadata.version("vllm-omni")
    with pytest.raises(seams.SeamError) as caught:
        install._install(table)
    text = str(caught.value)
    assert "\n" not in text
    for part in (f"vllm-omni {version}", "vllm-omni 0.30.x and vllm 0.30.x", problem):
        assert part in text


@pytest.mark.parametrize(
    ("subclass", "problem"),
    [
        ("Fits", None),
        ("TakesLess", "Here.method is (self, a), and ours is (self)"),
        ("WantsMore", "Here.method is (self, a), and ours is (self, a, further)"),
        ("IsNotAsync", "Here.coroutine is async (self, a, *, b), and ours is (self, a, *, b)"),
    ],
)
def test_an_override_has_to_take_what_upstream_gives(monkeypatch, subclass, problem):
    monkeypatch.setattr(check, "OURS", (__name__,))
    use = used("method(self, a)\n async coroutine(self, a, *, b)\n assigned", subclass)
    if problem is None:
        check.check_use(use)
        return
    with pytest.raises(seams.SeamError) as caught:
        check.check_use(use)
    assert str(caught.value).endswith(problem)


@pytest.mark.parametrize(
    "bad",
    [
        row("gone"),
        row("function", "gone"),
        # A module of ours that does not load beside this upstream.
        Seam(f"{__name__}:function", "unit_test_module_that_fails:x", why="to test"),
    ],
)
def test_nothing_is_installed_when_one_row_does_not_fit(tmp_path, monkeypatch, bad):
    (tmp_path / "unit_test_module_that_fails.py").write_text("import torch\ntorch.gone\n")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(seams.SeamError):
        install._install(Table((row("here.value"), bad)))
    assert here.value == 1
    with pytest.raises(KeyError):
        seams.original(f"{__name__}:here.value")


@pytest.mark.parametrize("package", ["vllm-omni", "vllm"])
@pytest.mark.parametrize("version", ["0.29.4", "0.31.0rc1", "1.30.0"])
def test_another_upstream_version_is_refused(monkeypatch, package, version):
    found = {"vllm-omni": "0.30.0", "vllm": "0.30.1.dev3+cpu", package: version}
    monkeypatch.setattr(importlib.metadata, "version", found.__getitem__)
    with pytest.raises(UpstreamError) as caught:
        seams.install_worker()
    text = str(caught.value)
    assert f"{package} {version}" in text
    assert "0.30.x" in text
    assert "VLLM_OMNI_HEALTH=off" in text


def test_a_seam_is_installed_once_and_keeps_the_original():
    original = here.value
    try:
        install._install(Table((row("here.value"),)))
        install._install(Table((row("here.value"),)))
        assert here.value is other
        assert seams.original(f"{__name__}:here.value") == original
    finally:
        here.value = original


def test_what_upstream_does_not_have_is_not_assigned():
    thing = Here()
    seams.assign(thing, assigned=3)
    assert thing.assigned == 3
    with pytest.raises(seams.SeamError, match=r"Here\.gone"):
        seams.assign(thing, gone=3)


REFUSED = """
import importlib.metadata, sys
found = importlib.metadata.version
importlib.metadata.version = lambda name: "0.99.0" if name == "vllm-omni" else found(name)
sys.argv = ["vllm", "serve", "--omni", *sys.argv[1:]]
from vllm_omni_health.plugin import register
register()
print("went on")
"""


def refused(log, *options):
    return subprocess.run(
        [sys.executable, "-c", REFUSED, *options],
        check=False,
        env={"PATH": "", "VLLM_OMNI_HEALTH_TERMINATION_LOG": str(log)},
        capture_output=True,
        text=True,
        timeout=120,
    )


def test_a_refusal_reaches_the_termination_log(tmp_path):
    log = tmp_path / "termination-log"
    done = refused(log, "model")
    assert done.returncode == 1
    assert "went on" not in done.stdout
    line = done.stderr.splitlines()[-1]
    assert line.startswith("vllm serve --omni: vllm-omni 0.99.0 does not fit")
    assert "Traceback" not in done.stderr
    assert json.loads(log.read_text())["exit_status"] == 1


@pytest.mark.parametrize("option", ["--help", "-h", "--help=port"])
def test_help_is_given_beside_any_version(tmp_path, option):
    log = tmp_path / "termination-log"
    done = refused(log, option)
    assert done.returncode == 0
    assert "went on" in done.stdout
    assert done.stderr == ""
    assert not log.exists()
