# SPDX-License-Identifier: Apache-2.0
"""The indexer of DSA on one device: the best keys of each query, and the loss by which the indexer learns."""

from __future__ import annotations

from typing import Any

import torch
from torch.compiler import is_compiling

from magi_attention.common.scalars import as_float, as_int
from magi_attention.errors import ContractError
from magi_attention.functional.calls.inputs import check_devices, check_qkv, refuse_dtensor
from magi_attention.kernels.index_attn import Kept, PreparedIndices, prepare_indices, with_kept_readers
from magi_attention.kernels.indexer import Blocks, Visible, kl_hopper
from magi_attention.kernels.indexer.custom_ops import call_kl_fwd, topk_blocks_op, topk_op
from magi_attention.kernels.reference.operands import FLOAT_DTYPES
from magi_attention.kernels.types import as_scale

_INTEGERS = (torch.int32, torch.int64)
_TOPK_BLOCKS, _KL_BLOCKS = Blocks(64, 1024), Blocks(32, 512)


def indexer_topk(
    q_index: torch.Tensor, k_index: torch.Tensor, weights: torch.Tensor, k: int, visible: Visible,
    blocks: Blocks | None = None,
) -> torch.Tensor:  # fmt: skip
    """``api.indexer_topk``."""
    _check_indexer(q_index, k_index, weights)
    _check_visible(visible, len(q_index), len(k_index))
    count = as_int(k, "k", at_least=1)
    # the op has no gradient, and is to be given nothing that has one
    tensors = q_index.detach(), k_index.detach(), weights.detach()
    blocks = blocks or Blocks(_TOPK_BLOCKS.rows, max(_TOPK_BLOCKS.keys, count))
    lists: torch.Tensor = topk_op(*tensors, count, *visible, *blocks)
    return lists


def indexer_topk_blocks(
    q_index: torch.Tensor, k_index: torch.Tensor, weights: torch.Tensor | None, k: int, k_block_size: int,
    local_blocks: int, visible: Visible, blocks: Blocks = _TOPK_BLOCKS,
) -> PreparedIndices:  # fmt: skip
    """``api.indexer_topk_blocks``."""
    _check_indexer(q_index, k_index, *([] if weights is None else [weights]))
    _check_visible(visible, len(q_index), len(k_index))
    count, size = as_int(k, "k", at_least=1), as_int(k_block_size, "k_block_size", at_least=1)
    tensors = q_index.detach(), k_index.detach(), None if weights is None else weights.detach()
    local = as_int(local_blocks, "local_blocks", at_least=0)
    if local > count:
        raise ContractError(f"local_blocks is {local} and k is {count}, which counts these, too; give a k of {local}.")
    rows, counts, k_start, k_end = topk_blocks_op(*tensors, count, size, local, *visible, *blocks)
    kept = None if is_compiling() else Kept()
    return PreparedIndices(rows, counts, len(k_index), size, k_start, k_end, kept=kept)


def indexer_kl(
    q_index: torch.Tensor, k_index: torch.Tensor, weights: torch.Tensor, q: torch.Tensor, k: torch.Tensor,
    lse: torch.Tensor, indices: torch.Tensor | PreparedIndices | None, visible: Visible, softmax_scale: float | None,
    softcap: float, blocks: Blocks = _KL_BLOCKS,
) -> torch.Tensor:  # fmt: skip
    """``api.indexer_kl``."""
    _check_indexer(q_index, k_index, weights)
    check_qkv(q, k, k)
    if not isinstance(lse, torch.Tensor):
        raise ContractError(f"lse is a {type(lse).__name__}; give meta.lse, the tensor (queries, heads) of attention.")
    if len(q) != len(q_index) or len(k) != len(k_index) or lse.shape != q.shape[:2]:
        raise ContractError(
            f"q {tuple(q.shape)}, k {tuple(k.shape)}, lse {tuple(lse.shape)}, q_index {tuple(q_index.shape)}, k_index "
            f"{tuple(k_index.shape)}: attention and indexer need the same queries and keys; lse is (queries, heads)."
        )
    check_devices(q, lse=lse, q_index=q_index)
    softcap = as_float(softcap, "softcap")
    lists: tuple[torch.Tensor | None, ...] = (None,) * 4
    if indices is None:
        _check_visible(visible, len(q), len(k))
    else:
        refuse_masks(visible)
        lists = _lists_of(indices, q_index, k_index, q, k, softcap)
    divergence: torch.Tensor = call_kl_fwd(
        q_index, k_index, weights, q.detach(), k.detach(), lse.detach(), *lists, *visible,
        q.shape[2] ** -0.5 if softmax_scale is None else as_scale(softmax_scale), softcap, *blocks,
    )[0]  # fmt: skip
    return divergence


