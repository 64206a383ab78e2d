# SPDX-License-Identifier: Apache-2.0
"""``attend_index`` on gloo processes: as one process, in a compiled model, and when a bound is passed."""

from __future__ import annotations

import pytest
import torch

from magi_attention.api import Mask, attend_index, index_attn_func, make_plan, prepare_index_exchange
from magi_attention.errors import ContractError
from magi_attention.testing.spawn import run_processes

TOTAL = 45


def processes(rank: int, world: int) -> None:
    gen = torch.Generator().manual_seed(3)
    tensors = [torch.randn(TOTAL, h, 8, generator=gen, dtype=torch.float64).requires_grad_() for h in (4, 2, 2)]
    indices = torch.randint(-9, TOTAL, (TOTAL, 2, 7), generator=gen)
    want, meta = index_attn_func(*tensors, indices)
    grads = torch.autograd.grad(want.square().sum(), tensors)

    plan = make_plan(Mask.causal(TOTAL), world)
    local = [plan.shard(x.detach()).requires_grad_() for x in tensors]
    lists = plan.shard(indices, pad_value=-1)
    out, lse = attend_index(*local, lists, plan)
    got = [out.detach(), lse.lse, *torch.autograd.grad(out.square().sum(), local)]
    for a, b in zip(got, (want.detach(), meta.lse, *grads)):
        torch.testing.assert_close(plan.gather(a), b)

    (q, k), width = tensors[:2], 5  # the values are the first columns of the keys
    want, _ = index_attn_func(q, k, None, indices, head_dim_v=width)
    out, _ = attend_index(*local[:2], None, lists, plan, head_dim_v=width)
    got = [out.detach(), *torch.autograd.grad(out.square().sum(), local[:2])]
    for a, b in zip(got, (want.detach(), *torch.autograd.grad(want.square().sum(), (q, k)))):
        torch.testing.assert_close(plan.gather(a), b)

    needed = sum(prepare_index_exchange(lists, plan).got_counts)
    needed_by_rank = [int(n) for n in plan_counts(needed, world)]
    with pytest.raises(ContractError, match=f"rank {world - 1} needs {needed_by_rank[-1]} rows of other ranks, 1 more"):
        attend_index(*local, lists, plan, max_rows=needed - (rank == world - 1))

    def layer(q, k, v, lists):
        return attend_index(q + 1, k, v, lists, plan)[0] * 2

    compiled = torch.compile(layer, backend="aot_eager")(*local, lists)
    assert torch.equal(compiled, layer(*local, lists))
    torch._dynamo.reset()  # which would find the graphs of before
    with pytest.raises(torch._dynamo.exc.Unsupported, match="known at run time only"):
        torch.compile(layer, backend="aot_eager", fullgraph=True)(*local, lists)


def plan_counts(needed: int, world: int) -> torch.Tensor:
    everywhere = [torch.zeros(1, dtype=torch.int64) for _ in range(world)]
    torch.distributed.all_gather(everywhere, torch.tensor([needed]))
    return torch.cat(everywhere)


def test_on_two_processes() -> None:
    run_processes(2, processes)
