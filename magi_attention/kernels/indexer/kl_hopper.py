# SPDX-License-Identifier: Apache-2.0
"""The indexer's loss over lists of keys by kernels for Hopper GPUs, and its gradients (``csrc/ffa/sm90/indexer_kl``).

The forward leaves the target of each listed key, so that the backward reads neither q nor k of attention: 4 bytes for
each entry of a list, until the backward has run.
"""

from __future__ import annotations

import torch

from magi_attention.env import general
from magi_attention.kernels.ffa.operands import DTYPES, dense, strides_of
from magi_attention.kernels.index_attn import PreparedIndices, with_readers
from magi_attention.kernels.index_attn.prepare_ffa import library_of
from magi_attention.native.index.abi import SUM_TAIL
from magi_attention.native.index.calls import IndexLibrary

SHARES_BYTES = 1 << 29  # of dk_index in memory at a time in a fixed order, where those of one query do not take more
MOST_INDEX_HEADS, MOST_INDEX_DIM, MOST_HEADS = 64, 128, 128
# Query heads that share a kv head, kv heads, and columns of all of these together, padded to 64 each.
_TILES = ((16, 36, 2304), (64, 9, 576), (128, 1, 576))
_empty, _zeros = torch.empty, torch.zeros


def library_for(
    q_index: torch.Tensor, k_index: torch.Tensor, q: torch.Tensor, k: torch.Tensor, lists: torch.Tensor | None,
    softcap: float,
) -> IndexLibrary | None:  # fmt: skip
    """The library whose kernels compute this loss; None where plain torch does: without lists, with a softcap, and
    where GPU, dtypes or sizes are others, portable kernels are asked for, or none are built."""
    if lists is None or softcap or not q.is_cuda or not (lists.numel() and len(k)):
        return None
    if q_index.dtype not in DTYPES or any(x.dtype != q_index.dtype for x in (k_index, q, k)):
        return None
    heads, dim = q_index.shape[1:]
    fits = 1 <= heads <= MOST_INDEX_HEADS and 8 <= dim <= MOST_INDEX_DIM and dim % 8 == 0
    return library_of(q) if fits and has_tile(q.shape[1], *k.shape[1:]) else None


def has_tile(heads_q: int, heads_kv: int, head_dim: int) -> bool:
    """Do the queries of one token of such attention fit into a tile of the forward?"""
    group, columns = heads_q // heads_kv, heads_kv * -(-head_dim // 64) * 64
    fits = any(group <= most and heads_kv <= kv and columns <= most_columns for most, kv, most_columns in _TILES)
    return fits and heads_q <= MOST_HEADS and head_dim > 0 and head_dim % (8 if heads_kv == 1 else 64) == 0


def is_deterministic() -> bool:
    """Are gradients of keys to be added in a fixed order?"""
    return torch.are_deterministic_algorithms_enabled() or general.is_deterministic_mode_enable()


