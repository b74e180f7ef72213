# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-omni-health project
"""The CPU platform: real stages, AR and diffusion, on a machine without an accelerator.

For development, tests and drills; nothing here is meant for production traffic. It is an
out-of-tree platform of vllm-omni and steps aside wherever an accelerator is found.
"""
