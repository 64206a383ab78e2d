# SPDX-License-Identifier: Apache-2.0
"""AttnSlices as one integer array, and the exact algebra on them.

A slice array has shape ``(N, 5)``, int64, columns ``q_start, q_end, k_start, k_end, type``. With local
indices ``i = q - q_start`` and ``j = k - k_start`` and lengths ``sq``, ``sk`` the allowed pairs are

=========  ====  ===============================
type       int   allowed
=========  ====  ===============================
FULL       0     all
CAUSAL     1     ``j <= i + sk - sq``
INVCAUSAL  2     ``j >= i``
BICAUSAL   3     ``i <= j <= i + sk - sq``
=========  ====  ===============================

All functions are vectorised over slices, take and return plain arrays and never change their input.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from enum import Enum
from numbers import Integral
from typing import TYPE_CHECKING, Any, TypeAlias, overload

import numpy as np
from numpy.typing import NDArray

from magi_attention.common.enum import AttnMaskType
from magi_attention.common.plan_cache import Kind, PlanCache
from magi_attention.common.scalars import as_int_array, as_pairs
from magi_attention.errors import ContractError, RangeError

if TYPE_CHECKING:
    import torch

MaskTypes: TypeAlias = Iterable[int | str | AttnMaskType] | int | str | AttnMaskType  # one for all slices, or one each

FULL, CAUSAL, INVCAUSAL, BICAUSAL = 0, 1, 2, 3
Q0, Q1, K0, K1, TYPE = range(5)
_UNBOUNDED = np.int64(1) << 60
MOST_TOKENS = 1 << 60  # positions stay below it, so that sums of two are int64
MOST_PAIRS = 1 << 62  # of one mask; below it twice their number, which areas() computes, is int64
MOST_POSITION = (1 << 31) - 1  # that kernels take
_AREA: Kind[None, int] = Kind("allowed pairs")
_DIGEST: Kind[None, bytes] = Kind("digest")
_TENSORS: Kind[torch.device, tuple[torch.Tensor, torch.Tensor, torch.Tensor]] = Kind("ranges and types")


def empty_slices() -> NDArray[np.int64]:
    return np.zeros((0, 5), dtype=np.int64)


@overload
def areas(slices: NDArray[np.int64]) -> NDArray[np.int64]: ...


@overload
def areas(slices: NDArray[np.int64], dtype: type[np.float64]) -> NDArray[np.float64]: ...


def areas(slices: NDArray[np.int64], dtype: type[np.int64] | type[np.float64] = np.int64) -> NDArray[Any]:
    """Number of allowed pairs of each slice, ``(N,)``; in float64 about right where int64 would overflow."""
    sq = slices[:, Q1] - slices[:, Q0]
    sk = slices[:, K1] - slices[:, K0]
    rows = np.minimum(sq, sk)
    trapezoid = (2 * sk - rows + 1).astype(dtype, copy=False) * rows // 2
    height: NDArray[Any] = sq.astype(dtype, copy=False)
    band = np.where(sk >= sq, height * (sk - sq + 1), 0)
    kind = slices[:, TYPE]
    out = np.where(kind == FULL, height * sk, np.where(kind == BICAUSAL, band, trapezoid))
    return np.where((sq > 0) & (sk > 0), out, 0)


def check_countable(slices: NDArray[np.int64], total_q: int, total_k: int) -> None:
    """``ContractError`` if the tokens of a mask, or its allowed pairs, are more than int64 arithmetic can count.

    Causal attention may have up to 3,037,000,499 tokens, full attention 2,147,483,647.
    """
    if total_q * total_k < MOST_PAIRS:  # Python's integers; no mask in it can have more
        return
    if max(total_q, total_k) >= MOST_TOKENS:
        raise ContractError(f"The sequence has {max(total_q, total_k):,} tokens; give fewer than 2**60.")
    pairs = float(areas(slices, np.float64).sum())
    if pairs >= MOST_PAIRS:
        raise ContractError(
            f"The mask allows {pairs:,.0f} (query, key) pairs, and fewer than {MOST_PAIRS:,} (2**62) can be counted; "
            "shorten the sequence, or what a query sees."
        )


def trim(slices: NDArray[np.int64]) -> NDArray[np.int64]:
    """Drops rows that see nothing and slices without pairs; afterwards non-FULL slices have sq <= sk."""
    return trim_with_index(slices)[0]


def trim_with_index(slices: NDArray[np.int64]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """As ``trim``, and which of the slices these are."""
    sq, sk = slices[:, Q1] - slices[:, Q0], slices[:, K1] - slices[:, K0]
    kind, excess = slices[:, TYPE], sq > sk
    index = np.flatnonzero((sq > 0) & (sk > 0) & ~(excess & (kind == BICAUSAL)))
    out = slices[index]
    for kind_of, edge, sign in ((CAUSAL, Q0, 1), (INVCAUSAL, Q1, -1)):
        at = np.flatnonzero((excess & (kind == kind_of))[index])
        out[at, edge] += sign * (sq - sk)[index[at]]
    return out, index


def cut_q(
    slices: NDArray[np.int64], start: NDArray[np.int64] | int, end: NDArray[np.int64] | int
) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Rows ``[start, end)`` of each trimmed slice; returns ``(pieces, parent index)``.

    ``start`` and ``end`` are global rows, scalars or one per slice.
    """
    a = np.clip(start, slices[:, Q0], slices[:, Q1])
    b = np.clip(end, slices[:, Q0], slices[:, Q1])
    out = slices.copy()
    causal = (slices[:, TYPE] & 1) == 1
    inverse = (slices[:, TYPE] & 2) == 2
    out[:, Q0], out[:, Q1] = a, b
    out[:, K0] += np.where(inverse, a - slices[:, Q0], 0)
    out[:, K1] -= np.where(causal, slices[:, Q1] - b, 0)
    keep = np.flatnonzero((b > a) & (out[:, K1] > out[:, K0]))
    return out[keep], keep


