# SPDX-License-Identifier: Apache-2.0
"""A layer with an indexer over gloo processes has the loss and the gradients of one process."""

from __future__ import annotations

import pytest
import torch

from magi_attention.api import (
    DispatchConfig,
    DistAttnConfig,
    Mask,
    attend,
    attend_index,
    index_attn_func,
    indexer_kl,
    indexer_topk,
    indexer_topk_blocks,
    make_plan,
    prepare_index_exchange,
)
from magi_attention.comm.transport.fake import FakeWorld
from magi_attention.errors import ContractError
from magi_attention.testing.spawn import run_processes

CU_SEQLENS = [0, 17, 47]  # no multiple of 2 or 3 tokens, so some rows are pad
TOTAL, TOPK = CU_SEQLENS[-1], 6


def layer(tensors, plan, is_sparse, is_shared=False):
    """Loss of this rank's tokens, the lists and gradients of q_index, k_index, weights, q and k."""
    leaves = [plan.shard(x).requires_grad_() for x in tensors]
    index_q, index_k, weights, q, k, v = leaves
    indices = exchange = None
    if is_sparse:
        index_keys = plan.gather(index_k)
        indices = indexer_topk(
            index_q, index_keys, weights, TOPK, positions=plan.positions(), cu_seqlens=CU_SEQLENS
        )
        exchange = prepare_index_exchange(indices[:, None], plan)
        out, meta = attend_index(q, k, v, exchange, plan)
        divergence = indexer_kl(*leaves[:5], meta.lse, exchange if is_shared else indices, plan)
    else:
        out, meta = attend(q, k, v, plan)
        divergence = indexer_kl(*leaves[:5], meta.lse, None, plan, cu_seqlens=CU_SEQLENS)
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
    loss, local, grads = layer(tensors, plan, is_sparse, is_shared=True)
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


@pytest.mark.parametrize("index_dtype", [torch.float64, torch.float32], ids=str)
@pytest.mark.parametrize("seed", range(4))
def test_some_ranks_hold_nothing_but_pads(seed, index_dtype):
    """Two kv heads, which share the lists; more keys are asked for than any query sees."""
    print("seed", seed)
    gen = torch.Generator().manual_seed(seed)
    total = (2, 3, 9, 13)[seed]
    cu_seqlens = [0, int(torch.randint(1, total, (), generator=gen)), total]
    masks = {"cu_seqlens": cu_seqlens}
    plan = make_plan(Mask.varlen(cu_seqlens, causal=True), 4, DistAttnConfig(DispatchConfig(4, True)))
    assert seed > 1 or total < 4 == sum(plan.shard_sizes)  # ranks with nothing but a pad
    of = [torch.randn(total, *s, generator=gen, dtype=torch.float64) for s in ((2, 4), (4,), (2,), (4, 6), (2, 6))]
    of = [x.to(index_dtype) for x in of[:3]] + of[3:]
    lse = 4 + torch.rand(total, 4, generator=gen)
    indices = indexer_topk(*of[:3], total + 3, **masks)
    leaves = [x.requires_grad_() for x in of[:3]]
    want = [indexer_kl(*of, lse, lists, **kind) for lists, kind in ((indices, {}), (None, masks))]
    want_grads = [torch.autograd.grad(x.sum(), leaves) for x in want]

    def rank(transport):
        local = [plan.shard(x.detach(), transport).requires_grad_() for x in of]
        rows, at = plan.shard(lse, transport, float("-inf")), plan.positions(transport)
        keys = plan.gather(local[1].detach(), transport)
        lists = indexer_topk(local[0], keys, local[2], total + 3, positions=at, **masks)
        assert torch.equal(plan.gather(lists, transport), indices)
        got = indexer_kl(*local, rows, lists, plan, transport), indexer_kl(*local, rows, None, plan, transport, **masks)
        grads = [torch.autograd.grad(x.sum(), local[:3]) for x in got]
        return [[plan.gather(x.detach(), transport) for x in (a, *b)] for a, b in zip(got, grads)]

    within = 1e-10 if index_dtype == torch.float64 else 1e-5
    for results in FakeWorld(4).run(rank):
        for got, divergence, grads in zip(results, want, want_grads):
            for a, b in zip(got, (divergence, *grads)):
                torch.testing.assert_close(a, b, atol=within, rtol=within)


@pytest.mark.parametrize("seed", range(3))
def test_blocks_over_ranks_are_those_of_one_process(seed):
    """Each of two kv heads attends to blocks that an index head of its own chose."""
    print("seed", seed)
    gen = torch.Generator().manual_seed(seed)
    total, world = 20 + 9 * seed, 2 + seed
    cu_seqlens = [0, int(torch.randint(1, total, (), generator=gen)), total]
    plan = make_plan(Mask.varlen(cu_seqlens, causal=True), world)
    of = [torch.randn(total, *s, generator=gen, dtype=torch.float64) for s in ((2, 4), (4,), (4, 6), (2, 6), (2, 5))]
    options = {"local_blocks": 1, "cu_seqlens": cu_seqlens}
    lists = indexer_topk_blocks(of[0], of[1], None, 3, 4, **options)
    leaves = [x.requires_grad_() for x in of[2:]]
    want, _ = index_attn_func(*leaves, lists)
    wanted = torch.autograd.grad(want.square().sum(), leaves)

    def rank(transport):
        q_index, _, *local = (plan.shard(x.detach(), transport) for x in of)
        at = plan.positions(transport)
        mine = indexer_topk_blocks(q_index, of[1], None, 3, 4, positions=at, **options)
        assert torch.equal(plan.gather(mine.rows, transport), lists.rows)
        mine_leaves = [x.requires_grad_() for x in local]
        out, _ = attend_index(*mine_leaves, mine, plan, transport)
        is_real = torch.from_numpy(plan.position_array(transport.rank)) < total
        grads = torch.autograd.grad(out[is_real].square().sum(), mine_leaves)
        return [plan.gather(x.detach(), transport) for x in (out, *grads)]

    for results in FakeWorld(world).run(rank):
        for a, b in zip(results, (want, *wanted)):
            torch.testing.assert_close(a, b, atol=1e-11, rtol=1e-11)


def test_what_is_refused_with_a_plan():
    plan = make_plan(Mask.causal(6), 1)
    of = [torch.zeros(6, *s) for s in ((2, 4), (4,), (2,), (3, 5), (1, 5), (3,))]
    lists = torch.zeros(6, 1, 2, dtype=torch.int32)
    exchange, of_two = prepare_index_exchange(lists, plan), prepare_index_exchange(lists.expand(6, 2, 2), plan)
    for call, words in (
        (lambda: indexer_kl(*of, exchange), "give plan="),
        (lambda: indexer_kl(*of, of_two, plan), "The exchange is for 2 kv heads"),
        (lambda: indexer_kl(*of, lists, plan), "6 queries, keys"),
        (lambda: indexer_kl(*of, exchange, plan, cu_seqlens=[0, 6]), "leave out positions"),
        (lambda: indexer_kl(of[0], of[1][:5], *of[2:], exchange, plan), "k_index takes 6 rows"),
    ):
        with pytest.raises(ContractError, match=words):
            call()
