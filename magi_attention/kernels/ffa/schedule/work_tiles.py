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
the list is that of the plan's own order, head by head; or one document after the other, where that is faster
(``unit_documents``).
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from magi_attention.common.intervals import ramps
from magi_attention.kernels.ffa.schedule.by_document import by_document, document_order, gain
from magi_attention.kernels.ffa.schedule.simulate import (
    IN_L2,
    UNIT,
    TileWalks,
    fewest_whole,
    groups_of,
    starts_of,
    walks_of_tiles,
)
from magi_attention.native import abi
from magi_attention.native.tile_plan import TilePlan

_ALL = 2**31 - 1  # behind the last block, of a work tile that has all
_SLACK = 12  # blocks by which tiles may miss a period and still fill it
_BEYOND = (1, 2, 3, 4)  # by which they may be longer: the one that suits all tiles best is taken
_UNFILLED = 24  # blocks, what a period that is not filled counts for then
_LAST_PERIODS = 2
_MOST_OUT = 0.1  # of the work, which may be out of step
_LEAST_ALIGNED = 0.9  # of the work, which must be of tiles that see the last block
# In turns, as in csrc/ffa/sm90/bwd/config.h.
LARGE_SECTIONS = 2  # query heads of a unit up to which sections are twice as large, if all still walk one way
MANY_RANKS = 8  # in work at a time for each of few heads, from which on all walk backwards


class UnitShape(NamedTuple):
    """What of a call a list depends on, besides the mask: ``group`` query heads share a kv head; ``places`` of the
    ``processors`` of the device are left to the call; ``by_document``: one document after the other, whatever is said
    above; ``tail``: how many units at the end are split, into how many parts of their query heads."""

    heads_kv: int
    group: int
    processors: int
    places: int
    by_document: bool = False
    tail: tuple[int, int] = (0, 1)


def with_units(words: np.ndarray, shape: UnitShape, there_at: np.ndarray | None = None) -> np.ndarray:
    """The words of a transposed plan with the list of its units behind them (``magi_work_tile``). By document, its
    tiles are in that order, too, for kernels that sum dq in order.

    ``there_at`` (tiles,) says in which order the keys of tiles arrive while the kernel runs.
    """
    plan = TilePlan(words)
    tiles = walks_of_tiles(plan)
    if shape.by_document:
        units = by_document(tiles, shape.heads_kv)
    else:
        units = _in_order(plan, tiles, shape, heads_per_section(len(tiles.first), shape))
        if _wants_periods(tiles, shape) and _share_out_of_step(units, tiles, shape) > _MOST_OUT:
            units = _in_periods(tiles, shape, there_at)
    made = np.concatenate([words, _rows(units, *shape.tail).ravel()])
    header = abi.TilePlanHeader.from_buffer(made.data)
    header.words_work_tiles = len(words)
    if shape.by_document:
        made[header.words_order :][: header.num_tiles] = document_order(tiles)
    return made


def _rows(units: np.ndarray, num_tail: int, parts: int) -> np.ndarray:
    """(work tiles, 8) int32, each a ``magi_work_tile``. So many units at the end are split, so that they do not leave
    most multiprocessors idle: first parts of all, then second parts."""
    rows = np.zeros((len(units), 8), dtype=np.int32)
    rows[:, [0, 1, 6]] = units
    rows[:, [3, 5, 7]] = 1, _ALL, -1
    whole, tail = rows[: len(rows) - num_tail], rows[len(rows) - num_tail :]
    tail[:, 3], tail[:, 7] = parts, np.arange(num_tail)
    split = np.tile(tail, (parts, 1))
    split[:, 2] = np.repeat(np.arange(parts), num_tail)
    return np.concatenate([whole, split])


def gain_by_document(plan: TilePlan, shape: UnitShape, heads: int | None = None) -> float:
    """By how much a backward is faster if it takes up one document after the other, as a logarithm, than in sections
    of so many ``heads``, or of ``heads_per_section``; see ``unit_documents.gain``."""
    tiles = walks_of_tiles(plan)
    if _wants_periods(tiles, shape) or tiles.count.max(initial=0) >= abi.TRAVERSAL_WRAP:
        return -1.0
    units = _in_order(plan, tiles, shape, heads or heads_per_section(len(tiles.first), shape))
    back = np.where(units[:, 2] == abi.TRAVERSAL_WRAP, tiles.first[units[:, 0]], units[:, 2])
    return gain(tiles, np.column_stack([units[:, :2], back]), shape.heads_kv, shape.places, shape.group)


