# SPDX-License-Identifier: Apache-2.0
"""Distributed attention as custom ops, which is how ``torch.compile`` sees it: one node forward, one backward.

What an op names (a manager or plan, a group, a policy) is described in ``handles``. Ranks run the same ops in the same
order because they compile the same model; what one rank alone leaves out as unused would make the others wait.
"""

from __future__ import annotations

import torch

from magi_attention.api.compiled.handles import CompiledFacts, runtime_of
from magi_attention.common.forward_meta import AttnForwardMeta
from magi_attention.common.scalars import as_float
from magi_attention.errors import ContractError
from magi_attention.functional.calls.autocast import cast_operands
from magi_attention.functional.dist_attn import run_backward, run_forward
from magi_attention.functional.runtime import AttnCall, AttnRuntime
from magi_attention.kernels import accumulation_dtype
from magi_attention.kernels.double_backward import refuse_double_backward
from magi_attention.kernels.dropout import dropout_of
from magi_attention.kernels.types import as_scale

_OPTIONS = (
    "Tensor? sink, SymInt handle, str group, int policy, SymInt tail_rows, ScalarType? precision, "
    "float? softmax_scale, float softcap, bool return_max_logits, float dropout_p, SymInt dropout_seed"
)
_FWD = f"(Tensor q, Tensor k, Tensor v, {_OPTIONS}, bool needs_backward) -> (Tensor, Tensor, Tensor, Tensor, Tensor)"
# Graphs that torch.compile keeps on disk call an op by position, so what is new in it comes last and has a default.
_BWD = (
    "(Tensor dout, Tensor q, Tensor k, Tensor v, Tensor out, Tensor lse, Tensor k_tail, Tensor v_tail, "
    f"{_OPTIONS}, Tensor? dlse=None) -> (Tensor, Tensor, Tensor, Tensor)"
)
# Ranks exchange rows in an op, and tables of a plan are made at its first use: no CUDA graph of torch.compile has it.
_TAGS = (torch.Tag.cudagraph_unsafe,)


def _call(runtime: AttnRuntime, tensors: tuple, options: tuple, dropout: tuple, needs_backward: bool) -> tuple:
    """The call, and q, k, v in the dtype that is computed in."""
    q, k, v, sink = tensors
    precision = runtime.policy.precision
    if precision is not None:
        q, k, v = (x.to(precision) for x in (q, k, v))
    call: AttnCall = runtime.call(q, k, v, sink, *options, None, needs_backward, dropout_of(*dropout))
    return call, q, k, v


@torch.library.custom_op("magi_attention::dist_attn_fwd", mutates_args=(), schema=_FWD, tags=_TAGS)
def dist_attn_fwd(
    q, k, v, sink, handle, group, policy, tail_rows, precision, softmax_scale, softcap, return_max_logits,
    dropout_p, dropout_seed, needs_backward,
):  # fmt: skip
    """``(out, lse, max_logits or empty, k and v of the last stage or empty)``."""
    runtime = runtime_of(handle, group, policy)
    with runtime.transport.guard("attention forward, input check"):
        options, dropout = (softmax_scale, softcap, return_max_logits), (dropout_p, dropout_seed)
        call, *qkv = _call(runtime, (q, k, v, sink), options, dropout, needs_backward)
    got = run_forward(call, *qkv, sink)
    max_logits = got.lse.new_empty(0) if got.max_logits is None else got.max_logits
    # In one launch there is no tail, but room for it.
    # Without rows both would be the same memory, which results of an op must not be.
    tail = [x.contiguous() if len(x) else x.new_empty(x.shape) for x in got.tail]
    tail = tail or [x.new_empty((tail_rows, *x.shape[1:])) for x in qkv[1:]]
    return got.out.to(q.dtype), got.lse, max_logits, *tail


@dist_attn_fwd.register_fake
def _(
    q, k, v, sink, handle, group, policy, tail_rows, precision, softmax_scale, softcap, return_max_logits,
    dropout_p, dropout_seed, needs_backward,
):  # fmt: skip
    computed = precision or q.dtype
    acc, heads = accumulation_dtype(computed), q.shape[1]
    tail = [x.new_empty((tail_rows, *x.shape[1:]), dtype=computed) for x in (k, v)]
    return (
        q.new_empty((q.shape[0], heads, v.shape[2])),
        q.new_empty((q.shape[0], heads), dtype=acc),
        q.new_empty((heads if return_max_logits else 0,), dtype=acc),
        *tail,
    )


