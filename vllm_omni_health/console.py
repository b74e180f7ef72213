# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-omni-health project
"""The standard streams of a server: there from the start, and one line for the person there."""

from __future__ import annotations

import contextlib
import fcntl
import functools
import os
import sys
from typing import TextIO


def open_standard_streams() -> None:
    """Give this process the standard streams that it was started without, as daemons may be.

    Else the next file that is opened takes their place, here or in a child process, and
    libraries that print fail. A shell leaves the script that it reads in such a place.
    """
    for descriptor, useless in ((0, os.O_WRONLY), (1, os.O_RDONLY), (2, os.O_RDONLY)):
        try:
            if fcntl.fcntl(descriptor, fcntl.F_GETFL) & os.O_ACCMODE != useless:
                continue
        except OSError:
            pass
        null = os.open(os.devnull, os.O_RDWR)
        if null != descriptor:
            os.dup2(null, descriptor)
            os.close(null)
        # Child processes are to have it as well.
        os.set_inheritable(descriptor, True)
    if sys.stdout is None:
        sys.stdout = open(os.devnull, "w")  # noqa: SIM115
    if sys.stderr is None:
        sys.stderr = open(os.devnull, "w")  # noqa: SIM115


@functools.cache
def plain_stderr() -> TextIO:
    """Stderr without the process prefix that upstream writes in front of every line: what
    machines read must be a whole line of JSON.

    Without one since the start, whatever has its number now is something else.
    """
    if sys.__stderr__ is None:
        return open(os.devnull, "w", encoding="utf-8")
    return open(2, "w", encoding="utf-8", closefd=False)


def complain(what: object) -> None:
    """One line for the person who started the server."""
    with contextlib.suppress(OSError):  # who has closed stderr does not want to know
        print(f"vllm serve --omni: {what}", file=plain_stderr(), flush=True)