def heads_per_section(tiles: int, shape: UnitShape) -> int:
    """As many that the longest tiles of a section, one for each multiprocessor, are half of it. One section or two are
    alike: the long tiles of a small one behind the other would end alone."""
    heads, at_once = shape.heads_kv, 2 * shape.processors
    sections = (tiles * heads + shape.processors) // at_once
    if sections <= 2:
        return heads if sections < 2 else (heads + 1) // 2
    return min(max((at_once + tiles // 2) // tiles, 1), heads)


def heads_per_section_in_turns(tiles: int, shape: UnitShape, parts: int, passes: int) -> int:
    """The same in turns, where the query heads of a tile are shared out among so many units, each of which walks its
    tile so many times: of one or two heads in a unit a section is twice that, if all can walk one way
    (``bwd_heads_per_section`` in ``csrc/ffa/sm90/bwd/workspace.h``)."""
    heads = shape.group // parts
    once, twice = (
        heads_per_section(tiles * parts, shape._replace(processors=n * shape.processors)) for n in (1, 2)
    )
    can_walk_one_way = shape.processors // (twice * parts * passes) >= MANY_RANKS * heads
    return twice if heads <= LARGE_SECTIONS and can_walk_one_way else once


def _in_order(plan: TilePlan, tiles: TileWalks, shape: UnitShape, at_once: int) -> np.ndarray:
    """(units, 3) tile, head and walk, in sections of so many heads, in each the costliest tiles first; those that all
    multiprocessors begin with walk early, the others forwards. The first section may have an order of its own."""
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
        walk = np.where(np.arange(len(tile)) * parts < shape.places, abi.TRAVERSAL_WRAP, 0)
        sections.append(np.column_stack([tile, head, walk]))
    return np.concatenate(sections).astype(np.int64)


def _order_of(plan: TilePlan, is_first: bool) -> np.ndarray:
    at = plan.header.words_first_order
    return plan.words[at:][: len(plan.tiles)] if is_first and at else plan.order


def _wants_periods(tiles: TileWalks, shape: UnitShape) -> bool:
    total, num = int(tiles.count.sum()), len(tiles.count)
    is_long = num > shape.places and tiles.blocks < abi.TRAVERSAL_WRAP
    return is_long and int(tiles.count[tiles.is_aligned].sum()) >= _LEAST_ALIGNED * total


def _share_out_of_step(units: np.ndarray, tiles: TileWalks, shape: UnitShape) -> float:
    """The share of the work of the second and third section, by its distance from the clock; that of the first where
    there are no others."""
    size, kept = len(tiles.first) * heads_per_section(len(tiles.first), shape), IN_L2 / shape.group
    some = units[: 3 * size]
    starts = starts_of(tiles.count[some[:, 0]] + UNIT, shape.places)
    out = work = 0.0
    for begin in range(size if len(units) > size else 0, len(some), size):
        at = slice(begin, begin + size)
        tile, early = some[at, 0], some[at, 2] == abi.TRAVERSAL_WRAP
        clock = (starts[at] - starts[begin]) % tiles.blocks
        wanted = np.where(early, 0, tiles.first[tile])
        is_out = np.abs(clock - wanted) > kept
        out += float(tiles.count[tile][is_out].sum())
        work += float(tiles.count[tile].sum())
    return out / work if work else 0.0


def _in_periods(tiles: TileWalks, shape: UnitShape, there_at: np.ndarray | None) -> np.ndarray:
    """The same list in periods, see above. Tiles that see nothing come first: at the end there is a last round to be
    shared out. The first period begins with tiles that are there."""
    cohorts = _cohorts(tiles)
    units = _listed(cohorts, shape.heads_kv)
    if there_at is not None and len(units.entry):
        units = _first_there(units, int((cohorts.cohort == cohorts.cohort[0]).sum()), there_at)
    whole = max(-(-int(units.entry[-1] + 1) // shape.places) - _LAST_PERIODS, 0) if len(units.entry) else 0
    period = np.minimum(units.entry // shape.places, whole)
    # In a period first what its groups begin with; of that, and of all that is left at the end, the longest first.
    order = np.lexsort((-tiles.count[units.tile], np.where(period < whole, units.side, 0), period))
    empty = np.flatnonzero(tiles.count == 0)
    tile = np.concatenate([np.repeat(empty, shape.heads_kv), units.tile[order]])
    head = np.concatenate([np.tile(np.arange(shape.heads_kv), len(empty)), units.head[order]])
    periods = np.concatenate([np.full(len(empty) * shape.heads_kv, -1), period[order]])
    return np.column_stack([tile, head, _walks(tile, periods, tiles, shape.places)])


class _Cohorts(NamedTuple):
    """Each tile that sees something once, (M,): the tiles group by group, and the group of each. ``cohort`` (groups,),
    not falling; those of one take about as long."""

    tile: np.ndarray
    group: np.ndarray
    cohort: np.ndarray


def _cohorts(tiles: TileWalks) -> _Cohorts:
    """First the groups that fill a period."""
    tried = [groups_of(tiles.count, tiles.blocks + beyond) for beyond in _BEYOND]
    missing = [tiles.blocks - np.bincount(group, tiles.count[tile]).astype(np.int64) for tile, group in tried]
    loss = [int(np.where(m <= _SLACK, np.abs(m), _UNFILLED).sum()) / max(len(m), 1) for m in missing]
    best = loss.index(min(loss))
    (tile, group), m = tried[best], missing[best]
    is_filled, first = m <= _SLACK, tile[np.searchsorted(group, np.arange(len(m)))]
    order = np.lexsort((np.where(is_filled, np.arange(len(m)), first), np.where(is_filled, -tiles.blocks, m)))
    number = np.empty(len(m), dtype=np.int64)
    number[order] = np.arange(len(m))
    by_number = np.argsort(number[group], kind="stable")
    cohort_of, short = {}, None
    for value in np.unique(m[~is_filled]).tolist():
        if short is None or value > short + 2:
            short = value
        cohort_of[value] = short
    cohort = np.array([cohort_of.get(value, -tiles.blocks) for value in m[order].tolist()], dtype=np.int64)
    return _Cohorts(tile[by_number], number[group][by_number], cohort)


class _Units(NamedTuple):
    """(U,) each: tile and head, the number of the *entry*, a group and a head, and which of the group they are."""

    tile: np.ndarray
    head: np.ndarray
    entry: np.ndarray
    side: np.ndarray


def _listed(cohorts: _Cohorts, heads: int) -> _Units:
    """Cohort by cohort, in each head by head, the groups one after the other."""
    sizes = np.unique(cohorts.cohort, return_counts=True)[1]
    begin = np.cumsum(sizes) - sizes
    group = np.concatenate([np.tile(b + np.arange(n), heads) for b, n in zip(begin, sizes)] or [begin])
    head = np.concatenate([np.repeat(np.arange(heads), n) for n in sizes] or [begin])
    counts = np.bincount(cohorts.group, minlength=len(cohorts.cohort))
    entry = np.repeat(np.arange(len(group)), counts[group])
    side = ramps(0, counts[group])
    at = (np.cumsum(counts) - counts)[group][entry] + side
    return _Units(cohorts.tile[at], head[entry], entry, side)


def _first_there(units: _Units, entries: int, there_at: np.ndarray) -> _Units:
    """In the first ``entries``: of each group those first that are there, and groups in that order."""
    some = units.entry < entries
    tile, entry, side = units.tile[some], units.entry[some], units.side[some]
    tile = tile[np.lexsort((side, there_at[tile], entry))]
    order = np.argsort(there_at[tile[side == 0]], kind="stable")
    place = np.empty(entries, dtype=np.int64)
    place[order] = np.arange(entries)
    by_place = np.argsort(place[entry], kind="stable")
    made = (tile[by_place], units.head[some], place[entry][by_place], side[by_place])
    return _Units(*(np.concatenate([mine, all_of[~some]]) for mine, all_of in zip(made, units)))


def _walks(tile: np.ndarray, period: np.ndarray, tiles: TileWalks, places: int) -> np.ndarray:
    """How many blocks each takes backwards: as many as the clock is behind its first one, by the time at which the
    first unit of its period starts."""
    starts = starts_of(tiles.count[tile] + UNIT, places)
    _, begins, which = np.unique(period, return_index=True, return_inverse=True)
    clock = (starts - starts[begins][which]) % tiles.blocks
    clock = np.where(clock > tiles.blocks - _SLACK, 0, clock)
    backwards = np.clip(np.round(tiles.first[tile] - clock), 0, tiles.count[tile]).astype(np.int64)
    return np.where(backwards < _SLACK, 0, backwards)
