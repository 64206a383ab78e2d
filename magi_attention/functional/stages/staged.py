# SPDX-License-Identifier: Apache-2.0
"""Attention over the process group: a kernel for each stage of keys, or one for all of them (``joined``)."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch

from magi_attention.comm.collectives.wire import dense_strides
from magi_attention.common.slices import SliceTable
from magi_attention.functional.runtime import HOST, JOINED, AttnCall, accumulation_dtype
from magi_attention.functional.stages.comm import Handle
from magi_attention.functional.stages.fetches import Fetches
from magi_attention.functional.stages.query_moves import Forward
from magi_attention.kernels import AttnOptions, Grads
from magi_attention.kernels.reference.operands import row_delta
from magi_attention.kernels.types import BackwardOperands, Operands


def forward_joined(
    call: AttnCall, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, sink: torch.Tensor | None, fetches: Fetches
) -> Forward:
    """One kernel over all keys, which are fetched first unless all are here."""
    runtime, prepared, slices, keys = call.runtime, call.prepared, call.runtime.part.host, HOST
    if not runtime.is_local:
        k, v = _join(k, v, fetches)
        keys, slices = JOINED, runtime.part.joined
        fetches.start_following()
    start, dropout = time.perf_counter(), call.dropout_mask(keys, q.device)
    options = prepared.forward if fetches.are_under_way else prepared.forward_alone
    x = Operands(q, k, v, slices, options, sink, dropout)
    if prepared.final is not None:
        got = Forward(*prepared.final.forward_final(x))
    else:
        partial = prepared.backend.forward(x)
        got = Forward(partial.out.to(q.dtype), partial.lse, partial.max_logits)
    call.record("compute", HOST, start)
    return got


def _join(k: torch.Tensor, v: torch.Tensor, fetches: Fetches) -> tuple[torch.Tensor, torch.Tensor]:
    """Local keys and values, followed by those of the only stage; what was received is free again."""
    fetches.start()
    fetched = fetches.take(0)
    return torch.cat([k, fetched[0]]), torch.cat([v, fetched[1]])


def forward_staged(
    call: AttnCall, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, sink: torch.Tensor | None, fetches: Fetches
) -> Forward:
    """Local keys while others travel, and then stage by stage."""
    runtime, prepared = call.runtime, call.prepared
    stages = runtime.part.stages
    tail: tuple[torch.Tensor, ...] = ()
    fetches.start()
    start = time.perf_counter()
    dropout = call.dropout_mask(HOST, q.device)
    partial = prepared.backend.forward(Operands(q, k, v, runtime.part.host, prepared.forward, sink, dropout))
    call.record("compute", HOST, start)
    for s, stage in enumerate(stages):
        k_stage, v_stage = fetches.take(s)
        is_last = s == len(stages) - 1
        if is_last:
            fetches.start_following()
        if len(stage.slices):
            start = time.perf_counter()
            options = prepared.forward if fetches.are_under_way else prepared.forward_alone
            x = Operands(q, k_stage, v_stage, stage.slices, options, dropout=call.dropout_mask(s, q.device))
            partial = prepared.backend.forward(x, partial)
            call.record("compute", s, start)
        if is_last and runtime.keeps_tail:
            tail = (k_stage, v_stage)
    return Forward(partial.out.to(q.dtype), partial.lse, partial.max_logits, tail)


class PendingGrads(NamedTuple):
    """Gradients of one pass whose kernels are launched, in the accumulation dtype or in that of the inputs.

    dq and dsink, that of this rank, are whole. ``wait`` adds to dk and dv the rows that come back, stage after stage.
    """

    grads: Grads
    returns: Sequence[Handle[None]] = ()

    def wait(self) -> Grads:
        for work in self.returns:
            work.wait()
        return self.grads


class StagedBackward:
    """One backward pass: dq is accumulated here, dk and dv by whoever owns the rows.

    ``after_first`` is called when the first kernel was launched.

    The first kernel writes dq and the gradients of its own keys, and gives delta to the others, which add to what is
    there; so only what is added to is cleared.
    """

    def __init__(
        self, call: AttnCall, dout: torch.Tensor, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor,
        sink: torch.Tensor | None, out: torch.Tensor, lse: torch.Tensor, delta: torch.Tensor | None,
        after_first: Callable[[], None] | None = None,
    ) -> None:  # fmt: skip
        self.call, self.runtime = call, call.runtime
        self.dout, self.q, self.k, self.v, self.sink, self.out, self.lse = dout, q, k, v, sink, out, lse
        self.dtype = accumulation_dtype(q.dtype)
        self.dq: torch.Tensor | None = None
        self.delta = delta
        self._after_first = after_first

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
        if self._after_first is not None:
            self._after_first()
            self._after_first = None
        return grads

    def _zeros(self, k: torch.Tensor, v: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Gradients of these keys, cleared by one kernel."""
        split = k.numel()
        both = torch.zeros(split + v.numel(), dtype=self.dtype, device=k.device)
        strides = [dense_strides(x.shape) for x in (k, v)]
        return both.as_strided(k.shape, strides[0]), both.as_strided(v.shape, strides[1], split)

    def run_joined(self, fetches: Fetches) -> PendingGrads:
        rows, prepared = self.runtime.part.num_tokens, self.call.prepared
        keys, values = _join(self.k, self.v, fetches)
        fetches.start_following()
        options = prepared.backward if fetches.are_under_way else prepared.backward_alone
        grads = self._attend(keys, values, self.runtime.part.joined, JOINED, options, self.sink)
        dk, dv = grads.dk[:rows], grads.dv[:rows]
        returned = self._return_rows(0, grads.dk[rows:], grads.dv[rows:], dk, dv)
        return PendingGrads(Grads(grads.dq, dk, dv, grads.dsink), [returned])

    def run_staged(self, fetches: Fetches, tail: tuple[torch.Tensor, ...]) -> PendingGrads:
        """Host first, or last when ``tail``, keys of the last stage, lets that stage's reduce hide behind it."""
        order = list(range(len(self.runtime.part.stages)))
        if tail:
            order = [order[-1], *order[:-1]]
        returns: list[Handle[None]] = []
        fetches.start()
        host = None if tail else self._host(is_alone=not order)
        own = self._zeros(self.k, self.v) if host is None else (host.dk, host.dv)
        for s in order:
            k_stage, v_stage = tail if tail and s == order[0] else fetches.take(s)
            if s == order[-1]:
                fetches.start_following()
            dk, dv = self._remote(s, k_stage, v_stage, is_alone=not (fetches.are_under_way or returns))
            returns.append(self._return_rows(s, dk, dv, *own))
            del k_stage, v_stage, dk, dv  # or they would live while the next stage is computed
        if host is None:
            host = self._host(is_alone=False, into=own)
        assert self.dq is not None
        return PendingGrads(Grads(self.dq, host.dk, host.dv, host.dsink), returns)

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
