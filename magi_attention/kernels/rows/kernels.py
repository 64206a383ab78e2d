# SPDX-License-Identifier: Apache-2.0
"""Range gather, fill and reduce by one CUDA kernel each; every function says False where it cannot be done so.

Gather and fill read ranges on the device, so nothing waits for it. A reduce is computed by who owns the result, for
which the ranges are turned into a list on the host: the first time that a pair of range tensors is seen, the host waits
for them; afterwards the list is found again for the very same tensors, unedited.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import lru_cache

import torch

from magi_attention.native.rows import (
    ALL_ROWS,
    MAX_RANGES,
    Part,
    PreparedRows,
    RowKernels,
    RowList,
    Terms,
    row_kernels,
)


def _rows_first(x: torch.Tensor, dim: int) -> torch.Tensor:
    return x if dim == 0 else x.movedim(dim, 0)


def _list_of(ranges: torch.Tensor, device: torch.device, count: int) -> RowList | None:
    """``ranges`` (n, 2) as the kernels read them, or None if there are too many."""
    if len(ranges) > MAX_RANGES or ranges.dtype not in (torch.int32, torch.int64):
        return None
    return RowList.of_ranges(ranges.to(device).contiguous(), count)


def gather(output: torch.Tensor, x: torch.Tensor, ranges: torch.Tensor, dim: int) -> bool:
    """``output`` becomes the rows of ``x`` in the ranges; it has as many rows along ``dim`` as they hold."""
    kernels = row_kernels(x)
    y, rows = _rows_first(output, dim), _rows_first(x, dim)
    if kernels is None or y.shape[1:] != rows.shape[1:] or output.device != x.device or y.dtype != x.dtype:
        return False
    listed = _list_of(ranges, x.device, y.shape[0])
    return listed is not None and kernels.copy([(y, rows)], ALL_ROWS, listed, listed.count)


def fill(x: torch.Tensor, ranges: torch.Tensor, count: int, value: float, dim: int) -> bool:
    """Sets the ``count`` rows of the ranges to ``value``, in place."""
    kernels = row_kernels(x)
    listed = None if kernels is None else _list_of(ranges, x.device, count)
    return listed is not None and kernels.fill(_rows_first(x, dim), listed, count, value)  # type: ignore[union-attr]


def reduce(
    x: torch.Tensor,
    output: torch.Tensor,
    sources: torch.Tensor,
    targets: torch.Tensor,
    dim: int,
    reduce_op: str,
    acc_reduce: bool,
    x_lse: torch.Tensor | None = None,
    output_lse: torch.Tensor | None = None,
) -> bool:
    """``range_reduce`` in float32, in the order of the ranges; ``x_lse`` and ``output_lse`` for "lse".

    Raises:
        ContractError: an input range and its output range differ in size.
    """
    kernels = row_kernels(x)
    if kernels is None or x.device != output.device:
        return False
    rows, y = _rows_first(x, dim), _rows_first(output, dim)
    terms = kernels.range_terms.get(sources, targets)
    if reduce_op != "lse":
        return kernels.reduce([(y, rows)], terms, acc_reduce, reduce_op == "avg")
    assert x_lse is not None and output_lse is not None
    return _merge(kernels, (y, rows), (output_lse, x_lse), terms, acc_reduce)


def _merge(
    kernels: RowKernels, pair: tuple[torch.Tensor, torch.Tensor], lse_pair: tuple[torch.Tensor, torch.Tensor],
    terms: Terms, acc_reduce: bool,
) -> bool:  # fmt: skip
    (y, rows), (y_lse, x_lse) = pair, lse_pair
    if y.dim() < 3 or not (x_lse.dim() == y_lse.dim() == 2 and y.shape[:2] == y_lse.shape):
        return False
    if y.dim() > 3:  # what comes after the heads is one dim to the kernel
        if not (y.is_contiguous() and rows.is_contiguous()):
            return False
        y, rows = y.flatten(2), rows.flatten(2)
    return kernels.merge((y, rows), lse_pair, terms, acc_reduce)


def rounded(tensors: Sequence[torch.Tensor], dtype: torch.dtype) -> list[torch.Tensor]:
    """``[x.to(dtype) for x in tensors]``; of dense float32 tensors with as many rows each, by one launch on a GPU."""
    first = tensors[0]
    is_alike = all(x.is_contiguous() and x.dtype == torch.float32 and len(x) == len(first) for x in tensors)
    if first.is_cuda and is_alike and dtype != torch.float32:
        widths = tuple(math.prod(x.shape[1:]) for x in tensors)
        launch = _rounding(first.get_device(), len(first), widths, dtype)
        if launch is not None:
            made = [torch.empty_like(x, dtype=dtype) for x in tensors]
            launch.run([at for x, y in zip(tensors, made) for at in (x.data_ptr(), y.data_ptr())])
            return made
    return [x.to(dtype) for x in tensors]


@lru_cache(maxsize=256)
def _rounding(index: int, count: int, widths: tuple[int, ...], dtype: torch.dtype) -> PreparedRows | None:
    kernels = row_kernels(torch.empty(0, device=torch.device("cuda", index)))
    if kernels is None or not all(widths):
        return None
    like = [torch.empty(1, width) for width in widths]
    parts = [Part.of(x, x.to(dtype)) for x in like]
    known = [part for part in parts if part is not None and part.as_copy(4) == part]
    return kernels.prepare_copy(known, ALL_ROWS, ALL_ROWS, count) if len(known) == len(parts) else None


__all__ = ["fill", "gather", "reduce", "rounded"]
