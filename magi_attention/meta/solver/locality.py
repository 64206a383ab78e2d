# SPDX-License-Identifier: Apache-2.0
"""Chunks to ranks, so that the ranks have equal areas and few rows travel.

Where queries see keys of their own document only, a rank that holds a run of its chunks needs no other keys than those
before the run. So ranks are filled one after another with runs of chunks. Chunks are ordered by the density of their
document, the area of a chunk in the mean, and within a document by position. A rank takes a run from the dense end and
a run from the other one, as many chunks as are its due, of an area near the mean of what is left; and the last few
chunks one by one from anywhere, so that the area comes out right. One causal sequence becomes zigzag: a run from its
end and one from its start. Long packed documents are cut into runs, and short ones stay whole.

Ranks that are filled last get what nobody took. They are dealt with by MinHeap, as many of them as it takes, and then
pairs of chunks are swapped with light ranks until no rank is above the limit. Sums are of integers and no function is
used whose last bit depends on the machine, so every rank that asks gets the same answer.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Iterator, Sequence
from itertools import accumulate

import numpy as np
from numpy.typing import NDArray

from magi_attention.common.slices import K0, areas
from magi_attention.meta.solver.partition import min_heap

Parts = list[list[int]]

TOLERATED = 1.01  # area of the heaviest rank, over what no dispatch of these chunks can be below
_TOLERANCE = 0.003  # of the mean area, for one rank
_MOST_ABOVE = 1.005  # the target of a rank over the mean, where ranks before it took too little
_MOST_SINGLES = 4  # chunks of a rank that are taken one by one
_TAILS = (1, 4, 16, 64)  # ranks that MinHeap fills
_NEIGHBOURS = 16  # chunks of about the wanted area that are tried for a swap


def document_of_chunks(pieces: NDArray[np.int64], chunk_of: NDArray[np.int64], num_chunks: int) -> NDArray[np.int64]:
    """(chunks,): the first key of the largest piece of each, -1 without pieces. Chunks that follow one another are of
    one document if it is the same."""
    size = areas(pieces)
    anchor = np.full(num_chunks, -1)
    if len(pieces):
        begins = np.flatnonzero(np.diff(chunk_of, prepend=chunk_of[:1] - 1))  # pieces are in the order of chunks
        most = np.repeat(np.maximum.reduceat(size, begins), np.diff(begins, append=len(size)))
        largest = np.flatnonzero(size == most)[::-1]  # of equal ones the first, which is written last
        anchor[chunk_of[largest]] = pieces[largest, K0]
    return anchor


def order_of_chunks(
    document: NDArray[np.int64], work: NDArray[np.int64], is_coarse: bool = False
) -> NDArray[np.int64]:
    """Chunk ids from the least to the most dense document, by position where densities are alike: in the same half
    octave, or ``is_coarse`` octave, so that neighbours mostly stay neighbours. ``document`` as of
    ``document_of_chunks``, ``work`` (chunks,) are areas."""
    starts = np.flatnonzero(np.diff(document, prepend=document[:1] - 1))
    counts = np.diff(starts, append=len(work))
    mantissa, exponent = np.frexp(np.add.reduceat(work, starts) / counts)
    density = 2 * exponent + (0 if is_coarse else mantissa > 0.7071)
    order: NDArray[np.int64] = np.argsort(np.repeat(density, counts), kind="stable")
    return order


def lower_bound(work: NDArray[np.int64], world: int) -> int:
    """An area that the heaviest of ``world`` ranks has at least, if each has ``len(work) // world`` chunks or more: the
    mean, and the largest chunk with the lightest ones beside it."""
    others = max(len(work) // world - 1, 0)
    return max(-(-int(work.sum()) // world), int(work.max()) + int(np.sort(work)[:others].sum()))


def two_ended(work: list[int], order: list[int], world: int, limit: int) -> Parts | None:
    """Chunks of each rank, none above ``limit``, or None where that was not found; see the top of this file.

    ``work`` are the areas of chunks, ``order`` as of ``order_of_chunks``. Each rank gets ``len(work) // world`` chunks,
    and the first ones one more where that leaves some.
    """
    size, extra = divmod(len(work), world)
    if size < 2:
        return None
    filled = _fill(work, order, [size + (rank < extra) for rank in range(world - 1)], limit)
    for tail in _TAILS:
        if tail >= max(world, 2):
            break
        kept = filled[: world - tail]
        tail = world - len(kept)
        taken = set().union(*kept)
        left = [chunk for chunk in range(len(work)) if chunk not in taken]
        dealt = min_heap([work[chunk] for chunk in left], tail)[1]
        assert dealt is not None
        parts = swap_down([*kept, *([left[i] for i in part] for part in dealt)], work, limit)
        if parts is not None:
            return parts
    return None


class _Pool:
    """Chunks that nobody has, by area."""

    def __init__(self, work: list[int]) -> None:
        by_area = np.argsort(np.array(work, dtype=np.int64), kind="stable")
        place = np.empty_like(by_area)
        place[by_area] = np.arange(len(work))
        self._chunks, self._place = by_area.tolist(), place.tolist()
        self._areas = [work[chunk] for chunk in self._chunks]
        # Forests whose roots are free: the next free place from here on, and one more than the last one before here.
        self._next = list(range(len(work) + 1))
        self._last = list(range(len(work) + 1))
        self.is_taken = bytearray(len(work))

    def take(self, chunk: int) -> None:
        place = self._place[chunk]
        self.is_taken[chunk] = 1
        self._next[place] = place + 1
        self._last[place + 1] = place

    def closest(self, area: float, but: list[int]) -> int:
        """The free chunk, but those, whose area is closest; of two the lighter one. There has to be one."""
        at = bisect_left(self._areas, area)
        above = _root(self._next, at)
        while above < len(self._areas) and self._chunks[above] in but:
            above = _root(self._next, above + 1)
        below = _root(self._last, at)
        while below and self._chunks[below - 1] in but:
            below = _root(self._last, below - 1)
        is_above = not below or (
            above < len(self._areas) and self._areas[above] - area < area - self._areas[below - 1]
        )
        chunk: int = self._chunks[above if is_above else below - 1]
        return chunk


def _root(parents: list[int], i: int) -> int:
    while parents[i] != i:
        parents[i] = i = parents[parents[i]]
    return i


def _fill(work: list[int], order: list[int], sizes: list[int], limit: int) -> Parts:
    """So many chunks for each of these ranks, or for the first ones of them; the rest is for one rank more."""
    pool, parts, left = _Pool(work), [], sum(work)
    world = len(sizes) + 1
    most, tolerance = _MOST_ABOVE * left / world, _TOLERANCE * left / world
    mean, is_moved = left / len(work), bytearray(len(work))
    light = _End(order, pool.is_taken, is_moved, [area <= mean for area in work])
    dense = _End(order[::-1], pool.is_taken, is_moved, [area >= mean for area in work])
    for rank, size in enumerate(sizes):
        target = min(left / (world - rank), most)
        found: list[int] | None = None
        best, taken = float("inf"), 0
        light.pass_on(dense)
        dense.pass_on(light)
        for chunks, area in _candidates(work, light.first(size - 1), dense.first(size - 1), size, target, pool):
            error = abs(area - target) if area <= limit else _MOST_SINGLES * (area - target)
            if error < best:
                found, best, taken = chunks, error, area
            if error <= tolerance:
                break
        if found is None:
            break
        for chunk in found:
            pool.take(chunk)
        left -= taken
        parts.append(found)
    return parts


class _End:
    """The free chunks from one end of ``order`` on.

    When ranks have taken the last chunks of a dense document, its first ones have little work, and the last ones of a
    light document have much. Those go over to the other end and are the first ones there.
    """

    def __init__(self, chunks: list[int], is_taken: bytearray, is_moved: bytearray, belongs: list[bool]) -> None:
        self._chunks, self._is_taken, self._is_moved, self._belongs = chunks, is_taken, is_moved, belongs
        self._at = 0  # where free chunks begin
        self._come: list[int] = []  # from the other end

    def pass_on(self, other: _End) -> None:
        """Gives the chunks at the front that do not belong here to the other end."""
        chunks, moved = self._chunks, []
        while self._at < len(chunks):
            chunk = chunks[self._at]
            if not self._is_taken[chunk] and not self._is_moved[chunk]:
                if self._belongs[chunk]:
                    break
                self._is_moved[chunk] = 1
                moved.append(chunk)
            self._at += 1
        if moved:
            other._come = moved[::-1] + other._come

    def first(self, count: int) -> list[int]:
        """So many chunks, or all."""
        self._come = found = [chunk for chunk in self._come if not self._is_taken[chunk]]
        found, at, chunks = found[:count], self._at, self._chunks
        is_taken, is_moved = self._is_taken, self._is_moved
        while len(found) < count and at < len(chunks):
            found += [chunk for chunk in chunks[at : at + count + 1] if not is_taken[chunk] and not is_moved[chunk]]
            at += count + 1
        return found[:count]


def _candidates(
    work: list[int], lights: list[int], heavies: list[int], size: int, target: float, pool: _Pool
) -> Iterator[tuple[list[int], int]]:
    """Chunks for one rank, with their area: with one chunk that fits what two runs leave, with two, and so on."""
    light = list(accumulate([work[chunk] for chunk in lights], initial=0))
    heavy = list(accumulate([work[chunk] for chunk in heavies], initial=0))
    for singles in range(1, min(_MOST_SINGLES, size) + 1):
        count = size - singles
        aim = target * count / size
        low, high = max(count - len(lights), 0), min(count, len(heavies))
        if low > high:
            continue
        errors = [abs(a + b - aim) for a, b in zip(heavy[low : high + 1], light[count - high : count - low + 1][::-1])]
        split = low + errors.index(min(errors))
        chunks, area = heavies[:split] + lights[: count - split], heavy[split] + light[count - split]
        for missing in range(singles, 0, -1):
            chunks.append(pool.closest((target - area) / missing, chunks))
            area += work[chunks[-1]]
        yield chunks, area


def swap_down(parts: Sequence[Sequence[int]], work: list[int], limit: int) -> Parts | None:
    """Swaps chunks of ranks above ``limit`` with lighter ones of other ranks until no rank is above it; None if that is
    not reached in as many swaps as there are ranks. No swap brings the other rank above the limit."""
    found = [list(part) for part in parts]
    loads = [sum([work[chunk] for chunk in part]) for part in found]
    above = [rank for rank, load in enumerate(loads) if load > limit]
    if not above:
        return found
    if len(above) > len(found) // 2:
        return None
    by_area = np.argsort(np.array(work, dtype=np.int64), kind="stable").tolist()
    sorted_work, rank_of = [work[chunk] for chunk in by_area], [0] * len(work)
    for rank, part in enumerate(found):
        for chunk in part:
            rank_of[chunk] = rank
    steps = len(found)
    for rank in above:
        while loads[rank] > limit:
            swap = _best_swap(found[rank], loads[rank], work, by_area, sorted_work, rank_of, loads, limit)
            steps -= 1
            if swap is None or not steps:
                return None
            given, taken = swap
            other, less = rank_of[taken], work[given] - work[taken]
            for owner, old, new, change in ((rank, given, taken, -less), (other, taken, given, less)):
                found[owner].remove(old)
                found[owner].append(new)
                loads[owner] += change
                rank_of[new] = owner
    return found


def _best_swap(
    mine: list[int], load: int, work: list[int], by_area: list[int], sorted_work: list[int], rank_of: list[int],
    loads: list[int], limit: int,
) -> tuple[int, int] | None:  # fmt: skip
    """A chunk of a rank and one of another rank to swap it with: of pairs that bring the rank below the limit the one
    with the lightest chunk, which needs the fewest keys; else the pair that takes most from it. None if none does."""
    excess, room = load - limit, limit - min(loads)
    best, found = (1, 0), None
    for chunk in mine:
        area = work[chunk]
        # Chunks that are lighter by what is to go; then, lighter by what the lightest rank has room for.
        fits = bisect_right(sorted_work, area - excess)
        for at in range(fits - 1, max(fits - 1 - _NEIGHBOURS, -1), -1):
            less = area - sorted_work[at]
            if loads[rank_of[by_area[at]]] + less <= limit:
                if (0, area) < best:
                    best, found = (0, area), (chunk, by_area[at])
                break
        else:
            if not best[0]:
                continue
            most = bisect_left(sorted_work, area - room)
            for at in range(most, min(most + _NEIGHBOURS, len(work))):
                less = area - sorted_work[at]
                other = rank_of[by_area[at]]
                if 0 < less < excess and loads[other] + less <= limit and (1, -less) < best:
                    best, found = (1, -less), (chunk, by_area[at])
    return found


__all__ = ["TOLERATED", "Parts", "document_of_chunks", "lower_bound", "order_of_chunks", "swap_down", "two_ended"]
