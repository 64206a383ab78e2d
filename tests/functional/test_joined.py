# SPDX-License-Identifier: Apache-2.0
"""When a single stage is waited for, and that only GPUs do so."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from magi_attention.api import Mask, make_plan
from magi_attention.comm.transport.fake import FakeWorld
from magi_attention.common.slices import SliceTable
from magi_attention.functional.dist_attn import dist_attn
from magi_attention.functional.runtime import AttnRuntime
from magi_attention.functional.stages.joined import are_on_one_host
from magi_attention.kernels.registry import default_registry
from magi_attention.testing.masks import random_slices


def tensors(tokens: int, heads: tuple[int, int] = (64, 8), device: str = "meta") -> tuple[torch.Tensor, ...]:
    counts = (heads[0], heads[1], heads[1])
    return tuple(torch.empty((tokens, n, 128), dtype=torch.bfloat16, device=device) for n in counts)


@pytest.mark.parametrize(
    ("ranks", "size", "is_one"),
    [((0, 1), 2, True), ((2, 3), 2, True), ((1, 2), 2, False), ((0, 8), 8, False), ((0,), None, 0)],
)
def test_hosts(ranks, size, is_one):
    assert are_on_one_host(ranks, size) == is_one


def test_on_a_cpu_a_stage_is_a_stage(monkeypatch):
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
    plan = make_plan(Mask.causal(64), 2)

    def rank(transport) -> bool:
        runtime = AttnRuntime(plan, transport, default_registry())
        call = runtime.call(*tensors(plan.rank(transport.rank).num_tokens, (2, 2), "cpu"), None, None, 0.0, False)
        return call.prepared.is_joined

    assert plan.num_stages == 1 and FakeWorld(2).run(rank) == [False, False]


@pytest.mark.parametrize("seed", range(6))
def test_joined_is_as_staged(seed, monkeypatch):
    """Random masks over 3 ranks, with sinks in every second; in float64 both are exact."""
    print(f"seed {seed}")
    rng, gen = np.random.default_rng(seed), torch.Generator().manual_seed(seed)
    tokens = 96
    plan = make_plan(Mask(SliceTable(random_slices(rng, tokens, tokens, max_slices=6)), tokens, tokens), 3)
    shapes = [(tokens, h, 16) for h in (4, 2, 2, 4)]
    *whole, dout = (torch.randn(s, generator=gen, dtype=torch.float64) for s in shapes)
    sink = torch.randn(2, 4, generator=gen, dtype=torch.float64) if seed % 2 else None

    def rank(transport) -> list[torch.Tensor]:
        runtime = AttnRuntime(plan, transport, default_registry())
        local = [plan.shard(x, transport).requires_grad_() for x in whole]
        out, lse, _ = dist_attn(*local, runtime, sink)
        return [out.detach(), lse, *torch.autograd.grad(out, local, plan.shard(dout, transport))]

    staged = FakeWorld(3).run(rank)
    monkeypatch.setattr(AttnRuntime, "_is_joined", lambda *_: True)
    for mine, theirs in zip(FakeWorld(3).run(rank), staged):
        for a, b in zip(mine, theirs):
            torch.testing.assert_close(a, b, rtol=1e-10, atol=1e-10)
