# SPDX-License-Identifier: Apache-2.0
"""Slice tables from the tensors that kernel calls take: ranges and types."""

from __future__ import annotations

import threading

import numpy as np
import torch

from magi_attention.common.scalars import as_int_array, as_pairs
from magi_attention.common.slices import FULL, SliceTable, type_code
from magi_attention.errors import ContractError, RangeError

_MAX_TABLES = 32


class SliceTables:
    """The slice tables that were asked for last, by value.

    Equal values give the same table object, so what is in its ``cache`` serves forward, backward and all layers.
    """

    def __init__(self) -> None:
        self._tables: dict[bytes, SliceTable] = {}  # least recently used first
        self._lock = threading.Lock()

    def __len__(self) -> int:
        return len(self._tables)

    @property
    def nbytes(self) -> int:
        """Bytes of the tables and of all that was made from them, on the host and on GPUs."""
        with self._lock:
            tables = list(self._tables.values())
        return sum(table.cache.nbytes for table in tables)

    def get(self, rows: np.ndarray) -> SliceTable:
        """The table of ``rows`` (N, 5) int64, which are checked when they are new."""
        key = rows.tobytes()
        made = self._tables.get(key)
        if made is None:
            made = _table(rows)
        with self._lock:
            table = self._tables.pop(key, made)
            self._tables[key] = table
            oldest = next(iter(self._tables)) if len(self._tables) > _MAX_TABLES else None
            dropped = None if oldest is None else self._tables.pop(oldest)
        del dropped  # outside the lock: a table may run code when it goes
        return table

    def clear(self) -> None:
        """Forgets the tables. A caller that holds one holds what was made from it."""
        with self._lock:
            dropped, self._tables = self._tables, {}
        del dropped


def table_from_tensors(
    q_ranges: torch.Tensor,
    k_ranges: torch.Tensor,
    attn_type_map: torch.Tensor | None = None,
    tables: SliceTables | None = None,
) -> SliceTable:
    """Slices of q_ranges (N, 2), k_ranges (N, 2) and types (N,), None for all FULL; by value.

    Tensors on a GPU are copied to the host, which synchronises. The table is one of ``tables``, or a new one.

    Raises:
        RangeError: a range with start > end or a negative start.
        ContractError: a type outside 0..3.
    """
    rows = _rows(q_ranges, k_ranges, attn_type_map)
    return _table(rows) if tables is None else tables.get(rows)


def _rows(q_ranges: torch.Tensor, k_ranges: torch.Tensor, attn_type_map: torch.Tensor | None) -> np.ndarray:
    """(N, 5) int64."""
    q, k = as_pairs(q_ranges, "q_ranges"), as_pairs(k_ranges, "k_ranges")
    kinds = np.full(len(q), FULL) if attn_type_map is None else as_int_array(attn_type_map, "attn_type_map")
    return np.concatenate([q, k, kinds.reshape(-1, 1)], axis=1)


def table_from_host_ranges(
    q_ranges: torch.Tensor, k_ranges: torch.Tensor, attn_type_map: torch.Tensor | None, total_q: int, total_k: int,
    tables: SliceTables | None = None,
) -> SliceTable:  # fmt: skip
    """``table_from_tensors`` without the slices that the planner on the device leaves out: ranges that are malformed or
    reach beyond the rows, and types outside 0..3."""
    rows = _rows(q_ranges, k_ranges, attn_type_map)
    starts, ends, kinds = rows[:, [0, 2]], rows[:, [1, 3]], rows[:, 4]
    is_in_order = ((starts >= 0) & (starts <= ends) & (ends <= (total_q, total_k))).all(axis=1)
    rows = rows[is_in_order & (kinds >= 0) & (kinds <= 3)]
    return _table(rows) if tables is None else tables.get(rows)


def table_from_attn_arg(attn_arg: object, tables: SliceTables | None = None) -> SliceTable:
    """Slices of any object with ``q_ranges``, ``k_ranges`` and ``attn_type_map``.

    Ranges are a tensor (N, 2) or an iterable of pairs or of objects with ``start`` and ``end``; types are a
    tensor (N,), an iterable of codes, names or ``AttnMaskType``, or None for all FULL.
    """
    q = _pairs(attn_arg.q_ranges, "q_ranges")  # type: ignore[attr-defined]
    k = _pairs(attn_arg.k_ranges, "k_ranges")  # type: ignore[attr-defined]
    types = getattr(attn_arg, "attn_type_map", None)
    if types is None:
        types = [FULL] * len(q)
    codes = types.tolist() if isinstance(types, torch.Tensor) else list(types)
    kinds = np.array([type_code(t) for t in codes], dtype=np.int64)
    if not len(q) == len(k) == len(kinds):
        raise ContractError(f"{len(q)} q ranges, {len(k)} k ranges and {len(kinds)} types; give as many of each.")
    rows = np.concatenate([q, k, kinds.reshape(-1, 1)], axis=1)
    return _table(rows) if tables is None else tables.get(rows)


def _pairs(ranges: object, name: str) -> np.ndarray:
    if not isinstance(ranges, torch.Tensor):
        ranges = [(r.start, r.end) if hasattr(r, "start") else tuple(r) for r in ranges]  # type: ignore[attr-defined]
    return as_pairs(ranges, name)


def _table(array: np.ndarray) -> SliceTable:
    for name, start, end in (("q", array[:, 0], array[:, 1]), ("k", array[:, 2], array[:, 3])):
        bad = np.flatnonzero((start > end) | (start < 0))
        if len(bad):
            i = int(bad[0])
            raise RangeError(
                f"{name} range {i} is [{start[i]}, {end[i]}); ranges are half-open with 0 <= start <= end."
            )
    bad = np.flatnonzero((array[:, 4] < 0) | (array[:, 4] > 3))
    if len(bad):
        raise ContractError(
            f"attn_type_map[{bad[0]}] is {array[bad[0], 4]}; use 0 (full), 1 (causal), 2 (inv_causal) or 3 (bi_causal)."
        )
    return SliceTable(array)
