# SPDX-License-Identifier: Apache-2.0
"""Lists made by kernels of ``csrc/ffa/sm90/index`` without a sort, as ``prepare`` makes them of torch operations."""

from __future__ import annotations

import torch

from magi_attention.env import build as env
from magi_attention.native.families import SM90
from magi_attention.native.index.calls import MOST_ENTRIES, IndexLibrary, load_index
from magi_attention.native.loader import why_absent


def library_of(x: torch.Tensor) -> IndexLibrary | None:
    """The kernels for the device of ``x``, or None where torch has to do it."""
    if not x.is_cuda or env.is_portable_kernels() or why_absent(SM90.library) is not None:
        return None
    return load_index() if torch.cuda.get_device_capability(x.device) in SM90.capabilities else None


def can_prepare(total_k: int, k_block_size: int) -> bool:
    """Has shared memory a bit for each entry that a list may have?"""
    return -(-total_k // k_block_size) <= MOST_ENTRIES


def prepare(
    library: IndexLibrary, indices: torch.Tensor, total_k: int, k_block_size: int, k_start: torch.Tensor | None
) -> tuple[torch.Tensor, torch.Tensor]:
    """``(rows, counts)`` of ``PreparedIndices`` from int32 or int64 lists in any order."""
    indices, starts = indices.contiguous(), None if k_start is None else k_start.int()
    rows, counts = _empty(indices)
    with torch.cuda.device(indices.device):
        library.prepare(
            **_fields(indices, rows, counts), total_k=total_k, k_block=k_block_size,
            is_int64=int(indices.dtype == torch.int64), k_starts=None if starts is None else starts.data_ptr(),
        )  # fmt: skip
    return rows, counts


def of_blocks(library: IndexLibrary, blocks: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """``(rows, counts)`` of ``PreparedIndices`` from bool blocks (lists, Hk, key blocks)."""
    blocks = blocks.contiguous()
    rows, counts = _empty(blocks)
    with torch.cuda.device(blocks.device):
        library.blocks(**_fields(blocks, rows, counts), total_k=blocks.shape[2], k_block=1)
    return rows, counts


def _empty(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    return x.new_empty(x.shape, dtype=torch.int32), x.new_empty(x.shape[:2], dtype=torch.int32)


def _fields(source: torch.Tensor, rows: torch.Tensor, counts: torch.Tensor) -> dict[str, int]:
    return {
        "num_lists": source.shape[0], "heads_kv": source.shape[1], "max_entries": source.shape[2],
        "indices": source.data_ptr(), "lists": rows.data_ptr(), "counts": counts.data_ptr(),
        "stream": torch.cuda.current_stream(source.device).cuda_stream,
    }  # fmt: skip


__all__ = ["can_prepare", "library_of", "of_blocks", "prepare"]
