# SPDX-License-Identifier: Apache-2.0
"""Assigning n workloads to k buckets so that the heaviest bucket is light.

Each function is pure and returns ``(heaviest load, bucket contents or None)``; contents are workload indices
in the order of assignment.
"""

from __future__ import annotations

import heapq
import logging
import random
from collections.abc import Callable, Iterator, Sequence

from magi_attention.errors import ContractError
from magi_attention.meta.solver.affinity import BaseDispatchAffinity

Result = tuple[float, list[list[int]] | None]

_log = logging.getLogger("magi_attention.meta")
MAX_SEARCH_STEPS = 20_000  # per limit, about 0.1 s; exact search is exponential in the number of chunks


def lower_bound(work: Sequence[float], k: int) -> Result:
    """The mean load: no assignment can beat it."""
    return sum(work) / k, None


def dynamic_programming(work: Sequence[float], k: int) -> Result:
    """Exact value over all subsets, O(k 3^n); for up to about 14 workloads."""
    n = len(work)
    if n > 16:
        raise ContractError(f"Dynamic programming over {n} workloads would take 3**{n} steps; use binary search.")
    load: list[float] = [0] * (1 << n)
    for subset in range(1, 1 << n):
        low = subset & -subset
        load[subset] = load[subset ^ low] + work[low.bit_length() - 1]
    best = load[:]
    for _ in range(1, k):
        following = best[:]
        for subset in range(1, 1 << n):
            part = subset
            while part:
                value = max(best[subset ^ part], load[part])
                if value < following[subset]:
                    following[subset] = value
                part = (part - 1) & subset
        best = following
    return best[-1], None


