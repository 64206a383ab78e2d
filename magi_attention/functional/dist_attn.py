# SPDX-License-Identifier: Apache-2.0
"""Distributed attention: partial results over host and remote keys, stage by stage.

Forward, degree D: all fetches (or the first) are launched, the host part runs meanwhile, then every stage is
awaited and accumulated into the same (out, lse). Backward fetches the keys again, accumulates dq, and returns
dk, dv rows to their owners by a group reduce per stage. The sum over stages is taken in stage order, so results
do not depend on arrival times. Fetches are started before the kernels that run beside them, so with one hardware
queue they begin first, too; kernels beside which rows travel leave ``sm_margin`` multiprocessors to NCCL, others none.

Nothing here waits for a GPU, copies to it or makes a tensor from host values, so calls can be captured in CUDA graphs
after one that was not.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch

from magi_attention.comm.collectives.wire import dense_strides
from magi_attention.common.slices import SliceTable
from magi_attention.functional.calls.autocast import cast_operands
from magi_attention.functional.heads.chunks import backward_by_head_chunks, forward_by_head_chunks
from magi_attention.functional.runtime import HOST, JOINED, AttnCall, AttnRuntime, Trace, accumulation_dtype
from magi_attention.functional.stages.comm import Handle
from magi_attention.functional.stages.query_moves import Forward, backward_with_moves, forward_with_moves
from magi_attention.kernels import AttnOptions, Grads, Problem
from magi_attention.kernels.double_backward import once_differentiable
from magi_attention.kernels.dropout import Dropout
from magi_attention.kernels.instruments import BACKWARD_RANGE, FORWARD_RANGE, profiler_range
from magi_attention.kernels.reference.operands import delta_with_dlse, row_delta
from magi_attention.kernels.rows.kernels import rounded
from magi_attention.kernels.types import BackwardOperands, FinalBackend, Operands


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
        q, k, v = cast_operands(q, k, v)  # type: ignore[assignment]
        out_dtype = q.dtype if isinstance(q, torch.Tensor) else None
        if precision is not None:
            q, k, v = (x.to(precision) if isinstance(x, torch.Tensor) else x for x in (q, k, v))
        call = runtime.call(q, k, v, sink, softmax_scale, softcap, return_max_logits, trace, dropout=dropout)
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
    if dout is None:  # nobody uses out here, but the other ranks still want gradients of these keys
        dout = torch.zeros_like(out)
    return *run_backward(ctx.call, dout, q, k, v, sink, out, lse, tuple(tail), dlse), None


def run_forward(
    call: AttnCall, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, sink: torch.Tensor | None
) -> Forward:
    """The forward pass of one call, without autograd."""
    if call.chunks:
        return forward_by_head_chunks(run_forward, call, q, k, v, sink)
    runtime, prepared = call.runtime, call.prepared
    with runtime.transport.guard("attention forward"), profiler_range(FORWARD_RANGE):
        # Calls of one kernel, that wait for no stage, are made here: every layer of a model on one GPU passes by.
        if prepared.fused is not None:
            attention, backend, start = *prepared.fused, time.perf_counter()
            x = Operands(q, k, v, attention.part.slices, prepared.forward_alone, sink)
            got = Forward(*attention.forward(backend, x))
            call.record("compute", HOST, start)
        elif runtime.queries is not None:
            got = forward_with_moves(call, q, k, v, sink)
        elif runtime.is_local and prepared.final is not None:
            slices, start, dropout = runtime.part.host, time.perf_counter(), call.dropout_mask(HOST, q.device)
            x = Operands(q, k, v, slices, prepared.forward_alone, sink, dropout)
            got = Forward(*prepared.final.forward_final(x))
            call.record("compute", HOST, start)
        elif prepared.is_joined or runtime.is_local:
            got = _forward_blocking(call, q, k, v, sink)
        else:
            got = _forward_staged(call, q, k, v, sink)
        if got.max_logits is not None and runtime.transport.size > 1:
            runtime.transport.all_reduce(got.max_logits, "max").wait()
    return got


def run_backward(
    call: AttnCall, dout: torch.Tensor, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, sink: torch.Tensor | None,
    out: torch.Tensor, lse: torch.Tensor, tail: tuple[torch.Tensor, ...] = (), dlse: torch.Tensor | None = None,
) -> tuple[torch.Tensor | None, ...]:  # fmt: skip
    """``(dq, dk, dv, dsink or None)`` of one call, in the dtypes of q, k, v and sink. ``dlse``: the gradient of lse;
    what a rank gives changes no message, so some may have one and others None."""
    if call.chunks:
        return backward_by_head_chunks(run_backward, call, dout, q, k, v, sink, out, lse, dlse)
    runtime, delta = call.runtime, delta_with_dlse(out, dout, lse, dlse)
    if delta is not None:
        call = _taking_delta(call, q, k, v, sink)
    prepared, options, start = call.prepared, call.prepared.backward_alone, time.perf_counter()
    with runtime.transport.guard("attention backward"), profiler_range(BACKWARD_RANGE):
        call.ensure_backward(dout)
        if prepared.fused is not None:
            attention, backend = prepared.fused
            slices = attention.part.slices
            grads = attention.backward(backend, BackwardOperands(dout, q, k, v, out, lse, slices, options, sink, delta))
            call.record("compute", HOST, start)
            reduce_dsink(call, grads.dsink)
        elif runtime.queries is not None:
            grads = backward_with_moves(call, dout, q, k, v, sink, out, lse, delta)
            reduce_dsink(call, grads.dsink)
            grads.dq, grads.dk, grads.dv = rounded((grads.dq, grads.dk, grads.dv), q.dtype)
        elif runtime.is_local and prepared.final is not None:
            slices, dropout = runtime.part.host, call.dropout_mask(HOST, q.device)
            x = BackwardOperands(dout, q, k, v, out, lse, slices, options, sink, delta, dropout)
            grads = prepared.final.backward_final(x)
            call.record("compute", HOST, start)
            reduce_dsink(call, grads.dsink)
        else:
            state = _Backward(call, dout, q, k, v, sink, out, lse, delta)
            grads = state.run_blocking() if prepared.is_joined and not runtime.is_local else state.run_staged(tail)
            grads.dq, grads.dk, grads.dv = rounded((grads.dq, grads.dk, grads.dv), q.dtype)
    dsink = None if grads.dsink is None or sink is None else grads.dsink.to(sink.dtype)
    return grads.dq, grads.dk, grads.dv, dsink


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


def _forward_blocking(
    call: AttnCall, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, sink: torch.Tensor | None
) -> Forward:
    """One kernel over all keys, which are fetched first unless all are here."""
    runtime, prepared, slices, keys = call.runtime, call.prepared, call.runtime.part.host, HOST
    if not runtime.is_local:
        start = time.perf_counter()
        k, v = _fetch_joined(call, k, v)
        call.record("comm", 0, start)
        keys, slices = JOINED, runtime.part.joined
    start, dropout = time.perf_counter(), call.dropout_mask(keys, q.device)
    x = Operands(q, k, v, slices, prepared.forward_alone, sink, dropout)
    if prepared.final is not None:
        got = Forward(*prepared.final.forward_final(x))
    else:
        partial = prepared.backend.forward(x)
        got = Forward(partial.out.to(q.dtype), partial.lse, partial.max_logits)
    call.record("compute", HOST, start)
    return got


def _fetch_joined(call: AttnCall, k: torch.Tensor, v: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Local keys and values, followed by those of the only stage; what was received is free again."""
    fetched = call.runtime.comms[0].fetch(k, v, call.prepared.exchange).wait()
    return torch.cat([k, fetched[0]]), torch.cat([v, fetched[1]])


