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
from collections.abc import Iterable, Iterator, Sequence
from functools import cached_property
from itertools import accumulate, chain

import numpy as np
from numpy.typing import NDArray

from magi_attention.meta.solver.partition import min_heap

Parts = list[list[int]]

TOLERATED = 1.01  # area of the heaviest rank, over what no dispatch of these chunks can be below
_TOLERANCE = 0.003  # of the mean area, for one rank
_MOST_ABOVE = 1.005  # the target of a rank over the mean, where ranks before it took too little
_MOST_SINGLES = 4  # chunks of a rank that are taken one by one
_TAILS = (1, 4, 16, 64)  # ranks that MinHeap fills
_NEIGHBOURS = 16  # chunks of about the wanted area that are tried for a swap


def order_of_chunks(document: NDArray[np.int64], work: NDArray[np.int64], is_coarse: bool = False) -> NDArray[np.int64]:
    """Chunk ids from the least to the most dense document, by position where densities are alike: in the same half
    octave, or ``is_coarse`` octave, so that neighbours mostly stay neighbours. ``document`` and ``work`` (chunks,) are
    as of ``Cut``."""
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


class Areas:
    """Areas of chunks. They are numbered here by area, from the lightest on, and of equal ones in their order."""

    def __init__(self, of_chunk: list[int]) -> None:
        self.of_chunk = of_chunk

    @property
    def ascending(self) -> list[int]:
        """(chunks,): the area of each number."""
        return self._sorted[2]

    def numbers(self, chunks: Sequence[int]) -> list[int]:
        number = self._sorted[1]
        return [number[chunk] for chunk in chunks]

    def chunks(self, numbers: Sequence[int]) -> list[int]:
        chunk = self._sorted[0]
        return [chunk[number] for number in numbers]

    @cached_property
    def _sorted(self) -> tuple[list[int], list[int], list[int]]:
        """Chunks by number, numbers by chunk, and areas by number."""
        areas = np.array(self.of_chunk, dtype=np.int64)
        order = np.argsort(areas, kind="stable")
        number = np.empty_like(order)
        number[order] = np.arange(len(order))
        return order.tolist(), number.tolist(), areas[order].tolist()


def two_ended(work: Areas, order: list[int], world: int, limit: int) -> Parts | None:
    """Chunks of each rank, none above ``limit``, or None where that was not found; see the top of this file.

    ``order`` as of ``order_of_chunks``. Each rank gets ``len(order) // world`` chunks, and the first ones one more
    where that leaves some.
    """
    size, extra = divmod(len(order), world)
    if size < 2:
        return None
    areas = work.ascending
    sizes = [size + (rank < extra) for rank in range(world - 1)]
    filled, rest = _fill(areas, work.numbers(order), sizes, limit)
    for tail in _TAILS:
        if tail >= max(world, 2):
            break
        kept = filled[: world - tail]
        tail = world - len(kept)
        left = sorted(chain(rest, *filled[len(kept) :]))
        dealt = min_heap([areas[chunk] for chunk in left], tail)[1]
        assert dealt is not None
        parts = [*map(list, kept), *([left[i] for i in part] for part in dealt)]
        if _swap_down(parts, areas, limit):
            return [work.chunks(part) for part in parts]
    return None


class _Pool:
    """Chunks that nobody has; ``areas`` ascend."""

    def __init__(self, areas: list[int]) -> None:
        self.areas = areas
        # Forests whose roots are free: the next free chunk from here on, and one more than the last one before here.
        self._next = list(range(len(areas) + 1))
        self._last = list(range(len(areas) + 1))
        self.is_gone = bytearray(len(areas))  # from the end of the order where it was: taken, or moved to the other end

    def take(self, chunks: list[int]) -> None:
        after, before, is_gone = self._next, self._last, self.is_gone
        for chunk in chunks:
            after[chunk] = chunk + 1
            before[chunk + 1] = chunk
            is_gone[chunk] = 1

    def free(self, chunks: Iterable[int]) -> list[int]:
        """Those of these that nobody has."""
        after = self._next
        return [chunk for chunk in chunks if after[chunk] == chunk]

    def closest(self, area: float, but: list[int]) -> int:
        """The free chunk, but those, whose area is closest; of two the lighter one. There has to be one."""
        areas, after, before = self.areas, self._next, self._last
        above = below = bisect_left(areas, area)
        while True:
            while (at := after[above]) != above:
                after[above] = above = after[at]
            if above not in but:
                break
            above += 1
        while True:
            while (at := before[below]) != below:
                before[below] = below = before[at]
            if below - 1 not in but:
                break
            below -= 1
        if not below or (above < len(areas) and areas[above] - area < area - areas[below - 1]):
            return above
        return below - 1


def _fill(areas: list[int], order: list[int], sizes: list[int], limit: int) -> tuple[Parts, list[int]]:
    """So many chunks for each of these ranks, or for the first ones of them, and the rest, which is for one rank more.
    ``areas`` ascend."""
    pool, parts, left = _Pool(areas), [], sum(areas)
    world = len(sizes) + 1
    most, tolerance = _MOST_ABOVE * left / world, _TOLERANCE * left / world
    mean = left / len(areas)
    light = _End(order, pool, range(bisect_right(areas, mean)))
    dense = _End(order[::-1], pool, range(bisect_left(areas, mean), len(areas)))
    for rank, size in enumerate(sizes):
        target = min(left / (world - rank), most)
        found: list[int] | None = None
        best, taken = float("inf"), 0
        light.pass_on(dense)
        dense.pass_on(light)
        for chunks, area in _candidates(pool, light.first(size - 1), dense.first(size - 1), size, target):
            error = abs(area - target) if area <= limit else _MOST_SINGLES * (area - target)
            if error < best:
                found, best, taken = chunks, error, area
            if error <= tolerance:
                break
        if found is None:
            break
        pool.take(found)
        left -= taken
        parts.append(found)
    return parts, pool.free(range(len(areas)))


