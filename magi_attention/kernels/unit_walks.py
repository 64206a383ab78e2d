# SPDX-License-Identifier: Apache-2.0
"""In which order the backward takes up its units where keys see many queries, and from where each walks its queries.

What all multiprocessors walk at the same time is read once and stays in L2; of one kv head whose tiles are more than
there are multiprocessors, all together does not fit. So they should be in step. Under a causal mask tile x of n sees
the blocks from x on. Think of a clock that counts blocks, and begins anew after the last one. At clock 0 a tile begins
that takes as many blocks from the end, backwards, as it has none at the start, and then the others forwards: at clock t
it is at block t or n - t, as all are that began with it. It ends at clock n - x, when the tile that sees the blocks
from n - x on can begin, forwards. So tiles go in *pairs* that fill a period of the clock, and as many pairs as there
are multiprocessors make a *period* of the list: first the ones that begin it, then the others in the order in which
those end. Pairs of the last periods go by cost, so that all multiprocessors end together.

Where a section of heads is a period, as at 32K on 132 multiprocessors, or tiles see different ends, as of documents,
the list is that of the plan's own order, head by head.
"""

from __future__ import annotations

from bisect import bisect_left
from typing import NamedTuple

import numpy as np

from magi_attention.kernels.hand_out import starts_of, steps_of_tiles
from magi_attention.native import abi
from magi_attention.native.tile_plan import TilePlan

STEP = 80  # queries of a block
_SLACK = 12  # blocks by which two tiles may miss a period and still be a pair
_IN_STEP = 192  # blocks of one query head that stay in L2
_UNIT = 0.1  # blocks, what it takes to begin and end a unit
_LAST_PERIODS = 2
_MOST_OUT = 0.1  # of the work, which may be out of step
_LEAST_ALIGNED = 0.9  # of the work, which must be of tiles that see the last block


class UnitShape(NamedTuple):
    """What of a call a list depends on, besides the mask: ``group`` query heads share a kv head; ``places`` of the
    ``processors`` of the device are left to the call."""

    heads_kv: int
    group: int
    processors: int
    places: int


class _Tiles(NamedTuple):
    """Of each tile the first block that it sees, how many, and whether that is all from there to the last of
    ``blocks``."""

    first: np.ndarray
    count: np.ndarray
    is_aligned: np.ndarray
    blocks: int


def with_units(words: np.ndarray, shape: UnitShape) -> np.ndarray:
    """The words of a transposed plan with the list of its units behind them (``magi_walked_unit``)."""
    plan = TilePlan(words)
    tiles = _tiles(plan)
    units = _in_order(plan, tiles, shape)
    if _wants_periods(tiles, shape) and _share_out_of_step(units, tiles, shape) > _MOST_OUT:
        units = _in_periods(plan, tiles, shape)
    rows = np.column_stack([units[:, 0], units[:, 1] << abi.WALK_BITS | units[:, 2]]).astype(np.int32).ravel()
    made = np.concatenate([words, rows, np.zeros(-len(rows) % 4, dtype=np.int32)])
    abi.TilePlanHeader.from_buffer(made).words_units = len(words)
    return made


