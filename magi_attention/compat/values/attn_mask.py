# SPDX-License-Identifier: Apache-2.0
"""``AttnMask``: the published mask object, as ranges with a type each."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from operator import attrgetter
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from magi_attention.common import slices
from magi_attention.common.disjoint import check_disjoint
from magi_attention.common.enum import AttnMaskType
from magi_attention.common.infer import dense_slices
from magi_attention.common.range import AttnRange
from magi_attention.common.ranges import AttnRanges
from magi_attention.common.scalars import as_bools
from magi_attention.common.slices import INVCAUSAL, K0, K1, Q0, Q1, TYPE, SliceTable
from magi_attention.compat.figures import drawn
from magi_attention.compat.values.rows import RowIntervals
from magi_attention.errors import ContractError, UnsupportedError

if TYPE_CHECKING:
    import torch


class AttnMask:
    """Which of ``total_seqlen_q`` queries may see which of ``total_seqlen_k`` keys; immutable.

    Make one with ``from_ranges`` or ``from_mask``. Slices are disjoint. ``magi_attention.common.mask.Mask``
    is the same thing for new code.

    Raises:
        UnsupportedError: (a ``RuntimeError``) the class itself is called.
    """

    device = "cpu"  # of mask_tensor
    meta_info_dim_size = 1  # size of the last dim of mask_tensor,
    mask_flag_dim_idx = 0  # where a pair's flag is entry 0:
    masked_flag, unmasked_flag = 0, 1

    _table: SliceTable
    _total_q: int
    _total_k: int

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        raise UnsupportedError("AttnMask(...) makes no mask; call AttnMask.from_ranges or AttnMask.from_mask.")

    @classmethod
    def _of(cls, table: SliceTable, total_seqlen_q: int, total_seqlen_k: int) -> AttnMask:
        self = object.__new__(cls)
        self._table, self._total_q, self._total_k = table, total_seqlen_q, total_seqlen_k
        array = table.array
        ends = [int(array[array[:, end] > array[:, end - 1], end].max(initial=0)) for end in (Q1, K1)]
        for name, end, total in (("q", ends[0], total_seqlen_q), ("k", ends[1], total_seqlen_k)):
            if end > total:
                raise ContractError(
                    f"A {name} range ends at {end}, beyond total_seqlen_{name} {total}; raise the total."
                )
        check_disjoint(table)
        return self

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
        return cls._of(table, total_q, ends[1] if total_seqlen_k is None else total_seqlen_k)

    @classmethod
    def from_mask(cls, mask: torch.Tensor | NDArray[np.generic] | Sequence[Sequence[int]]) -> AttnMask:
        """From a matrix ``(total_q, total_k)`` of booleans, or of the integers 0 and 1; the slices found reproduce it
        exactly.

        Where the keys of every row are one interval these are the published ones: FULL and CAUSAL, rows
        ascending, rows without keys in a CAUSAL slice (``RowIntervals.to_slices``). ``Mask.from_dense`` finds
        fewer for windows.
        """
        dense = as_bools(mask, "mask")
        if dense.ndim != 2:
            raise ContractError(f"The mask has {dense.ndim} dimensions; give a (total_q, total_k) matrix.")
        rows = RowIntervals.of_dense(dense)
        return cls._of(SliceTable(dense_slices(dense) if rows is None else rows.to_slices()), *dense.shape)

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
            raise ContractError(f"Invalid alignment {align!r}; use 'bottom-right' or 'top-left'.")
        diagonal = seqlen_k - seqlen_q if align == "bottom-right" else 0
        ones = torch.ones((seqlen_q, seqlen_k), dtype=dtype or torch.int32, device=device)
        return torch.tril(ones, diagonal=diagonal)

    # ---- reading ----------------------------------------------------------------------------------

    slices = property(attrgetter("_table"), doc="``SliceTable``.")
    total_seqlen_q = property(attrgetter("_total_q"))
    total_seqlen_k = property(attrgetter("_total_k"))

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
        """Flags ``(total_q, total_k, 1)``, int32: ``mask_flag_array`` with the published last dim."""
        import torch

        return torch.from_numpy(self.mask_flag_array).unsqueeze(-1)

    @property
    def mask_flag_array(self) -> NDArray[np.int32]:
        """Matrix ``(total_q, total_k)`` of zeros and ones, int32."""
        return slices.to_dense(self._table.array, self._total_q, self._total_k).astype(np.int32)

    @property
    def area(self) -> int:
        """Number of allowed pairs."""
        return self._table.area

    def tuples(self) -> Iterator[tuple[AttnRange, AttnRange, AttnMaskType]]:
        """``(q_range, k_range, type)`` of every slice, in stored order."""
        for q0, q1, k0, k1, kind in self._table.array.tolist():
            yield AttnRange(q0, q1), AttnRange(k0, k1), AttnMaskType.from_int_type(kind)

    def make_sub_mask(self, q_range: AttnRange, k_range: AttnRange) -> AttnMask:
        """The window of the mask, in coordinates that start at 0; ``ContractError`` if it leaves the mask.

        Slices are those of ``from_mask`` if the mask itself is FULL and CAUSAL only, as all published ones are;
        else cut pieces, rows ascending.
        """
        (q0, q1), (k0, k1) = q_range, k_range
        pieces = self._cut(q_range, k_range)
        pieces[:, [Q0, Q1]] -= q0
        pieces[:, [K0, K1]] -= k0
        is_published = not (self._table.array[:, TYPE] & INVCAUSAL).any()
        rows = RowIntervals.of_slices(pieces, q1 - q0, k1 - k0) if is_published else None
        if rows is None:
            pieces = slices.merge(pieces)
            pieces = pieces[np.lexsort((pieces[:, K0], pieces[:, Q1], pieces[:, Q0]))]
        else:
            pieces = rows.to_slices()
        return AttnMask._of(SliceTable(pieces), q1 - q0, k1 - k0)

    def calc_sub_area(self, q_range: AttnRange, k_range: AttnRange) -> int:
        """Number of allowed pairs in the window; ``ContractError`` if it leaves the mask."""
        return int(slices.areas(self._cut(q_range, k_range)).sum())

    def _cut(self, q_range: AttnRange, k_range: AttnRange) -> NDArray[np.int64]:
        (q0, q1), (k0, k1) = q_range, k_range
        for name, start, end, total in (("q", q0, q1, self._total_q), ("k", k0, k1, self._total_k)):
            if start < 0 or end > total:
                raise ContractError(f"{name}_range [{start}, {end}) leaves the mask; stay within [0, {total}).")
        rows, _ = slices.cut_q(slices.trim(self._table.array), q0, q1)
        return slices.cut_k(rows, k0, k1)[0]

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
        """Documents one after another in q and in k, each full, nothing outside? Each has a row and a key."""
        rows = self._rows()
        return rows is not None and rows.is_varlen_full()

    def is_varlen_causal(self) -> bool:
        """Documents one after another in q and in k, each causal (aligned at its end), nothing outside?"""
        rows = self._rows()
        return rows is not None and rows.is_varlen_causal()

    def _rows(self) -> RowIntervals | None:
        return RowIntervals.of_slices(self._table.array, self._total_q, self._total_k)

    def _highest_diagonals(self) -> NDArray[np.int64]:
        """Largest ``k - q`` of the allowed pairs of every slice."""
        array = slices.trim(self._table.array)
        _, high = slices.diagonal_bounds(array)
        highest: NDArray[np.int64] = np.minimum(high, array[:, K1] - 1 - array[:, Q0])
        return highest

    # ---- protocol of values -----------------------------------------------------------------------

    def visualize(self, save_path: str | None = None) -> None:
        """Draws the matrix with matplotlib, to ``save_path`` if given, else on the screen."""
        draw_matrix(slices.to_dense(self._table.array, self._total_q, self._total_k), save_path, repr(self))

    def __eq__(self, other: object) -> bool:
        return isinstance(other, AttnMask) and self._key() == other._key()

    def __hash__(self) -> int:
        return hash(self._key())

    def _key(self) -> tuple[SliceTable, int, int]:
        return self._table, self._total_q, self._total_k

    def __repr__(self) -> str:
        return f"AttnMask({self._total_q} x {self._total_k}, {len(self._table)} slices, area {self.area})"


def draw_matrix(matrix: NDArray[np.bool_], save_path: str | None = None, title: str = "") -> None:
    """Draws ``(rows, columns)`` to ``save_path``, or on the screen if None.

    Raises:
        UnsupportedError: matplotlib is missing.
    """
    with drawn(save_path, size=(8, 8)) as axes:
        axes[0, 0].imshow(matrix, aspect="auto", interpolation="nearest", cmap="viridis")
        axes[0, 0].set(title=title, xlabel="key", ylabel="query")
