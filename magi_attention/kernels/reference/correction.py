# SPDX-License-Identifier: Apache-2.0
"""Merging of partial attention results and of sinks, safe for rows that attend to nothing.

Two partial results of the same rows merge as ``lse = log(exp(lse1) + exp(lse2))`` and
``out = exp(lse1 - lse) * out1 + exp(lse2 - lse) * out2``. A sink is S extra logits per head (and per row
for layout "ssh") which join the softmax denominator only: they are neither scaled nor soft-capped.
A row with lse -inf has weight 0 everywhere; nothing here turns it into NaN.

Shapes: out (T, H, Dv), lse (T, H) float32 or float64, sink (S, H) for "sh" or (T, S, H) for "ssh".
The functions are plain tensor formulas for use inside forward and backward passes; derivatives through
rows with lse -inf are not defined, so take gradients by the formulas below instead of by autograd.
"""

from __future__ import annotations

import torch

from magi_attention.errors import ContractError, UnsupportedError

_NEG_INF = float("-inf")


def safe_subtract(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """``a - b`` where ``-inf - -inf`` is -inf, so that its exponential is weight 0."""
    return torch.where(a == _NEG_INF, a, a - b)


def safe_lse(x: torch.Tensor, dim: int = -1, keepdim: bool = False) -> torch.Tensor:
    """``log sum exp`` along ``dim``; -inf where all entries are -inf or the dimension is empty."""
    if x.shape[dim] == 0:
        return x.sum(dim, keepdim=keepdim).fill_(_NEG_INF)
    return torch.logsumexp(x, dim, keepdim=keepdim)


def safe_softmax(x: torch.Tensor, lse: torch.Tensor | None = None, dim: int = -1) -> torch.Tensor:
    """``exp(x - lse)`` along ``dim``; 0 where a row is all -inf.

    ``lse`` has the shape of ``x`` without ``dim`` (or with size 1 there); default: that of ``x`` itself. A
    larger one, such as that of all stages or with a sink, gives the weights within the larger softmax.
    """
    if lse is None:
        lse = safe_lse(x, dim, keepdim=True)
    elif lse.dim() == x.dim() - 1:
        lse = lse.unsqueeze(dim)
    return torch.exp(safe_subtract(x, lse))


def softmax_bwd(dout: torch.Tensor, out: torch.Tensor) -> torch.Tensor:
    """Gradient of softmax along the last dim: ``out * (dout - sum(out * dout))``."""
    return out * (dout - (out * dout).sum(-1, keepdim=True))


def check_sink(sink: torch.Tensor, seqlen_q: int, num_heads: int, sink_layout: str = "sh") -> None:
    """Raises ``ContractError`` unless ``sink`` has the shape of its layout."""
    if sink_layout == "sh":
        fits = sink.dim() == 2 and sink.shape[1] == num_heads
        want = f"(num_sinks, {num_heads})"
    elif sink_layout == "ssh":
        fits = sink.dim() == 3 and sink.shape[0] == seqlen_q and sink.shape[2] == num_heads
        want = f"({seqlen_q}, num_sinks, {num_heads})"
    elif sink_layout == "shd":
        raise UnsupportedError('Sink layout "shd" (sinks with values) is not implemented; use "sh" or "ssh".')
    else:
        raise ContractError(f'Unknown sink layout {sink_layout!r}; use "sh" or "ssh".')
    if not fits:
        raise ContractError(f'sink has shape {tuple(sink.shape)}; layout "{sink_layout}" needs {want}.')


def calc_lse_sink(sink: torch.Tensor, seqlen_q: int, sink_layout: str = "sh") -> torch.Tensor:
    """Log mass of the sinks of every row, ``log sum_s exp(sink)``: (seqlen_q, H), dtype of ``sink``."""
    check_sink(sink, seqlen_q, sink.shape[-1], sink_layout)
    if sink_layout == "sh":
        return safe_lse(sink, dim=0).expand(seqlen_q, -1)
    return safe_lse(sink, dim=1)


def sink_bwd(
    sink: torch.Tensor,
    lse: torch.Tensor,
    o: torch.Tensor,
    do: torch.Tensor,
    sink_layout: str = "sh",
    dsink: torch.Tensor | None = None,
) -> torch.Tensor:
    """Gradient of the sinks: ``-exp(sink - lse) * delta`` with ``delta = sum_d o * do``.

    ``lse`` is the final one, sink included. For "sh" the rows are summed. The result has the shape and
    dtype of ``sink``; if ``dsink`` is given, it is written into that tensor and that is returned.
    """
    acc = lse.dtype
    grad = sink_bwd_from_delta(sink, lse, (o.to(acc) * do.to(acc)).sum(-1), sink_layout)
    return grad.to(sink.dtype) if dsink is None else dsink.copy_(grad)


def sink_bwd_from_delta(
    sink: torch.Tensor, lse: torch.Tensor, delta: torch.Tensor, sink_layout: str = "sh"
) -> torch.Tensor:
    """As ``sink_bwd`` with ``delta`` (T, H) given; the result has the dtype of ``lse``."""
    check_sink(sink, lse.shape[0], lse.shape[1], sink_layout)
    # (T, S, H): the number of sinks is small, so this is no larger than a few lse tensors.
    logits = (sink[None] if sink_layout == "sh" else sink).to(lse.dtype)
    weight = torch.exp(safe_subtract(logits.expand(lse.shape[0], -1, -1), lse[:, None]))
    grad = -weight * delta[:, None].to(lse.dtype)
    return grad.sum(0) if sink_layout == "sh" else grad


def calc_lse_rescale_weight(lse_to_rescale: torch.Tensor, rescaled_lse: torch.Tensor) -> torch.Tensor:
    """Factor (T, H, 1) that moves an ``out`` normalised by the first lse to the second: ``exp(a - b)``."""
    return torch.exp(safe_subtract(lse_to_rescale, rescaled_lse)).unsqueeze(-1)


def correct_attn_lse(lse1: torch.Tensor, lse2: torch.Tensor, inplace: bool = False) -> torch.Tensor:
    """``log(exp(lse1) + exp(lse2))``, dtype of ``lse1``; written into ``lse1`` if ``inplace``."""
    lse = torch.logaddexp(lse1, lse2.to(lse1.dtype))
    return lse1.copy_(lse) if inplace else lse


def correct_attn_out(
    out1: torch.Tensor,
    lse1: torch.Tensor,
    out2: torch.Tensor,
    lse2: torch.Tensor,
    lse: torch.Tensor,
    inplace: bool = False,
) -> torch.Tensor:
    """``exp(lse1 - lse) * out1 + exp(lse2 - lse) * out2``, dtype of ``out1``; into ``out1`` if ``inplace``.

    ``lse`` is the merged one. The sum is formed in the dtype of ``lse`` and rounded once.
    """
    weight1 = calc_lse_rescale_weight(lse1, lse)
    weight2 = calc_lse_rescale_weight(lse2, lse)
    if inplace and out1.dtype == lse.dtype:
        return out1.mul_(weight1).addcmul_(out2.to(out1.dtype), weight2)
    merged = out1.to(lse.dtype) * weight1 + out2.to(lse.dtype) * weight2
    return out1.copy_(merged) if inplace else merged.to(out1.dtype)


def correct_attn_out_lse(
    out1: torch.Tensor,
    lse1: torch.Tensor,
    out2: torch.Tensor,
    lse2: torch.Tensor,
    inplace: bool = False,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Merged ``(out, lse)`` of two partial results; written into ``out1`` and ``lse1`` if ``inplace``."""
    lse = correct_attn_lse(lse1, lse2)
    out = correct_attn_out(out1, lse1, out2, lse2, lse, inplace=inplace)
    return out, (lse1.copy_(lse) if inplace else lse)


def correct_attn_lse_with_sink(
    lse: torch.Tensor, sink: torch.Tensor, sink_layout: str = "sh", inplace: bool = False
) -> torch.Tensor:
    """``lse`` with the mass of the sinks added; written into ``lse`` if ``inplace``."""
    check_sink(sink, lse.shape[0], lse.shape[1], sink_layout)
    return correct_attn_lse(lse, calc_lse_sink(sink.to(lse.dtype), lse.shape[0], sink_layout), inplace)


def correct_attn_out_with_sink(
    out: torch.Tensor, lse: torch.Tensor, sink: torch.Tensor, sink_layout: str = "sh", inplace: bool = False
) -> torch.Tensor:
    """``out`` rescaled by ``exp(lse - lse')`` with ``lse'`` the lse after the sinks.

    ``lse`` is the one before the sinks. Written into ``out`` if ``inplace``.
    """
    weight = calc_lse_rescale_weight(lse, correct_attn_lse_with_sink(lse, sink, sink_layout))
    if inplace:
        return out.mul_(weight) if out.dtype == lse.dtype else out.copy_(out.to(lse.dtype) * weight)
    return (out.to(lse.dtype) * weight).to(out.dtype)


def correct_attn_out_lse_with_sink(
    out: torch.Tensor, lse: torch.Tensor, sink: torch.Tensor, sink_layout: str = "sh", inplace: bool = False
) -> tuple[torch.Tensor, torch.Tensor]:
    """``(out, lse)`` with the sinks joined to the softmax denominator; in place if asked."""
    new_lse = correct_attn_lse_with_sink(lse, sink, sink_layout)
    out = correct_attn_out_with_sink(out, lse, sink, sink_layout, inplace=inplace)
    return out, (lse.copy_(new_lse) if inplace else new_lse)
