# SPDX-License-Identifier: Apache-2.0
"""``AttnMask``: the published mask object, as ranges with a type each."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from magi_attention.common import slices
from magi_attention.common.enum import AttnMaskType
from magi_attention.common.infer import dense_slices
from magi_attention.common.intervals import merge_intervals
from magi_attention.common.range import AttnRange
from magi_attention.common.ranges import AttnRanges
from magi_attention.common.slices import K0, K1, Q0, Q1, TYPE, SliceTable
from magi_attention.errors import ContractError

if TYPE_CHECKING:
    import torch


class AttnMask:
    """Which of ``total_seqlen_q`` queries may see which of ``total_seqlen_k`` keys; immutable.

    Make one with ``from_ranges`` or ``from_mask``. Slices are disjoint. ``magi_attention.common.mask.Mask``
    is the same thing for new code.
    """

    def __init__(self, table: SliceTable, total_seqlen_q: int, total_seqlen_k: int) -> None:
        self._table, self._total_q, self._total_k = table, total_seqlen_q, total_seqlen_k
        array = table.array
        ends = array[:, [Q1, K1]].max(axis=0) if len(array) else np.zeros(2, np.int64)
        for name, end, total in (("q", ends[0], total_seqlen_q), ("k", ends[1], total_seqlen_k)):
            if end > total:
                raise ContractError(
                    f"A {name} range ends at {end}, beyond total_seqlen_{name} {total}; raise the total."
                )
        overlap = slices.first_overlap(array)
        if overlap is not None:
            raise ContractError(f"Slices {overlap[0]} and {overlap[1]} share a (q, k) pair; cut one of them.")

    # ---- constructors -----------------------------------------------------------------------------

    @classmethod
    def from_ranges(
        cls,
        q_ranges: AttnRanges,
        k_ranges: AttnRanges,
        attn_mask_type: Sequence[AttnMaskType | str] | AttnMaskType | str = AttnMaskType.FULL,
        total_seqlen_q: int | None = None,
        total_seqlen_k: int | None = None,
    ) -> AttnMask:
        """From one q range, k range and type per slice; all four types.

        Totals default to the largest range end.

        Raises:
            ContractError: the lists differ in length, a range ends beyond its total, or slices overlap.
        """
        table = SliceTable.from_ranges(q_ranges, k_ranges, attn_mask_type)
        ends = table.array[:, [Q1, K1]].max(axis=0).tolist() if len(table) else [0, 0]
        total_q = ends[0] if total_seqlen_q is None else total_seqlen_q
        return cls(table, total_q, ends[1] if total_seqlen_k is None else total_seqlen_k)

    @classmethod
    def from_mask(cls, mask: torch.Tensor | np.ndarray | Sequence[Sequence[int]]) -> AttnMask:
        """From a matrix ``(total_q, total_k)`` of zeros and ones; the slices found reproduce it exactly."""
        dense = mask.detach().cpu().numpy() if hasattr(mask, "detach") else np.asarray(mask)
        if dense.ndim != 2:
            raise ContractError(f"The mask has {dense.ndim} dimensions; give a (total_q, total_k) matrix.")
        return cls(SliceTable(dense_slices(dense != 0)), *dense.shape)

    @staticmethod
    def make_causal_mask(
        seqlen_q: int,
        seqlen_k: int,
        align: str = "bottom-right",
        dtype: torch.dtype | None = None,
        device: Any = "cpu",
    ) -> torch.Tensor:
        """Matrix ``(seqlen_q, seqlen_k)`` of zeros and ones (int32 unless ``dtype`` is given).

        Row i allows ``j <= i + seqlen_k - seqlen_q`` if ``align`` is bottom-right, ``j <= i`` if top-left.
        """
        import torch

        if align not in ("bottom-right", "top-left"):
            raise ContractError(f"align={align!r} is unknown; use 'bottom-right' or 'top-left'.")
        diagonal = seqlen_k - seqlen_q if align == "bottom-right" else 0
        ones = torch.ones((seqlen_q, seqlen_k), dtype=dtype or torch.int32, device=device)
        return torch.tril(ones, diagonal=diagonal)

    # ---- reading ----------------------------------------------------------------------------------

    @property
    def slices(self) -> SliceTable:
        return self._table

    @property
    def total_seqlen_q(self) -> int:
        return self._total_q

    @property
    def total_seqlen_k(self) -> int:
        return self._total_k

    @property
    def q_ranges(self) -> AttnRanges:
        return AttnRanges.from_array(self._table.array[:, [Q0, Q1]])

    @property
    def k_ranges(self) -> AttnRanges:
        return AttnRanges.from_array(self._table.array[:, [K0, K1]])

    @property
    def attn_mask_type(self) -> list[AttnMaskType]:
        return [AttnMaskType.from_int_type(kind) for kind in self._table.array[:, TYPE].tolist()]

    @property
    def mask_tensor(self) -> torch.Tensor:
        """Matrix ``(total_q, total_k)`` of zeros and ones, int32."""
        import torch

        return torch.from_numpy(slices.to_dense(self._table.array, self._total_q, self._total_k)).int()

    @property
    def area(self) -> int:
        """Number of allowed pairs."""
        return self._table.area

    def tuples(self) -> Iterator[tuple[AttnRange, AttnRange, AttnMaskType]]:
        """``(q_range, k_range, type)`` of every slice, in stored order."""
        for q0, q1, k0, k1, kind in self._table.array.tolist():
            yield AttnRange(q0, q1), AttnRange(k0, k1), AttnMaskType.from_int_type(kind)

    def make_sub_mask(self, q_range: AttnRange, k_range: AttnRange) -> AttnMask:
        """The window of the mask, in coordinates that start at 0."""
        pieces = self._cut(q_range, k_range)
        pieces[:, [Q0, Q1]] -= q_range.start
        pieces[:, [K0, K1]] -= k_range.start
        return AttnMask(SliceTable(slices.merge(pieces)), q_range.seqlen, k_range.seqlen)

    def calc_sub_area(self, q_range: AttnRange, k_range: AttnRange) -> int:
        """Number of allowed pairs in the window."""
        return int(slices.areas(self._cut(q_range, k_range)).sum())

    def _cut(self, q_range: AttnRange, k_range: AttnRange) -> np.ndarray:
        rows, _ = slices.cut_q(slices.trim(self._table.array), q_range.start, q_range.end)
        return slices.cut_k(rows, k_range.start, k_range.end)[0]

    # ---- predicates on the set of pairs, whatever the slices --------------------------------------

    def is_square(self) -> bool:
        return self._total_q == self._total_k

    def is_empty(self) -> bool:
        """Is no pair allowed?"""
        return self.area == 0

    def is_pure_full(self) -> bool:
        """Is every pair allowed?"""
        return self.area == self._total_q * self._total_k

    def is_pure_causal(self) -> bool:
        """Is exactly ``j <= i + total_k - total_q`` allowed?"""
        whole = np.array([[0, self._total_q, 0, self._total_k, slices.CAUSAL]])
        within = self._highest_diagonals() <= self._total_k - self._total_q
        return bool(within.all()) and self.area == int(slices.areas(whole).sum())

    def is_varlen_full(self) -> bool:
        """Square blocks along the whole diagonal, full inside, nothing outside?"""
        lengths = self._block_lengths()
        return lengths is not None and self.area == int((lengths**2).sum())

    def is_varlen_causal(self) -> bool:
        """Square blocks along the whole diagonal, causal inside, nothing outside?"""
        lengths = self._block_lengths()
        if lengths is None or (self._highest_diagonals() > 0).any():
            return False
        return self.area == int((lengths * (lengths + 1) // 2).sum())

    def _highest_diagonals(self) -> np.ndarray:
        """Largest ``k - q`` of the allowed pairs of every slice."""
        array = slices.trim(self._table.array)
        _, high = slices.diagonal_bounds(array)
        return np.minimum(high, array[:, K1] - 1 - array[:, Q0])

    def _block_lengths(self) -> np.ndarray | None:
        """Lengths of the finest blocks that hold every slice whole; None if they do not tile the square."""
        array = _cut_single_diagonals(slices.trim(self._table.array))
        low, high = np.minimum(array[:, Q0], array[:, K0]), np.maximum(array[:, Q1], array[:, K1])
        # Doubled, with the end moved in: blocks that only touch stay apart.
        blocks = merge_intervals(np.stack([2 * low, 2 * high - 1], axis=1))
        starts, ends = blocks[:, 0] // 2, (blocks[:, 1] + 1) // 2
        bounds = np.concatenate([[0], ends])
        if not self.is_square() or bounds[-1] != self._total_q or (starts != bounds[:-1]).any():
            return None
        return ends - starts

    # ---- protocol of values -----------------------------------------------------------------------

    def visualize(self, save_path: str | None = None) -> None:
        """Draws the matrix with matplotlib, to ``save_path`` if given, else on the screen."""
        from magi_attention.common.draw import draw_matrix

        draw_matrix(slices.to_dense(self._table.array, self._total_q, self._total_k), save_path, repr(self))

    def __eq__(self, other: object) -> bool:
        return isinstance(other, AttnMask) and self._key() == other._key()

    def __hash__(self) -> int:
        return hash(self._key())

    def _key(self) -> tuple[SliceTable, int, int]:
        return self._table, self._total_q, self._total_k

    def __repr__(self) -> str:
        return f"AttnMask({self._total_q} x {self._total_k}, {len(self._table)} slices, area {self.area})"


def _cut_single_diagonals(array: np.ndarray) -> np.ndarray:
    """Bi-causal slices of width 1 row by row: the only slices whose rows share no key with the next row."""
    single = (array[:, TYPE] == slices.BICAUSAL) & (array[:, Q1] - array[:, Q0] == array[:, K1] - array[:, K0])
    rows = [
        [q0 + i, q0 + i + 1, k0 + i, k0 + i + 1, slices.FULL]
        for q0, q1, k0, _, _ in array[single].tolist()
        for i in range(q1 - q0)
    ]
    return np.concatenate([array[~single], np.array(rows, dtype=np.int64).reshape(-1, 5)])
