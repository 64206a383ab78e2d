# SPDX-License-Identifier: Apache-2.0
"""Block-sparse helpers: ranges and dense masks describe the same pairs."""

import pytest
import torch

from magi_attention.errors import ContractError
from magi_attention.utils import sparse_utils as su


def dense_from_ranges(q_ranges, k_ranges, total_q, total_k):
    mask = torch.zeros(total_q, total_k, dtype=torch.int32)
    for (q0, q1), (k0, k1) in zip(q_ranges.tolist(), k_ranges.tolist()):
        mask[q0:q1, k0:k1] += 1
    assert mask.max() <= 1, "no pair twice"
    return mask.bool()


def flattened(dense, num_kv_heads):
    """(1, HQ, Sq, Sk) to the (HQ * Sq, HK * Sk) mask of head-flattened tokens."""
    _, hq, sq, sk = dense.shape
    out = torch.zeros(hq, sq, num_kv_heads, sk, dtype=torch.bool)
    for h in range(hq):
        out[h, :, h // (hq // num_kv_heads)] = dense[0, h]
    return out.reshape(hq * sq, num_kv_heads * sk)


@pytest.mark.parametrize("mode", ["per_kv_head", "per_q_head"])
@pytest.mark.parametrize("hq, hk", [(4, 2), (3, 3), (4, 1)])
@pytest.mark.parametrize("sparsity", [0.01, 0.4, 1.0])
def test_uniform_blocks(mode, hq, hk, sparsity):
    torch.manual_seed(0)
    nq, nk, bm, bn = 3, 5, 4, 2
    mask, scores = su.generate_block_sparse_pattern(hq, hk, nq, nk, sparsity, mode, device="cpu")
    heads = hk if mode == "per_kv_head" else hq
    assert mask.shape == (1, *scores.shape) == (1, heads, nq, nk)
    assert (mask.sum(-1) == max(1, int(sparsity * nk))).all()
    assert (scores.masked_fill(~mask[0], 2).amin(-1) >= scores.masked_fill(mask[0], -1).amax(-1)).all()
    dense = su.get_sdpa_mask_from_block_sparse_mask(mask, nq * bm, nk * bn, bm, bn, hq)
    assert dense.shape == (1, hq, nq * bm, nk * bn)
    assert dense[0, hq - 1, bm, bn] == mask[0, heads - 1, 1, 1]
    ranges = su.generate_ranges_from_block_mask(su.flatten_block_mask(mask, hq, hk), bm, bn)
    assert ranges[0].dtype == torch.int32
    assert (dense_from_ranges(*ranges, hq * nq * bm, hk * nk * bn) == flattened(dense, hk)).all()
    topk, again = su.generate_block_sparse_pattern(hq, hk, nq, nk, sparsity, mode, "topk", scores=scores)
    assert again is scores and topk.shape == (heads, nq, max(1, int(sparsity * nk)))
    assert (su.get_sdpa_mask_from_topk_indices(topk, nq * bm, nk * bn, bm, bn, hq) == dense).all()
    from_mask = su.generate_ranges_from_block_mask(su.flatten_block_mask_to_kv_shape(mask), bm, bn)
    from_topk = su.generate_ranges_from_topk_indices(topk, bm, bn, nk)
    assert all((a == b).all() for a, b in zip(from_mask, from_topk))
    everything = su.generate_ranges_from_block_mask_triton(mask, bm, bn)
    is_set = mask.reshape(-1)
    assert all(len(x) == mask.numel() and (x[~is_set] == 0).all() for x in everything)
    assert all((a[is_set] == b).all() for a, b in zip(everything, from_mask))


def test_one_pattern_for_all_heads():
    mask, scores = su.generate_block_sparse_pattern(4, 2, 3, 5, 0.4, "shared", device="cpu")
    assert mask.shape == (1, 1, 3, 5) and scores.shape == (1, 3, 5)
    dense = su.get_sdpa_mask_from_block_sparse_mask(mask, 6, 5, 2, 1, 4)
    assert dense.shape == (1, 4, 6, 5) and (dense[0, 0] == dense[0, 3]).all()


def test_padded_topk_and_batches():
    topk = torch.tensor([[[[0, 2], [1, -1]]]])
    q, k = su.generate_ranges_from_topk_indices_triton(topk, 2, 3, 4)
    assert q.tolist() == [[0, 2], [0, 2], [2, 4]] and k.tolist() == [[0, 3], [6, 9], [3, 6]]
    dense = su.get_sdpa_mask_from_topk_indices(topk, 4, 11, 2, 3, 2, batch_size=3)
    assert dense.shape == (3, 2, 4, 11)
    assert dense[2, 1].sum(-1).tolist() == [6, 6, 3, 3]


@pytest.mark.parametrize("mode", ["per_kv_head", "per_q_head"])
def test_variable_blocks(mode):
    torch.manual_seed(1)
    hq, hk, sq, sk = 4, 2, 30, 41
    mask, rows, columns = su.generate_variable_block_sparse_pattern(hq, hk, sq, sk, 3, 4, 0.5, mode, 2, 5, "cpu")
    heads = mask.shape[1]
    assert rows.shape == (heads, 3) and columns.shape == (hk, 4)
    assert (rows.sum(1) == sq).all() and (columns.sum(1) == sk).all()
    assert rows.min() >= 2 and columns.min() >= 5 and len(set(rows.flatten().tolist())) > 1
    dense = su.get_sdpa_mask_from_var_block_mask(mask, sq, sk, rows, columns, hq)
    assert dense.shape == (1, hq, sq, sk)
    padded = su.get_sdpa_mask_from_var_block_mask(mask, sq + 2, sk - 1, rows, columns, hq, 3)
    assert padded.shape == (3, hq, sq + 2, sk - 1) and not padded[:, :, sq:].any()
    assert (padded[2, :, :sq] == dense[0, :, :, :-1]).all()
    edge = int(rows[0, 0]), int(columns[0, 0])
    assert (dense[0, 0, : edge[0], : edge[1]] == mask[0, 0, 0, 0]).all()
    assert dense[0, 0, edge[0], edge[1]] == mask[0, 0, 1, 1]
    ranges = su.generate_ranges_from_var_block_mask(su.flatten_block_mask(mask, hq, hk), rows, columns, hq, hk)
    assert (dense_from_ranges(*ranges, hq * sq, hk * sk) == flattened(dense, hk)).all()
    with pytest.raises(ContractError, match="do not fit"):
        su.generate_variable_block_sparse_pattern(1, 1, 10, 10, 3, 2, 0.5, device="cpu")


@pytest.mark.parametrize("block", [1, 2])
def test_index_attention(block):
    torch.manual_seed(2)
    b, hk, hq, sq, sk, topk, most = 2, 2, 4, 3, 12, 4, 6
    idx = su.build_index_attn_indices(b, hk, sq, sk, topk, most, "cpu", k_block_size=block)
    assert idx.shape == (b * sq, hk, most) and idx.dtype == torch.int32
    assert (idx[..., topk:] == -1).all() and (idx[..., :topk] >= 0).all()
    dense = su.get_sdpa_mask_from_index_attn_indices(idx, b, hq, hk, sq, sk, "cpu", k_block_size=block)
    expected = torch.zeros(b, hq, sq, sk, dtype=torch.bool)
    for n in range(b):
        for h in range(hk):
            for i in range(sq):
                for value in idx[n * sq + i, h, :topk].tolist():
                    row, head = divmod(value, hk)
                    batch, t = divmod(row, sk // block)
                    assert (batch, head) == (n, h)
                    expected[n, h * 2 : h * 2 + 2, i, t * block : (t + 1) * block] = True
    assert (dense == expected).all() and (dense.sum(-1) == topk * block).all()
    with pytest.raises(ContractError, match="topk"):
        su.build_index_attn_indices(1, 1, 1, 4, 5, 8, "cpu")


@pytest.mark.parametrize(
    "block, group, tile, swap, pack, sparse",
    [
        ((128, 128), 1, (128, 128), False, False, False),
        ((256, 300), 8, (128, 256), False, False, False),
        ((64, 65), 1, (64, 80), False, False, False),
        ((64, 64), 4, (128, 64), False, True, False),
        ((1, 64), 8, (8, 64), True, True, False),
        ((16, 128), 1, (16, 64), True, False, False),
        ((8, 8), 1, (8, 64), True, False, True),  # small q and small k: the tile must fit the swap
        ((1, 1), 128, (128, 128), False, True, True),
        ((33, 32), 1, (64, 128), False, False, True),
    ],
)
def test_tiles(block, group, tile, swap, pack, sparse):
    got = su.choose_ref_block(block, group)
    assert got == {
        "ref_block_size": tile,
        "swap_ab": swap,
        "pack_gqa": pack,
        "sparse_load": sparse,
        "index_attn": False,
    }


def test_every_tile_is_valid():
    for q in (1, 3, 8, 16, 17, 64, 100, 128, 500):
        for k in (1, 16, 63, 64, 100, 1024):
            for group in (1, 2, 8, 16):
                got = su.choose_ref_block((q, k), group)
                m, n = got["ref_block_size"]
                if got["swap_ab"]:
                    assert m in (8, 16) and n == 64
                else:
                    assert m in (64, 128) and n % 16 == 0 and n <= 256 and (not got["sparse_load"] or n == 128)
                    assert q >= 128 or m >= min(q * group, 128)


@pytest.mark.parametrize(
    "call",
    [
        lambda: su.generate_block_sparse_pattern(3, 2, 1, 1, 1.0, device="cpu"),
        lambda: su.generate_block_sparse_pattern(2, 2, 1, 1, 1.0, mode="x", device="cpu"),
        lambda: su.generate_block_sparse_pattern(2, 2, 1, 1, 1.0, sparse_format="x", device="cpu"),
        lambda: su.generate_block_sparse_pattern(2, 2, 1, 1, 1.0, scores=torch.zeros(1)),
        lambda: su.generate_variable_block_sparse_pattern(2, 2, 9, 9, 1, 1, 1.0, "shared", device="cpu"),
        lambda: su.flatten_block_mask(torch.zeros(2, 1, 1, 1), 1, 1),
        lambda: su.choose_ref_block((0, 1), 1),
    ],
)
def test_mistakes(call):
    with pytest.raises(ContractError):
        call()
