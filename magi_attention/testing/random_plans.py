# SPDX-License-Identifier: Apache-2.0
"""Random documents over any partition, for tests of what passes from rank to rank."""

from __future__ import annotations

import numpy as np

from magi_attention.api import Mask, Plan
from magi_attention.meta.planner import PlanOptions, plan_for_partitions


def random_documents(rng: np.random.Generator, total: int) -> list[int]:
    """``cu_seqlens`` of a few or many causal documents, some of them empty or of one token."""
    cuts = rng.integers(0, total + 1, size=int(rng.integers(0, max(total // 3, 1))))
    return [0, *np.sort(cuts).tolist(), total]


def random_plan(rng: np.random.Generator, most_tokens: int = 60, most_ranks: int = 5) -> Plan:
    """Documents over any partition in chunks of one to four tokens; some ranks may hold nothing but pad."""
    total, world, chunk = (int(rng.integers(1, n)) for n in (most_tokens, most_ranks + 1, 5))
    chunks = max(-(-total // chunk) + int(rng.integers(0, 3)), world)
    order = rng.permutation(chunks) if rng.random() < 0.7 else np.arange(chunks)
    cuts = np.sort(rng.choice(np.arange(1, chunks), size=world - 1, replace=False))
    mask = Mask.varlen(random_documents(rng, total), causal=True)
    parts = [sorted(part.tolist()) for part in np.split(order, cuts)]
    options = PlanOptions(cu_seqlens=mask.cu_seqlens, plan_type=Plan)
    plan = plan_for_partitions(mask.slices, total, chunks * chunk - total, chunk, parts, options)
    assert isinstance(plan, Plan)
    return plan
