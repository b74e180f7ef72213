# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-omni-health project
"""Memory of devices as it is: what a driver, the kernel or a drill's file says of it.

- ``figures``: the values; ``bounded``: how a query is kept from holding anybody up
- ``nvml``: NVIDIA devices; ``host``: the memory limit of this container, or the machine
- ``simulated``: a device in a file, for drills and tests alone
- ``survey``: all of them at one moment

Nothing here imports vLLM, vllm_omni or torch, or runs a command. Functions block and are for a
thread of their own.
"""
