# SPDX-License-Identifier: Apache-2.0
"""The indexer as torch custom ops, so that ``torch.compile(fullgraph=True)`` sees opaque nodes.

``magi_attention::indexer_topk`` and ``indexer_topk_blocks`` have no gradient. ``magi_attention::indexer_kl_fwd`` has
those of q_index, k_index and weights; to it q, k and lse are constants. Callers have checked shapes and dtypes. What
asks for a look at values (document starts, entries of lists) is checked here, where there are values.
"""

from __future__ import annotations

from typing import Any

import torch

from magi_attention.kernels.eager import eager_call, opaque_op
from magi_attention.kernels.index_attn import PreparedIndices
from magi_attention.kernels.indexer import hopper, kl_hopper
from magi_attention.kernels.indexer.kl import Problem, kl_backward, kl_forward
from magi_attention.kernels.indexer.topk import best_blocks, best_keys
from magi_attention.kernels.indexer.visible import Blocks, Visible
from magi_attention.kernels.types import accumulation_dtype
from magi_attention.native.index.calls import load_index

_INDEXER = "Tensor q_index, Tensor k_index, Tensor weights"
_VISIBLE = "bool causal, Tensor? positions, Tensor? cu_seqlens, Tensor? k_start, Tensor? k_end"
_LISTS = "Tensor? lists, Tensor? counts, Tensor? readers, Tensor? reader_begins"  # of ``PreparedIndices``, one kv head
_ATTENTION = f"Tensor q, Tensor k, Tensor lse, {_LISTS}, {_VISIBLE}, float softmax_scale, float softcap"
_BLOCKS = "int block_rows, int block_keys"
_NUM_CONSTANTS = 16  # arguments of the forward behind the indexer's three
Maybe = torch.Tensor | None


@torch.library.custom_op(
    "magi_attention::indexer_topk", mutates_args=(), schema=f"({_INDEXER}, SymInt k, {_VISIBLE}, {_BLOCKS}) -> Tensor"
)  # fmt: skip
def topk_op(
    q_index: torch.Tensor, k_index: torch.Tensor, weights: torch.Tensor, k: int, causal: bool, positions: Maybe,
    cu_seqlens: Maybe, k_start: Maybe, k_end: Maybe, block_rows: int, block_keys: int,
) -> torch.Tensor:  # fmt: skip
    """int32 (T, k): keys ascending, then -1."""
    visible = Visible(causal, positions, cu_seqlens, k_start, k_end)
    bounds = visible.bounds(len(q_index), len(k_index), q_index.device)
    library = hopper.library_for(q_index, k_index, k)
    with torch.autocast(q_index.device.type, enabled=False):
        if library is None:
            return best_keys(q_index, k_index, weights, bounds, k, Blocks(block_rows, block_keys))
        with torch.cuda.device(q_index.device):
            stream = torch.cuda.current_stream().cuda_stream
            return hopper.best_keys(library, q_index, k_index, weights, bounds, k, stream)


@topk_op.register_fake
def _(
    q_index: torch.Tensor, k_index: torch.Tensor, weights: torch.Tensor, k: int, causal: bool, positions: Maybe,
    cu_seqlens: Maybe, k_start: Maybe, k_end: Maybe, block_rows: int, block_keys: int,
) -> torch.Tensor:  # fmt: skip
    return q_index.new_empty((q_index.shape[0], k), dtype=torch.int32)


