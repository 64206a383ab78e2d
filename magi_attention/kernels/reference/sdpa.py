# SPDX-License-Identifier: Apache-2.0
"""Dense reference backend: the boolean mask, one softmax, and the textbook gradients.

    s = scale * q.k          c = softcap * tanh(s / softcap) or s        p = exp(c - lse)
    out = p v                dv = p^T dout                               dp = dout v^T
    dc = p * (dp - delta)    ds = dc * (1 - (c / softcap)^2) or dc       delta = sum_d out * dout
    dq = scale * ds k        dk = scale * ds^T q

With dropout, whose weights w are 0 or 1 / (1 - its p): out = (w p) v, dv = (w p)^T dout, dp = w dout v^T.
Memory is O(Hq * Tq * Tk). It computes in float64 for float64 inputs and large logits and in float32 else, on any
device. A pair that several slices allow counts as often, as in the CUDA kernels.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch

from magi_attention.common.disjoint import overlap_of
from magi_attention.common.intervals import ramps
from magi_attention.common.slices import CAUSAL, INVCAUSAL, K0, K1, Q0, Q1, TYPE, SliceTable, trim
from magi_attention.kernels.dropout import DropoutMask
from magi_attention.kernels.reference.backend import ReferenceBackend
from magi_attention.kernels.reference.correction import safe_lse, safe_softmax
from magi_attention.kernels.reference.numerics import LoadedOperands, masked_product, own_or_given
from magi_attention.kernels.reference.operands import tokens_first
from magi_attention.kernels.types import AttnOptions, BackwardOperands, Operands, Partial, accumulation_dtype


def count_pairs(pieces: np.ndarray, rows: int, cols: int) -> np.ndarray:
    """How many of the (trimmed) slices allow each pair, int32 (rows, cols); no Python loop over slices.

    Each slice row opens at its first allowed key and closes after its last; a running sum along the keys
    counts the open ones. Meant for many small slices; costs four bytes per pair while it works.
    """
    length = pieces[:, Q1] - pieces[:, Q0]
    owner = np.repeat(np.arange(len(pieces)), length)
    i = ramps(0, length)
    own = pieces[owner]
    first = own[:, K0] + np.where(own[:, TYPE] & INVCAUSAL, i, 0)
    end = own[:, K1] - np.where(own[:, TYPE] & CAUSAL, length[owner] - 1 - i, 0)
    end = np.maximum(end, first)
    open_count = np.zeros((rows, cols + 1), dtype=np.int32)
    np.add.at(open_count, (own[:, Q0] + i, first), 1)
    np.add.at(open_count, (own[:, Q0] + i, end), -1)
    return np.cumsum(open_count[:, :-1], axis=1)


@dataclass(frozen=True)
class SdpaBackend(ReferenceBackend):
    """The dense torch backend, ``"sdpa"``."""

    name: str = "sdpa"

    def _attend(self, x: Operands, loaded: LoadedOperands) -> Partial:
        acc = accumulation_dtype(x.q.dtype)
        logits = _logits(loaded, x.slices, x.options)
        lse = safe_lse(logits.weighted)
        p = safe_softmax(logits.weighted, lse)
        if x.dropout is not None:
            p *= _drop_weights(x.dropout, p)
        out = _product(loaded, p, logits.allowed, loaded.v_HTD[:, None])
        new = Partial(tokens_first(out).to(acc), tokens_first(lse).to(acc))
        if x.options.return_max_logits:
            new.max_logits = _max_per_head(logits.plain).to(acc)
        return new

    def _differentiate(
        self, x: BackwardOperands, loaded: LoadedOperands
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        y = loaded
        assert y.do_HGTD is not None and y.lse_HGT1 is not None and y.delta_HGT1 is not None
        logits = _logits(y, x.slices, x.options)
        lse_HGT1 = y.lse_HGT1
        if y.is_large:
            lse_HGT1 = own_or_given(safe_lse(logits.weighted, keepdim=True), lse_HGT1, x.lse.dtype)
        p = safe_softmax(logits.weighted, lse_HGT1)
        dp = torch.matmul(y.do_HGTD, y.v_HTD[:, None].transpose(-1, -2))
        weights = None if x.dropout is None else _drop_weights(x.dropout, p)
        if weights is not None:
            dp *= weights
        ds = p * (dp - y.delta_HGT1)
        if weights is not None:
            p *= weights
        if logits.slope is not None:
            ds *= logits.slope
        ds *= x.options.softmax_scale
        back = logits.allowed.T
        return (
            tokens_first(_product(y, ds, logits.allowed, y.k_HTD[:, None])),
            _sum_group(_product(y, ds.transpose(-1, -2), back, y.q_HGTD)),
            _sum_group(_product(y, p.transpose(-1, -2), back, y.do_HGTD)),
        )


class _Logits(NamedTuple):
    """Logits (Hk, G, Tq, Tk), -inf at forbidden pairs; with the logarithm of how many slices allow a pair added; the
    slope of the softcap or None; allowed pairs (Tq, Tk)."""

    plain: torch.Tensor
    weighted: torch.Tensor
    slope: torch.Tensor | None
    allowed: torch.Tensor


def _logits(x: LoadedOperands, slices: SliceTable, options: AttnOptions) -> _Logits:
    logits = torch.matmul(x.q_HGTD, x.k_HTD[:, None].transpose(-1, -2)).mul_(options.softmax_scale)
    slope = None
    if options.softcap > 0:
        logits = torch.tanh(logits / options.softcap)
        slope = 1 - logits**2
        logits = logits * options.softcap
    counts = torch.from_numpy(count_pairs(trim(slices.array), *logits.shape[2:])).to(logits.device)
    logits.masked_fill_(counts == 0, float("-inf"))
    is_disjoint = overlap_of(slices) is None
    weighted = logits if is_disjoint else logits + counts.clamp(min=1).to(logits.dtype).log()
    return _Logits(logits, weighted, slope, counts > 0)


def _product(x: LoadedOperands, weights: torch.Tensor, allowed: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
    return torch.matmul(weights, values) if x.is_tame else masked_product(weights, allowed, values)


def _drop_weights(dropout: DropoutMask, p_HGTT: torch.Tensor) -> torch.Tensor:
    heads = p_HGTT.shape[0] * p_HGTT.shape[1]
    return dropout.weights(heads).view(p_HGTT.shape).to(p_HGTT.dtype)


def _max_per_head(logits: torch.Tensor) -> torch.Tensor:
    if logits.numel() == 0:
        return logits.new_full((logits.shape[0] * logits.shape[1],), float("-inf"))
    return logits.amax((-1, -2)).reshape(-1)


def _sum_group(x_HGTD: torch.Tensor) -> torch.Tensor:
    return x_HGTD.sum(1).transpose(0, 1).contiguous()
