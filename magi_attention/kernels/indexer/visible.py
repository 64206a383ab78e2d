# SPDX-License-Identifier: Apache-2.0
"""Which keys each query may see, as a range of keys."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import torch

from magi_attention.errors import ContractError


class Blocks(NamedTuple):
    """How many queries and keys are held against each other at a time: memory, and nothing else, depends on it."""

    rows: int
    keys: int


class Visible(NamedTuple):
    """What lets a query see a key: all that is given must. Tensors are integers; the last two are (queries,).

    ``positions`` (queries,): where queries stand among the keys, by default as they are numbered. ``cu_seqlens``
    ``[0, n0, n0 + n1, ..., keys]``: first keys of documents, and the number of keys.
    """

    causal: bool
    positions: torch.Tensor | None
    cu_seqlens: torch.Tensor | None
    k_start: torch.Tensor | None
    k_end: torch.Tensor | None

    def bounds(self, queries: int, keys: int, device: torch.device) -> torch.Tensor:
        """int64 (queries, 2): first key of each query, and the one behind its last, from 0 to ``keys``.

        Its columns are contiguous. A causal mask of all keys takes two operations on the device."""
        low, high = bounds = torch.zeros((2, queries), dtype=torch.int64, device=device)
        if self.positions is not None:
            high.copy_(self.positions).add_(1)
        elif self.causal or self.cu_seqlens is not None:
            torch.arange(1, keys + 1, out=high)
        # Now high is the key behind the query's own.
        if self.cu_seqlens is not None:
            starts = _document_starts(self.cu_seqlens, keys).to(low)
            document = torch.searchsorted(starts, high)
            if self.positions is not None:
                document.clamp_(1, len(starts) - 1)
            if not self.causal:
                torch.index_select(starts, 0, document, out=high)
            elif self.positions is not None:
                torch.minimum(high, starts[document], out=high)
            torch.index_select(starts, 0, document.sub_(1), out=low)
        elif not self.causal:
            high.fill_(keys)
        elif self.positions is not None:
            high.clamp_(max=keys)
        if self.k_start is not None:
            torch.maximum(low, self.k_start.to(low), out=low)
        if self.k_end is not None:
            torch.minimum(high, self.k_end.to(low), out=high)
        return bounds.T


def _document_starts(cu_seqlens: torch.Tensor, keys: int) -> torch.Tensor:
    starts = cu_seqlens.tolist()
    if starts[0] != 0 or starts[-1] != keys or any(a > b for a, b in zip(starts, starts[1:])):
        raise ContractError(f"cu_seqlens must ascend from 0 to the {keys} keys; give [0, n0, n0 + n1, ...].")
    return cu_seqlens


def row_blocks(bounds: torch.Tensor, size: int) -> Iterator[tuple[slice, int, int]]:
    """Blocks of queries, each with the first key that one of them may see and the one behind the last."""
    parts = bounds.split(size)
    if not len(bounds):
        return
    spans = torch.stack([torch.stack((part[:, 0].amin(), part[:, 1].amax())) for part in parts]).tolist()
    for number, (low, high) in enumerate(spans):
        yield slice(number * size, number * size + len(parts[number])), max(low, 0), high


def visible_keys(bounds: torch.Tensor, start: int, stop: int) -> tuple[torch.Tensor, torch.Tensor]:
    """bool (rows, stop - start), and the numbers of these keys."""
    number = torch.arange(start, stop, device=bounds.device)
    return (number >= bounds[:, :1]) & (number < bounds[:, 1:]), number


__all__ = ["Blocks", "Visible", "row_blocks", "visible_keys"]
