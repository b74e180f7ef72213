"""The seams fit the installed upstream, and one that does not stops the start with one line."""

import importlib.metadata
import re
from pathlib import Path

import pytest
from vllm_omni.health import seams
from vllm_omni.health.seams import (
    COMMAND,
    DIFFUSION_ENGINE,
    DIFFUSION_WORKER,
    SERVER,
    STAGE_PROCESS,
    WORKER,
    Seam,
    SeamError,
    UpstreamError,
)

TABLES = (COMMAND, SERVER, STAGE_PROCESS, WORKER, DIFFUSION_ENGINE, DIFFUSION_WORKER)
ALL = tuple(dict.fromkeys(seam for table in TABLES for seam in table))
SOURCES = Path(__file__).parents[2]

here = type("Here", (), {"value": 1, "method": lambda self, a: a})


def function(first, second):
    return first, second


@pytest.fixture(autouse=True)
def forget_installs(monkeypatch):
    monkeypatch.setattr(seams, "_originals", {})


@pytest.mark.parametrize("seam", ALL, ids=lambda seam: seam.target)
def test_every_seam_fits_the_installed_upstream(seam):
    seams._check(seam, "as installed")
    assert seams._resolve(seam.replacement)[2] is not None
    assert seam.why


def test_there_are_few():
    assert len({seam.target for seam in ALL}) == len(ALL) <= 20


def row(target, **expected):
    return Seam(f"{__name__}:{target}", f"{__name__}:function", why="to test", **expected)


@pytest.mark.parametrize(
    ("seam", "problem"),
    [
        (row("gone"), "cannot be found"),
        (Seam("no.such.module:x", "x:y", why="to test"), "cannot be found"),
        (row("function", parameters=("first",)), "takes ('first', 'second'), not ('first',)"),
        (row("here", members=("value", "other")), "has no other"),
        (row("here.value", new=True), "exists, where none was expected"),
    ],
)
def test_a_mismatch_names_seam_version_and_what_is_supported(seam, problem):
    version = importlib.metadata.version("vllm-omni")
    with pytest.raises(SeamError) as caught:
        seams._install((seam,))
    text = str(caught.value)
    assert "\n" not in text
    for part in (seam.target, version, "0.30.x", problem, "to test"):
        assert part in text


def test_nothing_is_installed_when_one_row_does_not_fit():
    with pytest.raises(SeamError):
        seams._install((row("here.value"), row("gone")))
    assert here.value == 1


@pytest.mark.parametrize("version", ["0.29.4", "0.31.0rc1", "1.30.0"])
def test_another_upstream_version_is_refused(monkeypatch, version):
    monkeypatch.setattr(importlib.metadata, "version", lambda name: version)
    with pytest.raises(UpstreamError) as caught:
        seams.install_worker()
    text = str(caught.value)
    assert version in text
    assert "0.30.x" in text
    assert "VLLM_OMNI_HEALTH=off" in text


def test_a_seam_is_installed_once_and_keeps_the_original():
    original = here.value
    try:
        seams._install((row("here.value"),))
        seams._install((row("here.value"),))
        assert here.value is function
        assert seams.original(f"{__name__}:here.value") == original
    finally:
        here.value = original


def test_only_the_seams_module_rebinds_upstream_names():
    pattern = re.compile(r"\bsetattr\(|^\s*_?(vllm|upstream)[\w.]*\.\w+ = ", re.MULTILINE)
    offenders = [
        str(path.relative_to(SOURCES))
        for folder in ("vllm_omni", "vllm_omni_health")
        for path in (SOURCES / folder).rglob("*.py")
        if path.name != "seams.py" and pattern.search(path.read_text())
    ]
    assert offenders == []
