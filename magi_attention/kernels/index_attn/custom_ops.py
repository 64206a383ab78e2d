# SPDX-License-Identifier: Apache-2.0
"""Index attention as torch custom ops, so that ``torch.compile(fullgraph=True)`` sees opaque nodes.

``magi_attention::index_fwd`` and ``magi_attention::index_bwd`` take prepared lists and run what ``choose`` gives. With
v None the values are the first ``head_dim_v`` columns of k. Sinks join here, by the lse, so that no implementation has
to know them. ``out`` and ``lse`` have gradients, ``max_logits`` has none.
"""

from __future__ import annotations

from typing import Any

import torch

from magi_attention.kernels.eager import eager_call, opaque_op
from magi_attention.kernels.index_attn.choice import choose
from magi_attention.kernels.index_attn.reference import largest_logits
from magi_attention.kernels.index_attn.types import IndexProblem, PreparedIndices
from magi_attention.kernels.reference.correction import correct_attn_out_lse_with_sink, sink_bwd_from_delta
from magi_attention.kernels.reference.operands import delta_with_dlse, row_delta
from magi_attention.kernels.types import accumulation_dtype, options_of

_KV = "Tensor k, Tensor? v, SymInt head_dim_v"
_LISTS = (  # ``operands`` of ``PreparedIndices``
    "Tensor rows, Tensor counts, SymInt total_k, SymInt k_block_size, Tensor? k_start, Tensor? k_end, "
    "SymInt q_block_size, Tensor? readers, Tensor? reader_begins"
)
_OPTIONS = "Tensor? sink, str sink_layout, float softmax_scale, float softcap, bool deterministic, int sm_margin"
_NUM_LISTS = len(PreparedIndices._fields) - 1
Maybe = torch.Tensor | None


