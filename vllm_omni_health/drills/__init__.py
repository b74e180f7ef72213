# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-omni-health project
"""Drills: start a server, load it, break it on purpose, and see whether it keeps its promises.

What the tests, the demo, the benchmarks and the chaos command have in common:

- ``server``: a server process that was started here, with its logs, and its certain end;
  ``ports``: where it listens
- ``tree``: the processes of a server, by ancestry, each with its role
- ``traces``: what a server leaves outside its processes (shared memory, socket files)
- ``chat``, ``load``: requests, and what became of each of them
- ``probe``: ``/health`` over time; ``survey``: everything the server says at one moment
- ``precedence``: how threads that measure are kept from waiting
- ``faults``: what can be broken, and what the server promises to do about it
- ``drill``: one run from load to last process; ``contract``: the promises, checked

Every time is in seconds of ``time.monotonic()`` in one and the same process, so that figures
can be compared; every time that was found by polling goes with its interval.

Nothing here imports vLLM or vllm_omni.
"""
