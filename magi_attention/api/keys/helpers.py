# SPDX-License-Identifier: Apache-2.0
"""Helpers around keys: padding, batches, masks from lengths and windows."""

from __future__ import annotations

import warnings

import torch
import torch.nn.functional as F

from magi_attention.common import infer
from magi_attention.common.enum import AttnMaskType
from magi_attention.common.range import AttnRange
from magi_attention.common.ranges import AttnRanges
from magi_attention.common.scalars import as_int, as_window
from magi_attention.errors import ContractError
from magi_attention.meta import chunking


class PadSize(int):
    """An int; ``pad[0]`` gives it too, for callers of 1.0.x, where the result was a tuple."""

    def __getitem__(self, index: int) -> int:
        if index != 0:
            raise IndexError("compute_pad_size returns one number.")
        return int(self)


def compute_pad_size(total_seqlen_q: int, cp_size: int, chunk_size: int) -> int:
    """Smallest pad >= 0 (tokens) that makes the total a multiple of ``chunk_size * cp_size``."""
    return PadSize(chunking.compute_pad_size(total_seqlen_q, cp_size, chunk_size))


def squash_batch_dim(x: torch.Tensor) -> torch.Tensor:
    """``(b, s, ...)`` to ``(b * s, ...)``."""
    if x.dim() < 2:
        raise ContractError(f"squash_batch_dim takes (batch, sequence, ...), not shape {tuple(x.shape)}.")
    return x.flatten(0, 1)


def infer_varlen_mask_from_batch(
    batch_size: int, seq_len: int, device: str | torch.device | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """int32 ``cu_seqlens_q, cu_seqlens_k`` = ``[0, s, 2s, ..., b s]`` of a squashed batch.

    ``device`` defaults to the GPU if there is one.
    """
    batch_size, seq_len = as_int(batch_size, "batch_size"), as_int(seq_len, "seq_len")
    if device is None:
        device = "cuda" if torch.cuda.is_available() else "cpu"
    cu = torch.arange(0, batch_size + 1, dtype=torch.int32, device=device) * seq_len
    return cu, cu.clone()


def full_attention_to_varlen_attention(batch_size: int, seq_len: int) -> tuple[torch.Tensor, torch.Tensor]:
    """The name that ``infer_varlen_mask_from_batch`` had before 1.0.3."""
    warnings.warn(
        "full_attention_to_varlen_attention is now infer_varlen_mask_from_batch(batch_size, seq_len).",
        DeprecationWarning,
        stacklevel=2,
    )
    return infer_varlen_mask_from_batch(batch_size, seq_len)


def pad_at_dim(x: torch.Tensor, dim: int, pad_size: int, value: float = 0.0, side: str = "right") -> torch.Tensor:
    """Pads one dim with a constant on the ``"left"`` or ``"right"``."""
    if side not in ("left", "right"):
        raise ContractError(f"side is {side!r}; use 'left' or 'right'.")
    dim = dim % x.dim()
    pads = [0, 0] * (x.dim() - dim - 1) + ([pad_size, 0] if side == "left" else [0, pad_size])
    return F.pad(x, pads, value=value)


def unpad_at_dim(x: torch.Tensor, dim: int, pad_size: int) -> torch.Tensor:
    """Removes the last ``pad_size`` entries of ``dim``."""
    return x.narrow(dim, 0, x.shape[dim] - pad_size)


def apply_padding(
    q_ranges: AttnRanges,
    k_ranges: AttnRanges,
    attn_mask_type: list[AttnMaskType],
    total_seqlen: int,
    pad_size: int,
) -> tuple[AttnRanges, AttnRanges, list[AttnMaskType]]:
    """New triple with one more slice for the pad rows, which attend to nothing."""
    q, k = q_ranges.clone(), k_ranges.clone()
    q.append(AttnRange(total_seqlen, total_seqlen + pad_size))
    k.append(AttnRange(0, 0))
    return q, k, [*attn_mask_type, AttnMaskType.FULL]


def infer_attn_mask_from_sliding_window(
    q_range: AttnRange, k_range: AttnRange, window_size: tuple[int, int]
) -> tuple[AttnRanges, AttnRanges, list[AttnMaskType]]:
    """At most three disjoint slices of a ``(left, right)`` window on one segment; see ``common.infer``."""
    import numpy as np

    segment = np.array([[*q_range, *k_range]], dtype=np.int64)
    return _triple(infer.window_slices(segment, *as_window(window_size, "window_size")))


def infer_attn_mask_from_cu_seqlens(
    cu_seqlens_q,
    cu_seqlens_k,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    global_window_size: int = 0,
) -> tuple[AttnRanges, AttnRanges, list[AttnMaskType], int, int]:
    """Slices of packed samples and both totals: ``(q_ranges, k_ranges, types, total_q, total_k)``.

    Nothing is cached by tensor identity, so editing ``cu_seqlens`` in place is safe.
    """
    cu_q = infer.as_cu_seqlens(cu_seqlens_q, "cu_seqlens_q")
    cu_k = infer.as_cu_seqlens(cu_seqlens_k, "cu_seqlens_k")
    window = as_window(window_size, "window_size")
    rows = infer.varlen_slices(cu_q, cu_k, causal, window, global_window_size)
    return *_triple(rows), int(cu_q[-1]), int(cu_k[-1])


def _triple(rows) -> tuple[AttnRanges, AttnRanges, list[AttnMaskType]]:
    return (
        AttnRanges.from_ranges(rows[:, 0:2].tolist()),
        AttnRanges.from_ranges(rows[:, 2:4].tolist()),
        [AttnMaskType.from_int_type(kind) for kind in rows[:, 4].tolist()],
    )
