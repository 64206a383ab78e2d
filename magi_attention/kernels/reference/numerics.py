# SPDX-License-Identifier: Apache-2.0
"""What the plain formulas would spoil: logits too large for float32, and values that are not finite.

*Large logits.* A float32 logit of 1e6 is right to 0.06, and so is lse, so ``exp(s - lse)`` is off by 6%. Calls whose
logits may be large compute in float64. Their backward gets an lse that was rounded to float32; ``own_or_given`` takes
the rows' own one where the two are the same number but for that rounding.

*Not finite.* The weight of a forbidden pair is 0, but 0 * NaN is NaN. ``masked_product`` leaves forbidden pairs out, so
that NaN and inf of one document stay there. Tiles without forbidden pairs need no care.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch

from magi_attention.kernels.reference.operands import heads_first, unseen_rows
from magi_attention.kernels.types import AttnOptions, BackwardOperands, Operands, accumulation_dtype

_LARGE_LOGIT = 4096.0  # float32 is right to 2e-4 below


class LoadedOperands(NamedTuple):
    """Tensors of one call, rows without a pair blanked, in the dtype to compute in. ``is_tame``: no product of a
    forbidden pair is other than finite. ``is_large``: logits may be too large for the dtype of results."""

    q_HGTD: torch.Tensor
    k_HTD: torch.Tensor
    v_HTD: torch.Tensor
    is_tame: bool
    is_large: bool
    do_HGTD: torch.Tensor | None = None
    lse_HGT1: torch.Tensor | None = None
    delta_HGT1: torch.Tensor | None = None


def load_operands(x: Operands | BackwardOperands, delta: torch.Tensor | None = None) -> LoadedOperands:
    """Those of a forward, or of a backward with its ``delta`` (Tq, Hq).

    Values are looked at on CPUs alone: on a GPU that would wait for it.
    """
    q, k, v, slices, options = x.q, x.k, x.v, x.slices, x.options
    rows_of_out = (x.dout, x.lse, delta) if isinstance(x, BackwardOperands) else (None, None, None)
    acc, heads = accumulation_dtype(q.dtype), k.shape[1]
    q_unseen, k_unseen = unseen_rows(slices, q.shape[0], k.shape[0])
    q_HGTD = heads_first(q, heads, q_unseen)
    k_HTD, v_HTD = (heads_first(y, heads, k_unseen)[:, 0] for y in (k, v))
    backward = [
        None if y is None else heads_first(y if y.dim() == 3 else y[..., None], heads, q_unseen) for y in rows_of_out
    ]
    if q.device.type != "cpu":
        return LoadedOperands(q_HGTD, k_HTD, v_HTD, True, False, *backward)
    logit = _longest(q_HGTD) * _longest(k_HTD) * abs(options.softmax_scale)
    dp = _longest(v_HTD) * (1.0 if backward[0] is None else _longest(backward[0]))
    rows = [float(y.max()) for y in backward[1:] if y is not None and y.numel()]  # lse -inf is that of an empty row
    most = torch.finfo(acc).max / 1e3
    is_tame = all(value <= most for value in (logit, dp, *rows))
    if not _is_large(logit, acc, options):
        return LoadedOperands(q_HGTD, k_HTD, v_HTD, is_tame, False, *backward)
    wide = (None if y is None else y.double() for y in backward)
    return LoadedOperands(q_HGTD.double(), k_HTD.double(), v_HTD.double(), is_tame, True, *wide)


def compute_dtype(q: torch.Tensor, k: torch.Tensor, options: AttnOptions) -> torch.dtype:
    """float64 where logits may be too large for the accumulation dtype, else that."""
    acc = accumulation_dtype(q.dtype)
    if q.device.type != "cpu":
        return acc
    logit = _longest(q.to(acc)) * _longest(k.to(acc)) * abs(options.softmax_scale)
    return torch.float64 if _is_large(logit, acc, options) else acc


def _is_large(logit: float, acc: torch.dtype, options: AttnOptions) -> bool:
    capped = min(logit, options.softcap) if options.softcap > 0 else logit
    return acc != torch.float64 and not capped <= _LARGE_LOGIT  # NaN is large


def _longest(x: torch.Tensor) -> float:
    """The largest norm of a row (..., D); NaN if there is one."""
    return float(torch.linalg.vector_norm(x, dim=-1).max()) if x.numel() else 0.0


def own_or_given(own: torch.Tensor, given: torch.Tensor, given_dtype: torch.dtype) -> torch.Tensor:
    """The lse of rows over the keys of this call where ``given``, which was rounded to ``given_dtype``, is the same;
    else, where there are other keys or sinks, ``given``."""
    return torch.where((own - given).abs() <= 2 * torch.finfo(given_dtype).eps * given.abs(), own, given)


def masked_product(weights: torch.Tensor, allowed: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    """``weights @ x`` over allowed pairs alone, which give what they would give by themselves, NaN and inf included.

    weights (..., R, K), allowed bool (R, K), x (..., K, D).
    """
    is_finite = x.isfinite()
    weights = weights.masked_fill(~allowed, 0.0)
    out = torch.matmul(weights, x.masked_fill(~is_finite, 0.0))
    if bool(is_finite.all()):
        return out
    dtype = x.dtype
    above, below = (weights > 0).to(dtype), (weights < 0).to(dtype)
    neither = allowed.to(dtype) - above - below  # weights that are 0 or NaN
    inf, minus_inf, nan = ((x == math.inf).to(dtype), (x == -math.inf).to(dtype), x.isnan().to(dtype))
    up = (torch.matmul(above, inf) + torch.matmul(below, minus_inf)) > 0
    down = (torch.matmul(above, minus_inf) + torch.matmul(below, inf)) > 0
    spoilt = (torch.matmul(neither, (~is_finite).to(dtype)) + torch.matmul(allowed.to(dtype), nan)) > 0
    out = out.masked_fill(up, math.inf).masked_fill(down, -math.inf)
    return out.masked_fill(spoilt | (up & down), math.nan)


__all__ = ["LoadedOperands", "compute_dtype", "load_operands", "masked_product", "own_or_given"]
