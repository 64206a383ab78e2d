# SPDX-License-Identifier: Apache-2.0
"""``AttnRectangle``: a rectangle of (q, k) pairs cut by a band of diagonals."""

from __future__ import annotations

from itertools import product
from operator import attrgetter
from typing import Any

import numpy as np
from numpy.typing import NDArray

from magi_attention.common.enum import AttnMaskType
from magi_attention.common.range import AttnRange
from magi_attention.common.slices import CAUSAL, FULL, INVCAUSAL
from magi_attention.errors import RangeError

# Bounds of ``d = k - q`` that no sequence reaches: the band of a rectangle that is given none.
INT_MAX = 10**9
INT_MIN = -INT_MAX


def _range_property(name: str, what: str, is_empty_allowed: bool) -> Any:
    """One of the three ranges. Its setter copies and asks for a valid range, non-empty unless ``is_empty_allowed``."""

    def put(rectangle: AttnRectangle, value: AttnRange) -> None:
        if not (value.is_valid_close() if is_empty_allowed else value.is_valid_open()):
            rule = "start <= end" if is_empty_allowed else "start < end"
            raise RangeError(f"{name} {value!r} holds nothing; give {rule}.")
        setattr(rectangle, f"_{name}", value.clone())

    return property(attrgetter(f"_{name}"), put, doc=f"{what}.")


