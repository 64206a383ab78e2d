# SPDX-License-Identifier: Apache-2.0
"""The arithmetic of a group reduce: terms are added rank by rank, so every run gives the same bits."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from magi_attention.comm.collectives.layout import Rows
from magi_attention.comm.collectives.wire import Arrived, RowPack
from magi_attention.common.plan_cache import Kind
from magi_attention.errors import ContractError
from magi_attention.native.rows import Part, PreparedRows, Terms, row_kernels

Contribution = tuple[Rows, torch.Tensor]


def accumulation_dtype(dtype: torch.dtype) -> torch.dtype:
    """Floats are added in at least float32, integers as they are."""
    return torch.promote_types(dtype, torch.float32) if dtype.is_floating_point else dtype


def reduce_rows(
    output: torch.Tensor,
    contributions: Sequence[Contribution],
    acc_reduce: bool,
    num_contributions: torch.Tensor | None = None,
) -> None:
    """``output[row] = (output[row] if acc_reduce) + sum of the row's contributions``.

    With ``num_contributions``, (rows,) int64, the sum is divided by the number of its terms, the prior
    content being one of them; a row without any term is 0.
    """
    dtype = accumulation_dtype(output.dtype)
    total = output if dtype == output.dtype else output.to(dtype)
    if not acc_reduce:
        total.zero_()
    for rows, part in contributions:
        rows.add(total, part)
    if num_contributions is not None:
        terms = (num_contributions + int(acc_reduce)).clamp(min=1).to(dtype)
        total /= terms.view(-1, *[1] * (output.ndim - 1))
    if total is not output:
        output.copy_(total)


def reduce_arrived(
    arrived: Arrived, outputs: Sequence[torch.Tensor], out_lse: torch.Tensor | None, reduce_op: str, acc_reduce: bool
) -> None:
    """Reduces what arrived into ``outputs``; with ``out_lse`` by "lse", the lse having come as the last column."""
    if not arrived.layout.has_local_rows and _reduce_by_kernel(arrived, outputs, out_lse, reduce_op, acc_reduce):
        return
    segments = arrived.segments()
    for i, y in enumerate(outputs):
        terms = [(rows, tensors[i]) for rows, tensors in segments]
        if out_lse is not None:
            lse_terms = [(rows, tensors[-1]) for rows, tensors in segments]
            is_last = i == len(outputs) - 1  # why: every output is weighted by the lse before the reduce
            reduce_rows_lse(y, out_lse if is_last else out_lse.clone(), terms, lse_terms, acc_reduce)
        elif reduce_op == "avg":
            reduce_rows(y, terms, acc_reduce, arrived.layout.contributions(y.device))
        else:
            reduce_rows(y, terms, acc_reduce)


def _reduce_by_kernel(
    arrived: Arrived, outputs: Sequence[torch.Tensor], out_lse: torch.Tensor | None, reduce_op: str, acc_reduce: bool
) -> bool:
    """One launch on a GPU, with the same order of additions; False if that is not possible."""
    kernels = row_kernels(outputs[0])
    if kernels is None:
        return False
    if reduce_op == "avg" and arrived.layout.are_terms_sums:
        return False  # why: the kernel divides by the number of terms
    if out_lse is None:
        launch = _prepared_sum(arrived, outputs, reduce_op == "avg", acc_reduce)
        if launch is None:
            return False
        prepared, offsets, _ = launch
        at, addresses = arrived.wire.data_ptr(), []
        for y, offset in zip(outputs, offsets):
            addresses += (at + offset, y.data_ptr())
        prepared.run(addresses)
        return True
    # All rows are written: one that saw nothing becomes 0, whatever it held.
    terms = arrived.layout.terms(outputs[0].device, of_all_rows=True)
    last = len(outputs) - 1
    for i, (y, x) in enumerate(zip(outputs, arrived.columns)):
        if not kernels.merge((y, x), (out_lse, arrived.columns[-1]), terms, acc_reduce, write_lse=i == last):
            if i:
                raise ContractError("The outputs of one reduce by lse differ in dtype or layout; make them alike.")
            return False
    return True


_Sum = tuple[PreparedRows, list[int], Terms]  # which has the terms held while it runs
_SUMS: Kind[tuple[object, ...], tuple[_Sum | None, RowPack]] = Kind("sum of rows, and its pack for the id")


def _prepared_sum(arrived: Arrived, outputs: Sequence[torch.Tensor], is_average: bool, acc_reduce: bool) -> _Sum | None:
    """The launch for these outputs, where in a wire row each begins, in bytes, and the terms; None if there is none."""
    layout, pack = arrived.layout, arrived.pack
    device = outputs[0].get_device()
    key = (id(pack), device, is_average, acc_reduce, *[(y.stride(), y.dtype) for y in outputs])
    return layout.cache.get(_SUMS, key, lambda: (_prepare_sum(arrived, outputs, is_average, acc_reduce), pack))[0]


def _prepare_sum(arrived: Arrived, outputs: Sequence[torch.Tensor], is_average: bool, acc_reduce: bool) -> _Sum | None:
    layout, pack = arrived.layout, arrived.pack
    kernels, size = row_kernels(outputs[0]), pack.dtype.itemsize
    parts = [Part.of(x, y) for x, y in zip(arrived.columns, outputs)]
    if kernels is None or any(part is None or not part.elements for part in parts):
        return None
    # A buffer with no rows or one may have any stride.
    wanted = [part._replace(in_stride=pack.width * size) for part in parts if part is not None]
    # Without the prior content every row is written; with it only those that something is added to.
    terms = layout.terms(outputs[0].device, of_all_rows=not acc_reduce)
    launch = kernels.prepare_reduce(wanted, terms, acc_reduce, is_average)
    return None if launch is None else (launch, [begin * size for begin, _ in pack.spans], terms)


def reduce_rows_lse(
    output_THD: torch.Tensor,
    lse_TH: torch.Tensor,
    contributions: Sequence[Contribution],
    lse_contributions: Sequence[Contribution],
    acc_reduce: bool,
) -> None:
    """Combines partial attention results row by row, in place::

        lse = log sum_i exp(lse_i)        out = sum_i exp(lse_i - lse) out_i

    over the contributions, and over the prior content if ``acc_reduce``. Rows where every lse_i is -inf
    become 0 and -inf, whatever their out_i hold.
    """
    lse_dtype = accumulation_dtype(lse_TH.dtype)
    old = lse_TH.to(lse_dtype) if acc_reduce else torch.full_like(lse_TH, -torch.inf, dtype=lse_dtype)
    top = old.clone()
    for rows, part in lse_contributions:
        rows.put(top, torch.maximum(rows.take(top), part.to(lse_dtype)))
    safe_top = top.masked_fill(top == -torch.inf, 0.0)
    mass = torch.exp(old - safe_top)
    for rows, part in lse_contributions:
        rows.add(mass, torch.exp(part.to(lse_dtype) - rows.take(safe_top)))
    lse = safe_top + torch.log(mass)

    dtype = accumulation_dtype(output_THD.dtype)
    total = _weighted(output_THD.to(dtype), old, lse)
    for (rows, part), (_, part_lse) in zip(contributions, lse_contributions):
        rows.add(total, _weighted(part.to(dtype), part_lse.to(lse_dtype), rows.take(lse)))
    output_THD.copy_(total)
    lse_TH.copy_(lse)


def _weighted(part_THD: torch.Tensor, part_lse_TH: torch.Tensor, lse_TH: torch.Tensor) -> torch.Tensor:
    """exp(part_lse - lse) * part; 0 where part_lse is -inf, even if the part is not finite there."""
    is_empty = part_lse_TH == -torch.inf
    weight = torch.exp(part_lse_TH - lse_TH.masked_fill(is_empty, 0.0)).to(part_THD.dtype)
    return (part_THD * weight.unsqueeze(-1)).masked_fill(is_empty.unsqueeze(-1), 0.0)
