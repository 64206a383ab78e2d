# SPDX-License-Identifier: Apache-2.0
"""The indexer's kernels for Hopper GPUs: scores and exact top-k, some queries at a time."""

from __future__ import annotations

import torch

from magi_attention.env import build as env
from magi_attention.kernels.ffa.operands import DTYPES, dense, strides_of
from magi_attention.native.families import SM90
from magi_attention.native.index.calls import IndexLibrary, load_index
from magi_attention.native.loader import find

SCORES_BYTES = 1 << 28  # of scores in memory at a time, where those of one query do not take more
_PITCH = 128  # keys to a multiple of which rows of scores are rounded up
_MOST_HEADS, _MOST_DIM, _MOST_BEST, _MOST_KEYS = 64, 128, 4096, 1 << 30


def library_for(q_index: torch.Tensor, k_index: torch.Tensor, k: int) -> IndexLibrary | None:
    """The library whose kernels choose ``k`` keys for these; None where plain torch does, which is where GPU, dtype or
    sizes are others, where portable kernels are asked for, or none are built.

    Raises:
        UnsupportedError: kernels are built and cannot be used; the text says what to do.
    """
    heads, dim = q_index.shape[1:]
    fits = 1 <= heads <= _MOST_HEADS and 8 <= dim <= _MOST_DIM and dim % 8 == 0 and k <= _MOST_BEST
    if not fits or q_index.dtype not in DTYPES or not 0 < len(k_index) <= _MOST_KEYS:
        return None
    if not q_index.is_cuda or env.is_portable_kernels():
        return None
    if torch.cuda.get_device_capability(q_index.device) not in SM90.capabilities:
        return None
    return load_index() if find(SM90.library) else None


def best_keys(
    library: IndexLibrary, q_index: torch.Tensor, k_index: torch.Tensor, weights: torch.Tensor, bounds: torch.Tensor,
    k: int, stream: int,
) -> torch.Tensor:  # fmt: skip
    """int32 (T, k), as ``topk.best_keys``. Scores are sums in float32 of products in float32 of q and k: where those of
    two keys differ by no more than the rounding of such sums, either may be chosen, always the same one."""
    queries, heads, dim = q_index.shape
    if not queries:  # a rank without tokens
        return torch.empty((0, k), dtype=torch.int32, device=q_index.device)
    q_index, k_index, weights = dense(q_index), dense(k_index[:, None]), weights.float().contiguous()
    q_strides, k_strides = strides_of(q_index), strides_of(k_index)
    pitch = -(-len(k_index) // _PITCH) * _PITCH
    chunk = max(min(SCORES_BYTES // (4 * pitch), queries), 1)
    scores = torch.empty(chunk * pitch, dtype=torch.float32, device=q_index.device)
    lists = torch.empty((queries, k), dtype=torch.int32, device=q_index.device)
    bounds = bounds.contiguous()
    library.indexer_topk(
        dtype=DTYPES[q_index.dtype], total_q=queries, total_k=len(k_index), heads=heads, head_dim=dim, num_best=k,
        chunk=chunk, q_stride_token=q_strides[0], q_stride_head=q_strides[1], k_stride_token=k_strides[0],
        q=q_index.data_ptr(), k=k_index.data_ptr(), weights=weights.data_ptr(),
        bounds=bounds.data_ptr(), scores=scores.data_ptr(), lists=lists.data_ptr(), stream=stream,
    )  # fmt: skip
    return lists


__all__ = ["best_keys", "library_for"]
