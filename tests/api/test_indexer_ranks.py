# SPDX-License-Identifier: Apache-2.0
"""A layer with an indexer over gloo processes has the loss and the gradients of one process."""

from __future__ import annotations

import pytest
import torch

from magi_attention.api import Mask, attend, attend_index, indexer_kl, indexer_topk, make_plan
from magi_attention.testing.spawn import run_processes

CU_SEQLENS = [0, 17, 47]  # no multiple of 2 or 3 tokens, so some rows are pad
TOTAL, TOPK = CU_SEQLENS[-1], 6


def layer(tensors, plan, is_sparse):
    """Loss of this rank's tokens, the lists and gradients of q_index, k_index, weights, q and k."""
    leaves = [plan.shard(x).requires_grad_() for x in tensors]
    index_q, index_k, weights, q, k, v = leaves
    masks = {"positions": plan.positions(), "cu_seqlens": CU_SEQLENS}
    index_keys = plan.gather(index_k, is_partial_grad=True)
    indices = None
    if is_sparse:
        indices = indexer_topk(index_q, index_keys, weights, TOPK, **masks)
        out, meta = attend_index(q, k, v, indices[:, None], plan)
        masks = {}
    else:
        out, meta = attend(q, k, v, plan)
    divergence = indexer_kl(index_q, index_keys, weights, q, plan.gather(k.detach()), meta.lse, indices, **masks)
    is_real = torch.from_numpy(plan.position_array(rank_of(plan))) < TOTAL
    assert not divergence[~is_real].any()
    loss = out[is_real].square().sum() + divergence.sum()
    return loss, indices, torch.autograd.grad(loss, leaves)


def rank_of(plan) -> int:
    return torch.distributed.get_rank() if plan.cp_size > 1 else 0


def processes(rank: int, world: int, is_sparse: bool) -> None:
    gen = torch.Generator().manual_seed(11)
    shapes = (3, 4), (4,), (3,), (4, 6), (1, 6), (1, 5)
    tensors = [torch.randn(TOTAL, *s, generator=gen, dtype=torch.float64) for s in shapes]
    tensors[1][20:40] = tensors[1][20:21]  # keys whose scores are equal lie on several ranks
    mask = Mask.varlen(CU_SEQLENS, causal=True)
    want, lists, want_grads = layer(tensors, make_plan(mask, 1), is_sparse)
    plan = make_plan(mask, world)
    loss, local, grads = layer(tensors, plan, is_sparse)
    loss = loss.detach().clone()
    torch.distributed.all_reduce(loss)
    torch.testing.assert_close(loss, want.detach(), atol=1e-6, rtol=0)
    if is_sparse:
        assert torch.equal(plan.gather(local), lists)
    for a, b in zip(grads, want_grads):
        torch.testing.assert_close(plan.gather(a), b, atol=1e-6, rtol=0)


@pytest.mark.parametrize("is_sparse", [True, False], ids=["sparse", "dense"])
@pytest.mark.parametrize("world", [1, 2, 3])
def test_one_process_and_several(world, is_sparse) -> None:
    run_processes(world, processes, is_sparse)
