# SPDX-License-Identifier: Apache-2.0
"""Distributed attention as custom ops, which is how ``torch.compile`` sees it: one node forward, one backward.

An op takes tensors and numbers, so a manager is named by a number, its handle, which the keys made for it carry along
with what the shapes of results depend on. A compiled model that gets a key of another handle is compiled once more, for
any number; but where a module holds the key, whose numbers torch takes for constants. Ranks run the same ops in the
same order because they compile the same model; what one rank alone leaves out as unused would make the others wait.
"""

from __future__ import annotations

import itertools
import weakref
from typing import NamedTuple

import torch

from magi_attention.api.manager import RuntimeManager
from magi_attention.errors import UnknownKeyError
from magi_attention.functional.dist_attn import run_backward, run_forward
from magi_attention.functional.runtime import AttnCall, AttnRuntime
from magi_attention.kernels import accumulation_dtype
from magi_attention.kernels.double_backward import refuse_double_backward

_managers: weakref.WeakValueDictionary[int, RuntimeManager] = weakref.WeakValueDictionary()
_numbers = itertools.count(2)  # torch compiles 0 and 1 as constants

_OPTIONS = (
    "Tensor? sink, SymInt handle, SymInt tail_rows, ScalarType? precision, float? softmax_scale, float softcap, "
    "bool return_max_logits"
)
_FWD = f"(Tensor q, Tensor k, Tensor v, {_OPTIONS}, bool needs_backward) -> (Tensor, Tensor, Tensor, Tensor, Tensor)"
_BWD = (
    "(Tensor dout, Tensor q, Tensor k, Tensor v, Tensor out, Tensor lse, Tensor k_tail, Tensor v_tail, "
    f"{_OPTIONS}) -> (Tensor, Tensor, Tensor, Tensor)"
)


class CompiledFacts(NamedTuple):
    """What a compiled model knows of a key: the name of its manager, this rank's rows, how many rows the forward keeps
    for the backward, what is computed in, None for q's dtype, and where position ids are wanted."""

    handle: int
    local_rows: int
    tail_rows: int
    precision: torch.dtype | None
    positions_on: torch.device


NO_FACTS = CompiledFacts(0, 0, 0, None, torch.device("cpu"))  # of a key that was never made: there is no manager 0


def facts_of(manager: RuntimeManager) -> CompiledFacts:
    """The handle is forgotten when the manager is."""
    facts = manager.__dict__.get("compiled_facts")
    if facts is None:
        runtime = manager.dist_attn_runtime
        tail_rows, precision = runtime.comms[-1].rows if runtime.keeps_tail else 0, runtime.policy.precision
        rows, on = manager.layout.num_local, manager.positions_on
        facts = CompiledFacts(next(_numbers), rows, tail_rows, precision, on)
        manager.__dict__["compiled_facts"] = facts
        _managers[facts.handle] = manager
    return facts


def manager_of(handle: int) -> RuntimeManager:
    """``UnknownKeyError`` if it was dropped or nobody holds it."""
    manager = _managers.get(handle)
    if manager is None or manager.is_cleared:
        raise UnknownKeyError(
            "The dist attn runtime key of a compiled model does not exist! clear_cache() dropped it, or nobody holds "
            "it; make it again with magi_attn_flex_key or magi_attn_varlen_key."
        )
    return manager


def _runtime(handle: int) -> AttnRuntime:
    return manager_of(handle).dist_attn_runtime


def _call(runtime: AttnRuntime, tensors: tuple, scale, softcap, return_max_logits, needs_backward) -> tuple:
    """The call, and q, k, v in the dtype that is computed in."""
    q, k, v, sink = tensors
    precision = runtime.policy.precision
    if precision is not None:
        q, k, v = (x.to(precision) for x in (q, k, v))
    call: AttnCall = runtime.call(q, k, v, sink, scale, softcap, return_max_logits, None, needs_backward)
    return call, q, k, v


@torch.library.custom_op("magi_attention::dist_attn_fwd", mutates_args=(), schema=_FWD)
def dist_attn_fwd(
    q, k, v, sink, handle, tail_rows, precision, softmax_scale, softcap, return_max_logits, needs_backward
):  # fmt: skip
    """``(out, lse, max_logits or empty, k and v of the last stage or empty)``."""
    runtime = _runtime(handle)
    with runtime.transport.guard("attention forward, input check"):
        call, *qkv = _call(runtime, (q, k, v, sink), softmax_scale, softcap, return_max_logits, needs_backward)
    got = run_forward(call, *qkv, sink)
    max_logits = got.lse.new_empty(0) if got.max_logits is None else got.max_logits
    # In one launch there is no tail, but room for it.
    tail = [x.contiguous() for x in got.tail] or [x.new_empty((tail_rows, *x.shape[1:])) for x in qkv[1:]]
    return got.out.to(q.dtype), got.lse, max_logits, *tail


@dist_attn_fwd.register_fake
def _(q, k, v, sink, handle, tail_rows, precision, softmax_scale, softcap, return_max_logits, needs_backward):
    computed = precision or q.dtype
    acc, heads = accumulation_dtype(computed), q.shape[1]
    tail = [x.new_empty((tail_rows, *x.shape[1:]), dtype=computed) for x in (k, v)]
    return (
        q.new_empty((q.shape[0], heads, v.shape[2])),
        q.new_empty((q.shape[0], heads), dtype=acc),
        q.new_empty((heads if return_max_logits else 0,), dtype=acc),
        *tail,
    )


@torch.library.custom_op("magi_attention::dist_attn_bwd", mutates_args=(), schema=_BWD)
def dist_attn_bwd(
    dout, q, k, v, out, lse, k_tail, v_tail, sink, handle, tail_rows, precision, softmax_scale, softcap,
    return_max_logits,
):  # fmt: skip
    """``(dq, dk, dv, dsink or empty)`` in the dtypes of q, k, v and sink."""
    runtime = _runtime(handle)
    call, *qkv = _call(runtime, (q, k, v, sink), softmax_scale, softcap, return_max_logits, True)
    tail = (k_tail, v_tail) if runtime.keeps_tail else ()
    dtype = qkv[0].dtype
    dq, dk, dv, dsink = run_backward(call, dout.to(dtype), *qkv, sink, out.to(dtype), lse, tail)
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
    ctx.mark_non_differentiable(lse, max_logits, k_tail, v_tail)


def _grad(ctx, dout, *_):
    sink = ctx.saved_tensors[-1]
    dq, dk, dv, dsink = dist_attn_bwd(dout, *ctx.saved_tensors, *ctx.options)
    return dq, dk, dv, None if sink is None else dsink, *[None] * 7


dist_attn_fwd.register_autograd(_grad, setup_context=_save)
dist_attn_bwd.register_autograd(refuse_double_backward)

__all__ = ["NO_FACTS", "CompiledFacts", "dist_attn_bwd", "dist_attn_fwd", "facts_of", "manager_of"]