def _tiles(plan: TilePlan) -> _Tiles:
    low, high = plan.records[:, 0].astype(np.int64) // STEP, -(-plan.records[:, 1].astype(np.int64) // STEP)
    begin, layers = plan.tiles[:, 2].astype(np.int64), plan.tiles[:, 3]
    blocks = -(-plan.header.total_k // STEP)
    one = np.minimum(begin, max(len(low) - 1, 0))
    first = np.where(layers > 0, low[one], 0) if len(low) else np.zeros(len(begin), dtype=np.int64)
    ends = np.where(layers > 0, high[one], 0) if len(low) else first
    return _Tiles(first, steps_of_tiles(plan, STEP), (layers == 1) & (ends == blocks), blocks)


def _heads_per_section(tiles: int, shape: UnitShape) -> int:
    """As many that the longest tiles of a section, one for each multiprocessor, are half of it. One section or two are
    alike: the long tiles of a small one behind the other would end alone."""
    heads, at_once = shape.heads_kv, 2 * shape.processors
    sections = (tiles * heads + shape.processors) // at_once
    if sections <= 2:
        return heads if sections < 2 else (heads + 1) // 2
    return min(max((at_once + tiles // 2) // tiles, 1), heads)


def _in_order(plan: TilePlan, tiles: _Tiles, shape: UnitShape) -> np.ndarray:
    """(units, 3) tile, head and walk, section by section, in each the costliest tiles first; those that all
    multiprocessors begin with walk early, the others forwards. The first section may have an order of its own."""
    at_once = _heads_per_section(len(tiles.first), shape)
    parts = next(
        (n for n in range(1, shape.group + 1)
         if not shape.group % n and 10 * n * len(tiles.first) * shape.heads_kv >= 19 * shape.processors),
        shape.group,
    )  # fmt: skip
    sections = []
    for first in range(0, shape.heads_kv, at_once):
        heads = np.arange(first, min(first + at_once, shape.heads_kv))
        order = _order_of(plan, is_first=first == 0)
        tile, head = np.repeat(order, len(heads)), np.tile(heads, len(order))
        walk = np.where(np.arange(len(tile)) * parts < shape.places, abi.WALK_EARLY, 0)
        sections.append(np.column_stack([tile, head, walk]))
    return np.concatenate(sections).astype(np.int64)


def _order_of(plan: TilePlan, is_first: bool) -> np.ndarray:
    at = plan.header.words_first_order
    return plan.words[at:][: len(plan.tiles)] if is_first and at else plan.order


def _wants_periods(tiles: _Tiles, shape: UnitShape) -> bool:
    total, num = int(tiles.count.sum()), len(tiles.count)
    is_long = num > shape.places and tiles.blocks < abi.WALK_EARLY
    return is_long and int(tiles.count[tiles.is_aligned].sum()) >= _LEAST_ALIGNED * total


def _share_out_of_step(units: np.ndarray, tiles: _Tiles, shape: UnitShape) -> float:
    """Of the work of the second and third section, by its distance from the clock; of the first where there are no
    others."""
    size, kept = len(tiles.first) * _heads_per_section(len(tiles.first), shape), _IN_STEP / shape.group
    some = units[: 3 * size]
    starts = starts_of(tiles.count[some[:, 0]] + _UNIT, shape.places)
    out = work = 0.0
    for begin in range(size if len(units) > size else 0, len(some), size):
        at = slice(begin, begin + size)
        tile, early = some[at, 0], some[at, 2] == abi.WALK_EARLY
        clock = (starts[at] - starts[begin]) % tiles.blocks
        wanted = np.where(early, 0, tiles.first[tile])
        is_out = np.abs(clock - wanted) > kept
        out += float(tiles.count[tile][is_out].sum())
        work += float(tiles.count[tile].sum())
    return out / work if work else 0.0


def _in_periods(plan: TilePlan, tiles: _Tiles, shape: UnitShape) -> np.ndarray:
    """The same list in periods, see above. Where the first head has an order of its own, it keeps that."""
    lead = np.zeros((0, 2), dtype=np.int64)
    if plan.header.words_first_order:
        own = _order_of(plan, is_first=True)
        lead = np.column_stack([own, np.zeros(len(own), dtype=np.int64)])
    pairs = [(*pair, head) for head in range(len(lead) > 0, shape.heads_kv) for pair in _pairs(tiles)]
    periods = [pairs[i : i + shape.places] for i in range(0, len(pairs), shape.places)]
    listed, period_of = [lead], [np.full(len(lead), -1)]
    whole = max(len(periods) - _LAST_PERIODS, 0)
    for number, period in enumerate(periods[:whole]):
        both = [_by_count([(p[side], p[2]) for p in period if p[side] >= 0], tiles) for side in (0, 1)]
        listed += both
        period_of += [np.full(len(side), number) for side in both]
    rest = [(p[side], p[2]) for period in periods[whole:] for p in period for side in (0, 1) if p[side] >= 0]
    listed.append(_by_count(rest, tiles))
    period_of.append(np.full(len(rest), whole))
    units = np.concatenate(listed)
    return np.column_stack([units, _walks(units[:, 0], np.concatenate(period_of), tiles, shape.places)])


def _pairs(tiles: _Tiles) -> list[tuple[int, int]]:
    """Each tile once, the longest first, with one that takes about the rest of a period, or -1."""
    left = sorted(zip(tiles.count.tolist(), range(len(tiles.count))))
    pairs = []
    while left:
        count, tile = left.pop()
        wanted = tiles.blocks - count
        at = bisect_left(left, (wanted, -1))
        near = [i for i in (at - 1, at) if 0 <= i < len(left)]
        best = min(near, key=lambda i: abs(left[i][0] - wanted), default=-1)
        is_pair = best >= 0 and abs(left[best][0] - wanted) <= _SLACK
        pairs.append((tile, left.pop(best)[1] if is_pair else -1))
    return pairs


def _by_count(units: list[tuple[int, int]], tiles: _Tiles) -> np.ndarray:
    """(units, 2) tile and head, the longest first."""
    rows = np.array(units, dtype=np.int64).reshape(-1, 2)
    return rows[np.argsort(-tiles.count[rows[:, 0]], kind="stable")]


def _walks(tile: np.ndarray, period: np.ndarray, tiles: _Tiles, places: int) -> np.ndarray:
    """How many blocks each takes backwards: as many as the clock is behind its first one, by the time at which the
    first unit of its period starts."""
    starts = starts_of(tiles.count[tile] + _UNIT, places)
    _, begins, which = np.unique(period, return_index=True, return_inverse=True)
    clock = (starts - starts[begins][which]) % tiles.blocks
    clock = np.where(clock > tiles.blocks - _SLACK, 0, clock)
    backwards = np.clip(np.round(tiles.first[tile] - clock), 0, tiles.count[tile]).astype(np.int64)
    return np.where(backwards < _SLACK, 0, backwards)
