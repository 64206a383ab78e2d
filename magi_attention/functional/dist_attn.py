# SPDX-License-Identifier: Apache-2.0
"""Distributed attention: partial results over host and remote keys, stage by stage.

Forward, degree D: all fetches (or the first) are launched, the host part runs meanwhile, then every stage is
awaited and accumulated into the same (out, lse). Backward fetches the keys again, accumulates dq, and returns
dk, dv rows to their owners by a group reduce per stage: ``stages/staged.py``. The sum over stages is taken in stage
order, so results do not depend on arrival times. Fetches are started before the kernels that run beside them, so with
one hardware queue they begin first, too; kernels beside which rows travel leave ``sm_margin`` multiprocessors to NCCL,
others none.

Nothing here waits for a GPU, copies to it or makes a tensor from host values, so calls can be captured in CUDA graphs
after one that was not.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch

from magi_attention.errors import UnsupportedError
from magi_attention.functional.calls.autocast import cast_operands
from magi_attention.functional.calls.kept_results import keep_result, kept_result
from magi_attention.functional.calls.waited import waited
from magi_attention.functional.heads.chunks import backward_by_head_chunks, forward_by_head_chunks
from magi_attention.functional.runtime import HOST, AttnCall, AttnRuntime, Trace
from magi_attention.functional.stages.fetches import Fetches
from magi_attention.functional.stages.query_moves import Forward, backward_with_moves, forward_with_moves
from magi_attention.functional.stages.staged import PendingGrads, StagedBackward, forward_joined, forward_staged
from magi_attention.kernels import Problem
from magi_attention.kernels.double_backward import once_differentiable
from magi_attention.kernels.dropout import Dropout
from magi_attention.kernels.eager import Onlookers, needs_gradient
from magi_attention.kernels.instruments import BACKWARD_RANGE, FORWARD_RANGE, profiler_range
from magi_attention.kernels.reference.operands import delta_with_dlse
from magi_attention.kernels.rows.kernels import rounded
from magi_attention.kernels.types import BackwardOperands, FinalBackend, Operands

_ONLOOKERS = Onlookers()
_NO_TRANSFORM = (
    "Attention by a plan or key takes part in no transform of torch.func (grad, vmap, jacrev); differentiate by "
    "loss.backward() or torch.autograd.grad."
)


def dist_attn(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, runtime: AttnRuntime, sink: torch.Tensor | None = None,
    softmax_scale: float | None = None, softcap: float = 0.0, return_max_logits: bool = False,
    trace: Trace | None = None, dropout: Dropout | None = None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:  # fmt: skip
    """Attention of this rank's queries over all keys that the plan's mask allows.

    q ``(T, Hq, D)``, k ``(T, Hk, D)``, v ``(T, Hk, Dv)``: this rank's tokens, any strides. ``sink`` is
    ``(S, Hq)``, the same on all ranks, and so is ``dropout``. Returns out ``(T, Hq, Dv)`` in q's dtype, lse
    ``(T, Hq)`` (natural log, float32, or float64 for float64 inputs) and max_logits ``(Hq,)`` over all ranks or None.
    Collective over the group; out and lse are differentiable in q, k, v and sink. If a rank fails, the others raise
    ``PeerFailureError``. Under autocast q, k and v take its dtype, and so does out.
    """
    with runtime.transport.guard("attention forward, input check"):
        precision = runtime.policy.precision
        q, k, v = cast_operands(waited(q), waited(k), waited(v))  # type: ignore[assignment]
        out_dtype = q.dtype if isinstance(q, torch.Tensor) else None
        if precision is not None:
            q, k, v = (x.to(precision) if isinstance(x, torch.Tensor) else x for x in (q, k, v))
        call = runtime.call(q, k, v, sink, softmax_scale, softcap, return_max_logits, trace, dropout=dropout)
    tensors = q, k, v, sink
    if not needs_gradient(tensors) and _ONLOOKERS.let_pass(tensors):  # autograd takes a third of the host's time
        got = run_forward(call, q, k, v, sink)
        out, lse, max_logits = got.out, got.lse, got.max_logits
    else:
        if torch._C._are_functorch_transforms_active():
            raise UnsupportedError(_NO_TRANSFORM)
        out, lse, max_logits = _apply(q, k, v, sink, call)
    if out.dtype != out_dtype:  # asked here, because every layer passes by and to() unpacks longer to find out
        out = out.to(out_dtype)
    return out, lse, max_logits if return_max_logits else None


class _DistAttn(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, sink: torch.Tensor | None, call: AttnCall
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
        got = run_forward(call, q, k, v, sink)
        ctx.save_for_backward(q, k, v, sink, got.out, got.lse, *got.tail)
        ctx.call = call
        if got.max_logits is not None:
            ctx.mark_non_differentiable(got.max_logits)
        ctx.set_materialize_grads(False)  # that of lse would be made for every loss that does not use it
        return got.out, got.lse, got.max_logits

    @staticmethod
    def backward(
        ctx: Any, dout: torch.Tensor | None, dlse: torch.Tensor | None, _dmax: object
    ) -> tuple[torch.Tensor | None, ...]:
        if not torch.is_grad_enabled():
            return _backward(ctx, dout, dlse)
        with torch.no_grad():
            grads = _backward(ctx, dout, dlse)
        return once_differentiable(grads, (dout, dlse, *ctx.saved_tensors[:4]))


_apply: Callable[..., tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]] = _DistAttn.apply


def _backward(ctx: Any, dout: torch.Tensor | None, dlse: torch.Tensor | None) -> tuple[torch.Tensor | None, ...]:
    q, k, v, sink, out, lse, *tail = ctx.saved_tensors
    dout, dlse = waited(dout), waited(dlse)
    if dout is None:  # nobody uses out here, but the other ranks still want gradients of these keys
        dout = torch.zeros_like(out)
    return *run_backward(ctx.call, dout, q, k, v, sink, out, lse, tuple(tail), dlse), None


def run_forward(
    call: AttnCall, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, sink: torch.Tensor | None
) -> Forward:
    """The forward pass of one call, without autograd; what a checkpoint has kept of it is not computed again."""
    kept = kept_result(q, v)
    if kept is not None:
        return kept
    transport = call.runtime.transport
    with transport.guard("attention forward"), profiler_range(FORWARD_RANGE):
        if call.chunks:
            got = forward_by_head_chunks(_forward, call, q, k, v, sink)
        else:
            got = _forward(call, q, k, v, sink)
        if got.max_logits is not None and transport.size > 1:
            transport.all_reduce(got.max_logits, "max").wait()
    keep_result(got)
    return got


def _forward(
    call: AttnCall, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, sink: torch.Tensor | None,
    fetches: Fetches | None = None,
) -> Forward:  # fmt: skip
    """``fetches``: of this call, a head chunk. Its max_logits are those of this rank."""
    runtime, prepared = call.runtime, call.prepared
    # Calls of one kernel, that wait for no stage, are made here: every layer of a model on one GPU passes by.
    if prepared.fused is not None:
        attention, backend, start = *prepared.fused, time.perf_counter()
        x = Operands(q, k, v, attention.part.slices, prepared.forward_alone, sink)
        got = Forward(*attention.forward(backend, x))
        call.record("compute", HOST, start)
        return got
    if runtime.queries is not None:
        return forward_with_moves(call, q, k, v, sink)
    if runtime.is_local and prepared.final is not None:
        slices, start, dropout = runtime.part.host, time.perf_counter(), call.dropout_mask(HOST, q.device)
        x = Operands(q, k, v, slices, prepared.forward_alone, sink, dropout)
        got = Forward(*prepared.final.forward_final(x))
        call.record("compute", HOST, start)
        return got
    fetches = fetches or Fetches.of_forward(call, k, v)
    run = forward_joined if prepared.is_joined or runtime.is_local else forward_staged
    return run(call, q, k, v, sink, fetches)


def run_backward(
    call: AttnCall, dout: torch.Tensor, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, sink: torch.Tensor | None,
    out: torch.Tensor, lse: torch.Tensor, tail: tuple[torch.Tensor, ...] = (), dlse: torch.Tensor | None = None,
) -> tuple[torch.Tensor | None, ...]:  # fmt: skip
    """``(dq, dk, dv, dsink or None)`` of one call, in the dtypes of q, k, v and sink. ``dlse``: the gradient of lse;
    what a rank gives changes no message, so some may have one and others None."""
    with call.runtime.transport.guard("attention backward"), profiler_range(BACKWARD_RANGE):
        call.ensure_backward(dout)
        x = dout, q, k, v, sink, out, lse
        if call.chunks:
            grads = backward_by_head_chunks(_start_backward, call, x, dlse)
        else:
            grads = _start_backward(call, *x, dlse, tail).wait()
            if grads.dq.dtype != q.dtype or grads.dk.dtype != q.dtype:
                grads.dq, grads.dk, grads.dv = rounded((grads.dq, grads.dk, grads.dv), q.dtype)
        reduce_dsink(call, grads.dsink)
    dsink = None if grads.dsink is None or sink is None else grads.dsink.to(sink.dtype)
    return grads.dq, grads.dk, grads.dv, dsink


def _start_backward(
    call: AttnCall, dout: torch.Tensor, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, sink: torch.Tensor | None,
    out: torch.Tensor, lse: torch.Tensor, dlse: torch.Tensor | None, tail: tuple[torch.Tensor, ...] = (),
    fetches: Fetches | None = None, after_first: Callable[[], None] | None = None,
) -> PendingGrads:  # fmt: skip
    """Launches the kernels. With ``fetches`` this is a head chunk, and with ``after_first`` there is one before it,
    which that finishes behind the first kernel."""
    delta = delta_with_dlse(out, dout, lse, dlse)
    if delta is not None:
        call = _taking_delta(call, q, k, v, sink)
    runtime, prepared, start = call.runtime, call.prepared, time.perf_counter()
    options = prepared.backward_alone
    if prepared.fused is not None:
        attention, backend = prepared.fused
        slices = attention.part.slices
        grads = attention.backward(backend, BackwardOperands(dout, q, k, v, out, lse, slices, options, sink, delta))
        call.record("compute", HOST, start)
        return PendingGrads(grads)
    if runtime.queries is not None:
        return PendingGrads(backward_with_moves(call, dout, q, k, v, sink, out, lse, delta))
    if runtime.is_local and prepared.final is not None:
        slices, dropout = runtime.part.host, call.dropout_mask(HOST, q.device)
        x = BackwardOperands(dout, q, k, v, out, lse, slices, options, sink, delta, dropout)
        grads = prepared.final.backward_final(x)
        call.record("compute", HOST, start)
        return PendingGrads(grads)
    state = StagedBackward(call, dout, q, k, v, sink, out, lse, delta, after_first)
    fetches = fetches or Fetches.of_backward(call, k, v, has_tail=bool(tail))
    if prepared.is_joined and not runtime.is_local:
        return state.run_joined(fetches)
    return state.run_staged(fetches, tail)


def _taking_delta(
    call: AttnCall, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, sink: torch.Tensor | None
) -> AttnCall:
    """The call with a backend for its backward that takes delta."""
    prepared = call.prepared
    backend = call.runtime.registry.taking_delta(
        prepared.backend, lambda: Problem.of(q, k, v, prepared.backward, sink, needs_backward=True)
    )
    if backend is prepared.backend:
        return call
    final = backend if isinstance(backend, FinalBackend) else None
    return replace(call, prepared=replace(prepared, backend=backend, final=final))


def reduce_dsink(call: AttnCall, dsink: torch.Tensor | None) -> None:
    """Adds up (or averages) the gradient of the sinks over the ranks, in place, if the policy says so."""
    runtime = call.runtime
    if dsink is not None and runtime.policy.dsink_reduce != "none" and runtime.transport.size > 1:
        runtime.transport.all_reduce(dsink, runtime.policy.dsink_reduce).wait()