def cut_k(
    slices: NDArray[np.int64], start: NDArray[np.int64] | int, end: NDArray[np.int64] | int
) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Keys ``[start, end)`` of each trimmed slice; returns ``(pieces, parent index)``.

    ``start`` and ``end`` are global keys, scalars or one per slice. One slice gives up to three disjoint
    pieces whose areas sum to the number of allowed pairs inside the window.
    """
    n = len(slices)
    a = np.clip(start, slices[:, K0], slices[:, K1]) - slices[:, K0]
    b = np.clip(end, slices[:, K0], slices[:, K1]) - slices[:, K0]
    sq = slices[:, Q1] - slices[:, Q0]
    diagonal = (slices[:, K1] - slices[:, K0]) - sq
    kind = slices[:, TYPE]
    causal = (kind & 1) == 1
    inverse = (kind & 2) == 2
    # A row i meets the window's left edge a through its causal bound at i = a - D and loses key a through
    # its inverse bound after i = a; the same for b. These four rows are all the breakpoints there are.
    low = np.where(causal, np.clip(a - diagonal, 0, sq), 0)
    high = np.where(inverse, np.minimum(b, sq), sq)
    left_bound = np.where(inverse, np.clip(a, 0, sq), sq)
    right_bound = np.where(causal, np.clip(b - diagonal, 0, sq), 0)
    first = np.clip(np.minimum(left_bound, right_bound), low, high)
    second = np.clip(np.maximum(left_bound, right_bound), low, high)
    out = np.empty((3, n, 5), dtype=np.int64)
    live = np.empty((3, n), dtype=bool)
    edges = (low, first, second, high)
    for part in range(3):
        row0, row1 = edges[part], edges[part + 1]
        bound_right = causal & (row1 <= right_bound)  # the causal diagonal ends these rows, not b
        bound_left = inverse & (row0 >= left_bound)  # the inverse diagonal starts them, not a
        key0 = np.where(bound_left, row0, a)
        key1 = np.where(bound_right, row1 + diagonal, b)
        out[part, :, Q0] = slices[:, Q0] + row0
        out[part, :, Q1] = slices[:, Q0] + row1
        out[part, :, K0] = slices[:, K0] + key0
        out[part, :, K1] = slices[:, K0] + key1
        out[part, :, TYPE] = bound_right * CAUSAL + bound_left * INVCAUSAL
        live[part] = (row1 > row0) & (key1 > key0) & (b > a)
    keep = live.T.reshape(-1)
    pieces = out.transpose(1, 0, 2).reshape(-1, 5)[keep]
    parent = np.repeat(np.arange(n), 3)[keep]
    return pieces, parent


def pairs_before(slices: NDArray[np.int64], keys: NDArray[np.int64]) -> NDArray[np.int64]:
    """Allowed pairs whose key lies before each of ``keys``, all trimmed slices together: int64 like ``keys``.

    The number of queries that see a key changes by a jump at an edge, and by one for each key along a diagonal. So the
    pairs before x are sums of ``w (x - s)`` and of ``w (x - s) (x - s + 1) / 2`` over all such places ``s < x``. Twice
    that number is computed, modulo 2**64, in which it fits.
    """
    rows = slices[:, Q1] - slices[:, Q0]
    causal, inverse = slices[:, TYPE] & CAUSAL == CAUSAL, slices[:, TYPE] & INVCAUSAL == INVCAUSAL
    first, last = slices[inverse, K0], slices[causal, K1] + 1
    jumps = np.concatenate([slices[~inverse, K0], slices[~causal, K1]])
    heights = np.concatenate([rows[~inverse], -rows[~causal]])
    bends = np.concatenate([first, first + rows[inverse], last - rows[causal], last])
    signs = np.repeat([1, -1, -1, 1], [len(first), len(first), len(last), len(last)])
    total, (one, s1, _) = np.zeros(keys.shape, dtype=np.int64), _sums_before(jumps, heights, keys)
    total += 2 * (keys * one - s1)
    one, s1, s2 = _sums_before(bends, signs, keys)
    total += (keys * keys + keys) * one - (2 * keys + 1) * s1 + s2
    return total // 2


def _sums_before(
    places: NDArray[np.int64], weights: NDArray[np.int64], keys: NDArray[np.int64]
) -> tuple[NDArray[np.int64], ...]:
    """Sums of w, w s and w s**2 over the places ``s`` before each key, modulo 2**64."""
    order = np.argsort(places)
    s, w = places[order], weights[order]
    count = np.searchsorted(s, keys, side="left")
    return tuple(np.concatenate([[0], np.cumsum(part)])[count] for part in (w, w * s, w * s * s))


def merge(slices: NDArray[np.int64]) -> NDArray[np.int64]:
    """Joins pieces that touch in k (same q range) or in q (same diagonal), keeping the pair set."""
    before = -1
    while before != len(slices):
        before = len(slices)
        slices = _merge_rows(_merge_keys(slices))
    return slices


def _merge_keys(slices: NDArray[np.int64]) -> NDArray[np.int64]:
    order = np.lexsort((slices[:, K0], slices[:, Q1], slices[:, Q0]))
    rows = slices[order].tolist()
    out: list[list[int]] = []
    for row in rows:
        last = out[-1] if out else None
        if last is not None and last[:2] == row[:2] and last[K1] == row[K0]:
            sq = row[Q1] - row[Q0]
            left, right = last[TYPE], row[TYPE]
            # A diagonal bound may only stand at the outer side and must not reach into the other piece.
            left_ok = left == FULL or (left == INVCAUSAL and sq <= last[K1] - last[K0])
            right_ok = right == FULL or (right == CAUSAL and sq <= row[K1] - row[K0])
            if left_ok and right_ok:
                last[K1] = row[K1]
                last[TYPE] = left | right
                continue
        out.append(row)
    return np.array(out, dtype=np.int64).reshape(-1, 5)


def _merge_rows(slices: NDArray[np.int64]) -> NDArray[np.int64]:
    # Sorting by the invariants of each type brings the pieces of one diagonal side by side.
    kind = slices[:, TYPE]
    right = np.where(kind & 1, slices[:, K1] - slices[:, Q1], slices[:, K1])
    left = np.where(kind & 2, slices[:, K0] - slices[:, Q0], slices[:, K0])
    order = np.lexsort((slices[:, Q0], right, left, kind))
    rows, lefts, rights = slices[order].tolist(), left[order].tolist(), right[order].tolist()
    out: list[list[int]] = []
    key = None
    for row, lo, hi in zip(rows, lefts, rights):
        if out and key == (row[TYPE], lo, hi) and out[-1][Q1] == row[Q0]:
            out[-1][Q1] = row[Q1]
            out[-1][K0] = min(out[-1][K0], row[K0])
            out[-1][K1] = max(out[-1][K1], row[K1])
        else:
            out.append(row)
            key = (row[TYPE], lo, hi)
    return np.array(out, dtype=np.int64).reshape(-1, 5)


def diagonal_bounds(slices: NDArray[np.int64]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Closed bounds of ``d = k - q`` per slice; unbounded sides are +-2**60."""
    low = np.where(slices[:, TYPE] & 2, slices[:, K0] - slices[:, Q0], -_UNBOUNDED)
    high = np.where(slices[:, TYPE] & 1, slices[:, K1] - slices[:, Q1], _UNBOUNDED)
    return low, high