class _End:
    """The free chunks from one end of ``chunks`` on.

    When ranks have taken the last chunks of a dense document, its first ones have little work, and the last ones of a
    light document have much. Those go over to the other end and are the first ones there: what ``belongs`` here stays.
    """

    def __init__(self, chunks: list[int], pool: _Pool, belongs: range) -> None:
        self._chunks, self._pool, self._belongs = chunks, pool, belongs
        self._at = 0  # where free chunks begin
        self._come: list[int] = []  # from the other end

    def pass_on(self, other: _End) -> None:
        """Gives the chunks at the front that do not belong here to the other end."""
        chunks, is_gone, moved, at = self._chunks, self._pool.is_gone, [], self._at
        while at < len(chunks):
            chunk = chunks[at]
            if not is_gone[chunk]:
                if chunk in self._belongs:
                    break
                is_gone[chunk] = 1
                moved.append(chunk)
            at += 1
        self._at = at
        if moved:
            other._come = moved[::-1] + other._come

    def first(self, count: int) -> list[int]:
        """So many chunks, or all."""
        self._come = self._pool.free(self._come)
        found, at, chunks, is_gone = self._come[:count], self._at, self._chunks, self._pool.is_gone
        while len(found) < count and at < len(chunks):
            found += [chunk for chunk in chunks[at : at + count + 1] if not is_gone[chunk]]
            at += count + 1
        return found[:count]


def _candidates(
    pool: _Pool, lights: list[int], heavies: list[int], size: int, target: float
) -> Iterator[tuple[list[int], int]]:
    """Chunks for one rank, with their area: with one chunk that fits what two runs leave, with two, and so on."""
    areas = pool.areas
    light = list(accumulate(map(areas.__getitem__, lights), initial=0))
    heavy = list(accumulate(map(areas.__getitem__, heavies), initial=0))
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
            chunk = pool.closest((target - area) / missing, chunks)
            chunks.append(chunk)
            area += areas[chunk]
        yield chunks, area


def swap_down(parts: Sequence[Sequence[int]], work: Areas, limit: int) -> Parts | None:
    """Swaps chunks of ranks above ``limit`` with lighter ones of other ranks until no rank is above it; None if that is
    not reached in as many swaps as there are ranks. No swap brings the other rank above the limit."""
    if all(sum([work.of_chunk[chunk] for chunk in part]) <= limit for part in parts):
        return [list(part) for part in parts]
    found = [work.numbers(part) for part in parts]
    return [work.chunks(part) for part in found] if _swap_down(found, work.ascending, limit) else None


def _swap_down(parts: Parts, areas: list[int], limit: int) -> bool:
    """``swap_down`` in place, where ``areas`` ascend; False if it is not reached."""
    rooms = [limit - sum([areas[chunk] for chunk in part]) for part in parts]
    above = [rank for rank, room in enumerate(rooms) if room < 0]
    if not above or len(above) > len(parts) // 2:
        return not above
    owner = [0] * len(areas)
    for rank, part in enumerate(parts):
        for chunk in part:
            owner[chunk] = rank
    swaps = len(parts) - 1  # that are left
    for later, rank in zip(range(len(above) - 1, -1, -1), above):
        while rooms[rank] < 0:
            # A swap takes at most the room of the lightest rank, which gets less each time, and each later rank needs
            # a swap.
            excess, room = -rooms[rank], max(rooms)
            if room <= 0 or -(-excess // room) + later > swaps:
                return False
            swap = _best_swap(parts[rank], excess, room, areas, owner, rooms)
            swaps -= 1
            if swap is None:
                return False
            given, taken = swap
            other, less = owner[taken], areas[given] - areas[taken]
            for who, old, new, change in ((rank, given, taken, less), (other, taken, given, -less)):
                parts[who].remove(old)
                parts[who].append(new)
                rooms[who] += change
                owner[new] = who
    return True


def _best_swap(
    mine: list[int], excess: int, room: int, areas: list[int], owner: list[int], rooms: list[int]
) -> tuple[int, int] | None:
    """A chunk of a rank and one of another rank to swap it with: of pairs that take ``excess`` from it the one with the
    lightest chunk, which needs the fewest keys; else the pair that takes most from it. None if none does. ``areas``
    ascend; the ranks have ``rooms`` below the limit, of which ``room`` is the largest."""
    if room >= excess:
        for chunk in sorted(mine, key=areas.__getitem__):
            area = areas[chunk]
            fits = bisect_right(areas, area - excess)  # chunks that are lighter by what is to go
            for other in range(fits - 1, max(fits - 1 - _NEIGHBOURS, -1), -1):
                less = area - areas[other]
                if less > room:
                    break
                if less <= rooms[owner[other]]:
                    return chunk, other
    most, found = 0, None
    for chunk in mine:
        area = areas[chunk]
        first = bisect_left(areas, area - room)  # chunks that are lighter by what the lightest rank has room for
        end = min(first + _NEIGHBOURS, len(areas))
        for other in range(bisect_right(areas, area - excess, first, end), end):
            less = area - areas[other]
            if less <= most:
                break
            if less <= rooms[owner[other]]:
                most, found = less, (chunk, other)
                break
    return found
