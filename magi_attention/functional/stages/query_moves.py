# SPDX-License-Identifier: Apache-2.0
"""Attention where queries move too: a rank computes some pairs of its keys for queries of others.

Forward: keys and queries are on their way while local pairs are computed; then the pairs of received queries, whose
outputs go back while local queries meet received keys. Outputs merge by their lse. Backward the same, with dout, lse
and delta beside the queries; delta, one number for each row and head, is what the backward needs of out. Where a rank
receives few rows, its backward is one kernel over all that it has: gradients of local keys are written once then.
"""

from __future__ import annotations

import time
from typing import NamedTuple

import torch

from magi_attention.functional.heads.groups import heads_by_token, rows_by_group
from magi_attention.functional.runtime import HOST, JOINED, QUERIES, AttnCall
from magi_attention.functional.stages.comm import Handle
from magi_attention.kernels import Grads, Partial, accumulation_dtype
from magi_attention.kernels.reference.operands import row_delta
from magi_attention.kernels.types import BackwardOperands, Operands

_FEW = 4  # rows are few if a rank has so many times as many of its own


class Forward(NamedTuple):
    """``out`` in q's dtype, ``max_logits`` or None; ``tail``: (k, v) of the last stage, where the backward wants it."""

    out: torch.Tensor
    lse: torch.Tensor
    max_logits: torch.Tensor | None
    tail: tuple[torch.Tensor, ...] = ()


def forward_with_moves(
    call: AttnCall, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, sink: torch.Tensor | None
) -> Forward:
    """One call of a plan in which queries move."""
    runtime, prepared, part = call.runtime, call.prepared, call.runtime.part
    assert runtime.queries is not None and part.queries is not None
    q, k, v = (rows_by_group(x, runtime.head_groups) for x in (q, k, v))
    backend, stage, start = prepared.backend, part.stages[0], time.perf_counter()
    keys, queries = runtime.comms[0].fetch(k, v), runtime.queries.fetch(q)
    x = Operands(q, k, v, part.host, prepared.forward, sink, call.dropout_mask(HOST, q.device))
    partial = backend.forward(x)
    call.record("compute", HOST, start)
    k_remote, v_remote = keys.wait()
    (q_remote,) = queries.wait()
    call.record("comm", 0, start)

    start, dropout = time.perf_counter(), call.dropout_mask(JOINED, q.device, QUERIES)
    both = _behind(k, k_remote), _behind(v, v_remote)
    others = backend.forward(Operands(q_remote, *both, part.queries.slices, prepared.forward, None, dropout))
    wire = others.out.dtype if runtime.policy.forward_high_precision_reduce else q.dtype
    back = runtime.queries.give_back(
        (others.out, others.lse), (wire, others.lse.dtype), (partial.out, partial.lse), "lse"
    )
    if len(stage.slices):
        dropout = call.dropout_mask(0, q.device)
        backend.forward(Operands(q, k_remote, v_remote, stage.slices, prepared.forward_alone, None, dropout), partial)
    call.record("compute", 0, start)
    back.wait()
    out, lse = (heads_by_token(x, runtime.head_groups) for x in (partial.out.to(q.dtype), partial.lse))
    return Forward(out, lse, _greater(partial, others))


def _greater(a: Partial, b: Partial) -> torch.Tensor | None:
    """Those of received queries count at this rank; the caller takes the greatest over ranks."""
    if a.max_logits is None or b.max_logits is None:
        return a.max_logits
    return torch.maximum(a.max_logits, b.max_logits)


def backward_with_moves(
    call: AttnCall, dout: torch.Tensor, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, sink: torch.Tensor | None,
    out: torch.Tensor, lse: torch.Tensor, delta: torch.Tensor | None = None,
) -> Grads:  # fmt: skip
    """Gradients in the accumulation dtype, or in q's; dsink is that of this rank's queries. ``delta``: if known."""
    runtime = call.runtime
    assert runtime.queries is not None
    dout, q, k, v, out, lse = (rows_by_group(x, runtime.head_groups) for x in (dout, q, k, v, out, lse))
    delta = row_delta(out, dout, None) if delta is None else rows_by_group(delta, runtime.head_groups)
    dout = dout.to(q.dtype)
    keys, queries = runtime.comms[0].fetch(k, v), runtime.queries.fetch(q, dout, lse, delta)
    part = runtime.part
    assert part.queries is not None
    few = _FEW * (part.queries.recv_rows + part.stages[0].recv_rows) <= part.num_tokens
    if few and sink is None and call.dropout is None:  # each rank may choose: what travels is the same
        grads = _backward_joined(call, (q, dout, lse, delta), (k, v), keys, queries)
    else:
        grads = _backward_staged(call, (dout, q, k, v, out, lse), delta, sink, keys, queries)
    grads.dq, grads.dk, grads.dv = (heads_by_token(x, runtime.head_groups) for x in (grads.dq, grads.dk, grads.dv))
    return grads


