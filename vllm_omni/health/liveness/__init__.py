# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-omni-health project
"""Hung or busy: pings of replicas, beats of event loops, evidence of the kernel."""
