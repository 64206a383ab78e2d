# SPDX-License-Identifier: Apache-2.0
"""Scores of an indexer, and the keys, or the blocks of keys, that have the highest."""

from __future__ import annotations

import torch

from magi_attention.kernels.indexer.visible import Blocks, row_blocks, visible_keys
from magi_attention.kernels.types import accumulation_dtype

_NONE = torch.iinfo(torch.int32).max  # in place of -1 where none is to be last
_NEG_INF = float("-inf")


def best_keys(
    q_index: torch.Tensor, k_index: torch.Tensor, weights: torch.Tensor, bounds: torch.Tensor, k: int, blocks: Blocks
) -> torch.Tensor:
    """int32 (T, k): the keys with the highest scores within ``bounds``, ascending, then -1."""
    best = torch.full((len(q_index), k), -1, dtype=torch.int32, device=q_index.device)
    for rows, low, high in row_blocks(bounds, blocks.rows):
        shape = len(bounds[rows]), k
        values = torch.full(shape, _NEG_INF, dtype=accumulation_dtype(q_index.dtype), device=best.device)
        keys = best[rows]
        for start in range(low, high, blocks.keys):
            stop = min(start + blocks.keys, high)
            is_visible, number = visible_keys(bounds[rows], start, stop)
            scores = _scores(q_index[rows], k_index[start:stop], weights[rows]).masked_fill_(~is_visible, _NEG_INF)
            # what was found before has the lower positions and stands first, and the sort keeps the order of equals
            values = torch.cat((values, scores), 1)
            keys = torch.cat((keys, torch.where(is_visible, number, -1).int()), 1)
            values, order = values.sort(dim=1, descending=True, stable=True)
            values, keys = values[:, :k], keys.gather(1, order[:, :k])
        best[rows] = _ascending(keys)
    return best


def best_blocks(
    q_index: torch.Tensor, k_index: torch.Tensor, weights: torch.Tensor | None, bounds: torch.Tensor, k: int,
    block_size: int, local_blocks: int, blocks: Blocks,
) -> torch.Tensor:  # fmt: skip
    """int32 (T, lists, k): blocks of ``block_size`` keys with the highest scores, ascending, then -1.

    Blocks are counted from the first key within ``bounds``. A block has the score of its best key there; the last
    ``local_blocks`` of a query come before all others. With weights there is one list, else one for each head.
    """
    lists = q_index.shape[1] if weights is None else 1
    best = torch.full((len(q_index), lists, k), -1, dtype=torch.int32, device=q_index.device)
    num_blocks = ((bounds[:, 1] - bounds[:, 0]).clamp(min=0) + block_size - 1) // block_size
    for rows, low, high in row_blocks(bounds, blocks.rows):
        own, first = num_blocks[rows, None], bounds[rows, :1]
        count = int(own.max())
        shape = len(own), lists, count
        values = torch.full(shape, _NEG_INF, dtype=accumulation_dtype(q_index.dtype), device=best.device)
        for start in range(low, high if count else low, blocks.keys):
            stop = min(start + blocks.keys, high)
            is_visible, number = visible_keys(bounds[rows], start, stop)
            if weights is None:
                scores = _dots(q_index[rows], k_index[start:stop])
            else:
                scores = _scores(q_index[rows], k_index[start:stop], weights[rows])[:, None]
            scores = scores.masked_fill(~is_visible[:, None], _NEG_INF)
            place = ((number - first) // block_size).clamp(0, count - 1)[:, None].expand_as(scores)
            values.scatter_reduce_(2, place, scores, "amax")
        block = torch.arange(count, device=best.device)
        is_local = (block < own) & (block >= own - local_blocks)
        order = values.masked_fill_(is_local[:, None], -_NEG_INF).sort(dim=2, descending=True, stable=True).indices
        chosen = torch.where(order[..., :k] < own[:, None], order[..., :k], -1).int()
        best[rows, :, : chosen.shape[2]] = _ascending(chosen)
    return best


def _ascending(numbers: torch.Tensor) -> torch.Tensor:
    """Sorted along the last dimension, with -1 behind all others."""
    ordered = torch.where(numbers < 0, _NONE, numbers).sort(-1).values
    return torch.where(ordered == _NONE, -1, ordered)


def _scores(q_index: torch.Tensor, k_index: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
    """Scores (rows, keys) whose bits do not depend on how queries and keys are cut into blocks.

    A matrix product adds in an order that changes with its shape. In float64 that changes bits which the rounding to
    float32 removes. Heads are then added one by one."""
    acc = accumulation_dtype(q_index.dtype)
    q_index, k_index, weights = q_index.double(), k_index.double(), weights.to(acc)
    total = torch.zeros(len(q_index), len(k_index), dtype=acc, device=q_index.device)
    for head in range(q_index.shape[1]):
        total += (q_index[:, head] @ k_index.T).to(acc).relu_().mul_(weights[:, head, None])
    return total


def _dots(q_index: torch.Tensor, k_index: torch.Tensor) -> torch.Tensor:
    """(rows, heads, keys), as ``_scores`` has them."""
    dots = torch.einsum("rhd,kd->rhk", q_index.double(), k_index.double())
    return dots.to(accumulation_dtype(q_index.dtype))


__all__ = ["best_blocks", "best_keys"]
