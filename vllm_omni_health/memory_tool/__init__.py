# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-omni-health project
"""The command ``vllm-omni-memory``: what a server's memory does, for people, machines and CI.

- ``cli``: the command line; ``client``: the figures of a running server, or of this machine
- ``table``: figures as a table; ``gate``, ``load``: the check that fails a pipeline
"""
