# SPDX-License-Identifier: Apache-2.0
"""Local rows to consecutive shards and back: values, gradients of both orders, dtypes, dims."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from magi_attention.api import DispatchConfig, DistAttnConfig, Mask, make_plan
from magi_attention.comm.transport.fake import FakeWorld
from magi_attention.errors import ContractError, PeerFailureError
from magi_attention.testing.random_plans import random_plan


@pytest.mark.parametrize("dtype", [torch.float64, torch.int64, torch.bool, torch.bfloat16])
@pytest.mark.parametrize("seed", range(12))
def test_shards_follow_one_another(seed: int, dtype: torch.dtype) -> None:
    print("seed", seed)
    plan = random_plan(np.random.default_rng(seed))
    dim = seed % 3
    torch.manual_seed(seed)
    shape = [2, 3, 4]
    shape[dim] = plan.padded_tokens
    x = torch.randint(0, 100, shape).to(dtype)
    bounds = np.cumsum([0, *plan.shard_sizes])

    def rank(t):
        local = x.index_select(dim, torch.from_numpy(plan.position_array(t.rank)))
        inside = plan.to_contiguous(local, t, dim)
        assert torch.equal(inside, x.narrow(dim, int(bounds[t.rank]), plan.shard_sizes[t.rank]))
        return torch.equal(plan.from_contiguous(inside, t, dim), local)

    assert all(FakeWorld(plan.cp_size).run(rank))


@pytest.mark.parametrize("seed", range(6))
def test_gradients_go_the_way_back(seed: int) -> None:
    """Rows are weighted by their place in the shard, so that a gradient of another row would show; and once more."""
    print("seed", seed)
    plan = random_plan(np.random.default_rng(50 + seed))
    torch.manual_seed(seed)
    x, weight, inner = torch.randn(3, plan.padded_tokens, 3, dtype=torch.float64)
    leaf = x.clone().requires_grad_()
    (first,) = torch.autograd.grad(((leaf * inner) ** 3 * weight).sum(), leaf, create_graph=True)
    (second,) = torch.autograd.grad((first**2).sum(), leaf)
    bounds = np.cumsum([0, *plan.shard_sizes])

    def rank(t):
        at = torch.from_numpy(plan.position_array(t.rank))
        local, own = x[at].requires_grad_(), inner[bounds[t.rank] : bounds[t.rank + 1]]
        out = plan.from_contiguous((plan.to_contiguous(local, t) * own) ** 3, t)
        (first,) = torch.autograd.grad((out * weight[at]).sum(), local, create_graph=True)
        return at, first.detach(), torch.autograd.grad((first**2).sum(), local)[0]

    for at, got, again in FakeWorld(plan.cp_size).run(rank):
        torch.testing.assert_close(got, first.detach()[at])
        torch.testing.assert_close(again, second[at])


def test_uneven_shards_and_wrong_rows() -> None:
    plan = make_plan(Mask.causal(11), 3, DistAttnConfig(DispatchConfig(2, uneven_shard=True)))
    x = torch.arange(11)

    def rank(t):
        found = plan.to_contiguous(plan.shard(x, t), t)
        wrong = plan.shard(x, t)[: -1 if t.rank == 1 else None]
        with pytest.raises(ContractError if t.rank == 1 else PeerFailureError, match="rows along dim 0"):
            plan.to_contiguous(wrong, t)
        return found

    assert torch.equal(torch.cat(FakeWorld(3).run(rank)), x) and len(set(plan.shard_sizes)) > 1
