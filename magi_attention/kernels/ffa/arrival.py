# SPDX-License-Identifier: Apache-2.0
"""In which order tiles are taken while keys of other ranks arrive: first those that will wait least.

A tile waits where its walk comes to keys that are not there yet, and holds its multiprocessor meanwhile. Its *slack* is
how late everything that it needs is there, less the work that it finds before that: started then or later, it does not
wait. So tiles go by slack until all rows have arrived, and by cost from there on, the costliest first.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from magi_attention.native import abi
from magi_attention.native.planner.tile_plan import TilePlan

_BEYOND = 1.2  # rows may be later than thought, and to go by slack for longer costs little
_CTAS = 116  # of the attention kernel, while others put


class Pace(NamedTuple):
    """Rough times in seconds, which decide the order of tiles and nothing else.

    ``signals`` (R,): until the rows of each signal are there, not falling. ``pair`` and ``pair_backward``: of one query
    head and key in a CTA. ``heads`` query heads share a kv head; the forward works on ``l2_group_heads`` query heads at
    a time, the backward on one kv head.
    """

    signals: np.ndarray
    pair: float = 0.0
    pair_backward: float = 0.0
    heads: int = 1
    l2_group_heads: int = 1

    @property
    def until(self) -> float:
        """When tiles are taken by cost."""
        return _BEYOND * float(self.signals.max(initial=0.0))


def forward_order(words: np.ndarray, pace: Pace, arrivals: np.ndarray, base: int, tile: int) -> np.ndarray:
    """``words`` of a plan with its second order. A segment is walked from the right; buffer tiles of ``tile`` keys
    begin at ``base``, and ``arrivals`` has the signal of each."""
    plan = TilePlan(words)
    segments = plan.records[:, 0:2].astype(np.int64)
    rows = plan.header.num_groups * 64
    key = pace.pair * rows  # seconds of a CTA
    ends = base + tile * (1 + np.arange(len(arrivals)))
    late = (
        pace.signals[arrivals] + key * ends
    )  # less what is before it in the walk: the slack of each tile of the buffer
    slack, work = np.full(len(plan.tiles), -np.inf), np.zeros(len(plan.tiles))
    for i, (first, count) in enumerate(plan.tiles[:, 2:4].tolist()):
        done = 0
        for low, high in segments[first : first + count].tolist():
            if high > base:
                buffer = late[max(low - base, 0) // tile : -(-(high - base) // tile)]
                slack[i] = max(slack[i], buffer.max() - key * (done + high))
            done += high - low
        work[i] = done
    at_a_time = _CTAS * (rows // plan.header.tile_tokens) / pace.l2_group_heads
    return _with_first_order(words, slack, work * key / at_a_time, pace.until)


def backward_order(words: np.ndarray, pace: Pace, arrivals: np.ndarray, base: int) -> np.ndarray:
    """The same of a transposed plan, whose tiles of keys are local or of the buffer, and wait before they begin."""
    plan = TilePlan(words)
    size = plan.header.tile_tokens
    slack = there_at(size, pace, arrivals, base)
    lengths = np.diff(plan.records[:, 0:2].astype(np.int64))[:, 0]
    segments = np.concatenate([[0], np.cumsum(lengths)])
    first = plan.tiles[:, 2]
    queries = segments[first + plan.tiles[:, 3]] - segments[first]
    return _with_first_order(words, slack, queries * size * pace.heads * pace.pair_backward / _CTAS, pace.until)


def there_at(size: int, pace: Pace, arrivals: np.ndarray, base: int) -> np.ndarray:
    """(tiles,) seconds until each tile of ``size`` keys is there, -inf for local ones."""
    return np.concatenate([np.full(base // size, -np.inf), pace.signals[arrivals]])


def _with_first_order(words: np.ndarray, slack: np.ndarray, seconds: np.ndarray, until: float) -> np.ndarray:
    """The plan with a second order: tiles of the first ``until`` seconds by slack, then the rest as in its own order.

    ``seconds`` (tiles,) are those until the next tile can be taken.
    """
    plan = TilePlan(words)
    order = plan.order
    early = order[np.argsort(slack[order], kind="stable")]  # of equal ones the costliest first
    early = early[np.cumsum(seconds[early]) - seconds[early] < until]
    is_early = np.zeros(len(slack), dtype=bool)
    is_early[early] = True
    first = np.concatenate([early, order[~is_early[order]]]).astype(np.int32)
    abi.TilePlanHeader.from_buffer(words.data).words_first_order = len(words)
    return np.concatenate([words, first, np.zeros(-len(first) % 4, dtype=np.int32)])
