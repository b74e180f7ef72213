"""Which vllm-omni the layer goes with. Asked of its metadata, without importing it."""

from __future__ import annotations

import importlib.metadata

SUPPORTED = ("0.30",)
"""Release series of vllm-omni that the layer was run with."""


class UpstreamError(Exception):
    """Upstream is not as the layer needs it; the text is one line for a person."""


def check_version() -> str:
    """The version that is installed. Raises UpstreamError where it is none that fits."""
    try:
        version = importlib.metadata.version("vllm-omni")
    except importlib.metadata.PackageNotFoundError:
        raise UpstreamError("vllm-omni is not installed") from None
    if ".".join(version.split(".")[:2]) not in SUPPORTED:
        raise UpstreamError(
            f"vllm-omni {version} is not supported by this health layer, which knows "
            f"{', '.join(s + '.x' for s in SUPPORTED)}; install a version that fits, or set "
            "VLLM_OMNI_HEALTH=off to run without the layer"
        )
    return version
