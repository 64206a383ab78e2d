# SPDX-License-Identifier: Apache-2.0
"""Dense reference backend: the boolean mask, one softmax, and the textbook gradients.

    s = scale * q.k          c = softcap * tanh(s / softcap) or s        p = exp(c - lse)
    out = p v                dv = p^T dout                               dp = dout v^T
    dc = p * (dp - delta)    ds = dc * (1 - (c / softcap)^2) or dc       delta = sum_d out * dout
    dq = scale * ds k        dk = scale * ds^T q

With dropout, whose weights w are 0 or 1 / (1 - its p): out = (w p) v, dv = (w p)^T dout, dp = w dout v^T.
Memory is O(Hq * Tq * Tk). It computes in float64 for float64 inputs and in float32 else, on any device.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch

from magi_attention.common.intervals import ramps
from magi_attention.common.slices import CAUSAL, INVCAUSAL, K0, K1, Q0, Q1, TYPE, SliceTable, trim
from magi_attention.kernels.dropout import DropoutMask
from magi_attention.kernels.reference.correction import safe_lse, safe_softmax, sink_bwd_from_delta
from magi_attention.kernels.reference.operands import (
    as_kernel,
    check_operands,
    finish_backward,
    finish_forward,
    heads_first,
    reference_why_not,
    row_delta,
    tokens_first,
    unseen_rows,
)
from magi_attention.kernels.types import AttnOptions, Grads, Partial, Problem, accumulation_dtype, check_dropout


def allowed_pairs(pieces: np.ndarray, rows: int, cols: int) -> np.ndarray:
    """Boolean (rows, cols), True where a (trimmed) slice allows the pair; no Python loop over slices.

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
    return np.cumsum(open_count[:, :-1], axis=1) > 0


@dataclass(frozen=True)
class SdpaBackend:
    """The dense torch backend, ``"sdpa"``."""

    name: str = "sdpa"

    def why_not(self, problem: Problem) -> str | None:
        return reference_why_not(problem)

    @as_kernel
    def forward(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        slices: SliceTable,
        options: AttnOptions,
        sink: torch.Tensor | None = None,
        init: Partial | None = None,
        dropout: DropoutMask | None = None,
    ) -> Partial:
        """See ``Backend.forward``."""
        check_operands(q, k, v, slices)
        check_dropout(options, dropout, q, k)
        _, k_unseen = unseen_rows(slices, q.shape[0], k.shape[0])
        logits, _ = _logits(q, k, slices, options)
        lse = safe_lse(logits)
        p = safe_softmax(logits, lse)
        if dropout is not None:
            p *= _drop_weights(dropout, p)
        out = torch.matmul(p, heads_first(v, v.shape[1], k_unseen))
        new = Partial(tokens_first(out), tokens_first(lse))
        if options.return_max_logits:
            new.max_logits = _max_per_head(logits)
        return finish_forward(new, options, sink, init)

    @as_kernel
    def backward(
        self,
        dout: torch.Tensor,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        out: torch.Tensor,
        lse: torch.Tensor,
        slices: SliceTable,
        options: AttnOptions,
        sink: torch.Tensor | None = None,
        delta: torch.Tensor | None = None,
        init: Grads | None = None,
        dropout: DropoutMask | None = None,
    ) -> Grads:
        """See ``Backend.backward``."""
        check_operands(q, k, v, slices)
        check_dropout(options, dropout, q, k)
        heads = k.shape[1]
        q_unseen, k_unseen = unseen_rows(slices, q.shape[0], k.shape[0])
        delta = row_delta(out, dout, delta)
        logits, slope = _logits(q, k, slices, options)
        p = safe_softmax(logits, heads_first(lse[..., None], heads)[..., 0])
        do_h = heads_first(dout, heads, q_unseen)
        dp = torch.matmul(do_h, heads_first(v, heads, k_unseen).transpose(-1, -2))
        weights = None if dropout is None else _drop_weights(dropout, p)
        if weights is not None:
            dp *= weights
        ds = p * (dp - heads_first(delta[..., None], heads, q_unseen))
        if weights is not None:
            p *= weights
        if slope is not None:
            ds *= slope
        ds *= options.softmax_scale
        grads = Grads(
            dq=tokens_first(torch.matmul(ds, heads_first(k, heads, k_unseen))),
            dk=_sum_group(torch.matmul(ds.transpose(-1, -2), heads_first(q, heads, q_unseen))),
            dv=_sum_group(torch.matmul(p.transpose(-1, -2), do_h)),
        )
        grads.delta = delta
        if sink is not None:
            grads.dsink = sink_bwd_from_delta(sink, lse.to(delta.dtype), delta, options.sink_layout)
        return finish_backward(grads, init)


def _logits(
    q: torch.Tensor, k: torch.Tensor, slices: SliceTable, options: AttnOptions
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Logits (Hk, G, Tq, Tk) with -inf at forbidden pairs, and the slope of the softcap or None."""
    heads = k.shape[1]
    q_unseen, k_unseen = unseen_rows(slices, q.shape[0], k.shape[0])
    logits = torch.matmul(heads_first(q, heads, q_unseen), heads_first(k, heads, k_unseen).transpose(-1, -2)).mul_(
        options.softmax_scale
    )
    slope = None
    if options.softcap > 0:
        logits = torch.tanh(logits / options.softcap)
        slope = 1 - logits**2
        logits = logits * options.softcap
    allowed = allowed_pairs(trim(slices.array), q.shape[0], k.shape[0])
    return logits.masked_fill_(~torch.from_numpy(allowed).to(q.device), float("-inf")), slope


def _drop_weights(dropout: DropoutMask, p_HGTT: torch.Tensor) -> torch.Tensor:
    heads = p_HGTT.shape[0] * p_HGTT.shape[1]
    return dropout.weights(heads).view(p_HGTT.shape).to(p_HGTT.dtype)


def _max_per_head(logits: torch.Tensor) -> torch.Tensor:
    if logits.numel() == 0:
        return logits.new_full((logits.shape[0] * logits.shape[1],), float("-inf"))
    return logits.amax((-1, -2)).reshape(-1)


def _sum_group(x_HGTD: torch.Tensor) -> torch.Tensor:
    return x_HGTD.sum(1).transpose(0, 1).to(accumulation_dtype(x_HGTD.dtype)).contiguous()
