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
_KEYS, _BLOCKS = 128, 4  # to multiples of which rows of scores of keys, or blocks, are rounded up
_MOST_HEADS, _MOST_DIM, _MOST_BEST, _MOST_KEYS = 64, 128, 4096, 1 << 30


def library_for(q_index: torch.Tensor, k_index: torch.Tensor, k: int) -> IndexLibrary | None:
    """The library whose kernels choose ``k`` keys, or blocks of any size, for these; None where plain torch does, which
    is where GPU, dtype or sizes are others, where portable kernels are asked for, or none are built.

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
    return _best(library, q_index, k_index, weights, bounds, k, 0, 0, stream)[:, 0]


def best_blocks(
    library: IndexLibrary, q_index: torch.Tensor, k_index: torch.Tensor, weights: torch.Tensor | None,
    bounds: torch.Tensor, k: int, block_size: int, local_blocks: int, stream: int,
) -> torch.Tensor:  # fmt: skip
    """int32 (T, lists, k), as ``topk.best_blocks``, by the scores of ``best_keys`` or, without weights, of each head's
    dots in float32."""
    return _best(library, q_index, k_index, weights, bounds, k, block_size, local_blocks, stream)


def _best(
    library: IndexLibrary, q_index: torch.Tensor, k_index: torch.Tensor, weights: torch.Tensor | None,
    bounds: torch.Tensor, k: int, block_size: int, local_blocks: int, stream: int,
) -> torch.Tensor:  # fmt: skip
    """int32 (T, lists, k): keys, or blocks if they have a size."""
    (queries, heads, dim), keys = q_index.shape, len(k_index)
    block_size = min(block_size, keys)
    num_lists = heads if weights is None else 1
    lists = torch.empty((queries, num_lists, k), dtype=torch.int32, device=q_index.device)
    if not queries:  # a rank without tokens
        return lists
    q_index, k_index = dense(q_index), dense(k_index[:, None])
    weights = None if weights is None else weights.float().contiguous()
    q_strides, k_strides = strides_of(q_index), strides_of(k_index)
    places, step = (-(-keys // block_size), _BLOCKS) if block_size else (keys, _KEYS)
    pitch = num_lists * (-(-places // step) * step)  # of the scores of a query
    chunk = max(min(SCORES_BYTES // (4 * pitch), queries), 1)
    scratch = torch.empty(chunk * pitch, dtype=torch.int32, device=q_index.device)
    bounds = bounds.T.contiguous()
    library.indexer_topk(
        dtype=DTYPES[q_index.dtype], total_q=queries, total_k=keys, heads=heads, head_dim=dim, num_best=k,
        block_size=block_size, local_blocks=local_blocks, chunk=chunk,
        q_stride_token=q_strides[0], q_stride_head=q_strides[1], k_stride_token=k_strides[0],
        q=q_index.data_ptr(), k=k_index.data_ptr(), weights=None if weights is None else weights.data_ptr(),
        k_start=bounds[0].data_ptr(), k_end=bounds[1].data_ptr(), scratch=scratch.data_ptr(), lists=lists.data_ptr(),
        stream=stream,
    )  # fmt: skip
    return lists


__all__ = ["best_blocks", "best_keys", "library_for"]
