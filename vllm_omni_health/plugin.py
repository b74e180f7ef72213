# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-omni-health project
"""Entry points that vLLM and vllm-omni call in every process of theirs.

vLLM calls them in plain ``vllm serve`` and in helper processes too. So they do nothing but look
whether this process is a ``--omni`` server that is just being started; only then is anything of
upstream touched.
"""

from __future__ import annotations

import logging
import multiprocessing
import os
import sys

from vllm_omni_health.console import complain, open_standard_streams
from vllm_omni_health.refusal import refuse

logger = logging.getLogger(__name__)


def _starting_omni_server() -> bool:
    if multiprocessing.parent_process() is not None:
        # A child has its parent's command line. What it needs it gets with its target.
        return False
    if any(word == "-h" or word.partition("=")[0] == "--help" for word in sys.argv[1:]):
        # Help needs nothing of ours, and is given whatever is wrong.
        return False
    return "--omni" in sys.argv and "serve" in sys.argv[1:3]


def check_environment() -> None:
    """Entry point of ``vllm.platform_plugins``: names no platform, so vLLM goes on without it.

    vLLM asks for platforms as soon as it is imported itself, a second after the process has
    begun. What is known to be wrong by then need not wait for the ten seconds of imports that
    follow. Raises SystemExit with one clear line.
    """
    if not _starting_omni_server():
        return
    # Before the imports open files that would take the numbers of streams that are missing.
    open_standard_streams()
    from vllm_omni_health.settings import sources
    from vllm_omni_health.upstream import UpstreamError, check_versions

    try:
        if sources.enabled():
            check_versions()
            sources.check_environ()
    except (UpstreamError, sources.SettingsError) as exc:
        refuse(exc)


def register() -> None:
    """Entry point of ``vllm.general_plugins``: put our ``serve`` command in upstream's place.

    Called while vLLM builds its argument parser. Raises SystemExit with one clear line when
    upstream is not a version we know: vLLM would swallow anything else and serve without the
    layer.
    """
    if not _starting_omni_server():
        return
    # vLLM asks for no platforms where VLLM_TARGET_DEVICE names one.
    check_environment()
    from vllm_omni.health import seams

    from vllm_omni_health.settings.sources import SWITCH, enabled

    if not enabled():
        complain(f"the health layer is off ({SWITCH}={os.environ.get(SWITCH)})")
        return
    try:
        seams.install_command()
    except seams.SeamError as exc:
        refuse(exc)


def register_omni() -> None:
    """Entry point of ``vllm_omni.general_plugins``, called in diffusion processes and workers."""