def _lists_of(
    indices: torch.Tensor | PreparedIndices, q_index: torch.Tensor, k_index: torch.Tensor, q: torch.Tensor,
    k: torch.Tensor, softcap: float,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None, torch.Tensor | None]:  # fmt: skip
    """Lists as the ops of the loss take them: inverted where a backward in order by kernels follows."""
    if isinstance(indices, PreparedIndices):
        shape = tuple(indices.counts.shape)
        if not indices.is_plain or shape != (len(q), 1) or indices.q_block_size > 1 or indices.total_k != len(k):
            raise ContractError(
                f"The prepared lists are {shape} for (lists, kv heads), in blocks of {indices.q_block_size} queries "
                f"and {indices.k_block_size} of {indices.total_k} keys; give prepare_indices(indices[:, None], "
                f"{len(k)}) of indices ({len(q)} queries, keys), without bounds."
            )
        check_devices(q, indices=indices.rows)
        lists = indices
    else:
        check_lists(indices, len(q))
        lists = prepare_indices(indices[:, None].to(q.device), len(k))
    rows = lists.rows[:, 0]
    if not is_compiling() and torch.is_grad_enabled() and k_index.requires_grad and kl_hopper.is_deterministic():
        if kl_hopper.library_for(q_index, k_index, q, k, rows, softcap) is not None:
            lists = with_kept_readers(lists)
    return rows, lists.counts[:, 0], lists.readers, lists.reader_begins


def make_visible(
    causal: bool, positions: torch.Tensor | None, cu_seqlens: Any, k_start: torch.Tensor | None,
    k_end: torch.Tensor | None,
) -> Visible:  # fmt: skip
    """What ``api.indexer_topk`` takes after the star."""
    if cu_seqlens is not None and not isinstance(cu_seqlens, torch.Tensor):
        if not hasattr(cu_seqlens, "__len__"):
            raise ContractError(f"cu_seqlens is {cu_seqlens!r}; give integers [0, n0, n0 + n1, ...].")
        cu_seqlens = torch.tensor([as_int(x, "cu_seqlens") for x in cu_seqlens], dtype=torch.int64)
    return Visible(bool(causal), positions, cu_seqlens, k_start, k_end)


def _check_visible(visible: Visible, queries: int, keys: int) -> None:
    """``ContractError`` unless the tensors fit so many queries and keys."""
    starts = visible.cu_seqlens
    if starts is not None and (starts.dim() != 1 or len(starts) < 2 or starts.dtype not in _INTEGERS):
        raise ContractError(
            f"cu_seqlens is {starts.dtype} {tuple(starts.shape)}; give integers [0, n0, n0 + n1, ..., {keys}]."
        )
    for name in ("positions", "k_start", "k_end"):
        x = getattr(visible, name)
        if x is not None and not (_is_integers(x) and tuple(x.shape) == (queries,)):
            raise ContractError(
                f"{name} is {_form(x)}; give an int32 or int64 tensor ({queries},), a number for each query."
            )
    if visible.positions is None and queries != keys and (visible.causal or starts is not None):
        raise ContractError(
            f"There are {queries} queries for {keys} keys, and causal= and cu_seqlens= ask where queries stand; "
            "give positions=, as plan.positions() has them, or causal=False."
        )


def _check_indexer(q_index: torch.Tensor, k_index: torch.Tensor, *weights: torch.Tensor) -> None:
    """``ContractError`` unless these are (T, H, D), (S, D) and (T, H) if given, floating and on one device."""
    given = list(zip(("q_index", "k_index", "weights"), (q_index, k_index, *weights), (3, 2, 2)))
    for name, x, dims in given:
        refuse_dtensor(name, x)
        if not isinstance(x, torch.Tensor) or x.dim() != dims or x.dtype not in FLOAT_DTYPES:
            raise ContractError(
                f"{name} is {_form(x)}; give floating tensors q_index (queries, index heads, index dim), k_index "
                "(keys, index dim) and weights (queries, index heads)."
            )
    if q_index.shape[2] != k_index.shape[1] or any(q_index.shape[:2] != x.shape for x in weights):
        shapes = ", ".join([f"{name} {tuple(x.shape)}" for name, x, _ in given])
        raise ContractError(f"{shapes}: q_index and k_index need one index dim, and each index head needs a weight.")
    if q_index.dtype != k_index.dtype:
        raise ContractError(f"q_index is {q_index.dtype} and k_index {k_index.dtype}; cast both to one dtype.")
    check_devices(q_index, k_index=k_index, **{name: x for name, x, _ in given[2:]})


def refuse_masks(visible: Visible) -> None:
    """``ContractError`` where lists of keys are given and ``visible`` says something, too."""
    if any(x is not None for x in visible[1:]):
        raise ContractError("indices= say which keys a query has; leave out positions, cu_seqlens, k_start and k_end.")


def check_lists(indices: torch.Tensor, queries: int) -> None:
    """``ContractError`` unless these are integers (queries, keys)."""
    if not _is_integers(indices) or indices.dim() != 2 or len(indices) != queries:
        raise ContractError(f"indices are {_form(indices)}; give an int32 or int64 tensor ({queries} queries, keys).")


def _is_integers(x: object) -> bool:
    return isinstance(x, torch.Tensor) and x.dtype in _INTEGERS


def _form(x: object) -> str:
    return f"{x.dtype} {tuple(x.shape)}" if isinstance(x, torch.Tensor) else f"a {type(x).__name__}"
