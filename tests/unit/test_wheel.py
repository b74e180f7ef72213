# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-omni-health project
"""The wheel holds our files alone, and none where upstream's wheel has one."""

import importlib.metadata
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def ours(tmp_path_factory):
    folder = tmp_path_factory.mktemp("wheel")
    pip = [sys.executable, "-m", "pip", "--disable-pip-version-check", "wheel", "-q"]
    subprocess.run(
        [*pip, "--no-deps", "--no-build-isolation", "-w", folder, ROOT], check=True, timeout=300
    )
    (wheel,) = folder.glob("vllm_omni_health-*.whl")
    return {name for name in zipfile.ZipFile(wheel).namelist() if ".dist-info/" not in name}


def upstream():
    return {str(file) for file in importlib.metadata.files("vllm-omni")}


def test_no_file_is_at_a_path_of_upstreams(ours):
    assert ours & upstream() == set()


def test_no_package_of_upstreams_gets_an_init_of_ours(ours):
    packages = {str(Path(name).parent) for name in upstream() if name.endswith(".py")}
    inits = {str(Path(name).parent) for name in ours if name.endswith("/__init__.py")}
    assert inits & packages == set()


def test_it_holds_every_source_file_and_nothing_else(ours):
    listed = subprocess.run(
        ["git", "ls-files", "--cached", "--others", "--exclude-standard", "*.py"],
        cwd=ROOT,
        check=True,
        capture_output=True,
        text=True,
    ).stdout.split()
    assert ours == {name for name in listed if name.startswith(("vllm_omni/", "vllm_omni_health/"))}
    assert "vllm_omni/health/state/machine.py" in ours
