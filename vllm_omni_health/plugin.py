"""Entry points that vLLM and vllm-omni call in every process of theirs.

vLLM calls them while it builds its argument parser, in plain ``vllm serve`` and in helper
processes too. So they do nothing but look whether this process is a ``--omni`` server that is
just being started; only then is anything of upstream touched.
"""

from __future__ import annotations

import logging
import multiprocessing
import os
import sys

logger = logging.getLogger(__name__)

SWITCH = "VLLM_OMNI_HEALTH"
"""Environment variable that switches the layer off, for comparison runs."""


def _starting_omni_server() -> bool:
    if multiprocessing.parent_process() is not None:
        # A child has its parent's command line. What it needs it gets with its target.
        return False
    return "--omni" in sys.argv and "serve" in sys.argv[1:3]


def register() -> None:
    """Entry point of ``vllm.general_plugins``: put our ``serve`` command in upstream's place.

    Raises SystemExit with one clear line when upstream is not a version we know: vLLM would
    swallow anything else and serve without the layer.
    """
    if not _starting_omni_server():
        return
    from vllm_omni.health import seams
    from vllm_omni.health.settings.model import SettingsError, enabled

    try:
        if not enabled():
            print(
                f"vllm serve --omni: the health layer is off ({SWITCH}={os.environ.get(SWITCH)})",
                file=sys.stderr,
                flush=True,
            )
            return
        seams.install_command()
    except (seams.SeamError, SettingsError) as exc:
        print(f"vllm serve --omni: {exc}", file=sys.stderr, flush=True)
        raise SystemExit(1) from None


def register_omni() -> None:
    """Entry point of ``vllm_omni.general_plugins``, called in diffusion processes and workers."""
