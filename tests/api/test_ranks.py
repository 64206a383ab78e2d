# SPDX-License-Identifier: Apache-2.0
"""The published API over several ranks, as threads: own partitions, two masks over one dispatch, cross-attention."""

from __future__ import annotations

import pytest
import torch

from magi_attention import api
from magi_attention.api import (
    AttnRanges,
    DispatchConfig,
    DistAttnConfig,
    calc_attn,
    dispatch,
    dist_attn_runtime_dict_mgr,
    get_position_ids,
    magi_attn_flex_key,
    make_flex_key_for_new_mask_after_dispatch,
    make_varlen_key_for_new_mask_after_dispatch,
    undispatch,
)
from magi_attention.api.keys.dispatch_meta import DispatchMeta
from magi_attention.comm.transport.fake import FakeWorld
from magi_attention.common.enum import AttnRole, AttnType
from magi_attention.utils import flatten_nested_list, perm_idxs2unperm_idxs

HEADS = dict(num_heads_q=4, num_heads_kv=2, head_dim=8)


def ranges(*pairs) -> AttnRanges:
    return AttnRanges.from_ranges(list(pairs))


def causal_key(transport, total):
    full = ranges((0, total))
    return magi_attn_flex_key(full, full, "causal", total, total, **HEADS, pad_size=0, cp_group_or_mesh=transport)


def test_own_partition_through_a_hand_made_dispatch_meta() -> None:
    """Zig-zag shards, as one client injects them."""
    world, chunk, total = 2, 4, 16
    partitions = [[0, 3], [1, 2]]
    perm = flatten_nested_list(partitions)

    def rank(transport):
        metas = [
            DispatchMeta(
                attn_role=role,
                attn_type=AttnType.SELF_ATTN,
                total_seqlen=total,
                shard_seqlen=total // world,
                max_valid_ids=total,
                chunk_size=chunk,
                num_chunks=4,
                cp_rank=transport.rank,
                cp_size=world,
                partitions=partitions,
                partitions_perm_idxs=perm,
                partitions_unperm_idxs=perm_idxs2unperm_idxs(perm),
            )
            for role in (AttnRole.QUERY, AttnRole.KEY)
        ]
        full = ranges((0, total))
        config = DistAttnConfig()
        key = api.init_dist_attn_runtime_key(
            full, full, ["causal"], total, total, 4, 2, 8, 0, chunk, transport, None, config
        )
        mgr = api.init_dist_attn_runtime_mgr(
            full,
            full,
            ["causal"],
            total,
            total,
            4,
            2,
            8,
            chunk,
            transport,
            None,
            config,
            ref_dispatch_meta_q=metas[0],
            ref_dispatch_meta_k=metas[1],
        )
        dist_attn_runtime_dict_mgr[key] = mgr
        assert dist_attn_runtime_dict_mgr.get(key).dispatch_meta_q.partitions == partitions
        ids = dispatch(torch.arange(total), key)
        assert ids.tolist() == [[0, 1, 2, 3, 12, 13, 14, 15], [4, 5, 6, 7, 8, 9, 10, 11]][transport.rank]
        q, k = torch.arange(total * 32.0).view(total, 4, 8).cos(), torch.arange(total * 16.0).view(total, 2, 8).sin()
        return undispatch(calc_attn(dispatch(q, key), dispatch(k, key), dispatch(k, key), key)[0], key), q, k

    for got, q, k in FakeWorld(world).run(rank):
        plan = api.make_plan(api.Mask.causal(total), 1)
        torch.testing.assert_close(got, api.attend(q, k, k, plan)[0], atol=1e-5, rtol=1e-5)


def test_cross_mask_keys_do_not_collide() -> None:
    """The same second mask over two different dispatches must be two keys."""

    def rank(transport):
        total = 32
        values = dict(total_seqlen_q=total, total_seqlen_k=total, **HEADS, pad_size=0, cp_group_or_mesh=transport)
        full = ranges((0, total))
        sequential = DistAttnConfig(DispatchConfig(chunk_size=2, alg=api.SequentialDispatchAlg()))
        a = magi_attn_flex_key(full, full, "causal", **values, dist_attn_config=sequential)
        b = magi_attn_flex_key(full, full, "causal", **values)
        window = ranges((0, total)), ranges((0, total)), "full"
        over_a, over_b = (make_flex_key_for_new_mask_after_dispatch(*window, key) for key in (a, b))
        direct = magi_attn_flex_key(*window, **values)
        assert len({over_a, over_b, direct}) == 3
        cu = torch.tensor([0, 12, total], dtype=torch.int32)
        varlen = make_varlen_key_for_new_mask_after_dispatch(cu, cu, a, causal=True)
        x = torch.randn(total, 4, 8, generator=torch.Generator().manual_seed(0))
        local = dispatch(x, a)
        assert torch.equal(local, dispatch(x, over_a))
        docs = undispatch(calc_attn(local, local[:, :2], local[:, :2], varlen)[0], a)
        with pytest.raises(ValueError, match="describe the same sequence"):
            make_varlen_key_for_new_mask_after_dispatch(cu[:2], cu[:2], a)
        plan = api.make_plan(api.Mask.varlen([0, 12, total], causal=True), 1)
        torch.testing.assert_close(docs, api.attend(x, x[:, :2], x[:, :2], plan)[0], atol=1e-5, rtol=1e-5)

    FakeWorld(2).run(rank)


def test_cross_attention_slices() -> None:
    def rank(transport):
        key = causal_key(transport, 16)
        mgr = dist_attn_runtime_dict_mgr.get(key)
        q, k = ranges((0, 6), (6, 16)), ranges((0, 5), (5, 9))
        local = mgr.get_xattn_args(q, k, "full", return_host_only=True)
        ids = get_position_ids(key).tolist()
        seen = {}
        for a, b in zip(local.q_ranges.to_naive_ranges(), local.k_ranges.to_naive_ranges()):
            seen.update({ids[row]: tuple(b) for row in range(*a)})
        assert seen == {i: (0, 5) if i < 6 else (5, 9) for i in ids}
        everyone = mgr.get_xattn_args(q, k, "full")
        assert sum(e - s for s, e in everyone.q_ranges.to_naive_ranges()) == 16
        with pytest.raises(AssertionError, match="FULL"):
            mgr.get_xattn_args(q, k, "causal")
        with pytest.raises(ValueError, match="meets the rows"):
            mgr.get_xattn_args(ranges((0, 0)), ranges((0, 5)), "full")

    FakeWorld(2).run(rank)
