# SPDX-License-Identifier: Apache-2.0
"""Moves of tensor rows by CUDA kernels: copy, fill, reduce, merge; one launch each, nothing is waited for.

A row is ``x[i]``: its elements must lie next to each other, rows may be any distance apart. Lists of rows are int32
tensors on the device of the rows, or None for 0, 1, 2 ...; nobody checks them against the sizes of the tensors.
``csrc/include/magi/rows.h`` says what the kernels do.
"""

from __future__ import annotations

import ctypes
import logging
import math
import struct
import weakref
from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import Any, NamedTuple

import numpy as np
import torch

from magi_attention.common.intervals import ramps
from magi_attention.errors import ContractError, UnsupportedError
from magi_attention.native import abi
from magi_attention.native.families import describe_capabilities, family_of
from magi_attention.native.loader import check, load

_log = logging.getLogger("magi_attention.native")

Pair = tuple[torch.Tensor, torch.Tensor]  # (written, read)
_DTYPES = {torch.bfloat16: abi.BF16, torch.float16: abi.FP16, torch.float32: abi.FP32}
_RANGES = {torch.int32: abi.RANGES_INT32, torch.int64: abi.RANGES_INT64}
_pack_list = abi.ROW_LIST.pack
_pack_part = abi.ROW_PART.pack
_pack_copy, _pack_fill_head, _pack_reduce, _pack_merge, _pack_lse = (
    head.pack for head in (abi.ROW_COPY, abi.ROW_FILL, abi.ROW_REDUCE, abi.ROW_MERGE, abi.ROW_MERGE_LSE)
)
_pack_address = struct.Struct("=Q").pack
_ALL = _pack_list(abi.ROWS_ALL, 0, 0)
_ROUNDED = {(abi.FP32, abi.BF16), (abi.FP32, abi.FP16)}
_MAX_RANGE_TERMS = 256
_PART_PREFIX = struct.Struct("=2i3q")  # of ROW_PART, which ends with two addresses
_pack_part_prefix = _PART_PREFIX.pack


def row_stride(x: torch.Tensor) -> int | None:
    """Elements from one row of ``x`` to the next; None if the elements of a row are not next to each other."""
    if x.is_contiguous():
        return x.stride(0)
    dense = 1
    for size, stride in zip(reversed(x.shape[1:]), reversed(x.stride()[1:])):
        if size != 1:
            if stride != dense:
                return None
            dense *= size
    return x.stride(0)


class RowList:
    """Rows of a list that is kept for one device: ``rows`` int32 (count,), or None for all rows in order."""

    def __init__(self, rows: torch.Tensor | None, count: int) -> None:
        self.rows, self.count = rows, count
        self.packed = _ALL if rows is None else _pack_list(abi.ROWS_INT32, 0, rows.data_ptr())

    @classmethod
    def of_ranges(cls, ranges: torch.Tensor, count: int) -> RowList:
        """Ranges (n, 2), int32 or int64, contiguous, n at most ``MAX_RANGES``, that hold ``count`` rows.

        The kernel reads them, so the host need not know them. Rows beyond ``count`` are left out.
        """
        listed = cls(None, count)
        listed.rows = ranges  # held
        listed.packed = _pack_list(_RANGES[ranges.dtype], ranges.shape[0], ranges.data_ptr())
        return listed


MAX_RANGES = abi.ROW_RANGES
ALL_ROWS = RowList(None, 0)


class Terms:
    """The terms of each row of a sum: ``sources[begin[i]:begin[i + 1]]`` for row ``rows[i]``, in this order.

    All int32 on one device; ``rows`` (count,) or None for row i, ``begin`` (count + 1,), ``sources`` (begin[count],).
    """

    def __init__(self, rows: torch.Tensor | None, begin: torch.Tensor, sources: torch.Tensor) -> None:
        self.count = begin.shape[0] - 1
        self.tensors = (rows, begin, sources)
        self.addresses = (0 if rows is None else rows.data_ptr(), begin.data_ptr(), sources.data_ptr())


