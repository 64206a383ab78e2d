# SPDX-License-Identifier: Apache-2.0
"""The arithmetic of a group reduce: terms are added rank by rank, so every run gives the same bits."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from magi_attention.comm.layout import Rows

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
