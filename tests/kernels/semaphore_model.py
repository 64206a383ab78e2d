# SPDX-License-Identifier: Apache-2.0
"""The semaphore order of ``csrc/ffa/sm90/bwd/schedule/semaphore_targets.cuh`` and ``bwd/schedule/simulate.cuh`` once
more, in plain Python, and an adversary.

Times, flags and semaphore targets follow the kernels line by line. The adversary then runs the CTAs in the worst order
that it can think of, and shows that the rules leave no CTA waiting for ever. ``test_semaphores_on_cpu.py`` shows that
the CUDA code keeps to the times, flags and traversals; the tests on a GPU show that it keeps to the semaphore order.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import product

import numpy as np

from magi_attention.native.tile_plan import TilePlan, transposed

MANY_TILES = 8  # in work at a time for each of few heads, from which on all descend
TICKS = 32  # of expected time: one block
END_HALVES = 5  # of a step, what it takes to begin and end a work tile
BLOCKS_APART = 3  # that work tiles begin apart, where all descend
MOST_KEPT = 64 << 20  # bytes of Q, dO and dq, of which L2 keeps most
OF_DIM = {  # by head dim
    64: {"few_if_kept": 4, "most_apart": 2, "late_halves": 5},
    128: {"few_if_kept": 1, "most_apart": 1, "late_halves": 3},
    256: {"few_if_kept": 0, "most_apart": 1, "late_halves": 2},
}


@dataclass(frozen=True)
class Segment:
    first: int  # block
    end: int
    is_band: bool


@dataclass(frozen=True)
class WorkTile:
    order_idx: int
    head: int  # kv head and part of its query heads
    steps: tuple[tuple[int, int], ...]  # (query head of the part, block)
    targets: tuple[int, ...]


@dataclass(frozen=True)
class Schedule:
    """``ctas`` SMs; ``kinds`` work tiles of each tile in an L2 group, of ``heads`` query heads each.

    There are so many ``l2_groups``, the last of ``last_kinds``.
    """

    ctas: int
    kinds: int
    heads: int
    most_timed: int = 1024
    l2_groups: int = 1
    last_kinds: int = 0
    few_heads: int = 4
    few_if_kept: int = 1  # the same however few tiles are in work, if L2 keeps what is traversed
    most_apart: int = 1  # heads of work tiles that begin some blocks apart then
    traversed: float = 0.0  # bytes of Q, dO and dq, as a share of those that L2 keeps
    late_halves: int = 3  # of a step, by which a work tile of the first is expected behind the one before
    has_later_targets: bool = True  # L2 groups behind the first have targets of their own
    split: tuple[int, int, int] = (0, 0, 1)  # order indices from the first to before the second: so many parts by heads

    @property
    def wave(self) -> int:
        """How many tiles are in work at the start."""
        left, order_indices = self.ctas, 0
        while left >= (work_tiles := self.kinds * self.parts_of(order_indices)):
            left, order_indices = left - work_tiles, order_indices + 1
        return max(1, order_indices)

    def parts_of(self, order_idx: int) -> int:
        begin, end, parts = self.split
        return parts if begin <= order_idx < end else 1

    @property
    def is_one_way(self) -> bool:
        """Whether all descend, unless head by head."""
        is_few_anyway = self.heads <= self.few_if_kept and self.traversed <= 1
        return self.heads <= self.few_heads and (self.wave >= MANY_TILES * self.heads or is_few_anyway)

    def kinds_of(self, l2_group: int) -> int:
        return min(self.last_kinds or self.kinds, self.kinds) if l2_group + 1 == self.l2_groups else self.kinds


def segments_by_order(slices: np.ndarray, total_q: int, total_k: int, tile: int, block: int) -> list[list[Segment]]:
    """For each tile of keys, in the order of the plan."""
    plan = TilePlan.build(transposed(slices, total_q, total_k), total_k, total_q, tile, 2)
    found = []
    for number in plan.order:
        begin, count = plan.tiles[number][2:4]
        segments = []
        for record in plan.records[begin : begin + count]:
            lo, hi, full_lo, full_hi = record[8:12]
            segments.append(Segment(record[0] // block, -(-record[1] // block), bool(full_lo > lo and full_hi < hi)))
        found.append(segments)
    return found


def is_banded(tiles: list[list[Segment]]) -> bool:
    return sum(1 if segment.is_band else -1 for segments in tiles for segment in segments) > 0


def mode_of(tiles: list[list[Segment]], schedule: Schedule) -> tuple[bool, str]:
    """((all heads of a segment one after the other, "timed", "waves" or "tiles"))."""
    by_head = schedule.heads > 1 and is_banded(tiles) and schedule.split[2] == 1
    pairs = [(a, b) for segments in tiles for i, a in enumerate(segments) for b in segments[:i]]
    if any(len(segments) > 8 for segments in tiles) or any(a.first < b.end and b.first < a.end for a, b in pairs):
        return by_head, "tiles"
    return by_head, "timed" if not by_head and len(tiles) <= schedule.most_timed else "waves"


def descending(segment: Segment, backwards: int, shift: int = 0) -> list[int]:
    """``shift``: from so many blocks before the end on, and round, where all is taken descending."""
    blocks = [*range(segment.end - 1, segment.end - 1 - backwards, -1), *range(segment.first, segment.end - backwards)]
    at = shift % max(len(blocks), 1)
    return blocks[at:] + blocks[:at]


def begins_apart(tiles: list[list[Segment]], mode: str, schedule: Schedule) -> bool:
    is_short = schedule.heads <= schedule.most_apart and schedule.heads * schedule.traversed <= 1
    may_be = is_short and schedule.l2_groups == 1 and schedule.split[2] == 1
    has_bands = any(segment.is_band for segments in tiles for segment in segments)
    return may_be and schedule.is_one_way and mode == "timed" and not has_bands


def shift_of(order_idx: int, tiles: list[list[Segment]], mode: str, schedule: Schedule) -> int:
    if not begins_apart(tiles, mode, schedule):
        return 0
    follows = order_idx < schedule.wave or cost_of(tiles[order_idx]) == cost_of(tiles[order_idx - schedule.wave])
    return BLOCKS_APART * (order_idx % schedule.wave) if follows else 0


def cost_of(segments: list[Segment]) -> int:
    return sum(x.end - x.first for x in segments)


def backwards_of(segment: Segment, mode: str, by_head: bool, order_idx: int, schedule: Schedule) -> int:
    if mode == "tiles" or (schedule.is_one_way and not by_head):
        return segment.end - segment.first
    return 0 if order_idx >= schedule.wave or by_head else min(segment.first, segment.end - segment.first)


def work_tiles_of(tiles: list[list[Segment]], schedule: Schedule) -> list[WorkTile]:
    """All work tiles with their semaphore targets, in the order in which they are taken up."""
    by_head, mode = mode_of(tiles, schedule)
    traversals = [
        [
            descending(
                x, backwards_of(x, mode, by_head, order_idx, schedule), shift_of(order_idx, tiles, mode, schedule)
            )
            for x in segments
        ]
        for order_idx, segments in enumerate(tiles)
    ]
    parts_of_kind = schedule.split[2]  # those of a split tile may begin at different times
    tables = [
        [_semaphore_targets(traversals, list(starts), mode, by_head, schedule) for starts in zip(*by_rank)]
        for by_rank in expected_starts(tiles, mode, by_head, schedule)
    ]
    work_tiles = []
    for l2_group in range(schedule.l2_groups):
        table = tables[min(l2_group, len(tables) - 1)]
        for order_idx, blocks_of in enumerate(traversals):
            parts = schedule.parts_of(order_idx)
            for kind, part in product(range(schedule.kinds_of(l2_group)), range(parts)):
                count = schedule.heads // parts
                steps = tuple(_steps(blocks_of, range(part * count, (part + 1) * count), by_head))
                heads_of_part = schedule.heads // parts_of_kind
                targets = tuple(
                    table[kind * parts_of_kind + head // heads_of_part][order_idx, block] for head, block in steps
                )
                work_tiles.append(WorkTile(order_idx, l2_group * schedule.kinds + kind, steps, targets))
    return work_tiles


def expected_starts(tiles: list[list[Segment]], mode: str, by_head: bool, schedule: Schedule) -> list[list[list[int]]]:
    """By order index and kind, or part of it where some tiles are split, in ticks: of the first L2 group; and of the
    others, if they have semaphore targets of their own."""
    is_one_way = by_head or schedule.is_one_way
    has_end = not is_one_way or begins_apart(tiles, mode, schedule)
    halves = 0 if is_one_way else schedule.late_halves, END_HALVES if has_end else 0
    late, ends_after = (TICKS * n // (2 * schedule.heads) for n in halves)
    is_compared = len(tiles) <= schedule.most_timed and len(tiles) * schedule.kinds >= schedule.ctas
    is_later = schedule.has_later_targets and schedule.l2_groups > 1
    has_two = is_later and is_compared and not is_one_way and mode == "timed"
    scale, l2_groups = schedule.heads if by_head else 1, 2 if has_two else 1
    costs = [cost_of(segments) for segments in tiles]
    starts = simulated_starts(costs, schedule.kinds, schedule.ctas, late, ends_after, scale, l2_groups, schedule.split)
    return np.array(starts).reshape(l2_groups, len(tiles), schedule.kinds * schedule.split[2]).tolist()


def simulated_starts(
    costs: Sequence[int], kinds: int, ctas: int, late: int, ends_after: int, scale: int = 1, l2_groups: int = 1,
    split: tuple[int, int, int] = (0, 0, 1),
) -> list[int]:  # fmt: skip
    """When each work tile begins, of ``kinds`` for each tile: in the order of the list at the CTA that ends first.

    Work tiles of the tiles from ``split[0]`` to before ``split[1]`` are ``split[2]`` parts each, and there is a start
    for each part of all work tiles.
    """
    ends: list[int] = []
    starts = []
    for _, order_idx, _ in product(range(l2_groups), range(len(costs)), range(kinds)):
        parts = split[2] if split[0] <= order_idx < split[1] else 1
        for _ in range(parts):
            start = heapq.heappop(ends) if len(ends) == ctas else order_idx * late
            heapq.heappush(ends, start + TICKS * int(costs[order_idx]) // parts + ends_after)
            starts += [start * scale] * (split[2] // parts)
    return starts


def _semaphore_targets(
    traversals, starts: list[int], mode: str, by_head: bool, schedule: Schedule
) -> dict[tuple[int, int], int]:
    """By order index and block; of the first contribution, where there are several."""
    contributions: dict[int, list[tuple]] = {}
    for order_idx, blocks_of in enumerate(traversals):
        for key, block in _expected(blocks_of, starts[order_idx], order_idx, mode, by_head, schedule):
            contributions.setdefault(block, []).append((*key, order_idx))
    targets: dict[tuple[int, int], int] = {}
    for block, keys in contributions.items():
        keys.sort()
        for target, key in enumerate(keys):
            targets.setdefault((key[-1], block), target)
    return targets


def _expected(blocks_of, start, order_idx, mode, by_head, schedule):
    time, ticks = start, TICKS // schedule.parts_of(order_idx)
    for number, blocks in enumerate(blocks_of):
        for at, block in enumerate(blocks):
            if mode == "tiles":
                yield (order_idx,), block
            elif mode == "timed":
                yield (time + ticks * at,), block
            else:
                time_of_head = (start if by_head else time) + ticks * at
                yield (order_idx // schedule.wave, number if by_head else 0, time_of_head), block
        time += ticks * len(blocks)


def _steps(blocks_of, heads: range, by_head: bool) -> list[tuple[int, int]]:
    steps = []
    for blocks in blocks_of:
        if by_head:
            steps += [(head, block) for head in heads for block in blocks]
        else:
            steps += [(head, block) for block in blocks for head in heads]
    return steps


def run(work_tiles: list[WorkTile], ctas: int, rng: np.random.Generator, early: int = 0) -> dict[tuple, list[int]]:
    """Order indices, in the order in which their work tiles added to each (kind, head, block).

    Work tiles are taken up in order by whichever CTA is free; which CTA goes on next is up to ``rng``. With ``early``,
    which the kernel does not do, a CTA takes its next work tile when so many additions of the last one are to come.

    Raises:
        AssertionError: every CTA waits.
    """
    added: dict[tuple, list[int]] = {}
    work: list[tuple[WorkTile, int] | None] = [None] * ctas
    held: list[WorkTile | None] = [None] * ctas
    left = list(reversed(work_tiles))
    favourites = rng.random(ctas) ** 4 + 1e-3  # some CTAs are much slower than others
    while left or any(work):
        able = []
        for cta, job in enumerate(work):
            if job is None:
                if left:
                    able.append(cta)
            else:
                work_tile, step = job
                head, block = work_tile.steps[step]
                if len(added.get((work_tile.head, head, block), ())) >= work_tile.targets[step]:
                    able.append(cta)
        assert able, "every CTA waits for another"
        weights = favourites[able]
        cta = int(rng.choice(able, p=weights / weights.sum()))
        work_tile, step = work[cta] or (left.pop(), -1)
        if step >= 0:
            head, block = work_tile.steps[step]
            added.setdefault((work_tile.head, head, block), []).append(work_tile.order_idx)
        if step + 1 < len(work_tile.steps):
            work[cta] = (work_tile, step + 1)
            if left and held[cta] is None and len(work_tile.steps) - (step + 1) <= early:
                held[cta] = left.pop()
        else:
            taken, held[cta] = held[cta], None
            work[cta] = None if taken is None else (taken, 0)
    return added