def _forward_staged(
    call: AttnCall, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, sink: torch.Tensor | None
) -> Forward:
    runtime, prepared = call.runtime, call.prepared
    stages = runtime.part.stages
    fetches: dict[int, Handle[list[torch.Tensor]]] = {}
    launched: dict[int, float] = {}
    tail: tuple[torch.Tensor, ...] = ()
    waiting = list(range(len(stages)))

    def fetch_next() -> None:
        if waiting:
            s = waiting.pop(0)
            launched[s] = time.perf_counter()
            fetches[s] = runtime.comms[s].fetch(k, v, prepared.exchange)

    fetch_next()
    while waiting and runtime.policy.prefetch_all:
        fetch_next()
    start = time.perf_counter()
    dropout = call.dropout_mask(HOST, q.device)
    partial = prepared.backend.forward(Operands(q, k, v, runtime.part.host, prepared.forward, sink, dropout))
    call.record("compute", HOST, start)
    for s, stage in enumerate(stages):
        k_stage, v_stage = fetches.pop(s).wait()
        call.record("comm", s, launched[s])
        fetch_next()
        if len(stage.slices):
            start = time.perf_counter()
            options = prepared.forward if fetches else prepared.forward_alone
            x = Operands(q, k_stage, v_stage, stage.slices, options, dropout=call.dropout_mask(s, q.device))
            partial = prepared.backend.forward(x, partial)
            call.record("compute", s, start)
        if s == len(stages) - 1 and runtime.keeps_tail:
            tail = (k_stage, v_stage)
    return Forward(partial.out.to(q.dtype), partial.lse, partial.max_logits, tail)