def forward(
    library: IndexLibrary, q_index: torch.Tensor, k_index: torch.Tensor, weights: torch.Tensor, q: torch.Tensor,
    k: torch.Tensor, lse: torch.Tensor, lists: PreparedIndices, scale: float, stream: int,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:  # fmt: skip
    """As ``kl.kl_forward``, and the targets (T, N) before they are divided by their sum, by the entries of
    the lists."""
    queries, device = len(q), q.device
    operands = _Operands(q_index, k_index, weights, lists)
    q, heads_kv = dense(q), k.shape[1]
    k, lse = dense(k.flatten(1)[:, None]), lse.float().contiguous()  # kv heads side by side
    divergence, lse_index, mass = (_empty(queries, dtype=torch.float32, device=device) for _ in range(3))
    targets = _empty((queries, lists.rows.shape[2]), dtype=torch.float32, device=device)
    q_strides, k_strides = strides_of(q), strides_of(k)
    library.indexer_kl_fwd(
        **operands.fields(), heads_q=q.shape[1], heads_kv=heads_kv, head_dim=q.shape[2], softmax_scale=scale,
        q_stride_token=q_strides[0], q_stride_head=q_strides[1], k_stride_token=k_strides[0], q=q.data_ptr(),
        k=k.data_ptr(), lse=lse.data_ptr(), targets=targets.data_ptr(), divergence=divergence.data_ptr(),
        lse_index=lse_index.data_ptr(), mass=mass.data_ptr(), stream=stream,
    )  # fmt: skip
    return divergence, lse_index, mass, targets


def backward(
    library: IndexLibrary, grad: torch.Tensor, lse_index: torch.Tensor, mass: torch.Tensor, targets: torch.Tensor,
    q_index: torch.Tensor, k_index: torch.Tensor, weights: torch.Tensor, lists: PreparedIndices, in_order: bool,
    stream: int,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:  # fmt: skip
    """As ``kl.kl_backward``, from what ``forward`` returned. What queries add to dk_index is added in any order, or
    ``in_order``: shares of some queries at a time are left in memory, and added key by key by the inverted lists. All
    other sums have a fixed order always."""
    operands = _Operands(q_index, k_index, weights, lists)
    dq = _empty(q_index.shape, dtype=q_index.dtype, device=q_index.device)
    dweights = _empty(weights.shape, dtype=torch.float32, device=q_index.device)
    dk = _zeros(k_index.shape, dtype=torch.float32, device=q_index.device)
    grad, lse_index, mass = (x.float().contiguous() for x in (grad, lse_index, mass))
    fields = {
        **operands.fields(), "targets": targets.data_ptr(), "lse_index": lse_index.data_ptr(), "mass": mass.data_ptr(),
        "grad": grad.data_ptr(), "dq_index": dq.data_ptr(), "dk_index": dk.data_ptr(), "dweights": dweights.data_ptr(),
        "stream": stream,
    }  # fmt: skip
    if in_order:
        _add_in_order(library, operands, mass, dk, fields, stream)
    else:
        library.indexer_kl_bwd(**fields, query_begin=0, query_end=len(q_index))
    return dq, dk.to(k_index.dtype), dweights.to(weights.dtype)


def _add_in_order(
    library: IndexLibrary, operands: _Operands, mass: torch.Tensor, dk: torch.Tensor, fields: dict[str, int],
    stream: int,
) -> None:  # fmt: skip
    """Runs the backward in parts, and adds the shares of each to dk."""
    queries, entries = operands.prepared.rows.shape[0], operands.prepared.rows.shape[2]
    width = dk.shape[1]
    step = max(SHARES_BYTES // (4 * entries * width), 1)
    shares = _empty((min(step, queries) * entries, width), dtype=torch.float32, device=dk.device)
    # Queries without targets leave no shares. The inverted lists have them all the same, as attention's backward does.
    counts = operands.prepared.counts.masked_fill(~(mass > 0)[:, None], 0)
    inverted = with_readers(operands.prepared)
    assert inverted.readers is not None and inverted.reader_begins is not None
    addresses = (inverted.readers, inverted.reader_begins, counts, shares, dk)
    tail = SUM_TAIL.pack(*(x.data_ptr() for x in addresses), stream)
    for begin in range(0, queries, step):
        end = min(begin + step, queries)
        library.indexer_kl_bwd(**fields, query_begin=begin, query_end=end, dk_partials=shares.data_ptr())
        prefix = library.sum_prefix(
            total_k=len(dk), heads_kv=1, k_block=1, max_entries=entries, num_tiles=1, width=width, has_starts=0,
            list_begin=begin, list_end=end,
        )  # fmt: skip
        library.check(library.sum_raw(prefix + tail), "The sum of shares")


class _Operands:
    """What both directions read of the indexer, in layouts that the kernels take, and the prepared lists."""

    prepared: PreparedIndices

    def __init__(
        self, q_index: torch.Tensor, k_index: torch.Tensor, weights: torch.Tensor, lists: PreparedIndices
    ) -> None:
        self.q_index, self.k_index = dense(q_index), dense(k_index[:, None])
        self.weights = weights.float().contiguous()
        self.prepared = lists

    def fields(self) -> dict[str, int]:
        q, k, lists = self.q_index, self.k_index, self.prepared
        q_strides, k_strides = strides_of(q), strides_of(k)
        return {
            "dtype": DTYPES[q.dtype], "total_q": len(q), "total_k": len(k), "heads_index": q.shape[1],
            "head_dim_index": q.shape[2], "max_entries": lists.rows.shape[2], "q_index_stride_token": q_strides[0],
            "q_index_stride_head": q_strides[1], "k_index_stride_token": k_strides[0], "q_index": q.data_ptr(),
            "k_index": k.data_ptr(), "weights": self.weights.data_ptr(), "lists": lists.rows.data_ptr(),
            "counts": lists.counts.data_ptr(),
        }  # fmt: skip


__all__ = ["backward", "forward", "is_deterministic", "library_for"]