def _backward_staged(
    call: AttnCall, operands: tuple[torch.Tensor, ...], delta: torch.Tensor, sink: torch.Tensor | None,
    keys: Handle[list[torch.Tensor]], queries: Handle[list[torch.Tensor]],
) -> Grads:  # fmt: skip
    """Local pairs while rows travel; those of received queries; those of received keys. ``operands``: dout, q, k, v,
    out, lse."""
    runtime, prepared, part = call.runtime, call.prepared, call.runtime.part
    assert runtime.queries is not None and part.queries is not None
    backend, stage, rows, start = prepared.backend, part.stages[0], part.num_tokens, time.perf_counter()
    dout, q, k, v, out, lse = operands
    dropout = call.dropout_mask(HOST, q.device)
    local = BackwardOperands(dout, q, k, v, out, lse, part.host, prepared.backward, sink, delta, dropout)
    grads = backend.backward(local)
    call.record("compute", HOST, start)
    k_remote, v_remote = keys.wait()
    q_remote, dout_remote, lse_remote, delta_remote = queries.wait()
    call.record("comm", 0, start)

    start, dropout = time.perf_counter(), call.dropout_mask(JOINED, q.device, QUERIES)
    both = _behind(k, k_remote), _behind(v, v_remote)
    # With delta nobody reads out.
    received = (dout_remote, q_remote, *both, dout_remote, lse_remote)
    slices = part.queries.slices
    others = backend.backward(BackwardOperands(*received, slices, prepared.backward, None, delta_remote, dropout))
    wire = accumulation_dtype(q.dtype) if runtime.policy.high_precision_reduce else q.dtype
    back = runtime.queries.give_back((others.dq,), (wire,), (grads.dq,), "sum")
    grads.dk += others.dk[:rows]
    grads.dv += others.dv[:rows]
    dk_remote, dv_remote = others.dk[rows:].contiguous(), others.dv[rows:].contiguous()
    if len(stage.slices):
        init, dropout = Grads(grads.dq, dk_remote, dv_remote), call.dropout_mask(0, q.device)
        here, options = (dout, q, k_remote, v_remote, out, lse), prepared.backward_alone
        backend.backward(BackwardOperands(*here, stage.slices, options, None, delta, dropout), init)
    call.record("compute", 0, start)
    keys_back = runtime.comms[0].give_back(dk_remote, dv_remote, grads.dk, grads.dv, wire)
    back.wait()
    keys_back.wait()
    return grads


def _backward_joined(
    call: AttnCall, rows: tuple[torch.Tensor, ...], columns: tuple[torch.Tensor, ...],
    keys: Handle[list[torch.Tensor]], queries: Handle[list[torch.Tensor]],
) -> Grads:  # fmt: skip
    """One kernel over local and received rows; ``rows``: local q, dout, lse, delta, ``columns``: k, v. It waits for
    what travels, which is little beside what further passes over dk and dv would read and write."""
    runtime, prepared, part, start = call.runtime, call.prepared, call.runtime.part, time.perf_counter()
    assert runtime.queries is not None
    q, dout, lse, delta = (_behind(*pair) for pair in zip(rows, queries.wait()))
    k, v = (_behind(*pair) for pair in zip(columns, keys.wait()))
    call.record("comm", 0, start)
    start, own, is_high = time.perf_counter(), part.num_tokens, runtime.policy.high_precision_reduce
    # With delta nobody reads out.
    x = BackwardOperands(dout, q, k, v, dout, lse, part.with_queries, prepared.backward, None, delta)
    if prepared.final is None or is_high:
        grads = prepared.backend.backward(x)
    else:
        grads = prepared.final.backward_final(x)
    call.record("compute", HOST, start)
    wire = accumulation_dtype(q.dtype) if is_high else q.dtype
    (dq, dk, dv), grads.dq = (x[own:] for x in (grads.dq, grads.dk, grads.dv)), grads.dq[:own]
    grads.dk, grads.dv = grads.dk[:own], grads.dv[:own]
    back = runtime.queries.give_back((dq,), (wire,), (grads.dq,), "sum")
    keys_back = runtime.comms[0].give_back(dk, dv, grads.dk, grads.dv, wire)
    back.wait()
    keys_back.wait()
    return grads


def _behind(local: torch.Tensor, received: torch.Tensor) -> torch.Tensor:
    """Local rows and the received ones behind them; no copy where there are none."""
    return torch.cat([local, received]) if len(received) else local