def row_bounds(row: Iterable[int]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Half-open allowed key range of every row of one slice: two int64 arrays of length sq."""
    q0, q1, k0, k1, kind = (int(x) for x in row)
    i = np.arange(q1 - q0, dtype=np.int64)
    start = k0 + (i if kind & 2 else np.zeros_like(i))
    end = k1 - (q1 - q0 - 1 - i if kind & 1 else np.zeros_like(i))
    start, end = np.maximum(start, k0), np.minimum(end, k1)
    return start, np.maximum(end, start)


def to_dense(slices: NDArray[np.int64], total_q: int, total_k: int) -> NDArray[np.bool_]:
    """Boolean mask ``(total_q, total_k)``, True where attention is allowed; the ground truth of tests."""
    mask, all_columns = np.zeros((total_q, total_k), dtype=bool), np.arange(total_k)
    for row in slices:
        block = mask[row[Q0] : row[Q1], row[K0] : row[K1]]
        if row[TYPE] == 0:
            block[:] = True
            continue
        start, end = row_bounds(row)
        columns = all_columns[row[K0] : row[K1]]
        block |= (columns >= start[:, None]) & (columns < end[:, None])
    return mask


class SliceTable:
    """Immutable, hashable list of AttnSlices: what plans hold and kernels consume.

    ``array`` is int64 ``(N, 5)`` and read-only. Equality and hash are by value, order included. ``cache`` holds what
    was made from it, for this one object: a copy begins with an empty one. ``even_rows``: so many queries, from the
    first on, are known to see the same keys, because there is one slice and it is full; else 0.
    """

    __slots__ = ("__weakref__", "array", "cache", "even_rows")

    def __init__(self, array: NDArray[np.integer]) -> None:
        array = np.ascontiguousarray(as_int_array(array, "The slices")).reshape(-1, 5).copy()
        array.setflags(write=False)
        self.array = array
        is_full = len(array) == 1 and array[0, 0] == 0 and array[0, 4] == FULL
        self.even_rows = int(array[0, 1]) if is_full else 0
        self.cache = PlanCache()
        self.cache.count("slices", array)

    @classmethod
    def from_ranges(
        cls,
        q_ranges: Iterable[Iterable[int]],
        k_ranges: Iterable[Iterable[int]],
        types: MaskTypes = FULL,
    ) -> SliceTable:
        """From pairs of half-open ranges and one type, or one type per slice."""
        q, k = as_pairs(q_ranges, "q_ranges"), as_pairs(k_ranges, "k_ranges")
        kinds = type_codes(types, len(q))
        if not len(q) == len(k) == len(kinds):
            raise ContractError(
                f"{len(q)} q ranges, {len(k)} k ranges and {len(kinds)} mask types; "
                "give one k range and one type (or one type for all) per q range."
            )
        for name, ranges in (("q", q), ("k", k)):
            bad = np.flatnonzero((ranges[:, 0] > ranges[:, 1]) | (ranges[:, 0] < 0))
            if len(bad):
                i = int(bad[0])
                raise RangeError(
                    f"{name} range {i} is [{ranges[i, 0]}, {ranges[i, 1]}); "
                    "ranges are half-open with 0 <= start <= end."
                )
        return cls(np.concatenate([q, k, np.array(kinds, dtype=np.int64)[:, None]], axis=1))

    def __len__(self) -> int:
        return len(self.array)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, SliceTable) and np.array_equal(self.array, other.array)

    def __hash__(self) -> int:
        return hash(self.digest)

    def __repr__(self) -> str:
        return f"SliceTable({len(self)} slices, area {self.area})"

    def __reduce__(self) -> tuple[type[SliceTable], tuple[NDArray[np.int64]]]:
        return SliceTable, (np.array(self.array),)

    @property
    def digest(self) -> bytes:
        return self.cache.get(_DIGEST, None, self._digest)

    @property
    def area(self) -> int:
        """Number of allowed (q, k) pairs; exact when the slices are disjoint."""
        return self.cache.get(_AREA, None, self._area)

    def tensors(self, device: torch.device | str | int = "cpu") -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """``(q_ranges (N,2), k_ranges (N,2), types (N,))`` as int32 torch tensors, made once per device."""
        import torch

        device = torch.device(device)
        return self.cache.get(_TENSORS, device, lambda: self._tensors(device))

    def _digest(self) -> bytes:
        return hashlib.blake2b(self.array.tobytes(), digest_size=16).digest()

    def _area(self) -> int:
        return int(areas(self.array).sum())

    def _tensors(self, device: torch.device) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        import torch

        if self.array.size and self.array.max() > MOST_POSITION:
            raise ContractError(
                f"Slices reach position {self.array.max():,}, and kernels take positions up to {MOST_POSITION:,}; "
                "spread the sequence over more ranks."
            )
        packed = torch.from_numpy(self.array.astype(np.int32)).to(device)
        return packed[:, 0:2].contiguous(), packed[:, 2:4].contiguous(), packed[:, 4].contiguous()


def type_code(value: int | str | AttnMaskType) -> int:
    """Integer code of a mask type given as code, string or enum; ``ContractError`` if unknown."""
    return AttnMaskType.of(value).to_int_type()


def type_codes(types: MaskTypes, count: int) -> list[int]:
    """Integer codes of ``count`` slices from one type for all of them or from one each (the number is not checked)."""
    if isinstance(types, (int, Integral, str, Enum)):
        return [type_code(types)] * count
    return [type_code(t) for t in types]
