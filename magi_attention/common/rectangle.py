# SPDX-License-Identifier: Apache-2.0
"""``AttnRectangle``: a rectangle of (q, k) pairs cut by a band of diagonals."""

from __future__ import annotations

from itertools import product

import numpy as np

from magi_attention.common.enum import AttnMaskType
from magi_attention.common.range import AttnRange
from magi_attention.common.slices import CAUSAL, FULL, INVCAUSAL, areas
from magi_attention.errors import RangeError


class AttnRectangle:
    """Pairs with q in ``q_range``, k in ``k_range`` and ``d = k - q`` in the *closed* ``d_range``.

    A mask type bounds d: CAUSAL from above by ``k_end - q_end``, INVCAUSAL from below by
    ``k_start - q_start``, BICAUSAL by both. ``d_range`` bounds it further and is stored clipped to the
    diagonals that cross the rectangle.

    Only the three ``shrink_*`` methods change the object.

    Raises:
        RangeError: no diagonal is left (an empty rectangle, or BICAUSAL with more rows than keys).
    """

    __slots__ = ("q_range", "k_range", "d_range")

    def __init__(
        self,
        q_range: AttnRange,
        k_range: AttnRange,
        d_range: AttnRange | None = None,
        mask_type: AttnMaskType | int = AttnMaskType.FULL,
    ) -> None:
        kind = mask_type if isinstance(mask_type, AttnMaskType) else AttnMaskType.from_int_type(mask_type)
        code = kind.to_int_type()
        low, high = _corner_diagonals(q_range, k_range)
        if code & CAUSAL:
            high = min(high, k_range.end - q_range.end)
        if code & INVCAUSAL:
            low = max(low, k_range.start - q_range.start)
        if d_range is not None:
            low, high = max(low, d_range.start), min(high, d_range.end)
        if low > high or q_range.is_empty() or k_range.is_empty():
            raise RangeError(f"q {q_range!r}, k {k_range!r} as {kind.value} holds no pair; leave this rectangle out.")
        self.q_range, self.k_range, self.d_range = q_range.clone(), k_range.clone(), AttnRange(low, high)

    # ---- shrinking in place -----------------------------------------------------------------------

    def shrink_q_range(self) -> bool:
        """Drops rows without pairs; False, with nothing changed, if no row is left."""
        start = max(self.q_range.start, self.k_range.start - self.d_range.end)
        end = min(self.q_range.end, self.k_range.end - self.d_range.start)
        if start >= end:
            return False
        self.q_range = AttnRange(start, end)
        return True

    def shrink_k_range(self) -> bool:
        """Drops keys without pairs; False, with nothing changed, if no key is left."""
        start = max(self.k_range.start, self.q_range.start + self.d_range.start)
        end = min(self.k_range.end, self.q_range.end + self.d_range.end)
        if start >= end:
            return False
        self.k_range = AttnRange(start, end)
        return True

    def shrink_d_range(self) -> bool:
        """Clips the band to the diagonals of the rectangle; False, with nothing changed, if none is left."""
        low, high = _corner_diagonals(self.q_range, self.k_range)
        low, high = max(low, self.d_range.start), min(high, self.d_range.end)
        if low > high or self.q_range.is_empty() or self.k_range.is_empty():
            return False
        self.d_range = AttnRange(low, high)
        return True

    def get_valid_or_none(self) -> AttnRectangle | None:
        """A copy shrunk to what has pairs, or None if nothing has."""
        out = self.clone()
        # Bounds only tighten and rows, keys and diagonals limit each other in a circle of two steps.
        for _ in range(2):
            if not (out.shrink_d_range() and out.shrink_q_range() and out.shrink_k_range()):
                return None
        return out

    def is_valid(self) -> bool:
        """Does it hold a pair?"""
        return self.get_valid_or_none() is not None

    def check_valid(self) -> None:
        """``RangeError`` (a ``ValueError``) if it holds no pair."""
        if not self.is_valid():
            raise RangeError(f"{self!r} holds no pair; leave this rectangle out.")

    # ---- cutting ----------------------------------------------------------------------------------

    def cut_q(self, cut_pos: int) -> tuple[AttnRectangle | None, AttnRectangle | None]:
        """Rows before ``cut_pos`` and from it on; None for a side without pairs."""
        before = self.get_rect_within_q_segment(self.q_range.start, cut_pos)
        return before, self.get_rect_within_q_segment(cut_pos, self.q_range.end)

    def cut_k(self, cut_pos: int) -> tuple[AttnRectangle | None, AttnRectangle | None]:
        """Keys before ``cut_pos`` and from it on; None for a side without pairs."""
        before = self.get_rect_within_k_segment(self.k_range.start, cut_pos)
        return before, self.get_rect_within_k_segment(cut_pos, self.k_range.end)

    def get_rect_within_q_segment(self, start: int, end: int) -> AttnRectangle | None:
        """What lies in rows ``[start, end)``, shrunk; None if nothing."""
        return self._window(self.q_range.truncate(start, max(start, end)), self.k_range)

    def get_rect_within_k_segment(self, start: int, end: int) -> AttnRectangle | None:
        """What lies in keys ``[start, end)``, shrunk; None if nothing."""
        return self._window(self.q_range, self.k_range.truncate(start, max(start, end)))

    def _window(self, q_range: AttnRange, k_range: AttnRange) -> AttnRectangle | None:
        out = self.clone()
        out.q_range, out.k_range = q_range.clone(), k_range.clone()
        return out.get_valid_or_none()

    # ---- geometry ---------------------------------------------------------------------------------

    def intersection_q_id_on_left_boundary(self) -> int:
        """The row where the band's lower diagonal meets the first key; later rows start at the diagonal."""
        return self.k_range.start - self.d_range.start

    def intersection_q_id_on_right_boundary(self) -> int:
        """The row where the band's upper diagonal meets the last key; earlier rows end at the diagonal."""
        return self.k_range.end - 1 - self.d_range.end

    def is_full(self) -> bool:
        """Is every pair of the rectangle allowed?"""
        low, high = _corner_diagonals(self.q_range, self.k_range)
        return self.d_range.start <= low and self.d_range.end >= high

    def is_causal(self) -> bool:
        """Is it one CAUSAL slice?"""
        low, _ = _corner_diagonals(self.q_range, self.k_range)
        return self.d_range.start <= low and self.d_range.end == self.k_range.end - self.q_range.end

    def is_inv_causal(self) -> bool:
        """Is it one INVCAUSAL slice?"""
        _, high = _corner_diagonals(self.q_range, self.k_range)
        return self.d_range.end >= high and self.d_range.start == self.k_range.start - self.q_range.start

    def is_bi_causal(self) -> bool:
        """Is it one BICAUSAL slice?"""
        right = self.d_range.end == self.k_range.end - self.q_range.end
        return right and self.d_range.start == self.k_range.start - self.q_range.start

    def to_slices(self) -> np.ndarray:
        """At most three disjoint AttnSlices with the same pairs, int64 ``(n, 5)``, rows ascending."""
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
        return int(areas(self.to_slices()).sum())

    # ---- protocol of values -----------------------------------------------------------------------

    def clone(self) -> AttnRectangle:
        out = object.__new__(AttnRectangle)
        out.q_range, out.k_range = self.q_range.clone(), self.k_range.clone()
        out.d_range = self.d_range.clone()
        return out

    def _key(self) -> tuple[AttnRange, AttnRange, AttnRange]:
        return self.q_range, self.k_range, self.d_range

    def __eq__(self, other: object) -> bool:
        return isinstance(other, AttnRectangle) and self._key() == other._key()

    def __hash__(self) -> int:
        return hash(self._key())

    def __len__(self) -> int:
        return self.q_range.seqlen

    def __repr__(self) -> str:
        band = f"[{self.d_range.start}, {self.d_range.end}]"
        return f"q {self.q_range!r} x k {self.k_range!r} with k - q in {band}"


def _corner_diagonals(q_range: AttnRange, k_range: AttnRange) -> tuple[int, int]:
    """Least and largest ``k - q`` of the rectangle."""
    return k_range.start - q_range.end + 1, k_range.end - 1 - q_range.start
