# SPDX-License-Identifier: Apache-2.0
"""Distributed attention: partial results over host and remote keys, stage by stage.

Forward, degree D: all fetches (or the first) are launched, the host part runs meanwhile, then every stage is
awaited and accumulated into the same (out, lse). Backward fetches the keys again, accumulates dq, and returns
dk, dv rows to their owners by a group reduce per stage. The sum over stages is taken in stage order, so results
do not depend on arrival times.
"""

from __future__ import annotations

import time
from dataclasses import replace

import torch

from magi_attention.functional.runtime import AttnCall, AttnRuntime, Trace, accumulation_dtype
from magi_attention.kernels import Grads, Partial
from magi_attention.kernels.types import options_of

HOST = -1


def dist_attn(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    runtime: AttnRuntime,
    sink: torch.Tensor | None = None,
    softmax_scale: float | None = None,
    softcap: float = 0.0,
    return_max_logits: bool = False,
    trace: Trace | None = None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
    """Attention of this rank's queries over all keys that the plan's mask allows.

    q ``(T, Hq, D)``, k ``(T, Hk, D)``, v ``(T, Hk, Dv)``: this rank's tokens, any strides. ``sink`` is
    ``(S, Hq)``, the same on all ranks. Returns out ``(T, Hq, Dv)`` in q's dtype, lse ``(T, Hq)`` (natural log,
    float32, or float64 for float64 inputs) and max_logits ``(Hq,)`` over all ranks or None. Collective over the
    group; differentiable in q, k, v and sink. If a rank fails, the others raise ``PeerFailureError``.
    """
    with runtime.transport.guard("attention forward, input check"):
        precision = runtime.policy.precision
        out_dtype = q.dtype if isinstance(q, torch.Tensor) else None
        if precision is not None:
            q, k, v = (x.to(precision) if isinstance(x, torch.Tensor) else x for x in (q, k, v))
        call = runtime.call(q, k, v, sink, softmax_scale, softcap, return_max_logits, trace)
    out, lse, max_logits = _DistAttn.apply(q, k, v, sink, call)
    return out.to(out_dtype), lse, max_logits if return_max_logits else None


class _DistAttn(torch.autograd.Function):
    @staticmethod
    def forward(ctx, q, k, v, sink, call: AttnCall):
        with call.runtime.transport.guard("attention forward"):
            if call.one_launch is not None:
                start = time.perf_counter()
                partial = Partial(*call.one_launch.forward(call.backend, q, k, v, call.options, sink))
                call.record("compute", HOST, start)
            else:
                partial = (_forward_blocking if call.runtime.is_blocking else _forward_staged)(call, q, k, v, sink)
            max_logits = partial.max_logits
            if max_logits is None:
                max_logits = q.new_zeros(0)
            elif call.runtime.transport.size > 1:
                call.runtime.transport.all_reduce(max_logits, "max").wait()
        out = partial.out.to(q.dtype)
        tail = call.tail_kv or ()
        call.tail_kv = None
        ctx.save_for_backward(q, k, v, sink, out, partial.lse, *tail)
        ctx.call = call
        ctx.mark_non_differentiable(partial.lse, max_logits)
        return out, partial.lse, max_logits

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, dout, _dlse, _dmax):
        call: AttnCall = ctx.call
        q, k, v, sink, out, lse, *tail = ctx.saved_tensors
        o, sm_margin = call.options, 0 if call.one_launch is not None else call.runtime.policy.bwd_sm_margin
        # Equal options as one object, by which backends recognise a call.
        options = options_of(o.softmax_scale, o.softcap, o.sink_layout, o.deterministic, sm_margin)
        call = replace(call, options=options, tail_kv=tuple(tail) if tail else None)
        with call.runtime.transport.guard("attention backward"):
            if call.one_launch is not None:
                start = time.perf_counter()
                grads = call.one_launch.backward(call.backend, dout, q, k, v, out, lse, call.options, sink)
                call.record("compute", HOST, start)
                reduce_dsink(call, grads.dsink)
            else:
                state = _Backward(call, dout, q, k, v, sink, out, lse)
                grads = state.run_blocking() if call.runtime.is_blocking else state.run_staged()
        dsink = None if grads.dsink is None or sink is None else grads.dsink.to(sink.dtype)
        return grads.dq.to(q.dtype), grads.dk.to(k.dtype), grads.dv.to(v.dtype), dsink, None


def reduce_dsink(call: AttnCall, dsink: torch.Tensor | None) -> None:
    """The sink's gradient over all ranks, in place, if the policy asks for that."""
    runtime = call.runtime
    if dsink is not None and runtime.policy.dsink_reduce != "none" and runtime.transport.size > 1:
        runtime.transport.all_reduce(dsink, runtime.policy.dsink_reduce).wait()


def _forward_blocking(call: AttnCall, q, k, v, sink) -> Partial:
    runtime = call.runtime
    start = time.perf_counter()
    k_remote, v_remote = runtime.comms[0].fetch(k, v).wait()
    call.record("comm", 0, start)
    start = time.perf_counter()
    keys, values = torch.cat([k, k_remote]), torch.cat([v, v_remote])
    partial = call.backend.forward(q, keys, values, runtime.part.joined, call.options, sink)
    call.record("compute", HOST, start)
    return partial


