# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-omni-health project
"""Processes and their ends: the supervisor thread, what it watches, and what they leave behind."""
