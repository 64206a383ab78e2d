# SPDX-License-Identifier: Apache-2.0
"""The planner library: tile plans, schedules, and who computes which pairs."""