def _forward_staged(call: AttnCall, q, k, v, sink) -> Partial:
    runtime = call.runtime
    stages = runtime.part.stages
    fetches = {}
    launched = [time.perf_counter()] * len(stages)
    for s in range(len(stages) if runtime.policy.prefetch_all else min(1, len(stages))):
        launched[s] = time.perf_counter()
        fetches[s] = runtime.comms[s].fetch(k, v)
    start = time.perf_counter()
    partial = call.backend.forward(q, k, v, runtime.part.host, call.options, sink)
    call.record("compute", HOST, start)
    for s, stage in enumerate(stages):
        k_stage, v_stage = fetches.pop(s).wait()
        call.record("comm", s, launched[s])
        if s + 1 < len(stages) and s + 1 not in fetches:
            launched[s + 1] = time.perf_counter()
            fetches[s + 1] = runtime.comms[s + 1].fetch(k, v)
        if len(stage.slices):
            start = time.perf_counter()
            partial = call.backend.forward(q, k_stage, v_stage, stage.slices, call.options, init=partial)
            call.record("compute", s, start)
        if s == len(stages) - 1 and runtime.policy.hide_tail_reduce:
            call.tail_kv = (k_stage, v_stage)
    return partial


class _Backward:
    """One backward pass: dq is accumulated here, dk and dv by whoever owns the rows."""

    def __init__(self, call: AttnCall, dout, q, k, v, sink, out, lse) -> None:
        self.call, self.runtime = call, call.runtime
        self.dout, self.q, self.k, self.v, self.sink, self.out, self.lse = dout, q, k, v, sink, out, lse
        dtype = accumulation_dtype(q.dtype)
        self.delta = (out.to(dtype) * dout.to(dtype)).sum(-1)
        self.grads = Grads(
            torch.zeros(q.shape, dtype=dtype, device=q.device),
            torch.zeros(k.shape, dtype=dtype, device=k.device),
            torch.zeros(v.shape, dtype=dtype, device=v.device),
        )

    def _attend(self, k, v, slices, stage: int, dk, dv, sink=None) -> torch.Tensor | None:
        start = time.perf_counter()
        grads = self.call.backend.backward(
            self.dout,
            self.q,
            k,
            v,
            self.out,
            self.lse,
            slices,
            self.call.options,
            sink,
            self.delta,
            Grads(self.grads.dq, dk, dv),
        )
        self.call.record("compute", stage, start)
        return grads.dsink

    def run_blocking(self) -> Grads:
        comm, rows = self.runtime.comms[0], self.runtime.part.num_tokens
        k_remote, v_remote = comm.fetch(self.k, self.v).wait()
        keys, values = torch.cat([self.k, k_remote]), torch.cat([self.v, v_remote])
        dk = torch.zeros(keys.shape, dtype=self.grads.dk.dtype, device=keys.device)
        dv = torch.zeros(values.shape, dtype=dk.dtype, device=values.device)
        dsink = self._attend(keys, values, self.runtime.part.joined, HOST, dk, dv, self.sink)
        self.grads.dk += dk[:rows]
        self.grads.dv += dv[:rows]
        self._return_rows(0, dk[rows:], dv[rows:]).wait()
        return self._finish(dsink)

    def run_staged(self) -> Grads:
        """Host first, or last when the tail is hidden behind it."""
        stages, tail = self.runtime.part.stages, self.call.tail_kv
        order = list(range(len(stages)))
        if tail is not None:
            order = [order[-1], *order[:-1]]
        fetched = [s for s in order if tail is None or s != order[0]]
        fetches, launched = {}, {}

        def fetch_next() -> None:
            if fetched:
                s = fetched.pop(0)
                launched[s] = time.perf_counter()
                fetches[s] = self.runtime.comms[s].fetch(self.k, self.v)

        fetch_next()
        dsink = self._host() if tail is None else None
        returns = []
        for s in order:
            if s in fetches:
                k_stage, v_stage = fetches.pop(s).wait()
                self.call.record("comm", s, launched[s])
                fetch_next()
            else:
                assert tail is not None
                k_stage, v_stage = tail
            returns.append(self._remote(s, k_stage, v_stage))
        if tail is not None:
            dsink = self._host()
        for work in returns:
            work.wait()
        return self._finish(dsink)

    def _host(self) -> torch.Tensor | None:
        grads = self.grads
        return self._attend(self.k, self.v, self.runtime.part.host, HOST, grads.dk, grads.dv, self.sink)

    def _remote(self, s: int, k_stage, v_stage):
        dk = torch.zeros(k_stage.shape, dtype=self.grads.dk.dtype, device=k_stage.device)
        dv = torch.zeros(v_stage.shape, dtype=dk.dtype, device=v_stage.device)
        stage = self.runtime.part.stages[s]
        if len(stage.slices):
            self._attend(k_stage, v_stage, stage.slices, s, dk, dv)
        return self._return_rows(s, dk, dv)

    def _return_rows(self, s: int, dk, dv):
        wire = dk.dtype if self.runtime.policy.high_precision_reduce else self.k.dtype
        return self.runtime.comms[s].give_back(dk, dv, self.grads.dk, self.grads.dv, wire)

    def _finish(self, dsink: torch.Tensor | None) -> Grads:
        reduce_dsink(self.call, dsink)
        self.grads.dsink = dsink
        return self.grads
