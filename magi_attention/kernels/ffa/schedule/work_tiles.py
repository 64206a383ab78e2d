# SPDX-License-Identifier: Apache-2.0
"""The order in which a backward with m-blocks of 80 takes its work tiles, and where each begins its m-blocks.

CTAs that work at the same time should read the same m-blocks, which are then in L2. All m-blocks of one kv head do not
fit if its tiles are more than there are SMs. So CTAs have to keep in step. Under a causal mask tile x of n sees the
m-blocks from x on. Imagine a clock that counts m-blocks and starts anew after the last one:

* At time 0 a tile begins. It takes as many m-blocks from the end, descending, as lie before its first one, and then the
  others ascending. At time t it is at m-block t or n - t, and so is every tile that began with it.
* It ends at time n - x. Then the tile that sees the m-blocks from n - x on can begin, ascending.

So tiles form *groups* that fill one round of the clock (pairs under a causal mask). As many groups as there are SMs
make a *wave* of the list: first the tiles that begin it, then the others in the order in which those end. Tiles that
fill no wave come behind, in *batches* of about the same length, which begin and end together. The last waves go by
cost, so that all SMs end together.

Where an L2 group of heads is one wave (32K tokens on 132 SMs), or tiles see different ends (documents), the list is the
plan's own order, head by head; or one document after the other, where that is faster (``by_document``).
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from magi_attention.common.intervals import ramps
from magi_attention.kernels.ffa.schedule.by_document import by_document, document_order, gain
from magi_attention.kernels.ffa.schedule.simulate import (
    BEGIN_AND_END,
    IN_L2,
    TileBlocks,
    blocks_of_tiles,
    fewest_whole,
    groups_of,
    starts_of,
)
from magi_attention.native import abi
from magi_attention.native.tile_plan import TilePlan

_ALL = 2**31 - 1  # behind the last block, of a work tile that has all
_SLACK = 12  # blocks by which tiles may miss a wave and still fill it
_BEYOND = (1, 2, 3, 4)  # by which they may be longer: the one that suits all tiles best is taken
_UNFILLED = 24  # blocks, what a wave that is not filled counts for then
_LAST_WAVES = 2
_MOST_OUT = 0.1  # of the work, which may be out of step
_LEAST_ALIGNED = 0.9  # of the work, which must be of tiles that see the last block
# In deterministic order, as in csrc/ffa/sm90/bwd/config.h.
LARGE_L2_GROUPS = 2  # query heads of a work tile up to which L2 groups are twice as large, if all descend
MANY_TILES = 8  # in work at a time for each of few heads, from which on all descend


class WorkTileShape(NamedTuple):
    """What the work tiles of a call depend on, besides the mask.

    ``group`` query heads share a kv head. The call may use ``num_ctas`` of the ``num_sms`` of the device.
    ``by_document``: one document after the other. ``tail``: how many work tiles at the end are split, and into how many
    parts of their query heads.
    """

    heads_kv: int
    group: int
    num_sms: int
    num_ctas: int
    by_document: bool = False
    tail: tuple[int, int] = (0, 1)


def with_work_tiles(words: np.ndarray, shape: WorkTileShape, there_at: np.ndarray | None = None) -> np.ndarray:
    """The words of a transposed plan with the list of its work tiles behind them (``magi_work_tile``). By document, its
    tiles are in that order, too, for kernels that sum dq in order.

    ``there_at`` (tiles,) says in which order the keys of tiles arrive while the kernel runs.
    """
    plan = TilePlan(words)
    tiles = blocks_of_tiles(plan)
    if shape.by_document:
        work_tiles = by_document(tiles, shape.heads_kv)
    else:
        work_tiles = _in_order(plan, tiles, shape, heads_per_l2_group(len(tiles.first), shape))
        if _wants_waves(tiles, shape) and _share_out_of_step(work_tiles, tiles, shape) > _MOST_OUT:
            work_tiles = _in_waves(tiles, shape, there_at)
    made = np.concatenate([words, _rows(work_tiles, *shape.tail).ravel()])
    header = abi.TilePlanHeader.from_buffer(made.data)
    header.words_work_tiles = len(words)
    if shape.by_document:
        made[header.words_order :][: header.num_tiles] = document_order(tiles)
    return made


def _rows(work_tiles: np.ndarray, num_tail: int, parts: int) -> np.ndarray:
    """(work tiles, 8) int32, each a ``magi_work_tile``. So many work tiles at the end are split, so that they do not
    leave most SMs idle: first parts of all, then second parts."""
    rows = np.zeros((len(work_tiles), 8), dtype=np.int32)
    rows[:, [0, 1, 6]] = work_tiles
    rows[:, [3, 5, 7]] = 1, _ALL, -1
    whole, tail = rows[: len(rows) - num_tail], rows[len(rows) - num_tail :]
    tail[:, 3], tail[:, 7] = parts, np.arange(num_tail)
    split = np.tile(tail, (parts, 1))
    split[:, 2] = np.repeat(np.arange(parts), num_tail)
    return np.concatenate([whole, split])


def gain_by_document(plan: TilePlan, shape: WorkTileShape, heads: int | None = None) -> float:
    """By how much a backward is faster if it takes up one document after the other, as a logarithm, than in L2 groups
    of so many ``heads``, or of ``heads_per_l2_group``; see ``by_document.gain``."""
    tiles = blocks_of_tiles(plan)
    if _wants_waves(tiles, shape) or tiles.count.max(initial=0) >= abi.TRAVERSAL_WRAP:
        return -1.0
    work_tiles = _in_order(plan, tiles, shape, heads or heads_per_l2_group(len(tiles.first), shape))
    back = np.where(work_tiles[:, 2] == abi.TRAVERSAL_WRAP, tiles.first[work_tiles[:, 0]], work_tiles[:, 2])
    return gain(tiles, np.column_stack([work_tiles[:, :2], back]), shape.heads_kv, shape.num_ctas, shape.group)


def heads_per_l2_group(tiles: int, shape: WorkTileShape) -> int:
    """As many that the longest tiles of an L2 group, one for each SM, are half of it. Two L2 groups get as many heads
    each: the long tiles of a small second one would end alone."""
    heads, at_once = shape.heads_kv, 2 * shape.num_sms
    l2_groups = (tiles * heads + shape.num_sms) // at_once
    if l2_groups <= 2:
        return heads if l2_groups < 2 else (heads + 1) // 2
    return min(max((at_once + tiles // 2) // tiles, 1), heads)


def heads_per_l2_group_deterministic(tiles: int, shape: WorkTileShape, parts: int) -> int:
    """The same with deterministic dq, where the query heads of a tile are split into so many ``parts``.

    With one or two query heads in a work tile an L2 group is twice as large, if all descend
    (``bwd_heads_per_l2_group`` in ``csrc/ffa/sm90/bwd/workspace.h``).
    """
    heads = shape.group // parts
    once, twice = (heads_per_l2_group(tiles * parts, shape._replace(num_sms=n * shape.num_sms)) for n in (1, 2))
    all_descend = shape.num_sms // (twice * parts) >= MANY_TILES * heads
    return twice if heads <= LARGE_L2_GROUPS and all_descend else once


def _in_order(plan: TilePlan, tiles: TileBlocks, shape: WorkTileShape, at_once: int) -> np.ndarray:
    """(work tiles, 3) tile, head, descending m-blocks; in L2 groups of ``at_once`` heads, in each the costliest tiles
    first. Those that start first wrap, the others ascend. The first L2 group may have an order of its own."""
    parts = next(
        (n for n in range(1, shape.group + 1)
         if not shape.group % n and n * len(tiles.first) * shape.heads_kv >= fewest_whole(shape.num_sms)),
        shape.group,
    )  # fmt: skip
    l2_groups = []
    for first in range(0, shape.heads_kv, at_once):
        heads = np.arange(first, min(first + at_once, shape.heads_kv))
        order = _order_of(plan, is_first=first == 0)
        tile, head = np.repeat(order, len(heads)), np.tile(heads, len(order))
        descending = np.where(np.arange(len(tile)) * parts < shape.num_ctas, abi.TRAVERSAL_WRAP, 0)
        l2_groups.append(np.column_stack([tile, head, descending]))
    return np.concatenate(l2_groups).astype(np.int64)


def _order_of(plan: TilePlan, is_first: bool) -> np.ndarray:
    at = plan.header.words_first_order
    return plan.words[at:][: len(plan.tiles)] if is_first and at else plan.order


def _wants_waves(tiles: TileBlocks, shape: WorkTileShape) -> bool:
    total, num = int(tiles.count.sum()), len(tiles.count)
    is_long = num > shape.num_ctas and tiles.blocks < abi.TRAVERSAL_WRAP
    return is_long and int(tiles.count[tiles.is_aligned].sum()) >= _LEAST_ALIGNED * total


def _share_out_of_step(work_tiles: np.ndarray, tiles: TileBlocks, shape: WorkTileShape) -> float:
    """The share of the work of the second and third L2 group that is too far from the clock; of the first where there
    are no others."""
    size, kept = len(tiles.first) * heads_per_l2_group(len(tiles.first), shape), IN_L2 / shape.group
    some = work_tiles[: 3 * size]
    starts = starts_of(tiles.count[some[:, 0]] + BEGIN_AND_END, shape.num_ctas)
    out = work = 0.0
    for begin in range(size if len(work_tiles) > size else 0, len(some), size):
        at = slice(begin, begin + size)
        tile, early = some[at, 0], some[at, 2] == abi.TRAVERSAL_WRAP
        clock = (starts[at] - starts[begin]) % tiles.blocks
        wanted = np.where(early, 0, tiles.first[tile])
        is_out = np.abs(clock - wanted) > kept
        out += float(tiles.count[tile][is_out].sum())
        work += float(tiles.count[tile].sum())
    return out / work if work else 0.0


def _in_waves(tiles: TileBlocks, shape: WorkTileShape, there_at: np.ndarray | None) -> np.ndarray:
    """The same list in waves, see above. Tiles that see nothing come first: the last wave is for
    tiles that can be split. The first wave begins with tiles that are there."""
    batches = _tile_groups(tiles)
    work_tiles = _listed(batches, shape.heads_kv)
    if there_at is not None and len(work_tiles.entry):
        work_tiles = _first_there(work_tiles, int((batches.batch == batches.batch[0]).sum()), there_at)
    whole = max(-(-int(work_tiles.entry[-1] + 1) // shape.num_ctas) - _LAST_WAVES, 0) if len(work_tiles.entry) else 0
    wave = np.minimum(work_tiles.entry // shape.num_ctas, whole)
    # In a wave first what its groups begin with; of that, and of all that is left at the end, the longest first.
    order = np.lexsort((-tiles.count[work_tiles.tile], np.where(wave < whole, work_tiles.side, 0), wave))
    empty = np.flatnonzero(tiles.count == 0)
    tile = np.concatenate([np.repeat(empty, shape.heads_kv), work_tiles.tile[order]])
    head = np.concatenate([np.tile(np.arange(shape.heads_kv), len(empty)), work_tiles.head[order]])
    waves = np.concatenate([np.full(len(empty) * shape.heads_kv, -1), wave[order]])
    return np.column_stack([tile, head, _descending(tile, waves, tiles, shape.num_ctas)])


class _TileGroups(NamedTuple):
    """Each tile that sees something once, (M,): the tiles group by group, and the group of each. ``batch`` (groups,),
    not falling; those of one take about as long."""

    tile: np.ndarray
    group: np.ndarray
    batch: np.ndarray


def _tile_groups(tiles: TileBlocks) -> _TileGroups:
    """First the groups that fill a wave."""
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
    batch_of, short = {}, None
    for value in np.unique(m[~is_filled]).tolist():
        if short is None or value > short + 2:
            short = value
        batch_of[value] = short
    batch = np.array([batch_of.get(value, -tiles.blocks) for value in m[order].tolist()], dtype=np.int64)
    return _TileGroups(tile[by_number], number[group][by_number], batch)


class _WorkTiles(NamedTuple):
    """(U,) each: tile and head, the number of the *entry*, a group and a head, and which of the group they are."""

    tile: np.ndarray
    head: np.ndarray
    entry: np.ndarray
    side: np.ndarray


def _listed(batches: _TileGroups, heads: int) -> _WorkTiles:
    """Batch by batch, in each head by head, the groups one after the other."""
    sizes = np.unique(batches.batch, return_counts=True)[1]
    begin = np.cumsum(sizes) - sizes
    group = np.concatenate([np.tile(b + np.arange(n), heads) for b, n in zip(begin, sizes)] or [begin])
    head = np.concatenate([np.repeat(np.arange(heads), n) for n in sizes] or [begin])
    counts = np.bincount(batches.group, minlength=len(batches.batch))
    entry = np.repeat(np.arange(len(group)), counts[group])
    side = ramps(0, counts[group])
    at = (np.cumsum(counts) - counts)[group][entry] + side
    return _WorkTiles(batches.tile[at], head[entry], entry, side)


def _first_there(work_tiles: _WorkTiles, entries: int, there_at: np.ndarray) -> _WorkTiles:
    """In the first ``entries``: of each group those first that are there, and groups in that order."""
    some = work_tiles.entry < entries
    tile, entry, side = work_tiles.tile[some], work_tiles.entry[some], work_tiles.side[some]
    tile = tile[np.lexsort((side, there_at[tile], entry))]
    order = np.argsort(there_at[tile[side == 0]], kind="stable")
    place = np.empty(entries, dtype=np.int64)
    place[order] = np.arange(entries)
    by_place = np.argsort(place[entry], kind="stable")
    made = (tile[by_place], work_tiles.head[some], place[entry][by_place], side[by_place])
    return _WorkTiles(*(np.concatenate([mine, all_of[~some]]) for mine, all_of in zip(made, work_tiles)))


def _descending(tile: np.ndarray, wave: np.ndarray, tiles: TileBlocks, num_ctas: int) -> np.ndarray:
    """How many blocks each takes backwards: as many as the clock is behind its first one, by the time at which the
    first work tile of its wave starts."""
    starts = starts_of(tiles.count[tile] + BEGIN_AND_END, num_ctas)
    _, begins, which = np.unique(wave, return_index=True, return_inverse=True)
    clock = (starts - starts[begins][which]) % tiles.blocks
    clock = np.where(clock > tiles.blocks - _SLACK, 0, clock)
    backwards = np.clip(np.round(tiles.first[tile] - clock), 0, tiles.count[tile]).astype(np.int64)
    return np.where(backwards < _SLACK, 0, backwards)
