# SPDX-License-Identifier: Apache-2.0
"""Which work tiles of a forward are split along the keys: those that take longer than an SM's share of the whole.

A few queries that see all keys, beside many that see few, would keep some SMs busy long after the others. Work tiles
of one mask are equal for all heads, so what is split is a prefix of the plan's order, which goes by cost.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

MOST_PARTS = 16  # of a work tile, as in csrc/ffa/common/part.cuh: kMaxParts
_MOST_SPLIT = 320  # work tiles: the workspace has a counter for each
_LEAST_BLOCKS = 8  # of a part: it leaves its output in memory, which takes as long as two or three blocks
_LONG = 1.5  # times an SM's share, from where on a tile is split


class ForwardSplits(NamedTuple):
    """The first ``tiles`` of the order are split into at most ``parts`` parts, of at least ``blocks`` key blocks."""

    tiles: int
    parts: int
    blocks: int


def forward_splits(blocks: NDArray[np.integer], head_units: int, sms: int) -> ForwardSplits | None:
    """``blocks`` (tiles,): key blocks of 128 in the plan's order; ``head_units``: how often each tile is worked on, for
    each group of heads that share a tile once. None where no tile is long enough, or all tiles together are so few
    that the kernel splits each of them alike, which is as good."""
    if not len(blocks):
        return None
    share = max(int(blocks.sum()) * head_units / sms, _LEAST_BLOCKS)
    parts_of_all = min(MOST_PARTS, sms // (len(blocks) * head_units)) or 1
    if int(blocks[0]) / parts_of_all <= _LONG * share:
        return None
    least = max(int(share / 4), _LEAST_BLOCKS)  # small, so that they end together
    tiles = min(int((blocks > _LONG * share).sum()), _MOST_SPLIT // head_units)
    parts = min(MOST_PARTS, int(blocks[0]) // least)
    return ForwardSplits(tiles, parts, least) if tiles and parts > 1 else None


__all__ = ["ForwardSplits", "forward_splits"]
