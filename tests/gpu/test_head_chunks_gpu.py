# SPDX-License-Identifier: Apache-2.0
"""Head chunks on GPUs: equal to all heads at once and to float64 within rounding, and the same bits on every run, on
one rank, in one launch over NVLink and stage by stage."""

from __future__ import annotations

import random
import sys
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from places import places

from magi_attention.api import AttnPolicy, DispatchConfig, DistAttnConfig, Mask, OverlapConfig, attend, make_plan
from magi_attention.testing.spawn import run_processes

sys.path.insert(0, str(Path(__file__).parents[1] / "functional"))
from oracle import dense_attention  # noqa: E402

DEVICE, DTYPE, TOKENS = "cuda", torch.bfloat16, 1500
HEADS, DIM = (8, 4, 4, 8), 64  # of q, k, v and dout
pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU")]


def measure(rank: int, world: int, seed: int, stage_mode: str, degree: int) -> None:
    rng = random.Random(seed)
    ends = sorted(rng.sample(range(1, TOKENS), 3))
    mask = Mask.varlen([0, *ends, TOKENS], causal=rng.random() < 0.7)
    config = DistAttnConfig(DispatchConfig(128), OverlapConfig(degree=degree, min_chunk_size=64))
    plan, group = make_plan(mask, world, config), dist.group.WORLD
    generator = torch.Generator().manual_seed(seed)
    q, k, v, dout = (torch.randn(TOKENS, h, DIM, generator=generator).to(DEVICE, DTYPE) for h in HEADS)

    def run(chunks: int) -> list[torch.Tensor]:
        policy = AttnPolicy(head_chunks=chunks, deterministic=True, stage_mode=stage_mode)
        local = [plan.shard(x, group).requires_grad_() for x in (q, k, v)]
        out, _ = attend(*local, plan, group, policy=policy)
        out.backward(plan.shard(dout, group))
        return [plan.gather(x.detach(), group) for x in (out, *(x.grad for x in local))]

    exact = [x.double().requires_grad_() for x in (q, k, v)]
    out, *_ = dense_attention(*exact, torch.from_numpy(mask.to_dense()).to(DEVICE), DIM**-0.5)
    wanted = [out.detach(), *torch.autograd.grad(out, exact, dout.double())]
    whole = run(1)
    for chunks in (2, 4):
        got = run(chunks)
        for again in (run(chunks), run(chunks)):
            assert all(torch.equal(a, b) for a, b in zip(got, again)), "the same bits on every run"
        for number, (x, y, z) in enumerate(zip(got, whole, wanted)):
            size = z.norm()
            assert (x.double() - y.double()).norm() <= 0.01 * size, (chunks, number)
            assert (x.double() - z).norm() <= 0.015 * size, (chunks, number)


@pytest.mark.parametrize("degree", [0, 2])
def test_chunks_on_one_rank(degree):
    seed = random.randrange(10**6)
    print(f"seed {seed}")
    run_processes(1, measure, seed, "staged", degree, backend="nccl", timeout_s=180.0)


@pytest.mark.parametrize(("world", "backend"), places(2, 4))
@pytest.mark.parametrize(("stage_mode", "degree"), [("fused", 0), ("staged", 0), ("staged", 2)])
def test_chunks_on_several_ranks(world, backend, stage_mode, degree):
    seed = random.randrange(10**6)
    print(f"seed {seed}")
    run_processes(world, measure, seed, stage_mode, degree, backend=backend, timeout_s=180.0)
