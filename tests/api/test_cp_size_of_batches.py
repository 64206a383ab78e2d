# SPDX-License-Identifier: Apache-2.0
"""The number of context-parallel ranks is chosen for each batch: the same four processes take steps over groups of 1, 2
and 4 in turn, and each is as dense attention in float64."""

from __future__ import annotations

import random

import torch
import torch.distributed as dist

from magi_attention.api import Mask, attend, make_plan
from magi_attention.testing.ref_attn import ref_attn_func
from magi_attention.testing.spawn import run_processes

WORLD, HEADS, D = 4, (4, 2, 2), 8


def check_step(seed: int, size: int, group: dist.ProcessGroup, rank: int) -> None:
    """One batch over ``group``; every group of ``size`` ranks has documents of its own."""
    rng = random.Random(f"{seed} {size} {rank // size}")
    mask = Mask.from_lengths([rng.randint(1, 60) for _ in range(rng.randint(1, 5))], causal=rng.random() < 0.5)
    generator = torch.Generator().manual_seed(rng.randrange(2**31))
    whole = [torch.randn(mask.total_q, h, D, dtype=torch.float64, generator=generator) for h in (*HEADS, HEADS[0])]
    q, k, v, dout = whole
    wanted_of = [x.clone().requires_grad_() for x in (q, k, v)]
    wanted, _ = ref_attn_func(*wanted_of, torch.from_numpy(mask.to_dense()))
    wanted.backward(dout)

    plan = make_plan(mask, size)
    local = [plan.shard(x, group).requires_grad_() for x in (q, k, v)]
    out, _ = attend(*local, plan, group)
    out.backward(plan.shard(dout, group))
    for got, want in zip((out.detach(), *(x.grad for x in local)), (wanted.detach(), *(x.grad for x in wanted_of))):
        torch.testing.assert_close(plan.gather(got, group), want, atol=1e-11, rtol=1e-9)


def steps(rank: int, world: int, seed: int) -> list[int]:
    groups = {}
    for size in (1, 2, 4):  # made once, before training
        for first in range(0, world, size):
            made = dist.new_group(list(range(first, first + size)))
            if first <= rank < first + size:
                groups[size] = made
    sizes = random.Random(seed).choices(list(groups), k=5) + list(groups)
    for step, size in enumerate(sizes):
        check_step(seed + step, size, groups[size], rank)
    return sizes


def test_each_batch_has_a_size_of_its_own():
    seed = random.randrange(10**6)
    print(f"seed {seed}")
    assert set(run_processes(WORLD, steps, seed)[0]) == {1, 2, 4}
