# SPDX-License-Identifier: Apache-2.0
"""shard, gather and positions: identities, dtypes, dims, uneven shards. Gradients and rolls: compat/test_dispatch."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from magi_attention.comm.transport.fake import FakeWorld
from magi_attention.common.mask import Mask
from magi_attention.config import DispatchConfig, DistAttnConfig
from magi_attention.errors import ContractError
from magi_attention.functional.tokens.layout import TokenLayout, gather, positions, roll, shard
from magi_attention.meta.planner import build_plan


def make(total: int, cp: int, chunk: int, uneven: bool):
    mask = Mask.causal(total)
    return build_plan(mask.slices, total, cp, config=DistAttnConfig(DispatchConfig(chunk, uneven)))


layouts = st.tuples(st.integers(8, 60), st.sampled_from([1, 2, 3, 4, 8]), st.integers(1, 7), st.booleans())


@settings(max_examples=80, deadline=None, print_blob=True)
@given(sizes=layouts, dtype=st.sampled_from([torch.float64, torch.int64, torch.bool, torch.bfloat16, torch.int16]))
def test_gather_undoes_shard(sizes, dtype) -> None:
    plan = make(*sizes)
    x = torch.randint(0, 2, (plan.total_tokens, 3)).to(dtype)

    def rank(transport):
        layout = TokenLayout(plan, transport)
        local = shard(x, layout, pad_value=1)
        ids = torch.from_numpy(plan.position_array(transport.rank))
        padded = torch.cat([x, torch.ones(plan.pad_size, 3).to(dtype)])
        assert torch.equal(local, padded[ids])
        assert torch.equal(positions(layout, "cpu"), ids.clamp(max=plan.total_tokens - 1))
        return gather(local, layout), gather(local, layout, keep_pad=True), padded

    for natural, kept, padded in FakeWorld(plan.cp_size).run(rank):
        assert torch.equal(natural, x) and torch.equal(kept, padded)


@pytest.mark.parametrize("dim", [1, -1, 2])
def test_other_dims(dim) -> None:
    plan = make(20, 3, 2, False)
    shape = [4, 5, 6]
    shape[dim] = 20
    x = torch.randn(shape)

    def rank(transport):
        layout = TokenLayout(plan, transport)
        local = shard(x, layout, dim=dim)
        rolled = roll(local, layout, 1, dim=dim)
        return gather(local, layout, dim=dim), gather(rolled, layout, dim=dim, keep_pad=True)

    for natural, rolled in FakeWorld(3).run(rank):
        assert torch.equal(natural, x)
        padded = torch.cat([x.movedim(dim, 0), torch.zeros(plan.pad_size, *x.movedim(dim, 0).shape[1:])])
        assert torch.equal(rolled, torch.roll(padded, 1, 0).movedim(0, dim))


def test_wrong_sizes_say_what_is_expected() -> None:
    plan = make(20, 2, 2, False)

    def rank(transport):
        layout = TokenLayout(plan, transport)
        with pytest.raises(ContractError, match="20 rows"):
            shard(torch.zeros(21, 2), layout)
        with pytest.raises(ContractError, match="gather"):
            gather(torch.zeros(20, 2), layout)
        with pytest.raises(ContractError, match="roll"):
            roll(torch.zeros(3, 2), layout, 1)
        for move, what in ((shard, "shard .*20 rows"), (gather, "gather .*10 rows")):
            with pytest.raises(ContractError, match=what.replace(" .*", ".* got a list; give a tensor with ")):
                move([0] * 20, layout)

    FakeWorld(2).run(rank)
    with pytest.raises(ContractError, match="2 ranks and the group has 3"):
        FakeWorld(3).run(lambda t: TokenLayout(plan, t))


@settings(max_examples=40, deadline=None, print_blob=True)
@given(sizes=layouts, dim=st.sampled_from([0, 1]))
def test_partial_gradients_of_shard_add_up(sizes, dim) -> None:
    """Each rank gets the rows that it keeps, so that the sum over ranks is what one process gets."""
    plan = make(*sizes)
    x = torch.randn(plan.total_tokens, 2, dtype=torch.float64)
    weight = torch.randn(plan.total_tokens, 2, dtype=torch.float64)

    def rank(transport):
        layout = TokenLayout(plan, transport)
        leaf = x.clone().requires_grad_()
        local = shard(leaf.movedim(0, dim), layout, 7.0, dim, is_partial_grad=True)
        assert torch.equal(local.movedim(dim, 0), shard(x, layout, 7.0))
        (local * shard(weight.movedim(0, dim), layout, dim=dim)).sum().backward()
        mine = torch.zeros(plan.total_tokens, 1)
        mine[positions(layout, "cpu")[torch.from_numpy(plan.position_array(layout.rank)) < plan.total_tokens]] = 1
        assert torch.equal(leaf.grad, weight * mine)
        return leaf.grad

    assert torch.equal(sum(FakeWorld(plan.cp_size).run(rank)), weight)
