# SPDX-License-Identifier: Apache-2.0
"""Masks to test with: random disjoint slices and the named families of the published benchmarks.

Random masks come from a random guillotine partition of the ``total_q x total_k`` rectangle. Parts are
dropped (holes), shrunk, given a random type, or split along a diagonal into two slices whose rectangles
overlap while their pairs do not. The order is shuffled, so that q ranges are unsorted and repeat.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from magi_attention.common.slices import BICAUSAL, CAUSAL, FULL, INVCAUSAL, SliceTable, empty_slices

ALL_TYPES = (FULL, CAUSAL, INVCAUSAL, BICAUSAL)


def random_slices(
    rng: np.random.Generator,
    total_q: int,
    total_k: int,
    max_slices: int = 16,
    types: Sequence[int] = ALL_TYPES,
    drop: float = 0.2,
    shrink: float = 0.3,
    diagonal_split: float = 0.25,
) -> np.ndarray:
    """Random disjoint slices, int64 ``(N, 5)`` with ``N <= max_slices`` (N may be 0), unsorted.

    ``drop``, ``shrink`` and ``diagonal_split`` are the probabilities that a part of the partition is left
    out, made smaller, or split along a diagonal into a CAUSAL and an INVCAUSAL slice with overlapping
    rectangles (only when ``types`` has both). Slices with more rows than keys occur for all types, so
    rows without keys and whole slices without pairs occur too.
    """
    if total_q <= 0 or total_k <= 0 or max_slices <= 0:
        return empty_slices()
    rects = _partition(rng, total_q, total_k, int(rng.integers(1, max_slices + 1)))
    can_split = CAUSAL in types and INVCAUSAL in types
    rows: list[list[int]] = []
    for rect in rects:
        if rng.random() < drop:
            continue
        if rng.random() < shrink:
            rect = _shrunk(rng, rect)
        q0, q1, k0, k1 = rect
        if can_split and q1 - q0 <= k1 - k0 and rng.random() < diagonal_split:
            rows.append([*rect, CAUSAL])
            gap = (k1 - k0) - (q1 - q0) + 1
            if q1 - q0 > 1:  # what the causal slice leaves out, a triangle touching its diagonal
                rows.append([q0, q1 - 1, k0 + gap, k1, INVCAUSAL])
        else:
            rows.append([*rect, int(rng.choice(types))])
    if len(rows) > max_slices:
        rows = [rows[i] for i in rng.permutation(len(rows))[:max_slices]]
    if not rows:
        return empty_slices()
    return np.array(rows, dtype=np.int64)[rng.permutation(len(rows))]


def _partition(rng: np.random.Generator, total_q: int, total_k: int, parts: int) -> list[list[int]]:
    rects = [[0, total_q, 0, total_k]]
    for _ in range(4 * parts):
        if len(rects) >= parts:
            break
        rect = rects.pop(int(rng.integers(len(rects))))
        axis = 2 * int(rng.integers(2))
        low, high = rect[axis], rect[axis + 1]
        if high - low < 2:
            rects.append(rect)
            continue
        cut = int(rng.integers(low + 1, high))
        first, second = list(rect), list(rect)
        first[axis + 1] = second[axis] = cut
        rects += [first, second]
    return rects


def _shrunk(rng: np.random.Generator, rect: list[int]) -> list[int]:
    out = list(rect)
    for axis in (0, 2):
        low, high = rect[axis], rect[axis + 1]
        out[axis] = int(rng.integers(low, high))
        out[axis + 1] = int(rng.integers(out[axis] + 1, high + 1))
    return out


def random_cu_seqlens(rng: np.random.Generator, total: int, num_docs: int) -> np.ndarray:
    """Bounds ``0 = c_0 < ... < c_n = total`` of at most ``num_docs`` documents, int64."""
    inner = rng.integers(1, total, size=max(num_docs - 1, 0)) if total > 1 else np.zeros(0, np.int64)
    return np.unique(np.concatenate([[0], inner, [total]])).astype(np.int64)


def full(total: int) -> SliceTable:
    """Every token sees every token."""
    return SliceTable.from_ranges([(0, total)], [(0, total)], FULL)


def causal(total: int) -> SliceTable:
    """Every token sees itself and what is before it."""
    return SliceTable.from_ranges([(0, total)], [(0, total)], CAUSAL)


def varlen(cu_seqlens: Sequence[int], kind: int = FULL) -> SliceTable:
    """One slice of type ``kind`` per document ``[cu[i], cu[i + 1])``."""
    docs = list(zip(cu_seqlens[:-1], cu_seqlens[1:]))
    return SliceTable.from_ranges(docs, docs, kind)


def sliding_window_causal(total: int, window: int) -> SliceTable:
    """Token ``i`` sees ``max(0, i - window) .. i``: a CAUSAL head, then a BICAUSAL band."""
    head = min(window + 1, total)
    q, k, kinds = [(0, head)], [(0, head)], [CAUSAL]
    if total > head:
        q, k, kinds = [*q, (head, total)], [*k, (1, total)], [*kinds, BICAUSAL]
    return SliceTable.from_ranges(q, k, kinds)


def sliding_window(total: int, window: int) -> SliceTable:
    """Token ``i`` sees ``max(0, i - window) .. min(total - 1, i + window)``; needs ``total > 2 * window``."""
    w = window
    return SliceTable.from_ranges(
        [(0, w), (w, total - w), (total - w, total)],
        [(0, 2 * w), (0, total), (total - 2 * w, total)],
        [CAUSAL, BICAUSAL, INVCAUSAL],
    )


def varlen_block_causal(cu_seqlens: Sequence[int], block: int) -> SliceTable:
    """Per document, blocks of ``block`` tokens; a block sees itself and the document's earlier blocks."""
    q, k = [], []
    for start, end in zip(cu_seqlens[:-1], cu_seqlens[1:]):
        for low in range(int(start), int(end), block):
            high = min(low + block, int(end))
            q.append((low, high))
            k.append((int(start), high))
    return SliceTable.from_ranges(q, k, FULL)