class _Backward:
    """One backward pass: dq is accumulated here, dk and dv by whoever owns the rows.

    The first kernel writes dq and the gradients of its own keys, and gives delta to the others, which add to what is
    there; so only what is added to is cleared.
    """

    def __init__(
        self, call: AttnCall, dout: torch.Tensor, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor,
        sink: torch.Tensor | None, out: torch.Tensor, lse: torch.Tensor, delta: torch.Tensor | None,
    ) -> None:  # fmt: skip
        self.call, self.runtime = call, call.runtime
        self.dout, self.q, self.k, self.v, self.sink, self.out, self.lse = dout, q, k, v, sink, out, lse
        self.dtype = accumulation_dtype(q.dtype)
        self.dq: torch.Tensor | None = None
        self.delta = delta

    def _attend(
        self, k: torch.Tensor, v: torch.Tensor, slices: SliceTable, keys: int, options: AttnOptions,
        sink: torch.Tensor | None = None, into: tuple[torch.Tensor, torch.Tensor] | None = None,
    ) -> Grads:  # fmt: skip
        """Adds to dq, and to (dk, dv) of ``into`` where given; dsink is that of these keys alone. ``keys``: which."""
        start = time.perf_counter()
        init = None
        if self.dq is not None or into is not None:
            if self.dq is None:
                self.dq = torch.zeros(self.q.shape, dtype=self.dtype, device=self.q.device)
            if self.delta is None:
                self.delta = row_delta(self.out, self.dout, None)
            init = Grads(self.dq, *(into or self._zeros(k, v)))
        dropout = self.call.dropout_mask(keys, self.q.device)
        x = BackwardOperands(self.dout, self.q, k, v, self.out, self.lse, slices, options, sink, self.delta, dropout)
        grads = self.call.prepared.backend.backward(x, init)
        if init is None:
            self.dq, self.delta = grads.dq, grads.delta
        self.call.record("compute", max(keys, HOST), start)
        return grads

    def _zeros(self, k: torch.Tensor, v: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Gradients of these keys, cleared by one kernel."""
        split = k.numel()
        both = torch.zeros(split + v.numel(), dtype=self.dtype, device=k.device)
        strides = [dense_strides(x.shape) for x in (k, v)]
        return both.as_strided(k.shape, strides[0]), both.as_strided(v.shape, strides[1], split)

    def run_blocking(self) -> Grads:
        rows = self.runtime.part.num_tokens
        keys, values = _fetch_joined(self.call, self.k, self.v)
        options = self.call.prepared.backward_alone
        grads = self._attend(keys, values, self.runtime.part.joined, JOINED, options, self.sink)
        dk, dv = grads.dk[:rows], grads.dv[:rows]
        self._return_rows(0, grads.dk[rows:], grads.dv[rows:], dk, dv).wait()
        reduce_dsink(self.call, grads.dsink)
        return Grads(grads.dq, dk, dv, grads.dsink)

    def run_staged(self, tail: tuple[torch.Tensor, ...]) -> Grads:
        """Host first, or last when ``tail``, keys of the last stage, lets that stage's reduce hide behind it."""
        order = list(range(len(self.runtime.part.stages)))
        if tail:
            order = [order[-1], *order[:-1]]
        waiting = order[1:] if tail else list(order)
        fetches: dict[int, Handle[list[torch.Tensor]]] = {}
        launched: dict[int, float] = {}
        returns: list[Handle[None]] = []

        def fetch_next() -> None:
            if waiting:
                s = waiting.pop(0)
                launched[s] = time.perf_counter()
                fetches[s] = self.runtime.comms[s].fetch(self.k, self.v, self.call.prepared.exchange)

        fetch_next()
        host = None if tail else self._host(is_alone=not order)
        own = self._zeros(self.k, self.v) if host is None else (host.dk, host.dv)
        for s in order:
            if s in fetches:
                k_stage, v_stage = fetches.pop(s).wait()
                self.call.record("comm", s, launched[s])
                fetch_next()
            else:
                k_stage, v_stage = tail
            dk, dv = self._remote(s, k_stage, v_stage, is_alone=not (fetches or returns))
            returns.append(self._return_rows(s, dk, dv, *own))
            del k_stage, v_stage, dk, dv  # or they would live while the next stage is computed
        if host is None:
            host = self._host(is_alone=False, into=own)
        for work in returns:
            work.wait()
        reduce_dsink(self.call, host.dsink)
        assert self.dq is not None
        return Grads(self.dq, host.dk, host.dv, host.dsink)

    def _host(self, is_alone: bool, into: tuple[torch.Tensor, torch.Tensor] | None = None) -> Grads:
        options = self._options(is_alone)
        return self._attend(self.k, self.v, self.runtime.part.host, HOST, options, self.sink, into)

    def _remote(
        self, s: int, k_stage: torch.Tensor, v_stage: torch.Tensor, is_alone: bool
    ) -> tuple[torch.Tensor, torch.Tensor]:
        stage = self.runtime.part.stages[s]
        if not len(stage.slices):
            return self._zeros(k_stage, v_stage)
        grads = self._attend(k_stage, v_stage, stage.slices, s, self._options(is_alone))
        return grads.dk, grads.dv

    def _options(self, is_alone: bool) -> AttnOptions:
        prepared = self.call.prepared
        return prepared.backward_alone if is_alone else prepared.backward

    def _return_rows(
        self, s: int, dk_stage: torch.Tensor, dv_stage: torch.Tensor, dk: torch.Tensor, dv: torch.Tensor
    ) -> Handle[None]:
        wire = dk_stage.dtype if self.runtime.policy.high_precision_reduce else self.k.dtype
        exchange = self.call.prepared.exchange
        return self.runtime.comms[s].give_back(dk_stage, dv_stage, dk, dv, wire, exchange)