def list_terms(sources: np.ndarray, targets: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """``(rows, begin, sources)`` of ``Terms`` from ranges (n, 2) of equal sizes, terms in their order."""
    sizes = sources[:, 1] - sources[:, 0]
    if not np.array_equal(sizes, targets[:, 1] - targets[:, 0]):
        raise ContractError("An input range and its output range differ in size; make them equal.")
    source_rows, target_rows = ramps(sources[:, 0], sizes), ramps(targets[:, 0], sizes)
    order = np.argsort(target_rows, kind="stable")
    rows, counts = np.unique(target_rows, return_counts=True)
    return rows, np.concatenate([[0], np.cumsum(counts)]), source_rows[order]


class RangeTerms:
    """The terms of reduces of ranges, on one device, by the two range tensors that they were made from.

    The first time that a pair is seen, the host waits for it. Its terms go when one of the tensors does.
    """

    def __init__(self, device: torch.device | str) -> None:
        self._device = device
        self._entries: dict[tuple[Any, ...], tuple[tuple[Any, ...], tuple[Any, ...], Terms]] = {}

    def get(self, sources: torch.Tensor, targets: torch.Tensor) -> Terms:
        """Those of range tensors (n, 2), edits of which are noticed."""
        pair = (sources, targets)
        if any(x.is_inference() for x in pair):  # which have no version to tell edits by
            return self._make(sources, targets)
        key, entries = (id(sources), id(targets)), self._entries
        state = tuple((x._version, x.data_ptr(), x.shape) for x in pair)
        known = entries.get(key)
        if known is not None and known[1] == state and all(ref() is x for ref, x in zip(known[0], pair)):
            return known[2]
        terms = self._make(sources, targets)
        if len(entries) >= _MAX_RANGE_TERMS:
            entries.clear()
        refs = tuple(weakref.ref(x, lambda _: entries.pop(key, None)) for x in pair)
        entries[key] = (refs, state, terms)
        return terms

    def __len__(self) -> int:
        return len(self._entries)

    @property
    def nbytes(self) -> int:
        """Bytes of all of them."""
        kept = [x for *_, terms in list(self._entries.values()) for x in terms.tensors]
        return sum(0 if x is None else x.nbytes for x in kept)

    def _make(self, sources: torch.Tensor, targets: torch.Tensor) -> Terms:
        lists = list_terms(*(x.detach().cpu().long().numpy().reshape(-1, 2) for x in (sources, targets)))
        return Terms(*(torch.from_numpy(x.astype(np.int32)).to(self._device) for x in lists))


class Part(NamedTuple):
    """One tensor on each side of a launch, without its addresses: dtype codes, elements of a row, strides in bytes."""

    in_dtype: int
    out_dtype: int
    elements: int
    in_stride: int
    out_stride: int

    @classmethod
    def of(cls, x: torch.Tensor, y: torch.Tensor) -> Part | None:
        """The part that moves rows from ``x`` to ``y``; None for dtypes or layouts that no kernel takes."""
        in_stride, out_stride, elements = row_stride(x), row_stride(y), math.prod(y.shape[1:])
        if in_stride is None or out_stride is None:
            return None
        in_bytes, out_bytes = x.element_size(), y.element_size()
        in_dtype, out_dtype = _DTYPES.get(x.dtype), _DTYPES.get(y.dtype)
        if x.dtype == y.dtype and in_dtype is None:  # may be copied all the same
            in_dtype = out_dtype = abi.RAW
        if in_dtype is None or out_dtype is None:
            return None
        return cls(in_dtype, out_dtype, elements, in_stride * in_bytes, out_stride * out_bytes)

    def as_copy(self, width: int) -> Part | None:
        """For a copy, ``width`` bytes being an element: in bytes if nothing is rounded; None if no kernel does it."""
        if self.in_dtype == self.out_dtype:
            return self._replace(in_dtype=abi.RAW, out_dtype=abi.RAW, elements=self.elements * width)
        return self if (self.in_dtype, self.out_dtype) in _ROUNDED else None

    @property
    def kind(self) -> tuple[int, int]:
        return self.in_dtype, self.out_dtype


class PreparedRows:
    """A launch that lacks nothing but its stream and addresses."""

    def __init__(self, kernels: RowKernels, function: str, head: bytes, parts: Sequence[Part]) -> None:
        self._kernels, self._head = kernels, head
        self._function = getattr(kernels.library, function)
        self._prefixes = [_pack_part_prefix(*part) for part in parts]
        self._pack = struct.Struct("=" + f"{len(head)}sQ" + f"{_PART_PREFIX.size}s2Q" * len(parts)).pack

    def run(self, addresses: Sequence[int]) -> None:
        """``addresses``: what is read and what is written of part 0, of part 1, and so on."""
        kernels = self._kernels
        index = kernels.index
        if index != kernels.current_device():
            with torch.cuda.device(index):
                return self.run(addresses)
        arguments: list = [self._head, kernels.stream(index)]
        at = 0
        for prefix in self._prefixes:
            arguments += (prefix, addresses[at], addresses[at + 1])
            at += 2
        status = self._function(self._pack(*arguments))
        if status:
            check(kernels.library, status, "Moving rows")


class RowKernels:
    """The kernels on the device of index ``index``; every method gives False, and has done nothing, where its kernel
    does not take the tensors: dtypes, or elements of a row apart. Nothing here is differentiable."""

    def __init__(self, library: ctypes.CDLL, index: int) -> None:
        self.library, self.index = library, index
        self.range_terms = RangeTerms(torch.device("cuda", index))
        self.stream = torch._C._cuda_getCurrentRawStream
        self.current_device = torch._C._cuda_getDevice

    def prepare_copy(
        self, parts: Sequence[Part], out_rows: RowList, in_rows: RowList, num_rows: int
    ) -> PreparedRows | None:
        """The launch of ``copy`` for up to four parts of one kind; the lists must be held as long as it is used."""
        if not 1 <= len(parts) <= abi.ROW_PARTS or len({part.kind for part in parts}) != 1:
            return None
        head = _pack_copy(abi.ABI_VERSION, len(parts), num_rows) + in_rows.packed + out_rows.packed
        return PreparedRows(self, "magi_row_copy", head, parts)

    def prepare_reduce(
        self, parts: Sequence[Part], terms: Terms, accumulate: bool, average: bool
    ) -> PreparedRows | None:
        """The launch of ``reduce`` for up to four parts of one kind; ``terms`` must be held as long as it is used."""
        is_same = len({part.kind for part in parts}) == 1
        if not 1 <= len(parts) <= abi.ROW_PARTS or not is_same or abi.RAW in parts[0].kind:
            return None
        head = _pack_reduce(abi.ABI_VERSION, len(parts), terms.count, accumulate, average, *terms.addresses)
        return PreparedRows(self, "magi_row_reduce", head, parts)

    def copy(self, pairs: Sequence[Pair], out_rows: RowList, in_rows: RowList, num_rows: int) -> bool:
        """``y[out_rows[i]] = x[in_rows[i]]`` for every (y, x) of ``pairs`` and i < ``num_rows``.

        Dtypes are equal, or float32 to a 16-bit float. One launch for up to four pairs of one kind.
        """
        moves = []
        for y, x in pairs:
            part = Part.of(x, y)
            part = None if part is None else part.as_copy(x.element_size())
            if part is None:
                return False
            if x.numel() and num_rows:
                moves.append((part, x.data_ptr(), y.data_ptr()))
        self._launch(moves, lambda parts: self.prepare_copy(parts, out_rows, in_rows, num_rows))
        return True

    @staticmethod
    def _launch(moves: list[tuple[Part, int, int]], prepare: Callable[[list[Part]], PreparedRows | None]) -> None:
        """One launch for each kind and four parts of it."""
        by_kind: dict[tuple[int, int], list] = {}
        for move in moves:
            by_kind.setdefault(move[0].kind, []).append(move)
        for same in by_kind.values():
            for at in range(0, len(same), abi.ROW_PARTS):
                some = same[at : at + abi.ROW_PARTS]
                launch = prepare([part for part, *_ in some])
                assert launch is not None
                launch.run([address for _, *pair in some for address in pair])

    def fill(self, x: torch.Tensor, rows: RowList, num_rows: int, value: float) -> bool:
        """``x[rows[i]] = value`` for i < ``num_rows``."""
        stride, size = row_stride(x), x.element_size()
        if stride is None or size > 8:
            return False
        if x.numel() and num_rows:
            bits = int.from_bytes(bytes(torch.tensor([value], dtype=x.dtype).view(torch.uint8).tolist()), "little")
            row_bytes = x[0].numel() * size
            head = _pack_fill_head(abi.ABI_VERSION, size, bits, num_rows, row_bytes, stride * size)
            self._call("magi_row_fill", head + rows.packed + _pack_address(x.data_ptr()))
        return True

    def reduce(self, pairs: Sequence[Pair], terms: Terms, accumulate: bool, average: bool) -> bool:
        """``y[row] = (y[row] if accumulate) + sum of its terms of x`` for every (y, x).

        In float32 and in order, rounded once. With ``average`` divided by the number of terms, the prior row included.
        """
        moves = []
        for y, x in pairs:
            part = Part.of(x, y)
            if part is None or abi.RAW in part.kind:
                return False
            if y.numel() and terms.count:
                moves.append((part, x.data_ptr(), y.data_ptr()))
        self._launch(moves, lambda parts: self.prepare_reduce(parts, terms, accumulate, average))
        return True

    def merge(self, pair: Pair, lse_pair: Pair, terms: Terms, accumulate: bool, write_lse: bool = True) -> bool:
        """Partial attention results (rows, heads, dim) become one, weighted by their lse (rows, heads) float32.

        ``lse_pair`` is only read unless ``write_lse``.
        """
        (y, x), (y_lse, x_lse) = pair, lse_pair
        strides, part = (row_stride(x_lse), row_stride(y_lse)), Part.of(x, y)
        is_float32 = x_lse.dtype == y_lse.dtype == torch.float32
        if part is None or abi.RAW in part.kind or None in strides or not is_float32 or y.dim() != 3:
            return False
        if y.numel() and terms.count:
            head = _pack_merge(abi.ABI_VERSION, y.shape[1], terms.count, accumulate, write_lse, *terms.addresses)
            lse = _pack_lse(x_lse.data_ptr(), y_lse.data_ptr(), 4 * strides[0], 4 * strides[1])  # type: ignore[operator]
            self._call("magi_row_merge", head, lse + _pack_part(*part, x.data_ptr(), y.data_ptr()))
        return True

    def _call(self, function: str, head: bytes, tail: bytes = b"") -> None:
        if self.index != self.current_device():
            with torch.cuda.device(self.index):
                return self._call(function, head, tail)
        status = getattr(self.library, function)(head + _pack_address(self.stream(self.index)) + tail)
        if status:
            check(self.library, status, "Moving rows")


def row_kernels(x: torch.Tensor) -> RowKernels | None:
    """The kernels for the device of ``x``; None on a CPU, and, which one log line says, on a GPU without them."""
    return _kernels(x.get_device()) if x.is_cuda else None


@lru_cache(maxsize=64)
def _kernels(index: int) -> RowKernels | None:
    capability = torch.cuda.get_device_capability(index)
    try:
        family = family_of(capability)
        if family is None:
            raise UnsupportedError(
                f"there are kernels for compute capabilities {describe_capabilities()}, and this GPU has {capability}."
            )
        library = load(family.library)
        bind(library)
    except UnsupportedError as reason:
        _log.warning("Rows are moved by several torch operations each instead of one CUDA kernel: %s", reason)
        return None
    return RowKernels(library, index)


def bind(library: ctypes.CDLL) -> None:
    """Sets the argument types of the row functions; ``UnsupportedError`` if the library is of before there were any."""
    try:
        for name, (result, arguments) in abi.ROW_FUNCTIONS.items():
            entry = getattr(library, name)
            entry.restype, entry.argtypes = result, arguments
    except AttributeError:
        raise UnsupportedError(
            f"{library._name} has no row kernels; run `python -m magi_attention.native.build --only ffa` to replace it."
        ) from None
