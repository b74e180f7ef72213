# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-omni-health project
"""Device memory is watched, and pressure closes admission before it kills.

- ``floor``: how much must stay free; ``pressure``: when it does not, without flapping
- ``reports``: what stages say of themselves; ``discrepancy``: that against what is measured
- ``ownership``: which processes are this service's, and which stage's
- ``watch``: the thread that samples, judges and tells the state machine; ``view``: what it shows
- ``preflight``: what is looked at before stages start, and when they are ready
- ``metrics``: the same figures for Prometheus
"""