@opaque_op(
    "magi_attention::index_fwd",
    schema=(
        f"(Tensor q, {_KV}, {_LISTS}, {_OPTIONS}, bool return_max_logits, bool needs_backward) "
        "-> (Tensor, Tensor, Tensor)"
    ),
)  # fmt: skip
def index_fwd(
    q: torch.Tensor, k: torch.Tensor, v: Maybe, head_dim_v: int, rows: torch.Tensor, counts: torch.Tensor,
    total_k: int, k_block_size: int, k_start: Maybe, k_end: Maybe, q_block_size: int, readers: Maybe,
    reader_begins: Maybe, sink: Maybe, sink_layout: str, softmax_scale: float, softcap: float, deterministic: bool,
    sm_margin: int, return_max_logits: bool, needs_backward: bool,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:  # fmt: skip
    """``(out (Tq, Hq, Dv) in q's dtype, lse (Tq, Hq), max_logits (Hq,) or empty)``."""
    lists = PreparedIndices(
        rows, counts, total_k, k_block_size, k_start, k_end, q_block_size, readers, reader_begins
    )
    options = options_of(softmax_scale, softcap, sink_layout, deterministic, sm_margin, return_max_logits)
    problem = IndexProblem.of_lists(q, k, v, options, lists, sink, needs_backward, head_dim_v)
    out, lse = choose(problem).forward(problem, q, k, v, lists)
    if sink is not None:
        out, lse = correct_attn_out_lse_with_sink(out, lse, sink, sink_layout)
    max_logits = largest_logits(options, q, k, lists) if return_max_logits else lse.new_empty(0)
    return out.to(q.dtype), lse, max_logits


@index_fwd.register_fake
def _(
    q: torch.Tensor, k: torch.Tensor, v: Maybe, head_dim_v: int, *rest: Any
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    *_, return_max_logits, _needs_backward = rest
    acc, heads = accumulation_dtype(q.dtype), q.shape[1]
    return (
        q.new_empty((q.shape[0], heads, head_dim_v)),
        q.new_empty((q.shape[0], heads), dtype=acc),
        q.new_empty((heads if return_max_logits else 0,), dtype=acc),
    )


@opaque_op(
    "magi_attention::index_bwd",
    schema=(
        f"(Tensor dout, Tensor q, {_KV}, Tensor out, Tensor lse, {_LISTS}, {_OPTIONS}, Tensor? dlse=None) "
        "-> (Tensor, Tensor, Tensor, Tensor)"
    ),
)  # fmt: skip
def index_bwd(
    dout: torch.Tensor, q: torch.Tensor, k: torch.Tensor, v: Maybe, head_dim_v: int, out: torch.Tensor,
    lse: torch.Tensor, rows: torch.Tensor, counts: torch.Tensor, total_k: int, k_block_size: int, k_start: Maybe,
    k_end: Maybe, q_block_size: int, readers: Maybe, reader_begins: Maybe, sink: Maybe, sink_layout: str,
    softmax_scale: float, softcap: float, deterministic: bool, sm_margin: int, dlse: Maybe = None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:  # fmt: skip
    """``(dq, dk, dv, dsink)`` in the dtypes of q, k, v and sink; ``dsink`` is empty without a sink.

    Without v ``dv`` is empty, and the gradient of the values is in ``dk``. ``dlse`` (Tq, Hq): the gradient of lse, or
    None.
    """
    lists = PreparedIndices(
        rows, counts, total_k, k_block_size, k_start, k_end, q_block_size, readers, reader_begins
    )
    options = options_of(softmax_scale, softcap, sink_layout, deterministic, sm_margin)
    problem = IndexProblem.of_lists(q, k, v, options, lists, sink, True, head_dim_v)
    delta = delta_with_dlse(out, dout, lse, dlse)
    dq, dk, dv = choose(problem).backward(problem, dout, q, k, v, out, lse, lists, delta)
    if sink is None:
        dsink = lse.new_empty(0)
    else:
        dsink = sink_bwd_from_delta(sink, lse, row_delta(out, dout, delta), sink_layout).to(sink.dtype)
    dv = k.new_empty(0) if dv is None else dv.to(k.dtype)
    return dq.to(q.dtype), dk.to(k.dtype), dv, dsink


@index_bwd.register_fake
def _(
    dout: torch.Tensor, q: torch.Tensor, k: torch.Tensor, v: Maybe, head_dim_v: int, out: torch.Tensor,
    lse: torch.Tensor, *rest: Any,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:  # fmt: skip
    sink = rest[_NUM_LISTS]  # behind the lists
    dsink = lse.new_empty((0,)) if sink is None else sink.new_empty(sink.shape)
    dv = k.new_empty((0,)) if v is None else v.new_empty(v.shape)
    return q.new_empty(q.shape), k.new_empty(k.shape), dv, dsink


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[torch.Tensor, ...]) -> None:
    q, k, v, head_dim_v, *rest = inputs
    lists, (sink, *options) = PreparedIndices(*rest[:_NUM_LISTS]), rest[_NUM_LISTS:]
    out, lse, max_logits = output
    tensors = lists.rows, lists.counts, lists.k_start, lists.k_end, lists.readers, lists.reader_begins
    ctx.save_for_backward(q, k, v, out, lse, sink, *tensors)
    ctx.sizes = lists.total_k, lists.k_block_size, lists.q_block_size
    ctx.head_dim_v, ctx.options = head_dim_v, options[:5]
    ctx.mark_non_differentiable(max_logits)
    ctx.set_materialize_grads(False)  # that of lse would be made for every loss that does not use it


def _grad(ctx: Any, dout: Maybe, dlse: Maybe, _dmax_logits: object) -> tuple[torch.Tensor | None, ...]:
    q, k, v, out, lse, sink, rows, counts, k_start, k_end, *readers = ctx.saved_tensors
    total_k, k_block, q_block = ctx.sizes
    lists = rows, counts, total_k, k_block, k_start, k_end, q_block, *readers
    if dout is None:
        dout = torch.zeros_like(out)
    dq, dk, dv, dsink = call_index_bwd(dout, q, k, v, ctx.head_dim_v, out, lse, *lists, sink, *ctx.options, dlse)
    return dq, dk, None if v is None else dv, *[None] * (1 + _NUM_LISTS), None if sink is None else dsink, *[None] * 7


call_index_fwd = eager_call(index_fwd, _save, _grad)
call_index_bwd = eager_call(index_bwd)