def prefix_causal(total: int, prefix: int) -> SliceTable:
    """A bidirectional prefix, then causal tokens that see all before them."""
    return SliceTable.from_ranges([(0, prefix), (prefix, total)], [(0, prefix), (0, total)], [FULL, CAUSAL])


def share_question(total: int, question: int, answers: int) -> SliceTable:
    """One causal question, then independent causal answers that all see the question."""
    bounds = np.linspace(question, total, answers + 1).astype(int)
    docs = [(int(a), int(b)) for a, b in zip(bounds[:-1], bounds[1:]) if b > a]
    q = [(0, question), *docs, *docs]
    k = [(0, question), *docs, *[(0, question)] * len(docs)]
    return SliceTable.from_ranges(q, k, [CAUSAL] * (1 + len(docs)) + [FULL] * len(docs))


def global_and_window(total: int, sink_tokens: int, window: int) -> SliceTable:
    """Causal sliding window plus ``sink_tokens`` first tokens that every later token sees."""
    g, first = sink_tokens, min(sink_tokens + window, total)
    q, k, kinds = [(0, first)], [(0, first)], [CAUSAL]
    if total > first:
        q += [(first, total)] * 2
        k += [(0, g), (first - window + 1, total)]
        kinds += [FULL, BICAUSAL]
    return SliceTable.from_ranges(q, k, kinds)


def mask_families(total: int) -> dict[str, SliceTable]:
    """Named self-attention masks over ``total >= 16`` tokens; documents and windows scale with it."""
    cu = [0, total // 8, total // 8 + total // 3, total - total // 4, total]
    window = max(total // 8, 1)
    quarter, half = total // 4, total // 2
    return {
        "full": full(total),
        "causal": causal(total),
        "varlen_full": varlen(cu, FULL),
        "varlen_causal": varlen(cu, CAUSAL),
        "sliding_window_causal": sliding_window_causal(total, window),
        "sliding_window": sliding_window(total, window),
        "varlen_block_causal": varlen_block_causal(cu, max(total // 16, 1)),
        "prefix_causal": prefix_causal(total, total // 3),
        "share_question": share_question(total, quarter, 4),
        "global_and_window": global_and_window(total, max(total // 16, 1), window),
        "inv_causal": SliceTable.from_ranges([(0, total)], [(0, total)], INVCAUSAL),
        "diagonal": SliceTable.from_ranges([(0, total)], [(0, total)], BICAUSAL),
        # Keys that nobody sees, rows that see nothing, unsorted and repeated q ranges.
        "holes": SliceTable.from_ranges(
            [(half, total - quarter), (0, quarter), (half, total - quarter)],
            [(half, total - quarter), (0, quarter // 2), (0, quarter)],
            [CAUSAL, FULL, INVCAUSAL],
        ),
        "empty": SliceTable(empty_slices()),
    }
