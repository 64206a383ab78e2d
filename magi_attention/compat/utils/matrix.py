# SPDX-License-Identifier: Apache-2.0
"""Dense masks from kernel arguments, and matrices as text and pictures."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from magi_attention.common.ranges import AttnRanges
from magi_attention.common.slices import SliceTable, to_dense
from magi_attention.compat.utils.device import default_device
from magi_attention.compat.values.attn_mask import draw_matrix
from magi_attention.errors import ContractError


def make_slice_mask_from_ffa_attn_type(
    seqlen_q: int, seqlen_k: int, attn_type_idx: int = 0, device: torch.device | str | None = None
) -> torch.Tensor:
    """Bool ``(seqlen_q, seqlen_k)`` of one slice of integer type 0 full, 1 causal, 2 inv_causal, 3 bi_causal.

    ``device`` None is CUDA if there is one, else the CPU.
    """
    table = SliceTable.from_ranges([(0, seqlen_q)], [(0, seqlen_k)], attn_type_idx)
    dense = torch.from_numpy(to_dense(table.array, seqlen_q, seqlen_k))
    return dense.to(default_device() if device is None else device)


def make_attn_mask_from_ffa_args(
    q_ranges: AttnRanges | torch.Tensor,
    k_ranges: AttnRanges | torch.Tensor,
    attn_type_map: Sequence[int] | torch.Tensor,
    total_seqlen_q: int,
    total_seqlen_k: int,
    device: torch.device | str | None = None,
) -> torch.Tensor:
    """Bool ``(total_seqlen_q, total_seqlen_k)``: the pairs of all slices together.

    The published function lets a later slice overwrite the whole rectangle of an earlier one, which loses
    pairs when only the rectangles overlap; here no pair is lost. ``device`` None is CUDA if there is one.
    """
    table = SliceTable.from_ranges(_pairs(q_ranges), _pairs(k_ranges), _codes(attn_type_map))
    dense = torch.from_numpy(to_dense(table.array, total_seqlen_q, total_seqlen_k))
    return dense.to(default_device() if device is None else device)


def _pairs(ranges):
    return ranges.tolist() if isinstance(ranges, torch.Tensor) else ranges


def _codes(types):
    return types.tolist() if isinstance(types, torch.Tensor) else list(types)


def repr_matrix(matrix: np.ndarray | torch.Tensor) -> str:
    """Rows and columns as aligned text."""
    rows = [[str(cell) for cell in row] for row in _two_dimensional(matrix).tolist()]
    width = max((len(cell) for row in rows for cell in row), default=0)
    return "\n".join(" ".join(cell.rjust(width) for cell in row) for row in rows)


def vis_matrix(matrix: np.ndarray | torch.Tensor, title: str = "", save_path: str | None = None) -> None:
    """Draws a matrix to ``save_path``, or on the screen."""
    draw_matrix(_two_dimensional(matrix), save_path, title)


def vis_attn_mask(attn_mask: np.ndarray | torch.Tensor, save_path: str | None = None) -> None:
    """Draws a mask ``(total_q, total_k)`` to ``save_path``, or on the screen."""
    draw_matrix(_two_dimensional(attn_mask).astype(float), save_path, "allowed pairs")


def vis_cute_layout(
    shape: Sequence[int], stride: Sequence[int], title: str = "", save_path: str | None = None
) -> np.ndarray:
    """Draws and returns the offsets ``i * stride[0] + j * stride[1]`` of a 2-D layout ``shape:stride``."""
    if len(shape) != 2 or len(stride) != 2:
        raise ContractError(f"Layout {tuple(shape)}:{tuple(stride)} is not 2-D; give two sizes and strides.")
    offsets = np.arange(shape[0])[:, None] * stride[0] + np.arange(shape[1])[None] * stride[1]
    draw_matrix(offsets, save_path, title or f"{tuple(shape)}:{tuple(stride)}")
    return offsets


def _two_dimensional(matrix: np.ndarray | torch.Tensor) -> np.ndarray:
    array = matrix.detach().cpu().numpy() if isinstance(matrix, torch.Tensor) else np.asarray(matrix)
    if array.ndim != 2:
        raise ContractError(f"A matrix has two dimensions, not {array.ndim}.")
    return array


def pad_and_pack_tensors(
    tensors: list[torch.Tensor],
    target_length: int,
    padding_value: float = 0.0,
    dtype: torch.dtype = torch.int32,
) -> torch.Tensor:
    """1-D tensors, each padded at its end to ``target_length``, as rows of ``(len(tensors), target_length)``.

    Raises:
        ContractError: a tensor is longer, not 1-D, or there is none.
    """
    if not tensors or any(t.dim() != 1 or len(t) > target_length for t in tensors):
        raise ContractError(f"Give at least one 1-D tensor, none longer than {target_length}.")
    out = torch.full((len(tensors), target_length), padding_value, dtype=dtype, device=tensors[0].device)
    for row, tensor in zip(out, tensors):
        row[: len(tensor)] = tensor
    return out
