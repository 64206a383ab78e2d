# SPDX-License-Identifier: Apache-2.0
"""The sparse helpers as published programs use them: from a pattern, by keywords, to the kernel and to a dense mask."""

from __future__ import annotations

import pytest
import torch

from magi_attention.api import flex_flash_attn_func
from magi_attention.utils import sparse_utils as su

HQ, HK, S, D = 4, 2, 24, 8
F64 = torch.float64


def leaves(seed, batch=1):
    print(f"seed {seed}")
    gen = torch.Generator().manual_seed(seed)
    return [torch.randn(batch * S, h, D, generator=gen, dtype=F64).requires_grad_() for h in (HQ, HK, HK)]


def dense(q, k, v, mask):
    """Out (B * S, HQ, D) of an SDPA mask (B, HQ, S, S) in which every row sees something."""
    q, k, v = (x.unflatten(0, (-1, S)).transpose(1, 2) for x in (q, k, v))
    k, v = (x.repeat_interleave(HQ // HK, 1) for x in (k, v))
    out = torch.nn.functional.scaled_dot_product_attention(q, k, v, attn_mask=mask)
    return out.transpose(1, 2).flatten(0, 1)


def by_kv_head(x, heads):
    """(S, H, D) as (HK * S, heads, D): the kv heads one after another along the sequence."""
    return x.unflatten(1, (HK, heads)).transpose(0, 1).flatten(0, 1)


def agree(out, want, inputs):
    torch.testing.assert_close(out, want)
    dout = torch.randn(out.shape, dtype=F64, generator=torch.Generator().manual_seed(1))
    for pair in zip(*(torch.autograd.grad(x, inputs, dout) for x in (out, want))):
        torch.testing.assert_close(*pair)


@pytest.mark.parametrize("kind", ["mask", "mask on the device", "topk", "variable"])
def test_block_patterns_reach_the_kernel(kind):
    torch.manual_seed(3)
    inputs = leaves(3)
    shape = dict(num_q_heads=HQ, num_kv_heads=HK, sparsity=0.4, mode="per_kv_head", device="cpu")
    if kind == "variable":
        pattern, rows, columns = su.generate_variable_block_sparse_pattern(
            seqlen_q=S, seqlen_k=S, num_q_blocks=4, num_kv_blocks=6, min_q_block_size=2, min_kv_block_size=2, **shape
        )
        mask = su.get_sdpa_mask_from_var_block_mask(
            block_mask=pattern, seqlen_q=S, seqlen_k=S, block_row_sz=rows, block_col_sz=columns, num_q_heads=HQ, bsz=1
        )
        flat = su.flatten_block_mask_to_kv_shape(mask_kv_4d=pattern)
        ranges = su.generate_ranges_from_var_block_mask(
            block_mask=flat, block_row_sz=rows, block_col_sz=columns, num_q_heads=HK, num_kv_heads=HK
        )
    else:
        form = "topk" if kind == "topk" else "block_mask"
        pattern, _ = su.generate_block_sparse_pattern(
            num_q_blocks=S // 6, num_kv_blocks=S // 3, sparse_format=form, scores=None, **shape
        )
        sizes = dict(seqlen_q=S, seqlen_k=S, block_size_q=6, block_size_k=3, num_q_heads=HQ, batch_size=1)
        if kind == "topk":
            mask = su.get_sdpa_mask_from_topk_indices(topk_indices=pattern, **sizes)
            make = su.generate_ranges_from_topk_indices_triton
            ranges = make(topk_indices=pattern, block_m=6, block_n=3, num_k_blocks=S // 3)
        else:
            mask = su.deprecated_slow_get_sdpa_mask_from_block_sparse_mask(block_mask=pattern, **sizes)
            if kind == "mask":
                flat = su.flatten_block_mask_to_kv_shape(mask_kv_4d=pattern)
                ranges = su.generate_ranges_from_block_mask(block_mask=flat, block_m=6, block_n=3)
            else:
                ranges = su.generate_ranges_from_block_mask_triton(block_mask=pattern, block_m=6, block_n=3)
    hints = su.choose_ref_block(block_size=(6, 3), qhead_per_khead=HQ // HK)
    q, k, v = inputs
    out, _ = flex_flash_attn_func(
        by_kv_head(q, HQ // HK), by_kv_head(k, 1), by_kv_head(v, 1), *ranges, auto_range_merge=True, **hints
    )
    agree(out.unflatten(0, (HK, S)).transpose(0, 1).flatten(1, 2), dense(q, k, v, mask), inputs)


def test_index_patterns_reach_the_kernel():
    """Rows of the flattened k over batches and kv heads, and the logical positions of newer releases."""
    torch.manual_seed(4)
    batch, q, k, v = 2, *(inputs := leaves(4, 2))
    indices = su.build_index_attn_indices(
        B=batch, NHK=HK, S_q=S, S_kv=S, topk=5, max_topk=8, device="cpu", k_block_size=1
    )
    mask = su.get_sdpa_mask_from_index_attn_indices(
        index_attn_indices=indices, B=batch, NHQ=HQ, NHK=HK, S_q=S, S_kv=S, device="cpu", k_block_size=1
    )
    out, _ = flex_flash_attn_func(
        q.reshape(-1, HQ // HK, D), k.reshape(-1, 1, D), v.reshape(-1, 1, D), index_attn_indices=indices,
        index_attn=True, pack_gqa=True,
    )  # fmt: skip
    agree(out.reshape(q.shape), dense(q, k, v, mask), inputs)
    logical = torch.where(indices < 0, indices, indices // HK)
    agree(flex_flash_attn_func(q, k, v, index_sparse_indices=logical)[0], dense(q, k, v, mask), inputs)