@torch.library.custom_op(
    "magi_attention::indexer_topk_blocks", mutates_args=(),
    schema=(
        "(Tensor q_index, Tensor k_index, Tensor? weights, SymInt k, SymInt block_size, SymInt local_blocks, "
        f"{_VISIBLE}, {_BLOCKS}) -> (Tensor, Tensor, Tensor, Tensor)"
    ),
)  # fmt: skip
def topk_blocks_op(
    q_index: torch.Tensor, k_index: torch.Tensor, weights: Maybe, k: int, block_size: int, local_blocks: int,
    causal: bool, positions: Maybe, cu_seqlens: Maybe, k_start: Maybe, k_end: Maybe, block_rows: int, block_keys: int,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:  # fmt: skip
    """``(rows, counts, k_start, k_end)`` of ``PreparedIndices``."""
    visible = Visible(causal, positions, cu_seqlens, k_start, k_end)
    bounds = visible.bounds(len(q_index), len(k_index), q_index.device)
    library = hopper.library_for(q_index, k_index, k)
    with torch.autocast(q_index.device.type, enabled=False):
        if library is None:
            blocks = Blocks(block_rows, block_keys)
            best = best_blocks(q_index, k_index, weights, bounds, k, block_size, local_blocks, blocks)
        else:
            with torch.cuda.device(q_index.device):
                stream = torch.cuda.current_stream().cuda_stream
                best = hopper.best_blocks(
                    library, q_index, k_index, weights, bounds, k, block_size, local_blocks, stream
                )  # fmt: skip
    return best, (best >= 0).sum(2, dtype=torch.int32), bounds[:, 0].clone(), bounds[:, 1].clone()


@topk_blocks_op.register_fake
def _(
    q_index: torch.Tensor, k_index: torch.Tensor, weights: Maybe, k: int, *_: Any
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:  # fmt: skip
    shape = q_index.shape[0], q_index.shape[1] if weights is None else 1
    rows, counts = q_index.new_empty((*shape, k), dtype=torch.int32), q_index.new_empty(shape, dtype=torch.int32)
    return rows, counts, *(q_index.new_empty(shape[:1], dtype=torch.int64) for _ in range(2))  # type: ignore[return-value]


def _problem(
    q_index: torch.Tensor, k_index: torch.Tensor, weights: torch.Tensor, q: torch.Tensor, k: torch.Tensor,
    lse: torch.Tensor, lists: Maybe, causal: bool, positions: Maybe, cu_seqlens: Maybe, k_start: Maybe, k_end: Maybe,
    softmax_scale: float, softcap: float, block_rows: int, block_keys: int,
) -> Problem:  # fmt: skip
    bounds = None
    if lists is None:
        bounds = Visible(causal, positions, cu_seqlens, k_start, k_end).bounds(len(q), len(k), q.device)
    blocks = Blocks(block_rows, block_keys)
    return Problem(q_index, k_index, weights, q, k, lse, bounds, lists, softmax_scale, softcap, blocks)


def _prepared(lists: torch.Tensor, counts: Maybe, readers: Maybe, begins: Maybe, total_k: int) -> PreparedIndices:
    assert counts is not None
    return PreparedIndices(lists[:, None], counts[:, None], total_k, readers=readers, reader_begins=begins)


@opaque_op(
    "magi_attention::indexer_kl_fwd",
    schema=f"({_INDEXER}, {_ATTENTION}, {_BLOCKS}) -> (Tensor, Tensor, Tensor, Tensor)",
)  # fmt: skip
def kl_fwd(
    q_index: torch.Tensor, k_index: torch.Tensor, weights: torch.Tensor, q: torch.Tensor, k: torch.Tensor,
    lse: torch.Tensor, lists: Maybe, counts: Maybe, readers: Maybe, reader_begins: Maybe, causal: bool,
    positions: Maybe, cu_seqlens: Maybe, k_start: Maybe, k_end: Maybe, softmax_scale: float, softcap: float,
    block_rows: int, block_keys: int,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:  # fmt: skip
    """The divergence of each query, the logsumexp of its scores and the sum of its targets, (T,) each; and the targets
    (T, N) that kernels leave for their backward, or nothing (0,)."""
    library = kl_hopper.library_for(q_index, k_index, q, k, lists, softcap)
    if library is not None and lists is not None:
        with torch.cuda.device(q.device), torch.autocast(q.device.type, enabled=False):
            stream = torch.cuda.current_stream().cuda_stream
            prepared = _prepared(lists, counts, None, None, len(k))
            return kl_hopper.forward(library, q_index, k_index, weights, q, k, lse, prepared, softmax_scale, stream)
    problem = _problem(
        q_index, k_index, weights, q, k, lse, lists, causal, positions, cu_seqlens, k_start, k_end, softmax_scale,
        softcap, block_rows, block_keys,
    )  # fmt: skip
    with torch.autocast(q.device.type, enabled=False):
        divergence, lse_index, mass = kl_forward(problem)
    return divergence, lse_index, mass, divergence.new_empty(0)


@kl_fwd.register_fake
def _(
    q_index: torch.Tensor, k_index: torch.Tensor, weights: torch.Tensor, q: torch.Tensor, k: torch.Tensor,
    lse: torch.Tensor, lists: Maybe, counts: Maybe, readers: Maybe, reader_begins: Maybe, causal: bool,
    positions: Maybe, cu_seqlens: Maybe, k_start: Maybe, k_end: Maybe, softmax_scale: float, softcap: float, *_: Any,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:  # fmt: skip
    acc = accumulation_dtype(q_index.dtype)
    by_kernels = kl_hopper.library_for(q_index, k_index, q, k, lists, softcap) is not None
    shape = lists.shape if by_kernels and lists is not None else (0,)
    divergence, lse_index, mass = (q_index.new_empty(q_index.shape[:1], dtype=acc) for _ in range(3))
    return divergence, lse_index, mass, q_index.new_empty(shape, dtype=acc)


@opaque_op(
    "magi_attention::indexer_kl_bwd",
    schema=(
        f"(Tensor grad, Tensor lse_index, Tensor mass, Tensor targets, {_INDEXER}, {_ATTENTION}, {_BLOCKS}) "
        "-> (Tensor, Tensor, Tensor)"
    ),
)  # fmt: skip
def kl_bwd(
    grad: torch.Tensor, lse_index: torch.Tensor, mass: torch.Tensor, targets: torch.Tensor, q_index: torch.Tensor,
    k_index: torch.Tensor, weights: torch.Tensor, q: torch.Tensor, k: torch.Tensor, lse: torch.Tensor, lists: Maybe,
    counts: Maybe, readers: Maybe, reader_begins: Maybe, causal: bool, positions: Maybe, cu_seqlens: Maybe,
    k_start: Maybe, k_end: Maybe, softmax_scale: float, softcap: float, block_rows: int, block_keys: int,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:  # fmt: skip
    """Gradients of q_index, k_index and weights in their dtypes. ``lse_index``, ``mass`` and ``targets`` are the
    forward's; where there are targets, kernels left them, and kernels go on."""
    if targets.dim() == 2 and lists is not None:
        library, in_order = load_index(), kl_hopper.is_deterministic()
        with torch.cuda.device(q.device), torch.autocast(q.device.type, enabled=False):
            stream = torch.cuda.current_stream().cuda_stream
            prepared = _prepared(lists, counts, readers, reader_begins, len(k))
            saved = grad, lse_index, mass, targets, q_index, k_index, weights, prepared
            return kl_hopper.backward(library, *saved, in_order, stream)
    problem = _problem(
        q_index, k_index, weights, q, k, lse, lists, causal, positions, cu_seqlens, k_start, k_end, softmax_scale,
        softcap, block_rows, block_keys,
    )  # fmt: skip
    with torch.autocast(q.device.type, enabled=False):
        return kl_backward(problem, grad, lse_index, mass)


@kl_bwd.register_fake
def _(
    grad: torch.Tensor, lse_index: torch.Tensor, mass: torch.Tensor, targets: torch.Tensor, q_index: torch.Tensor,
    k_index: torch.Tensor, weights: torch.Tensor, *_: Any,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:  # fmt: skip
    return tuple(x.new_empty(x.shape) for x in (q_index, k_index, weights))  # type: ignore[return-value]


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[torch.Tensor, ...]) -> None:
    tensors = [x if isinstance(x, torch.Tensor) else None for x in inputs]
    ctx.save_for_backward(*output[1:], *tensors)
    ctx.rest = [None if isinstance(x, torch.Tensor) else x for x in inputs]
    ctx.mark_non_differentiable(*output[1:])


def _grad(ctx: Any, grad: torch.Tensor, *_: object) -> tuple[torch.Tensor | None, ...]:
    lse_index, mass, targets, *tensors = ctx.saved_tensors
    inputs = [rest if x is None else x for x, rest in zip(tensors, ctx.rest)]
    return *call_kl_bwd(grad, lse_index, mass, targets, *inputs), *[None] * _NUM_CONSTANTS


call_kl_fwd = eager_call(kl_fwd, _save, _grad)
call_kl_bwd = eager_call(kl_bwd)