@torch.library.custom_op("magi_attention::dist_attn_bwd", mutates_args=(), schema=_BWD, tags=_TAGS)
def dist_attn_bwd(
    dout, q, k, v, out, lse, k_tail, v_tail, sink, handle, group, policy, tail_rows, precision, softmax_scale,
    softcap, return_max_logits, dropout_p, dropout_seed, dlse=None,
):  # fmt: skip
    """``(dq, dk, dv, dsink or empty)`` in the dtypes of q, k, v and sink."""
    runtime = runtime_of(handle, group, policy)
    options, dropout = (softmax_scale, softcap, return_max_logits), (dropout_p, dropout_seed)
    call, *qkv = _call(runtime, (q, k, v, sink), options, dropout, True)
    tail = (k_tail, v_tail) if runtime.keeps_tail else ()
    dtype = qkv[0].dtype
    dq, dk, dv, dsink = run_backward(call, dout.to(dtype), *qkv, sink, out.to(dtype), lse, tail, dlse)
    dk, dv = dk.to(k.dtype), dv.to(v.dtype)
    if dk.untyped_storage().data_ptr() == dv.untyped_storage().data_ptr():  # which results of an op must not be
        dv = dv.clone()
    return dq.to(q.dtype), dk, dv, lse.new_empty(0) if dsink is None else dsink


@dist_attn_bwd.register_fake
def _(dout, q, k, v, out, lse, k_tail, v_tail, sink, *_options):
    grads = [x.new_empty(x.shape) for x in (q, k, v)]
    return *grads, lse.new_empty(0) if sink is None else sink.new_empty(sink.shape)


def _save(ctx, inputs, output) -> None:
    q, k, v, sink, *options, _ = inputs
    out, lse, max_logits, k_tail, v_tail = output
    ctx.save_for_backward(q, k, v, out, lse, k_tail, v_tail, sink)
    ctx.options = options
    ctx.mark_non_differentiable(max_logits, k_tail, v_tail)
    ctx.set_materialize_grads(False)  # that of lse would be made for every loss that does not use it


def _grad(ctx, dout, dlse, *_):
    *saved, sink = ctx.saved_tensors  # under checkpointing they can be read once
    if dout is None:
        dout = torch.zeros_like(saved[3])
    dq, dk, dv, dsink = dist_attn_bwd(dout, *saved, sink, *ctx.options, dlse)
    return dq, dk, dv, None if sink is None else dsink, *[None] * 11


dist_attn_fwd.register_autograd(_grad, setup_context=_save)
dist_attn_bwd.register_autograd(refuse_double_backward)


def compiled_attn(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    sink: torch.Tensor | None,
    facts: CompiledFacts,
    softmax_scale: float | None,
    softcap: float,
    return_max_logits: bool,
    dropout_p: float = 0.0,
    dropout_seed: int | None = None,
) -> tuple[torch.Tensor, AttnForwardMeta]:
    """``attend`` and ``calc_attn`` while a model is traced."""
    q, k, v = cast_operands(q, k, v)
    has_grad = q.requires_grad or k.requires_grad or v.requires_grad or (sink is not None and sink.requires_grad)
    scale = None if softmax_scale is None else as_scale(softmax_scale)
    return_max_logits = bool(return_max_logits)
    if dropout_p and dropout_seed is None:
        raise ContractError("dropout_p needs dropout_seed; give an integer, another one for each layer and step.")
    got = dist_attn_fwd(
        q, k, v, sink, facts.handle, facts.group, facts.policy, facts.tail_rows, facts.precision, scale,
        as_float(softcap, "softcap"), return_max_logits, dropout_p, dropout_seed or 0,
        torch.is_grad_enabled() and has_grad,
    )  # fmt: skip
    return got[0], AttnForwardMeta(lse=got[1], max_logits=got[2] if return_max_logits else None)