def binary_search(work: Sequence[float], k: int, sizes: int | None = None) -> Result:
    """Smallest limit for which backtracking finds an assignment; starts from the greedy one.

    ``sizes`` forces that many workloads into every bucket. The problem is NP-hard: a limit whose search exceeds
    ``MAX_SEARCH_STEPS`` counts as infeasible, and one log line then says how far the result may be from the best.
    """
    order = sorted(range(len(work)), key=lambda i: (-work[i], i))
    value, best = min_heap(work, k)
    assert best is not None
    floor = low = max(max(work, default=0), -(-sum(work) // k))
    high: float = int(value) - 1
    gave_up = False
    while low <= high:
        limit = (low + high) // 2
        try:
            found = _fits(work, order, k, limit, sizes)
        except SearchBudgetError:
            found, gave_up = None, True
        if found is None:
            low = limit + 1
        else:
            best, high = found, limit - 1
    if sizes is None and len(work) >= k:
        _fill_empty(work, best)
    value = _heaviest(work, best)
    if gave_up:
        _log.warning(
            "The exact dispatch of %d chunks to %d ranks was cut short; its heaviest rank is at most %.3g%% over the "
            "best possible. Larger chunks make it exact, MinHeapDispatchAlg makes it fast.",
            len(work),
            k,
            100 * (value / max(floor, 1) - 1),
        )
    return value, best


class SearchBudgetError(Exception):
    """Inner signal: the search over one limit took too many steps."""


def _fill_empty(work: Sequence[float], buckets: list[list[int]]) -> None:
    """Gives empty buckets the lightest workload of the fullest one; the heaviest load cannot grow."""
    for bucket in buckets:
        fullest = max(buckets, key=len)
        if not bucket and len(fullest) > 1:
            item = min(fullest, key=lambda i: (work[i], i))
            fullest.remove(item)
            bucket.append(item)


def _fits(
    work: Sequence[float], order: Sequence[int], k: int, limit: float, sizes: int | None
) -> list[list[int]] | None:
    """Depth-first search for an assignment with no load above ``limit``; heaviest workloads first.

    Buckets of equal load (and count) are alike, and a state that failed once is not searched again.
    """
    loads: list[float] = [0] * k
    counts = [0] * k
    trail: list[tuple[int, Iterator[int]]] = []  # bucket chosen at each depth and the ones still to try
    failed: set[tuple[object, ...]] = set()
    room = len(order) if sizes is None else sizes
    slack, smallest = k * limit - sum(work), work[order[-1]] if order else 0
    steps, descend = 0, True
    while len(trail) < len(order) or not descend:
        steps += 1
        if steps > MAX_SEARCH_STEPS:
            raise SearchBudgetError
        item = work[order[len(trail)]] if descend else work[order[len(trail) - 1]]
        if descend:
            wasted = sum(limit - load for load in loads if limit - load < smallest)
            state = (len(trail), *sorted(zip(loads, counts if sizes is not None else loads)))
            options = [] if wasted > slack or state in failed else _choices(loads, counts, item, limit, room, sizes)
            failed.add(state)  # true unless this branch succeeds, and then nobody asks
            untried = iter(options)
        else:
            bucket, untried = trail.pop()
            loads[bucket] -= item
            counts[bucket] -= 1
        chosen = next(untried, None)
        descend = chosen is not None
        if chosen is not None:
            loads[chosen] += item
            counts[chosen] += 1
            trail.append((chosen, untried))
        elif not trail:
            return None
    buckets: list[list[int]] = [[] for _ in range(k)]
    for index, (bucket, _) in zip(order, trail):
        buckets[bucket].append(index)
    return buckets


def _choices(
    loads: Sequence[float], counts: Sequence[int], item: float, limit: float, room: int, sizes: int | None
) -> list[int]:
    seen, out = set(), []
    for bucket in sorted(range(len(loads)), key=lambda b: (loads[b], b)):
        alike = (loads[bucket], counts[bucket] if sizes is not None else 0)
        if loads[bucket] + item <= limit and counts[bucket] < room and alike not in seen:
            seen.add(alike)
            out.append(bucket)
    return out


def backtracking_pruning(work: Sequence[float], k: int) -> Result:
    """Exact under equal counts: n must be a multiple of k."""
    return binary_search(work, k, sizes=_equal_count(len(work), k))


def min_heap(work: Sequence[float], k: int) -> Result:
    """Longest first: each workload to the least loaded bucket with room (at most ceil(n / k)).

    Equal workloads go by higher index first, equal loads to the lower bucket. No bucket stays empty while
    n >= k: the last workloads are kept for buckets that have none.
    """
    n, cap = len(work), -(-len(work) // k)
    heap: list[tuple[float, int]] = [(0, bucket) for bucket in range(k)]
    buckets: list[list[int]] = [[] for _ in range(k)]
    empty, placed = k, 0
    items = sorted(range(n - 1, -1, -1), key=work.__getitem__, reverse=True)
    while empty and placed < n:
        parked = []
        while n - placed <= empty and buckets[heap[0][1]]:
            parked.append(heapq.heappop(heap))
        bucket = heap[0][1]
        empty -= not buckets[bucket]
        _to_lightest(heap, buckets, work, items[placed : placed + 1], cap)
        for entry in parked:
            heapq.heappush(heap, entry)
        placed += 1
    _to_lightest(heap, buckets, work, items[placed:], cap)
    return _heaviest(work, buckets), buckets


def _to_lightest(
    heap: list[tuple[float, int]], buckets: list[list[int]], work: Sequence[float], items: Sequence[int], cap: int
) -> None:
    """Each of ``items`` to the least loaded bucket of the ``heap``, which a bucket with ``cap`` of them leaves."""
    for item in items:
        load, bucket = heap[0]
        mine = buckets[bucket]
        mine.append(item)
        if len(mine) < cap:
            heapq.heapreplace(heap, (load + work[item], bucket))
        else:
            heapq.heappop(heap)


def topp_heap(
    work: Sequence[float],
    k: int,
    affinities: Sequence[BaseDispatchAffinity],
    make_affinity: Callable[[], BaseDispatchAffinity],
    top_p: float,
    batch: int = 1,
) -> Result:
    """Longest first with equal counts; among the ``ceil(k top_p)`` least loaded buckets with room, the one
    whose accumulated affinity is closest. The candidates are renewed after ``batch`` workloads."""
    n, cap = len(work), _equal_count(len(work), k)
    width = max(1, -(-int(round(k * top_p * 1e9)) // 10**9))
    loads: list[float] = [0] * k
    buckets: list[list[int]] = [[] for _ in range(k)]
    held = [make_affinity() for _ in range(k)]
    candidates: list[int] = []
    for placed, item in enumerate(sorted(range(n), key=lambda i: (-work[i], -i))):
        candidates = [b for b in candidates if len(buckets[b]) < cap]
        if placed % batch == 0 or not candidates:
            free = [b for b in range(k) if len(buckets[b]) < cap]
            candidates = sorted(free, key=lambda b: (loads[b], b))[:width]
        candidates.sort(key=lambda b: (loads[b], b))
        bucket = candidates[affinities[item].get_closest_affinity_idx([held[b] for b in candidates])]
        loads[bucket] += work[item]
        buckets[bucket].append(item)
        held[bucket].update(affinities[item])
    return _heaviest(work, buckets), buckets


def random_select(work: Sequence[float], k: int, seed: int) -> Result:
    """A permutation drawn from a private generator with a fixed seed, cut into equal blocks."""
    size = _equal_count(len(work), k)
    order = list(range(len(work)))
    random.Random(seed).shuffle(order)
    buckets = [order[i * size : (i + 1) * size] for i in range(k)]
    return _heaviest(work, buckets), buckets


def sequential(work: Sequence[float], k: int) -> Result:
    """Contiguous blocks; the first ``n % k`` buckets hold one more."""
    size, extra = divmod(len(work), k)
    buckets, start = [], 0
    for bucket in range(k):
        stop = start + size + (bucket < extra)
        buckets.append(list(range(start, stop)))
        start = stop
    return _heaviest(work, buckets), buckets


def sorted_sequential(
    work: Sequence[float],
    k: int,
    sample_ids: Sequence[Sequence[int]],
    sample_areas: Sequence[int],
    ratio: float,
) -> Result:
    """Samples by area, largest first; a sample's free workloads, last to first, fill the least loaded
    bucket, moving on after ``ceil(ratio * count)`` of them (ratio < 1) or when it is full."""
    n, cap = len(work), _equal_count(len(work), k)
    loads: list[float] = [0] * k
    buckets: list[list[int]] = [[] for _ in range(k)]
    free = [True] * n
    members: dict[int, list[int]] = {}
    for item, ids in enumerate(sample_ids):
        for sample in set(ids):
            members.setdefault(sample, []).append(item)
    for sample in sorted(range(len(sample_areas)), key=lambda s: (-sample_areas[s], s)):
        items = [i for i in reversed(members.get(sample, [])) if free[i]]
        quota = n if ratio >= 1 else max(1, -(-int(round(ratio * len(items) * 1e9)) // 10**9))
        bucket, used = -1, 0
        for item in items:
            if bucket < 0 or used >= quota or len(buckets[bucket]) >= cap:
                bucket, used = _least_loaded(loads, buckets, cap), 0
            buckets[bucket].append(item)
            loads[bucket] += work[item]
            free[item] = False
            used += 1
    for item in (i for i in range(n) if free[i]):
        bucket = _least_loaded(loads, buckets, cap)
        buckets[bucket].append(item)
        loads[bucket] += work[item]
    return _heaviest(work, buckets), buckets


def _least_loaded(loads: list[float], buckets: list[list[int]], cap: int) -> int:
    return min((b for b in range(len(loads)) if len(buckets[b]) < cap), key=lambda b: (loads[b], b))


def _equal_count(n: int, k: int) -> int:
    if n % k:
        raise ContractError(
            f"{n} chunks do not divide over {k} ranks, and this dispatch algorithm gives every rank the same "
            "number; change the chunk size or use MinHeapDispatchAlg, BSDispatchAlg or SequentialDispatchAlg."
        )
    return n // k


def _heaviest(work: Sequence[float], buckets: list[list[int]]) -> float:
    return max((sum(map(work.__getitem__, bucket)) for bucket in buckets), default=0)
