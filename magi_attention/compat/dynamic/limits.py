# SPDX-License-Identifier: Apache-2.0
"""Placements in which no rank receives more than a limit, and the search for the least limit.

Under a limit, ranks choose in turn which rows to receive. Then pairs go to ranks that have both rows, those with the
fewest such ranks first.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable

import numpy as np

from magi_attention.compat.dynamic.grid import Grid
from magi_attention.meta.solver.placement import Bools, Ints, Placement

MOST_LOAD = 1.10  # of a rank, over the mean
_STEPS, _TOLERANCE = 20, 0.01  # of the search
_SWEEPS = 5
_LATER = 0.05  # worth of a pair whose other row is not here yet, or that another rank can compute, over one that is
Spread = Callable[[Grid, Placement, Bools], None]


def least_limit(grid: Grid, spread: Spread) -> Ints:
    """The rank of each pair under the least limit for which no rank has more than ``MOST_LOAD``. Where none is found,
    only keys move, or if that is uneven, ``spread`` has every row at every rank."""
    best = Placement(grid.pairs, grid.world, grid.pairs.queries.at)
    low, high = 0.0, float(best.sent().max(initial=0))
    if best.heaviest > MOST_LOAD * grid.mean:
        best = _placed(grid, np.ones((len(grid.pairs.area), grid.world), dtype=bool), spread)
    for _ in range(_STEPS):
        if high - low <= _TOLERANCE * high:
            break
        limit = (low + high) / 2
        options = _options(grid, limit)
        found = _placed(grid, options, spread) if options.any(axis=1).all() else None
        if found is not None and found.heaviest <= MOST_LOAD * grid.mean:
            best, high = found, limit
        else:
            low = limit
    return best.rank


def _options(grid: Grid, limit: float) -> Bools:
    """(pairs, ranks): who can compute a pair, after each rank has chosen rows to receive, of ``limit`` in all. Ranks
    take turns, each with the row that makes the most area computable for its cost."""
    pairs, world = grid.pairs, grid.world
    area = np.zeros((len(pairs.queries.cost), len(pairs.keys.cost)))
    area[pairs.queries.of, pairs.keys.of] = pairs.area
    ranks = np.arange(world)[:, None]
    has_q, has_k = pairs.queries.owner == ranks, pairs.keys.owner == ranks  # (ranks, chunks)
    worth = area * np.where((has_q.T.astype(int) @ has_k.astype(int)) > 0, _LATER, 1)
    cost = np.concatenate([pairs.queries.cost, pairs.keys.cost])
    left, has_chosen = np.full(world, limit), True
    while has_chosen:
        has_chosen = False
        for rank in range(world):
            by_q = worth @ np.where(has_k[rank], 1, _LATER)
            by_k = np.where(has_q[rank], 1, _LATER) @ worth
            value = np.concatenate([np.where(has_q[rank], 0, by_q), np.where(has_k[rank], 0, by_k)])
            value = np.where(cost <= left[rank], value / np.maximum(cost, 1), 0)
            best = int(value.argmax())
            if value[best] <= 0:
                continue
            has_chosen, is_query = True, best < len(area)
            chunk = best if is_query else best - len(area)
            (has_q if is_query else has_k)[rank, chunk] = True
            left[rank] -= cost[best]
            if is_query:
                worth[chunk, has_k[rank]] = _LATER * area[chunk, has_k[rank]]
            else:
                worth[has_q[rank], chunk] = _LATER * area[has_q[rank], chunk]
    options: Bools = (has_q[:, pairs.queries.of] & has_k[:, pairs.keys.of]).T
    return options


def _placed(grid: Grid, options: Bools, spread: Spread) -> Placement:
    pairs, found = grid.pairs, Placement(grid.pairs, grid.world)
    order = np.lexsort((-pairs.area, options.sum(axis=1)))
    for pair in order.tolist():
        at_query = int(pairs.queries.at[pair])
        has_room = found.loads[at_query] + pairs.area[pair] <= grid.mean
        if at_query == pairs.keys.at[pair] or (options[pair, at_query] and has_room):
            rank = at_query
        else:
            rank = int(np.where(options[pair], found.loads, np.iinfo(np.int64).max).argmin())
        found.move(np.array([pair]), rank)
    spread(grid, found, options)
    return found


def spread_by_sweeps(grid: Grid, found: Placement, options: Bools) -> None:
    """Five times over the pairs of ranks above ``MOST_LOAD``: each goes to its least loaded rank, if that is better."""
    for _ in range(_SWEEPS):
        if found.heaviest <= MOST_LOAD * grid.mean:
            return
        for pair in range(len(found.rank)):
            rank = int(found.rank[pair])
            if found.loads[rank] <= MOST_LOAD * grid.mean:
                continue
            to = int(np.where(options[pair], found.loads, np.iinfo(np.int64).max).argmin())
            if found.loads[to] + grid.pairs.area[pair] < found.loads[rank]:
                found.move(np.array([pair]), to)


def spread_by_flow(grid: Grid, found: Placement, options: Bools) -> None:
    """Augmenting paths: a rank above ``MOST_LOAD`` gives one pair to the next rank, that one another to the next, until
    one has room. So a maximum flow is found, but that no pair is divided."""
    most = MOST_LOAD * grid.mean
    for _ in range(4 * len(found.rank)):
        heaviest = int(found.loads.argmax())
        if found.loads[heaviest] <= most:
            return
        path = _path(grid, found, options, heaviest)
        if path is None:
            return
        for pair, to in path:
            found.move(np.array([pair]), to)


def _path(grid: Grid, found: Placement, options: Bools, start: int) -> list[tuple[int, int]] | None:
    """Pairs and where they go, by the fewest ranks; the last of these gets no more than ``start`` had."""
    came: dict[int, tuple[int, int]] = {}
    queue, seen = deque([start]), {start}
    while queue:
        rank = queue.popleft()
        mine = np.flatnonzero(found.rank == rank)
        for to in range(grid.world):
            movable = mine[options[mine, to]]
            if to in seen or not len(movable):
                continue
            pair = int(movable[grid.pairs.area[movable].argmax()])
            seen.add(to)
            came[to] = rank, pair
            if found.loads[to] + grid.pairs.area[pair] < found.loads[start]:
                path = []
                while to != start:
                    rank, pair = came[to]
                    path.append((pair, to))
                    to = rank
                return path
            queue.append(to)
    return None


__all__ = ["MOST_LOAD", "least_limit", "spread_by_flow", "spread_by_sweeps"]
