# SPDX-License-Identifier: Apache-2.0
"""The published helpers around keys: padding, batches as packed documents, masks from cumulative lengths."""

from __future__ import annotations

import torch

from magi_attention.api import (
    AttnMaskType,
    AttnRanges,
    infer_attn_mask_from_cu_seqlens,
    infer_varlen_mask_from_batch,
    squash_batch_dim,
)
from magi_attention.api.keys.helpers import apply_padding, compute_pad_size, pad_at_dim, unpad_at_dim


def ranges(*pairs) -> AttnRanges:
    return AttnRanges.from_ranges(list(pairs))


def test_functools() -> None:
    assert compute_pad_size(1024, 6, chunk_size=208) == 224 == compute_pad_size(1024, 6, 208)[0]
    assert squash_batch_dim(torch.zeros(2, 3, 4)).shape == (6, 4)
    cu_q, cu_k = infer_varlen_mask_from_batch(3, 4, device="cpu")
    assert cu_q.tolist() == cu_k.tolist() == [0, 4, 8, 12] and cu_q.dtype == torch.int32
    x = torch.arange(6).view(2, 3)
    assert pad_at_dim(x, 1, 2, value=9).tolist() == [[0, 1, 2, 9, 9], [3, 4, 5, 9, 9]]
    assert pad_at_dim(x, -2, 1, value=9, side="left").tolist()[0] == [9, 9, 9]
    assert torch.equal(unpad_at_dim(pad_at_dim(x, 1, 2), 1, 2), x)
    q, k, types = apply_padding(ranges((0, 10)), ranges((0, 10)), [AttnMaskType.CAUSAL], 10, 6)
    assert (q.to_naive_ranges()[1], k.to_naive_ranges()[1]) == ((10, 16), (0, 0))
    assert types == [AttnMaskType.CAUSAL, AttnMaskType.FULL]
    cu = torch.tensor([0, 4, 8])
    before = infer_attn_mask_from_cu_seqlens(cu, cu)[0].to_naive_ranges()
    cu[1] = 2
    assert infer_attn_mask_from_cu_seqlens(cu, cu)[0].to_naive_ranges() != before