class AttnRectangle:
    """Pairs with q in ``q_range``, k in ``k_range`` and ``d = k - q`` in the *closed* ``d_range``.

    A mask type bounds d: CAUSAL from above by ``k_end - q_end``, INVCAUSAL from below by
    ``k_start - q_start``, BICAUSAL by both, and ``d_range`` bounds it further. What is stored is the tightest
    form: no row, key or diagonal without a pair at either end.

    The ranges given are copied. Only the three ``shrink_*`` methods and the setters change the object, and
    the bounds of its ranges can be set in place; methods that use an invalid range raise ``RangeError``.

    Raises:
        RangeError: no pair is left (an empty rectangle, or BICAUSAL with more rows than keys).
        ContractError: an unknown mask type.
    """

    __slots__ = ("_q_range", "_k_range", "_d_range")

    def __init__(
        self,
        q_range: AttnRange,
        k_range: AttnRange,
        d_range: AttnRange | None = None,
        mask_type: AttnMaskType | int | str = AttnMaskType.FULL,
    ) -> None:
        kind = AttnMaskType.of(mask_type)
        code = kind.to_int_type()
        low, high = AttnRange(INT_MIN, INT_MAX) if d_range is None else d_range
        if code & CAUSAL:
            high = min(high, k_range.end - q_range.end)
        if code & INVCAUSAL:
            low = max(low, k_range.start - q_range.start)
        self._q_range, self._k_range = q_range.clone(), k_range.clone()
        is_crossed = low <= high
        if is_crossed:
            self._d_range = AttnRange(low, high)
        if not (is_crossed and self.shrink_d_range() and self.shrink_q_range() and self.shrink_k_range()):
            band = "" if d_range is None else f" with k - q in [{d_range.start}, {d_range.end}]"
            raise RangeError(
                f"q {q_range!r} x k {k_range!r} as {kind.value}{band} holds no pair; leave this rectangle out."
            )

    # ---- the three ranges -------------------------------------------------------------------------

    q_range = _range_property("q_range", "Rows", is_empty_allowed=False)
    k_range = _range_property("k_range", "Keys", is_empty_allowed=False)
    d_range = _range_property("d_range", "Diagonals ``k - q``, both ends included", is_empty_allowed=True)

    # ---- shrinking in place -----------------------------------------------------------------------

    def shrink_q_range(self) -> bool:
        """Drops rows without pairs; False, with nothing changed, if no row is left."""
        (q0, q1), (k0, k1), (low, high) = self._bounds()
        return self._shrink("q_range", max(q0, k0 - high), min(q1, k1 - low))

    def shrink_k_range(self) -> bool:
        """Drops keys without pairs; False, with nothing changed, if no key is left."""
        (q0, q1), (k0, k1), (low, high) = self._bounds()
        return self._shrink("k_range", max(k0, q0 + low), min(k1, q1 + high))

    def _shrink(self, name: str, start: int, end: int) -> bool:
        if start >= end:
            return False
        setattr(self, name, AttnRange(start, end))
        return True

    def shrink_d_range(self) -> bool:
        """Clips the band to the diagonals of the rectangle; False, with nothing changed, if none is left."""
        (q0, q1), (k0, k1), (low, high) = self._bounds()
        low, high = max(low, k0 - q1 + 1), min(high, k1 - 1 - q0)
        if low > high or q0 == q1 or k0 == k1:
            return False
        self.d_range = AttnRange(low, high)
        return True

    def _bounds(self) -> tuple[tuple[int, int], tuple[int, int], tuple[int, int]]:
        """The bounds of q, k and d; ``RangeError`` if one is invalid."""
        return self.q_range.to_naive_range(), self.k_range.to_naive_range(), self.d_range.to_naive_range()

    def get_valid_or_none(self) -> AttnRectangle | None:
        """A copy shrunk to what has pairs, or None if nothing has."""
        if not all(r.is_valid_close() for r in (self.q_range, self.k_range, self.d_range)):
            return None
        out = self.clone()
        # Bounds only tighten and rows, keys and diagonals limit each other in a circle of two steps.
        for _ in range(2):
            if not (out.shrink_d_range() and out.shrink_q_range() and out.shrink_k_range()):
                return None
        return out

    def is_valid(
        self, q_range: AttnRange | None = None, k_range: AttnRange | None = None, d_range: AttnRange | None = None
    ) -> bool:
        """Does it hold a pair, with the ranges given in the place of its own? An invalid range holds none."""
        return self._with(q_range, k_range, d_range).get_valid_or_none() is not None

    def check_valid(
        self, q_range: AttnRange | None = None, k_range: AttnRange | None = None, d_range: AttnRange | None = None
    ) -> None:
        """``RangeError`` (a ``ValueError``) unless ``is_valid``."""
        if not self.is_valid(q_range, k_range, d_range):
            raise RangeError(f"{self._with(q_range, k_range, d_range)!r} holds no pair; leave this rectangle out.")

    def _with(self, q_range: AttnRange | None, k_range: AttnRange | None, d_range: AttnRange | None) -> AttnRectangle:
        """Not copied and not checked: for reading."""
        out = object.__new__(AttnRectangle)
        out._q_range = self.q_range if q_range is None else q_range
        out._k_range = self.k_range if k_range is None else k_range
        out._d_range = self.d_range if d_range is None else d_range
        return out

    # ---- cutting ----------------------------------------------------------------------------------

    def cut_q(self, cut_pos: int) -> tuple[AttnRectangle | None, AttnRectangle | None]:
        """Rows before ``cut_pos`` and from it on; None for a side without pairs."""
        before = self.get_rect_within_q_segment(self.q_range.start, cut_pos)
        return before, self.get_rect_within_q_segment(cut_pos, self.q_range.end)

    def cut_k(self, cut_pos: int) -> tuple[AttnRectangle | None, AttnRectangle | None]:
        """Keys before ``cut_pos`` and from it on; None for a side without pairs."""
        before = self.get_rect_within_k_segment(self.k_range.start, cut_pos)
        return before, self.get_rect_within_k_segment(cut_pos, self.k_range.end)

    def get_rect_within_q_segment(self, q_start: int, q_end: int) -> AttnRectangle | None:
        """What lies in rows ``[q_start, q_end)``, shrunk; None if nothing."""
        return self._window(self.q_range.truncate(q_start, max(q_start, q_end)), self.k_range)

    def get_rect_within_k_segment(self, k_start: int, k_end: int) -> AttnRectangle | None:
        """What lies in keys ``[k_start, k_end)``, shrunk; None if nothing."""
        return self._window(self.q_range, self.k_range.truncate(k_start, max(k_start, k_end)))

    def _window(self, q_range: AttnRange, k_range: AttnRange) -> AttnRectangle | None:
        self._bounds()
        return self._with(q_range, k_range, None).get_valid_or_none()

    # ---- geometry ---------------------------------------------------------------------------------

    def intersection_q_id_on_left_boundary(self) -> int:
        """The row where the band's lower diagonal meets the first key; later rows start at the diagonal."""
        _, (k0, _), (low, _) = self._bounds()
        return k0 - low

    def intersection_q_id_on_right_boundary(self) -> int:
        """The row where the band's upper diagonal meets the last key; earlier rows end at the diagonal."""
        _, (_, k1), (_, high) = self._bounds()
        return k1 - 1 - high

    def is_full(self) -> bool:
        """Is every pair of the rectangle allowed?"""
        (q0, q1), (k0, k1), (low, high) = self._bounds()
        return low <= k0 - q1 + 1 and high >= k1 - 1 - q0

    def is_causal(self) -> bool:
        """Is it one CAUSAL slice?"""
        (_, q1), (k0, k1), (low, high) = self._bounds()
        return low <= k0 - q1 + 1 and high == k1 - q1

    def is_inv_causal(self) -> bool:
        """Is it one INVCAUSAL slice?"""
        (q0, _), (k0, k1), (low, high) = self._bounds()
        return low == k0 - q0 and high >= k1 - 1 - q0

    def is_bi_causal(self) -> bool:
        """Is it one BICAUSAL slice?"""
        (q0, q1), (k0, k1), (low, high) = self._bounds()
        return low == k0 - q0 and high == k1 - q1

    def to_slices(self) -> NDArray[np.int64]:
        """At most three disjoint AttnSlices with the same pairs, int64 ``(n, 5)``, rows ascending."""
        self._bounds()
        rect = self.get_valid_or_none()
        if rect is None:
            return np.zeros((0, 5), dtype=np.int64)
        (q0, q1), (k0, k1), (low, high) = rect.q_range, rect.k_range, rect.d_range
        if q1 - q0 == 1:
            return np.array([[q0, q1, k0, k1, FULL]], dtype=np.int64)
        # Rows before `causal_end` end at the upper diagonal, rows from `inverse_from` on start at the lower
        # one. On the row where diagonal and edge meet both readings are right; take the fewest pieces.
        best: list[list[int]] = []
        for causal_end, inverse_from in product((k1 - 1 - high, k1 - high), (k0 - low, k0 - low + 1)):
            cuts = sorted({q0, q1, min(max(causal_end, q0), q1), min(max(inverse_from, q0), q1)})
            pieces = []
            for start, end in zip(cuts[:-1], cuts[1:]):
                causal, inverse = end <= causal_end, start >= inverse_from
                kind = (CAUSAL if causal else 0) | (INVCAUSAL if inverse else 0)
                first, last = start + low if inverse else k0, end + high if causal else k1
                pieces.append([start, end, first, last, kind])
            if not best or (len(pieces), pieces[0][4]) < (len(best), best[0][4]):
                best = pieces
        return np.array(best, dtype=np.int64)

    def to_qk_range_mask_type(self) -> list[tuple[AttnRange, AttnRange, int]]:
        """``to_slices`` as ``(q_range, k_range, integer type)`` tuples."""
        return [(AttnRange(q0, q1), AttnRange(k0, k1), kind) for q0, q1, k0, k1, kind in self.to_slices().tolist()]

    def area(self) -> int:
        """Number of pairs."""
        q, k, d = self._bounds()
        return self.count_areas(*q, *k, *d)

    @staticmethod
    def count_areas(lq: int, rq: int, lk: int, rk: int, ld: int, rd: int) -> int:
        """Number of pairs with ``lq <= q < rq``, ``lk <= k < rk`` and ``ld <= k - q <= rd``, 0 if a range is empty."""
        if lq >= rq or lk >= rk or ld > rd:
            return 0

        def up_to(d: int) -> int:
            """Pairs with ``k - q <= d``: row q sees ``q + d + 1 - lk`` keys, but from 0 to ``rk - lk`` of them."""
            rows = _triangle(rq + d - lk) - _triangle(lq + d - lk)
            return rows - (_triangle(rq + d - rk) - _triangle(lq + d - rk))

        return up_to(rd) - up_to(ld - 1)

    # ---- protocol of values -----------------------------------------------------------------------

    def clone(self) -> AttnRectangle:
        return self._with(self.q_range.clone(), self.k_range.clone(), self.d_range.clone())

    def _key(self) -> tuple[AttnRange, AttnRange, AttnRange]:
        return self.q_range, self.k_range, self.d_range

    def __eq__(self, other: object) -> bool:
        return isinstance(other, AttnRectangle) and self._key() == other._key()

    def __hash__(self) -> int:
        return hash(self._key())

    def __len__(self) -> int:
        return 1  # as published

    def __repr__(self) -> str:
        band = f"[{self.d_range.start}, {self.d_range.end}]"
        return f"q {self.q_range!r} x k {self.k_range!r} with k - q in {band}"


def _triangle(n: int) -> int:
    """``1 + 2 + ... + n``, 0 for a negative n."""
    return n * (n + 1) // 2 if n > 0 else 0
