# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-omni-health project
"""Health layer for vllm-omni: faults with a type, one state machine, one exit status.

Nothing is imported here, so that a child process can import a single module of
this package without paying for the rest.
"""

__version__ = "0.1.0"
