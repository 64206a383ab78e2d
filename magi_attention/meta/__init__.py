# SPDX-License-Identifier: Apache-2.0
"""Planning: from a mask to what every rank computes, sends and receives. No torch, no process groups."""

from magi_attention.meta.plan import Plan
from magi_attention.meta.planner import PlanOptions, build_plan, plan_for_partitions
from magi_attention.meta.rank_plan import RankPlan, StagePlan

__all__ = [
    "Plan",
    "PlanOptions",
    "RankPlan",
    "StagePlan",
    "build_plan",
    "plan_for_partitions",
]
