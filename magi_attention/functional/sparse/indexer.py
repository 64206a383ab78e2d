# SPDX-License-Identifier: Apache-2.0
"""The indexer of DSA: which keys a query may see, the scores of these keys, and the best of them.

``best_keys`` here and ``kl_forward``, ``kl_backward`` of ``indexer_kl`` are all the arithmetic there is: a kernel has
their arguments and results, and whoever adds one decides here, by a sentence to the user, what it does not take.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

import numpy as np
import torch

from magi_attention.common.scalars import as_int, as_int_array
from magi_attention.errors import ContractError
from magi_attention.functional.inputs import check_devices, refuse_dtensor
from magi_attention.kernels.reference.operands import FLOAT_DTYPES
from magi_attention.kernels.types import accumulation_dtype

_NONE = torch.iinfo(torch.int32).max  # in place of -1 where none is to be last
_NEG_INF = float("-inf")


class Blocks(NamedTuple):
    """How many queries and keys are held against each other at a time: memory, and nothing else, depends on it."""

    rows: int
    keys: int


class Seen(NamedTuple):
    """Which keys the caller lets queries see: what ``indexer_topk`` takes after the star."""

    causal: bool
    positions: torch.Tensor | None
    cu_seqlens: Any
    k_start: torch.Tensor | None
    k_end: torch.Tensor | None

    def bounds(self, queries: int, keys: int, device: torch.device) -> torch.Tensor:
        """int64 (queries, 2): first key of each query, and the one behind its last."""
        low = torch.zeros(queries, dtype=torch.int64, device=device)
        high = torch.full_like(low, keys)
        if self.causal or self.cu_seqlens is not None:
            at = self._positions(queries, keys, device)
            if self.causal:
                high = torch.minimum(high, at + 1)
            if self.cu_seqlens is not None:
                starts = _document_starts(self.cu_seqlens, keys).to(device)
                document = torch.searchsorted(starts, at, right=True).clamp(1, len(starts) - 1)
                low, high = starts[document - 1], torch.minimum(high, starts[document])
        if self.k_start is not None:
            low = torch.maximum(low, _by_query("k_start", self.k_start, queries, device))
        if self.k_end is not None:
            high = torch.minimum(high, _by_query("k_end", self.k_end, queries, device))
        return torch.stack((low, high), 1)

    def _positions(self, queries: int, keys: int, device: torch.device) -> torch.Tensor:
        if self.positions is not None:
            return _by_query("positions", self.positions, queries, device)
        if queries != keys:
            raise ContractError(
                f"There are {queries} queries for {keys} keys, and causal= and cu_seqlens= ask where queries stand; "
                "give positions=, as plan.positions() has them, or causal=False."
            )
        return torch.arange(keys, device=device)


def _by_query(name: str, x: torch.Tensor, queries: int, device: torch.device) -> torch.Tensor:
    is_fit = isinstance(x, torch.Tensor) and tuple(x.shape) == (queries,) and x.dtype in (torch.int32, torch.int64)
    if not is_fit:
        what = f"{x.dtype} {tuple(x.shape)}" if isinstance(x, torch.Tensor) else f"a {type(x).__name__}"
        raise ContractError(f"{name} is {what}; give an int32 or int64 tensor ({queries},), a number for each query.")
    return x.to(device, torch.int64)


def _document_starts(cu_seqlens: Any, keys: int) -> torch.Tensor:
    starts = as_int_array(cu_seqlens, "cu_seqlens")
    if starts.ndim != 1 or len(starts) < 2 or starts[0] != 0 or starts[-1] != keys or (np.diff(starts) < 0).any():
        raise ContractError(f"cu_seqlens must ascend from 0 to the {keys} keys; give [0, n0, n0 + n1, ...].")
    return torch.from_numpy(starts)


def check_indexer(q_index: torch.Tensor, k_index: torch.Tensor, weights: torch.Tensor) -> None:
    """``ContractError`` unless these are (T, H, D), (S, D) and (T, H), floating and on one device."""
    for name, x, dims in (("q_index", q_index, 3), ("k_index", k_index, 2), ("weights", weights, 2)):
        refuse_dtensor(name, x)
        if not isinstance(x, torch.Tensor) or x.dim() != dims or x.dtype not in FLOAT_DTYPES:
            what = f"{x.dtype} {tuple(x.shape)}" if isinstance(x, torch.Tensor) else f"a {type(x).__name__}"
            raise ContractError(
                f"{name} is {what}; give floating tensors q_index (queries, index heads, index dim), k_index (keys, "
                "index dim) and weights (queries, index heads)."
            )
    shapes = f"q_index {tuple(q_index.shape)}, k_index {tuple(k_index.shape)}, weights {tuple(weights.shape)}"
    if q_index.shape[2] != k_index.shape[1] or q_index.shape[:2] != weights.shape:
        raise ContractError(f"{shapes}: q_index and k_index need one index dim, and each index head needs a weight.")
    if q_index.dtype != k_index.dtype:
        raise ContractError(f"q_index is {q_index.dtype} and k_index {k_index.dtype}; cast both to one dtype.")
    check_devices(q_index, k_index=k_index, weights=weights)


def indexer_topk(
    q_index: torch.Tensor,
    k_index: torch.Tensor,
    weights: torch.Tensor,
    k: int,
    seen: Seen,
    blocks: Blocks | None = None,
) -> torch.Tensor:
    """``api.indexer_topk``."""
    check_indexer(q_index, k_index, weights)
    count = as_int(k, "k", at_least=1)
    bounds = seen.bounds(len(q_index), len(k_index), q_index.device)
    with torch.no_grad(), torch.autocast(q_index.device.type, enabled=False):
        return best_keys(q_index, k_index, weights, bounds, count, blocks or Blocks(64, max(1024, count)))


def best_keys(
    q_index: torch.Tensor, k_index: torch.Tensor, weights: torch.Tensor, bounds: torch.Tensor, k: int, blocks: Blocks
) -> torch.Tensor:
    """int32 (T, k): the keys with the highest scores within ``bounds``, ascending, then -1."""
    best = torch.full((len(q_index), k), -1, dtype=torch.int32, device=q_index.device)
    for rows, low, high in row_blocks(bounds, blocks.rows):
        values = torch.full(
            (len(bounds[rows]), k), _NEG_INF, dtype=accumulation_dtype(q_index.dtype), device=best.device
        )
        keys = best[rows]
        for start in range(low, high, blocks.keys):
            stop = min(start + blocks.keys, high)
            is_seen, number = seen_keys(bounds[rows], start, stop)
            scores = _scores(q_index[rows], k_index[start:stop], weights[rows]).masked_fill_(~is_seen, _NEG_INF)
            # what was found before has the lower positions and stands first, and the sort keeps the order of equals
            values = torch.cat((values, scores), 1)
            keys = torch.cat((keys, torch.where(is_seen, number, -1).int()), 1)
            values, order = values.sort(dim=1, descending=True, stable=True)
            values, keys = values[:, :k], keys.gather(1, order[:, :k])
        keys = torch.where(keys < 0, _NONE, keys).sort(1).values
        best[rows] = torch.where(keys == _NONE, -1, keys)
    return best


def row_blocks(bounds: torch.Tensor, size: int) -> Iterator[tuple[slice, int, int]]:
    """Blocks of queries, each with the first key that one of them may see and the one behind the last."""
    parts = bounds.split(size)
    if not len(bounds):
        return
    spans = torch.stack([torch.stack((part[:, 0].amin(), part[:, 1].amax())) for part in parts]).tolist()
    for number, (low, high) in enumerate(spans):
        yield slice(number * size, number * size + len(parts[number])), max(low, 0), high


def seen_keys(bounds: torch.Tensor, start: int, stop: int) -> tuple[torch.Tensor, torch.Tensor]:
    """bool (rows, stop - start), and the numbers of these keys."""
    number = torch.arange(start, stop, device=bounds.device)
    return (number >= bounds[:, :1]) & (number < bounds[:, 1:]), number


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


__all__ = ["Blocks", "Seen", "best_keys", "check_indexer", "indexer_topk", "row_blocks", "seen_keys"]
