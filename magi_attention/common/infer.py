# SPDX-License-Identifier: Apache-2.0
"""Slices of packed sequences: cu_seqlens, sliding windows, global prefixes.

A window ``(left, right)`` lets query row ``i`` of a segment with ``sq`` queries and ``sk`` keys see the keys
``c - left .. c + right`` with ``c = i + sk - sq`` (aligned to the end of the segment). A side of -1, or of at
least ``sk - 1``, is unlimited. With more queries than keys the first ``sq - sk`` rows see nothing.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, TypeAlias

import numpy as np
from numpy.typing import NDArray

from magi_attention.common.scalars import as_int, as_int_array, as_pairs, as_window
from magi_attention.common.slices import BICAUSAL, CAUSAL, FULL, INVCAUSAL, MOST_TOKENS, cut_k, trim
from magi_attention.errors import ContractError

if TYPE_CHECKING:
    import torch

CuSeqlens: TypeAlias = "Sequence[int] | NDArray[np.integer] | torch.Tensor"
_LENGTHS = "If these are the lengths of documents, Mask.from_lengths takes them."


def as_cu_seqlens(value: object, name: str = "cu_seqlens") -> NDArray[np.int64]:
    """Cumulative lengths as int64 ``(n + 1,)`` from a list, array or tensor (CPU or CUDA).

    ``ContractError`` unless they are integers in one dimension that start at 0 and never decrease; it says what they
    may be in place of that: lengths, or cumulative lengths whose array is filled up behind them.
    """
    cu = as_int_array(value, name)
    if cu.ndim != 1 or not len(cu):
        raise ContractError(f"{name} has shape {cu.shape}; give a 1-D array of integers such as [0, 512, 2048].")
    negative = np.flatnonzero(cu < 0)
    if cu[0] == 0 and len(negative) and (np.diff(cu[: negative[0]]) >= 0).all():
        end = int(negative[0])
        raise ContractError(
            f"{name} is {cu[end]} from entry {end} on, behind the total {cu[end - 1]}, as what fills up an array; give "
            f"the entries before it, {name}[:{end}]."
        )
    if cu[0] != 0:
        hint = f" {_LENGTHS}" if (cu > 0).all() else ""
        raise ContractError(f"{name} starts at {cu[0]}; the first entry must be 0.{hint}")
    falls = np.flatnonzero(np.diff(cu) < 0)
    if len(falls):
        i = int(falls[0])
        hint = "" if len(negative) else f" {_LENGTHS}"
        raise ContractError(
            f"{name} decreases from {cu[i]} to {cu[i + 1]} at entry {i + 1}; give cumulative lengths "
            f"[0, n0, n0 + n1, ...] that never decrease.{hint}"
        )
    return cu


def cumulative(lengths: object, name: str = "lengths") -> NDArray[np.int64]:
    """``[0, n0, n0 + n1, ...]``, int64 ``(n + 1,)``, of document lengths from a list, array or tensor.

    ``ContractError`` unless they are integers >= 0 in one dimension.
    """
    sizes = as_int_array(lengths, name)
    if sizes.ndim != 1:
        raise ContractError(f"{name} has shape {sizes.shape}; give a 1-D array of integers such as [512, 1536].")
    if (sizes < 0).any():
        i = int(np.flatnonzero(sizes < 0)[0])
        raise ContractError(f"{name}[{i}] is {sizes[i]}; lengths count tokens and must be >= 0.")
    total = sum(sizes.tolist())  # Python's integers, which never overflow
    if total >= MOST_TOKENS:
        raise ContractError(f"{name} add up to {total:,} tokens; give fewer than 2**60.")
    return np.concatenate([[0], np.cumsum(sizes)]).astype(np.int64)


def documents(cu_seqlens: CuSeqlens, total: int) -> tuple[int, ...]:
    """``cu_seqlens`` of one packed sequence of ``total`` tokens, without empty documents.

    ``ContractError`` if they are no cumulative lengths or end elsewhere.
    """
    cu = as_cu_seqlens(cu_seqlens)
    if cu[-1] != total:
        raise ContractError(
            f"cu_seqlens end at {cu[-1]}, but the sequence has {total} tokens; describe all of them, without the pad "
            "that a plan adds."
        )
    return tuple(np.unique(cu).tolist())


def window_slices(segments: NDArray[np.int64], left: int, right: int, prefix: int = 0) -> NDArray[np.int64]:
    """Disjoint slices of a sliding window on every segment ``(q0, q1, k0, k1)``.

    ``prefix`` keys at the start of every segment are seen by each row as far as its right side reaches,
    whatever ``left`` says; the window itself then covers the other keys.
    """
    left, right = as_window((left, right))
    prefix = as_int(prefix, "The global prefix")
    if prefix < 0:
        raise ContractError(f"The global prefix is {prefix}; it counts keys and must be >= 0.")
    q0, q1, k0, k1 = segments.T
    sk = k1 - k0
    q0 = np.maximum(q0, q1 - sk)
    lefts = np.where((left == -1) | (left >= sk - 1), sk, left)
    rights = np.where((right == -1) | (right >= sk - 1), sk, right)
    limited = not (left == -1 and right == -1)
    heads = np.minimum(prefix, sk) if limited else np.zeros_like(sk)
    local = _band(q0, q1, k1, lefts, rights)
    pieces, parent = cut_k(local, k0 + heads, k1)
    order = [parent]
    parts = [pieces]
    if heads.any():
        head_pieces, head_parent = cut_k(_band(q0, q1, k1, sk, rights), k0, k0 + heads)
        parts.insert(0, head_pieces)
        order.insert(0, head_parent)
    merged, owner = np.concatenate(parts), np.concatenate(order)
    return merged[np.argsort(owner, kind="stable")]


def _band(
    q0: NDArray[np.int64],
    q1: NDArray[np.int64],
    k1: NDArray[np.int64],
    left: NDArray[np.int64],
    right: NDArray[np.int64],
) -> NDArray[np.int64]:
    """Imaginary bi-causal slice whose real keys are cut out of it: the window before clipping."""
    start = k1 - (q1 - q0) - left
    return np.stack([q0, q1, start, k1 + right, np.full_like(q0, BICAUSAL)], axis=1)


def varlen_slices(
    cu_q: NDArray[np.int64],
    cu_k: NDArray[np.int64],
    causal: bool = False,
    window: tuple[int, int] = (-1, -1),
    prefix: int = 0,
) -> NDArray[np.int64]:
    """One block per sample, full, causal or windowed; samples never see each other."""
    if len(cu_q) != len(cu_k):
        raise ContractError(
            f"cu_seqlens_q describes {len(cu_q) - 1} samples and cu_seqlens_k {len(cu_k) - 1}; "
            "give both the same number of samples."
        )
    window = as_window(window)
    windowed = window != (-1, -1)
    if causal and windowed:
        raise ContractError(
            f"causal=True together with window_size={window}; "
            "write a causal window as window_size=(w, 0) with causal=False."
        )
    segments = np.stack([cu_q[:-1], cu_q[1:], cu_k[:-1], cu_k[1:]], axis=1)
    if windowed:
        return window_slices(segments, *window, prefix)
    kind = np.full((len(segments), 1), CAUSAL if causal else FULL)
    return np.concatenate([segments, kind], axis=1)


def causal_slices_with_blocks(
    cu: NDArray[np.int64], blocks: Iterable[Iterable[int]], window: tuple[int, int]
) -> NDArray[np.int64]:
    """Causal or windowed documents, and the later keys of each block: a triangle beside the band, so that no pair is in
    two slices."""
    left, right = as_window(window)
    if right != 0:
        raise ContractError(f"window is {(left, right)}; a query sees later keys in its block alone, so give (w, 0).")
    start, end = _as_blocks(blocks, cu).T
    later = np.stack([start, end - 1, start + 1, end, np.full_like(start, INVCAUSAL)], axis=1)
    return np.concatenate([varlen_slices(cu, cu, window=(left, 0)), later[end - start > 1]])


def _as_blocks(blocks: Iterable[Iterable[int]], cu: NDArray[np.int64]) -> NDArray[np.int64]:
    """Token ranges inside documents, ascending and disjoint."""
    pairs = as_pairs(blocks, "blocks")
    pairs = pairs[np.argsort(pairs[:, 0], kind="stable")]
    start, end = pairs.T
    limit = cu[np.minimum(np.searchsorted(cu, start, side="right"), len(cu) - 1)]  # the end of the document
    for is_bad, what in (
        (start >= end, "is empty; leave it out, ranges are half-open with start < end"),
        ((start < 0) | (end > cu[-1]), f"is not inside the {cu[-1]} tokens; blocks are ranges of the packed sequence"),
        (end > limit, "reaches into another document; cut it there"),
        (end > np.append(start, cu[-1])[1:], "overlaps the next one; blocks are disjoint"),
    ):
        bad = np.flatnonzero(is_bad)
        if len(bad):
            raise ContractError(f"Block [{start[bad[0]]}, {end[bad[0]]}) {what}.")
    return pairs


def dense_slices(mask: NDArray[np.bool_]) -> NDArray[np.int64]:
    """Exact disjoint slices of a boolean mask: every run of a row joins the diagonal it continues."""
    if mask.ndim != 2:
        raise ContractError(f"A dense mask has two dimensions (queries, keys), not {mask.ndim}.")
    edges = np.diff(mask.astype(np.int8), axis=1, prepend=0, append=0)
    rows, starts = np.nonzero(edges == 1)
    ends = np.nonzero(edges == -1)[1]
    open_slices: dict[tuple[int, int], list[int]] = {}  # last row's (k0, k1) -> slice, step in k0 and k1
    done: list[list[int]] = []
    previous = -1
    for row, k0, k1 in zip(rows.tolist(), starts.tolist(), ends.tolist()):
        if row != previous:
            current = {} if row != previous + 1 else open_slices
            last_row, open_slices, previous = current, {}, row
        entry = _continue(last_row, k0, k1)
        if entry is None:
            entry = [row, row + 1, k0, k1, -1]
            done.append(entry)
        entry[1] = row + 1
        open_slices[(k0, k1)] = entry
        # A causal slice is named by the widest right edge, an inverse one by the first left edge.
        entry[3] = k1
    for entry in done:
        entry[4] = max(entry[4], FULL)
    return trim(np.array(done, dtype=np.int64).reshape(-1, 5))


def _continue(last_row: dict[tuple[int, int], list[int]], k0: int, k1: int) -> list[int] | None:
    for kind, step in ((0, (0, 0)), (1, (0, 1)), (2, (1, 0)), (3, (1, 1))):
        key = (k0 - step[0], k1 - step[1])
        entry = last_row.get(key)
        if entry is not None and entry[4] in (-1, kind):
            entry[4] = kind
            del last_row[key]
            return entry
    return None
