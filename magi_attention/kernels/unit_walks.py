# SPDX-License-Identifier: Apache-2.0
"""In which order the backward takes up its units where keys see many queries, and from where each walks its queries.

What all multiprocessors walk at the same time is read once and stays in L2; of one kv head whose tiles are more than
there are multiprocessors, all together does not fit. So they should be in step. Under a causal mask tile x of n sees
the blocks from x on. Think of a clock that counts blocks, and begins anew after the last one. At clock 0 a tile begins
that takes as many blocks from the end, backwards, as it has none at the start, and then the others forwards: at clock t
it is at block t or n - t, as all are that began with it. It ends at clock n - x, when the tile that sees the blocks
from n - x on can begin, forwards. So tiles go in *groups* that fill a period of the clock, pairs under a causal mask,
and as many groups as there are multiprocessors make a *period* of the list: first the ones that begin it, then the
others in the order in which those end. Tiles with which no period can be filled come behind, in *cohorts* of about the
same length, which begin and end together. The last periods go by cost, so that all multiprocessors end together.

Where a section of heads is a period, as at 32K on 132 multiprocessors, or tiles see different ends, as of documents,
the list is that of the plan's own order, head by head.
"""

from __future__ import annotations

from bisect import bisect_left
from statistics import fmean
from typing import NamedTuple

import numpy as np

from magi_attention.kernels.hand_out import WIDE, fewest_whole, starts_of, steps_of_tiles
from magi_attention.native import abi
from magi_attention.native.tile_plan import TilePlan

_SLACK = 12  # blocks by which tiles may miss a period and still fill it
_BEYOND = (1, 2, 3, 4)  # by which they may be longer: the one that suits all tiles best is taken
_UNFILLED = 24  # blocks, what a period that is not filled counts for then
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


def with_units(words: np.ndarray, shape: UnitShape, there_at: np.ndarray | None = None) -> np.ndarray:
    """The words of a transposed plan with the list of its units behind them (``magi_walked_unit``).

    ``there_at`` (tiles,) says in which order the keys of tiles arrive while the kernel runs.
    """
    plan = TilePlan(words)
    tiles = _tiles(plan)
    units = _in_order(plan, tiles, shape)
    if _wants_periods(tiles, shape) and _share_out_of_step(units, tiles, shape) > _MOST_OUT:
        units = _in_periods(tiles, shape, there_at)
    rows = np.column_stack([units[:, 0], units[:, 1] << abi.WALK_BITS | units[:, 2]]).astype(np.int32).ravel()
    made = np.concatenate([words, rows, np.zeros(-len(rows) % 4, dtype=np.int32)])
    abi.TilePlanHeader.from_buffer(made).words_units = len(words)
    return made


def _tiles(plan: TilePlan) -> _Tiles:
    low, high = plan.records[:, 0].astype(np.int64) // WIDE, -(-plan.records[:, 1].astype(np.int64) // WIDE)
    begin, layers = plan.tiles[:, 2].astype(np.int64), plan.tiles[:, 3]
    blocks = -(-plan.header.total_k // WIDE)
    one = np.minimum(begin, max(len(low) - 1, 0))
    first = np.where(layers > 0, low[one], 0) if len(low) else np.zeros(len(begin), dtype=np.int64)
    ends = np.where(layers > 0, high[one], 0) if len(low) else first
    return _Tiles(first, steps_of_tiles(plan, WIDE), (layers == 1) & (ends == blocks), blocks)


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
         if not shape.group % n and n * len(tiles.first) * shape.heads_kv >= fewest_whole(shape.processors)),
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


def _in_periods(tiles: _Tiles, shape: UnitShape, there_at: np.ndarray | None) -> np.ndarray:
    """The same list in periods, see above. Tiles that see nothing come first: at the end there is a last round to be
    shared out. The first period begins with tiles that are there."""
    heads, cohorts = range(shape.heads_kv), _cohorts(tiles)
    groups = [(group, head) for cohort in cohorts for head in heads for group in cohort]
    if there_at is not None and cohorts:
        count = len(cohorts[0])
        first = [(sorted(group, key=there_at.__getitem__), head) for group, head in groups[:count]]
        groups[:count] = sorted(first, key=lambda g: there_at[g[0][0]])
    periods = [groups[i : i + shape.places] for i in range(0, len(groups), shape.places)]
    empty = np.flatnonzero(tiles.count == 0)
    listed = [np.column_stack([np.repeat(empty, len(heads)), np.tile(heads, len(empty))]).astype(np.int64)]
    period_of = [np.full(len(listed[0]), -1)]
    whole = max(len(periods) - _LAST_PERIODS, 0)
    for number, period in enumerate(periods[:whole]):
        for side in range(max(len(group) for group, _ in period)):
            units = _by_count([(group[side], head) for group, head in period if len(group) > side], tiles)
            listed.append(units)
            period_of.append(np.full(len(units), number))
    rest = [(tile, head) for period in periods[whole:] for group, head in period for tile in group]
    listed.append(_by_count(rest, tiles))
    period_of.append(np.full(len(rest), whole))
    units = np.concatenate(listed)
    return np.column_stack([units, _walks(units[:, 0], np.concatenate(period_of), tiles, shape.places)])


def _cohorts(tiles: _Tiles) -> list[list[list[int]]]:
    """Groups of tiles in cohorts, in each of which they take about as long: first those that fill a period."""
    tried = [_groups(tiles, beyond) for beyond in _BEYOND]
    missing = [[tiles.blocks - int(tiles.count[group].sum()) for group in groups] for groups in tried]
    loss = [fmean([abs(m) if m <= _SLACK else _UNFILLED for m in some]) for some in missing]
    best = loss.index(min(loss))
    cohorts: list[list[list[int]]] = [[group for group, m in zip(tried[best], missing[best]) if m <= _SLACK]]
    short = None
    for m, group in sorted((m, group) for m, group in zip(missing[best], tried[best]) if m > _SLACK):
        if short is None or m > short + 2:
            short = m
            cohorts.append([])
        cohorts[-1].append(group)
    return cohorts if cohorts[0] else cohorts[1:]


def _groups(tiles: _Tiles, beyond: int) -> list[list[int]]:
    """Each tile that sees something once: the longest that is left, and the longest that still fit behind it into a
    period, which they may exceed by ``beyond`` blocks."""
    left = sorted((count, tile) for tile, count in enumerate(tiles.count.tolist()) if count)
    groups = []
    while left:
        count, tile = left.pop()
        group, room = [tile], tiles.blocks + beyond - count
        while (at := bisect_left(left, (room + 1, -1))) > 0:
            count, tile = left.pop(at - 1)
            group.append(tile)
            room -= count
        groups.append(group)
    return groups


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
