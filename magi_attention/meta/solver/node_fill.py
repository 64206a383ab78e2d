# SPDX-License-Identifier: Apache-2.0
"""Chunks to nodes, so that few rows cross the network, and in each node to its ranks.

Nodes are filled one after another with runs of chunks, as ``locality`` fills ranks: a run from the dense end of the
order and one from the light end. A node has many chunks, so two runs come close to the area that it is due, and the
last chunk is taken out of a document that one of the runs cuts: its keys are needed in any case. Documents that no run
cuts stay in one node.

Where the ranks of a node could not have equal areas, as where it has more chunks of over half a rank's area than it
has ranks, fewer chunks come from the dense end, and the second run lies where the area comes out right.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from itertools import chain, islice

import numpy as np
from numpy.typing import NDArray

from magi_attention.meta.solver.locality import Areas, Parts, swap_down, two_ended
from magi_attention.meta.solver.partition import min_heap

Ints = NDArray[np.int64]
_TOLERANCE = 0.003  # of the area that a node is due
_MOST_TRIES = 4  # choices of chunks for one node
_MOST_ABOVE = 0.25  # of the nodes, whose ranks could not share their chunks: swaps between nodes may mend that


def fill_nodes(work: Ints, order: Ints, document: Ints, members: Sequence[Sequence[int]], limit: int) -> Parts | None:
    """Chunks of each rank, none above ``limit``, or None where that was not found. A few chunks may have been swapped
    between nodes at last.

    ``work`` are the areas of chunks; ``order`` as of ``order_of_chunks``, ``document`` as of ``Cut``.
    ``members`` are the ranks of each node. A rank gets ``len(work) // ranks`` chunks, and as many ranks as chunks are
    left by that one more.
    """
    world = sum(map(len, members))
    size, extra = divmod(len(work), world)
    place = np.empty_like(order)
    place[order] = np.arange(len(order))
    is_free = np.ones(len(work), dtype=np.bool_)
    free, left, ranks_left = order, int(work.sum()), world
    parts: Parts = [[] for _ in range(world)]
    above = 0  # nodes with a rank that is
    for ranks in members:
        count = len(ranks) * size + sum(rank < extra for rank in ranks)
        due = left * len(ranks) / ranks_left
        chunks, split, is_above = _fill_node(work, free, document, place, (count, len(ranks)), due, limit)
        for rank, part in zip(ranks, split):
            parts[rank] = part
        above += is_above
        if above > _MOST_ABOVE * len(members):
            return None
        is_free[chunks] = False
        free = free[np.flatnonzero(is_free[free])]
        left, ranks_left = left - int(work[chunks].sum()), ranks_left - len(ranks)
    return swap_down(parts, Areas(work.tolist()), limit)


def split_evenly(chunks: Ints, work: Ints, ranks: int, limit: int) -> Parts | None:
    """Chunks of each rank of a node by MinHeap, with swaps where a rank is above ``limit``; None if they are too few.
    Every document is in all ranks then, and so all send as many of its rows."""
    areas = work[chunks].tolist()
    dealt = min_heap(areas, ranks)[1]
    assert dealt is not None
    found = swap_down(dealt, Areas(areas), limit)
    return None if found is None else _chosen(chunks, found)


def _chosen(chunks: Ints, parts: Parts) -> Parts:
    """``parts`` of numbers within ``chunks`` as parts of these."""
    ids = chunks.tolist()
    return [[ids[i] for i in part] for part in parts]


def _fill_node(
    work: Ints, free: Ints, document: Ints, place: Ints, counts: tuple[int, int], due: float, limit: int
) -> tuple[Ints, Parts, bool]:
    """``counts[0]`` of the free chunks, of an area near ``due``, and those of each of ``counts[1]`` ranks: the first
    choice that these can share within ``limit``, or else the one whose heaviest rank by MinHeap is lightest. And
    whether a rank is above the limit."""
    count, ranks = counts
    is_last = count == len(free)
    choices = iter([np.sort(free)]) if is_last else _choices(work, free, document, counts, due, limit)
    best: tuple[float, Ints, Parts] | None = None
    for chunks in islice(choices, _MOST_TRIES):
        areas = Areas(work[chunks].tolist())
        parts: Parts | None
        if ranks == 1:
            parts = [list(range(count))] if sum(areas.of_chunk) <= limit else None
        else:
            parts = two_ended(areas, np.argsort(place[chunks]).tolist(), ranks, limit)
        if parts is None:
            heaviest, dealt = min_heap(areas.of_chunk, ranks)
            assert dealt is not None
            parts = swap_down(dealt, areas, limit)
            if best is None or heaviest < best[0]:
                best = heaviest, chunks, dealt
        if parts is not None:
            return chunks, _chosen(chunks, parts), False
    assert best is not None
    return best[1], _chosen(*best[1:]), True


def _can_share(work: Ints, ranks: int, limit: int) -> bool:
    """False where some rank has to be above ``limit``: of ``k * ranks + 1`` chunks one rank has ``k + 1``, beside the
    lightest ones."""
    ascending = np.sort(work)
    lightest = np.concatenate([[0], np.cumsum(ascending)])
    heavy = ascending[::-1][::ranks]
    number = np.arange(1, len(heavy) + 1)
    others = np.maximum(len(work) // ranks - number, 0)
    return bool((number * heavy + lightest[others] <= limit).all())


def _choices(work: Ints, free: Ints, document: Ints, counts: tuple[int, int], due: float, limit: int) -> Iterator[Ints]:
    """Chunks for one node, ascending, from the choice that cuts the fewest documents on: those of about the area that
    is due which ranks may be able to share, or if there is none the first."""
    count, ranks = counts
    dense_runs, light_runs = (np.concatenate([[0], np.cumsum(work[end[:count]])]) for end in (free[::-1], free))
    fits = np.flatnonzero(dense_runs + light_runs[::-1] <= due)
    dense = int(fits[-1]) if len(fits) else 0
    first = _two_runs(work, free, document, (count, dense), due)
    fewer = [dense // ranks * ranks, *(max(dense - 2**i, 0) for i in range(dense.bit_length() + 1))]
    has_any = False
    for chosen in chain([first], _runs_and_windows(work, free, count, dict.fromkeys(fewer), due)):
        areas = work[chosen]
        if abs(int(areas.sum()) - due) <= _TOLERANCE * due and _can_share(areas, ranks, limit):
            has_any = True
            yield np.sort(chosen)
    if not has_any:
        yield np.sort(first)


def _two_runs(work: Ints, free: Ints, document: Ints, counts: tuple[int, int], due: float) -> Ints:
    """A run of about ``counts[1]`` chunks from the dense end and one from the light end, ``counts[0]`` in all. The last
    chunk comes out of a document that one of them cuts, if the area is nearer to ``due`` with it."""
    count, dense = counts
    best = np.concatenate([free[len(free) - dense :], free[: count - dense]])
    error = abs(int(work[best].sum()) - due)
    for many in (dense, dense - 1):
        low, high = count - 1 - many, len(free) - many
        if many < 0 or low < 0:
            continue
        run = np.concatenate([free[high:], free[:low]])
        # Chunks of a document follow one another, so those of a cut one are next to the run.
        below, above = free[low : min(low + 4 * count, high)], free[max(high - 4 * count, low) : high]
        single = np.concatenate([
            below[document[below] == document[free[low - 1]]] if low else below[:0],
            above[document[above] == document[free[high]]] if many else above[:0],
        ])  # fmt: skip
        if not len(single):
            continue
        gap = due - int(work[run].sum())
        at = int(np.argmin(np.abs(work[single] - gap)))
        if abs(int(work[single[at]]) - gap) < error:
            best, error = np.append(run, single[at]), abs(int(work[single[at]]) - gap)
    return best


def _runs_and_windows(work: Ints, free: Ints, count: int, numbers: Iterable[int], due: float) -> Iterator[Ints]:
    """For each of ``numbers`` a run of so many chunks from the dense end, and one anywhere below it, ``count`` chunks
    in all, of an area near ``due``."""
    before = np.concatenate([[0], np.cumsum(work[free])])
    for dense in numbers:
        high, length = len(free) - dense, count - dense
        areas = before[length : high + 1] - before[: high - length + 1]
        start = int(np.argmin(np.abs(areas - (due - (before[-1] - before[high])))))
        yield np.concatenate([free[high:], free[start : start + length]])
