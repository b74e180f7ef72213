# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-omni-health project
"""Which releases of upstream the layer goes with. Asked of their metadata, without an import."""

from __future__ import annotations

import importlib.metadata

RELEASES = {"vllm-omni": "0.30", "vllm": "0.30"}
"""Release series that the layer was run with."""


class UpstreamError(Exception):
    """Upstream is not as the layer needs it; the text is one line for a person."""


def check_versions() -> str:
    """The versions that are installed, in words. Raises UpstreamError where one does not fit."""
    found = {}
    for name, series in RELEASES.items():
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            raise UpstreamError(unfit(name, "it is not installed")) from None
        if found[name].split(".")[:2] != series.split("."):
            problem = "the version is not supported"
            raise UpstreamError(unfit(f"{name} {found[name]}", problem)) from None
    return ", ".join(f"{name} {version}" for name, version in found.items())


def unfit(found: str, problem: str) -> str:
    """The line that says what of upstream was found, what is wrong, and what would fit."""
    known = " and ".join(f"{name} {series}.x" for name, series in RELEASES.items())
    return (
        f"{found} does not fit this health layer, which knows {known}: {problem}; install a "
        "version that fits, or set VLLM_OMNI_HEALTH=off to run without the layer"
    )
