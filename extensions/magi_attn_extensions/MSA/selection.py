# SPDX-License-Identifier: Apache-2.0
"""Which blocks of keys a query of MSA sees."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from magi_attention.kernels.index_attn.reference import BUDGET
from magi_attn_extensions.MSA.config import BLOCK, MsaConfig

NEG_INF = float("-inf")


def select_blocks(
    index_q: torch.Tensor, index_k: torch.Tensor, positions: torch.Tensor, config: MsaConfig
) -> torch.Tensor:
    """int64 (n, H, ``topk_blocks``): the blocks of each query of one document, -1 where it has no more.

    index_q (n, H, Di); index_k (keys, Di), those of the document from its beginning, as far as a query reaches;
    ``positions`` (n,) of the queries in the document. A block begins at a multiple of ``BLOCK`` from there.
    """
    keys = index_k.shape[0]
    blocks = -(-keys // BLOCK)
    kept = min(config.topk_blocks, blocks)
    if config.score_in_fp32:
        index_q, index_k = index_q.float(), index_k.float()
    scores = torch.einsum("nhd,kd->nhk", index_q, index_k)
    scores = scores.masked_fill(torch.arange(keys, device=scores.device) > positions[:, None, None], NEG_INF)
    scores = torch.nn.functional.pad(scores, (0, blocks * BLOCK - keys), value=NEG_INF)
    scores = scores.unflatten(2, (blocks, BLOCK)).amax(dim=3)
    number, own = torch.arange(blocks, device=scores.device), (positions // BLOCK)[:, None]
    always = (number <= own) & ((number < config.init_blocks) | (number > own - config.local_blocks))
    best = scores.masked_fill(always[:, None], float("inf")).topk(kept, dim=2)
    chosen = best.indices.masked_fill(best.values == NEG_INF, -1)
    return torch.nn.functional.pad(chosen, (0, config.topk_blocks - kept), value=-1)


def select_packed(
    index_q: torch.Tensor, index_k: torch.Tensor, pieces: Sequence[tuple[int, int, int, int]],
    positions: torch.Tensor, config: MsaConfig,
) -> torch.Tensor:  # fmt: skip
    """``select_blocks`` of a rank's rows (T, H, Di) with the keys (total, 1, Di) of all ranks in natural order.

    ``pieces`` are (first row, end row, first key, end key), one document each, in the order of the rows;
    ``positions`` (T,) count from 0 in each document. No more than ``BUDGET`` scores are formed at a time.
    """
    chosen = [index_q.new_empty((0, index_q.shape[1], config.topk_blocks), dtype=torch.int64)]
    for begin, end, first, last in pieces:
        step = max(BUDGET // (index_q.shape[1] * (last - first)), 1)
        for start in range(begin, end, step):
            rows = slice(start, min(start + step, end))
            chosen.append(select_blocks(index_q[rows], index_k[first:last, 0], positions[rows], config))
    return torch.cat(chosen)
