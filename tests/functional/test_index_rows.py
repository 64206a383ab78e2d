# SPDX-License-Identifier: Apache-2.0
"""Index attention over ranks is that of one process: outputs, gradients, what travels, and what is refused."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from oracle import dense_attention

from magi_attention.api import (
    DispatchConfig,
    DistAttnConfig,
    Mask,
    attend_index,
    index_attn_func,
    make_plan,
    prepare_index_exchange,
)
from magi_attention.comm.transport.fake import FakeWorld
from magi_attention.errors import ContractError

F64, NEG_INF = torch.float64, float("-inf")


def make(total, world, chunk, uneven=False):
    return make_plan(Mask.causal(total), world, DistAttnConfig(DispatchConfig(chunk, uneven)))


def draw(total, heads, width, seed, reach=None):
    """q, k, v in float64 and lists of positions with duplicates, -1 anywhere and empty rows."""
    gen = torch.Generator().manual_seed(seed)
    heads_q, heads_kv = heads
    shapes = (total, heads_q, 6), (total, heads_kv, 6), (total, heads_kv, 5)
    tensors = [torch.randn(s, generator=gen, dtype=F64) for s in shapes]
    low, high = (-total // 3, total) if reach is None else reach
    indices = torch.randint(low, high, (total, heads_kv, width), generator=gen, dtype=torch.int32)
    indices[torch.rand(total, generator=gen) < 0.2] = -1
    return tensors, indices


def whole(tensors, indices, dout, dlse, sink, **options):
    """Out, lse and gradients of q, k, v and the sink, pair by pair in one softmax over all tokens. Without v, values
    are the first columns of k."""
    leaves = [x.clone().requires_grad_() for x in (*tensors, *sink)]
    (q, k, *v), sink = leaves[: len(tensors)], leaves[len(tensors) :]
    seen = (indices[..., None] == torch.arange(len(k))).any(2).permute(1, 0, 2)
    out, lse, _ = dense_attention(q, k, v[0] if v else k[..., :5], seen, *options.values(), *sink)
    loss = (out * dout).sum() + (lse * dlse)[lse.isfinite()].sum()
    return [out.detach(), lse.detach(), *torch.autograd.grad(loss, leaves)]


@settings(max_examples=50, deadline=None, print_blob=True)
@given(
    total=st.integers(4, 40),
    world=st.sampled_from([1, 2, 4]),
    chunk=st.integers(1, 5),
    uneven=st.booleans(),
    heads=st.sampled_from([(4, 2), (3, 3), (4, 1)]),
    width=st.sampled_from([0, 1, 3, 9]),
    has=st.tuples(st.booleans(), st.booleans(), st.booleans()),
    seed=st.integers(0, 10**6),
)
def test_over_ranks_it_is_one_softmax(total, world, chunk, uneven, heads, width, has, seed):
    """Pad rows and their lists hold poison; every rank's lists reach everywhere. With values or without, sinks or none,
    and a loss of lse, whose slope is infinite for rows that see nothing."""
    plan, (has_v, has_sink, uses_lse) = make(total, world, chunk, uneven), has
    tensors, indices = draw(total, heads, width, seed)
    tensors, gen = tensors[: 2 + has_v], torch.Generator().manual_seed(seed)
    dout, dlse, sink = (
        torch.randn(s, generator=gen, dtype=F64) for s in ((total, heads[0], 5), (total, heads[0]), (2, heads[0]))
    )
    sinks = [sink] * has_sink
    options = dict(softmax_scale=0.4, softcap=3.0)
    want = whole(tensors, indices, dout, dlse * uses_lse, sinks, **options)

    def rank(transport):
        leaves = [plan.shard(x, transport, float("nan")).requires_grad_() for x in tensors]
        leaves += [x.clone().requires_grad_() for x in sinks]
        (q, k, *v), own = leaves[: len(tensors)], leaves[len(tensors) :]
        lists = plan.shard(indices, transport, 0)  # those of pad rows: all see token 0
        values = dict(v=v[0]) if v else dict(v=None, head_dim_v=5)
        more = dict(sink=own[0], **options) if own else options
        out, meta = attend_index(q, k, indices=lists, plan=plan, group=transport, **values, **more)
        is_pad = torch.from_numpy(plan.position_array(transport.rank)) >= total
        of_out = plan.shard(dout, transport, 7.0).masked_fill(is_pad[:, None, None], 0)
        of_lse = plan.shard(dlse, transport).masked_fill(meta.lse == NEG_INF, NEG_INF)
        losses = (out, meta.lse)[: 1 + uses_lse], (of_out, of_lse)[: 1 + uses_lse]
        grads = torch.autograd.grad(losses[0], leaves, losses[1])
        assert not out[is_pad].any() and not grads[0][is_pad].any()
        return [
            *(plan.gather(x.detach(), transport) for x in (out, meta.lse, *grads[: len(tensors)])),
            *grads[len(tensors) :],
        ]

    results = FakeWorld(world).run(rank)
    for got in results:
        for name, a, b in zip(("out", "lse", "dq", "dk", "dv")[: 4 + has_v], got, want):
            torch.testing.assert_close(a, b, atol=1e-11, rtol=1e-11, msg=name)
    if has_sink:
        torch.testing.assert_close(sum(got[-1] for got in results), want[-1], atol=1e-11, rtol=1e-11)


@pytest.mark.parametrize("is_prepared", [False, True])
@pytest.mark.parametrize("seed", range(4))
def test_joined_lists_are_one_softmax_over_keys_of_two_kinds(seed, is_prepared):
    """As DeepSeek V4 attends: values are the keys, to a window of tokens, chosen compressed rows and a sink."""
    print("seed", seed)
    gen = torch.Generator().manual_seed(seed)
    world, total, dim, heads = (1, 2, 3, 4)[seed], 17 + seed, 8, 3
    plan = make(total, world, 3, uneven=bool(seed % 2))
    shapes = (total, heads, dim), (total, 2, dim), (1, heads), (total, heads, dim)
    q, kv, sink, dout = (torch.randn(shape, generator=gen, dtype=F64) for shape in shapes)
    at = torch.arange(total)[:, None]
    window = (at - torch.arange(4)).clamp(min=-1)
    chosen = torch.randint(-total, total, (total, 4), generator=gen)
    indices = torch.stack((window, chosen), 1)

    leaves = [x.clone().requires_grad_() for x in (q, kv, sink)]
    sees = torch.cat([(x[..., None] == torch.arange(total)).any(1) for x in (window, chosen)], 1)
    keys = leaves[1].transpose(0, 1).flatten(0, 1)
    logits = torch.einsum("thd,sd->ths", leaves[0], keys).masked_fill(~sees[:, None], float("-inf")) * 0.3
    logits = torch.cat((logits, leaves[2].T.expand(total, heads, 1)), 2)
    want = torch.einsum("ths,sd->thd", logits.softmax(2)[..., :-1], keys)
    wanted = torch.autograd.grad(want, leaves, dout)

    def rank(transport):
        local = [plan.shard(x, transport).requires_grad_() for x in (q, kv)] + [sink.clone().requires_grad_()]
        lists = plan.shard(indices, transport, -1)
        if is_prepared:
            lists = prepare_index_exchange(lists, plan, transport, is_joined=True)
        out, meta = attend_index(
            *local[:2], None, lists, plan, transport, head_dim_v=dim, sink=local[2], softmax_scale=0.3, is_joined=True
        )
        grads = torch.autograd.grad(out, local, plan.shard(dout, transport))
        return [*(plan.gather(x.detach(), transport) for x in (out, meta.lse, *grads[:2])), grads[2]]

    results = FakeWorld(world).run(rank)
    for got in results:
        for a, b in zip(got, (want, logits.logsumexp(2), *wanted[:2])):
            torch.testing.assert_close(a, b.detach(), atol=1e-11, rtol=1e-11)
    torch.testing.assert_close(sum(got[4] for got in results), wanted[2], atol=1e-11, rtol=1e-11)


def test_an_exchange_says_whether_its_lists_are_joined():
    plan = make(6, 1, 3)
    lists, q, kv = torch.zeros(6, 2, 1, dtype=torch.int32), torch.randn(6, 2, 4), torch.randn(6, 2, 4)
    exchange = prepare_index_exchange(lists, plan, is_joined=True)
    with pytest.raises(ContractError, match="is_joined=True, and k is .* with is_joined=False"):
        attend_index(q, kv, kv, exchange, plan)


def test_each_needed_row_travels_once_and_layers_share_the_exchange():
    plan, world = make(32, 4, 2), 4
    tensors, indices = draw(32, (4, 2), 6, 11)
    print("seed 11")
    owner = torch.empty(32, dtype=torch.int64)
    for r in range(world):
        owner[torch.from_numpy(plan.position_array(r))] = r
    pairs = [(q, h) for q in range(32) for h in range(2)]
    needed = [{(int(t), h) for q, h in pairs if owner[q] == r for t in indices[q, h]} for r in range(4)]
    wanted = [[sum(t >= 0 and owner[t] == o for t, _ in needed[r]) for o in range(world)] for r in range(world)]

    def rank(transport):
        lists = plan.shard(indices, transport, -1)
        exchange = prepare_index_exchange(lists, plan, transport, deterministic=transport.rank % 2 == 0)
        assert (exchange.lists.readers is None) is (transport.rank % 2 == 1)
        before = list(transport.rows_to)
        local = [plan.shard(x, transport) for x in tensors]
        shared = [attend_index(*local, exchange, plan, transport)[0] for _ in range(2)]
        fetched = [(b - a) // 2 for a, b in zip(before, transport.rows_to)]
        assert torch.equal(*shared) and torch.equal(shared[0], attend_index(*local, lists, plan, transport)[0])
        with pytest.raises(ContractError, match="prepare an exchange of these lists"):
            attend_index(local[0][:, :2], *(x[:, :1] for x in local[1:]), exchange, plan, transport)
        return exchange.got_counts, fetched

    results = FakeWorld(world).run(rank)
    for me, (got, sent) in enumerate(results):
        assert list(got) == [0 if o == me else n for o, n in enumerate(wanted[me])]
        assert sent == [0 if r == me else wanted[r][me] for r in range(world)]


def test_values_that_are_columns_of_the_keys_travel_once():
    plan = make(30, 3, 5)
    (q, k, _), indices = draw(30, (4, 1), 5, 21)
    print("seed 21")
    dout = torch.randn(30, 4, 4, generator=torch.Generator().manual_seed(21), dtype=F64)

    def rank(transport, with_v):
        local = [plan.shard(x, transport).requires_grad_() for x in (q, k)]
        lists = prepare_index_exchange(plan.shard(indices, transport, -1), plan, transport)
        values = dict(v=local[1][..., :4]) if with_v else dict(v=None, head_dim_v=4)
        out, _ = attend_index(*local, indices=lists, plan=plan, group=transport, **values)
        grads = torch.autograd.grad(out, local, plan.shard(dout, transport))
        return [plan.gather(x.detach(), transport) for x in (out, *grads)]

    for ours, theirs in zip(*(FakeWorld(3).run(rank, with_v) for with_v in (False, True))):
        for a, b in zip(ours, theirs):
            torch.testing.assert_close(a, b, atol=1e-12, rtol=1e-12)
    with pytest.raises(ContractError, match="give one of the two"):
        attend_index(q, k, k, indices, make(30, 1, 5), head_dim_v=4)


def test_the_same_bits_on_every_run_in_low_precision():
    plan = make(48, 4, 3)
    tensors, indices = draw(48, (4, 2), 20, 5)
    tensors = [x.bfloat16() for x in tensors]

    def rank(transport):
        runs = []
        for _ in range(2):
            local = [plan.shard(x, transport).requires_grad_() for x in tensors]
            out, meta = attend_index(*local, plan.shard(indices, transport, -1), plan, transport, deterministic=True)
            runs.append([out.detach(), meta.lse, *torch.autograd.grad(out.float().square().sum(), local)])
        assert all(torch.equal(*pair) for pair in zip(*runs))
        return plan.gather(runs[0][0], transport), plan.gather(runs[0][3], transport)

    leaves = [x.requires_grad_() for x in tensors]
    out, _ = index_attn_func(*leaves, indices)
    (dk,) = torch.autograd.grad(out.float().square().sum(), leaves[1:2])
    for got, got_dk in FakeWorld(4).run(rank):
        torch.testing.assert_close(got, out.detach(), atol=2e-2, rtol=2e-2)
        torch.testing.assert_close(got_dk, dk, atol=5e-2, rtol=5e-2)


def test_one_rank_beyond_its_bound_is_named_on_all_ranks():
    plan = make(24, 3, 8)  # ranks 0, 1, 2 hold 8 tokens each
    tensors, indices = draw(24, (2, 1), 3, 1, reach=(0, 1))
    holds = [torch.from_numpy(plan.position_array(r)) for r in range(3)]
    indices[:] = -1
    indices[holds[1], 0, 0] = holds[2].int()  # rank 1 wants 8 rows of rank 2
    indices[holds[0], 0, 1] = holds[0].int()  # rank 0 its own

    def rank(transport, bounds):
        local = [plan.shard(x, transport) for x in tensors]
        lists = plan.shard(indices, transport, -1)
        return attend_index(*local, lists, plan, transport, max_rows=bounds[transport.rank])[0]

    def refused(transport):
        with pytest.raises(ContractError) as caught:
            rank(transport, (0, 5, 0))
        return str(caught.value), rank(transport, (0, 8, 0))  # and goes on

    for message, out in FakeWorld(3).run(refused):
        assert "rank 1 needs 8 rows of other ranks, 3 more than its max_rows of 5. Nothing was sent" in message
        assert torch.isfinite(out).all()
    with pytest.raises(ContractError, match="max_rows is 2.5"):
        FakeWorld(3).run(rank, (2.5, 2.5, 2.5))


def test_all_ranks_are_told_what_one_does_wrong_and_the_group_goes_on():
    plan = make(16, 2, 4)
    tensors, indices = draw(16, (4, 2), 3, 2)

    def rank(transport, case):
        local = [plan.shard(x, transport) for x in tensors]
        lists = plan.shard(indices, transport, -1)
        if transport.rank == 1:
            local[0] = {"q": local[0][:-1], "no q": None}.get(case, local[0])
            local[2] = [1.0] if case == "v" else local[2]
            lists = {"beyond": lists + 16, "rows": lists[1:], "heads": lists[:, :1]}.get(case, lists)
        with pytest.raises(ContractError) as caught:
            attend_index(*local, lists, plan, transport)
        assert "Rank 1: " in str(caught.value)
        attend_index(*(plan.shard(x, transport) for x in tensors), plan.shard(indices, transport, -1), plan, transport)
        return str(caught.value)

    for case, text in (
        ("q", "q has 7 rows and k 8, and rank 1 holds 8 of 16 tokens"),
        ("no q", "q is a NoneType; give a tensor"),
        ("v", "v is a list; give a tensor"),
        ("beyond", "but k has only 16 rows"),
        ("rows", "indices are (7, 2, 3), and rank 1 holds 8"),
        ("heads", "indices are (8, 1, 3) for 2 kv heads"),
    ):
        assert all(text in message for message in FakeWorld(2, timeout_s=60).run(rank, case)), case
