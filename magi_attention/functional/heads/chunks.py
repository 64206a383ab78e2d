# SPDX-License-Identifier: Apache-2.0
"""Attention of a few kv heads at a time: less memory for rows that travel and for partial results.

Every chunk of heads is a call of its own over the same plan, one behind the other in the order of the heads, so
results of a given number of chunks do not depend on arrival times. What a call keeps for its backward is that of all
heads: q, k, v, out and lse.

Where rows travel over the process group, those of the next chunk set out before the last kernel of a chunk, and
gradients that return to their owners do so beside the first kernel of the next chunk. So rows of two chunks are there
at a time. In one launch, rows of a chunk travel beside its own kernel.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from magi_attention.functional.heads.groups import head_chunks_of
from magi_attention.functional.runtime import AttnCall
from magi_attention.functional.stages.fetches import Fetches
from magi_attention.functional.stages.query_moves import Forward
from magi_attention.functional.stages.staged import PendingGrads
from magi_attention.kernels import Grads


def forward_by_head_chunks(
    run: Callable[..., Forward], call: AttnCall, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor,
    sink: torch.Tensor | None,
) -> Forward:  # fmt: skip
    """``run(chunk, q, k, v, sink, fetches)`` for each of ``call.chunks``, joined."""
    count = len(call.chunks)
    out = q.new_empty(*q.shape[:2], v.shape[2])
    lse: torch.Tensor | None = None
    logits = []
    all_fetches = _chained(Fetches.of_forward, call, k, v)
    parts = head_chunks_of(count, q, k, v, sink, out)
    for i, (chunk, fetches, (*operands, out_part)) in enumerate(zip(call.chunks, all_fetches, parts)):
        got = run(chunk, *operands, fetches)
        out_part.copy_(got.out)
        if lse is None:
            lse = got.lse.new_empty(*q.shape[:2])
        lse[:, i * got.lse.shape[1] : (i + 1) * got.lse.shape[1]] = got.lse
        logits.append(got.max_logits)
        del got  # or it would live while the next chunk is computed
    assert lse is not None
    return Forward(out, lse, None if logits[0] is None else torch.cat(logits))  # type: ignore[arg-type]


def backward_by_head_chunks(
    start: Callable[..., PendingGrads], call: AttnCall, operands: tuple[torch.Tensor | None, ...],
    dlse: torch.Tensor | None,
) -> Grads:  # fmt: skip
    """``start(chunk, *operands, dlse, fetches=, after_first=)`` for each of ``call.chunks``, joined.

    ``operands``: dout, q, k, v, sink, out, lse.
    """
    _, q, k, v, *_ = operands
    dq, dk, dv = (torch.empty(x.shape, dtype=x.dtype, device=x.device) for x in (q, k, v) if x is not None)
    dsinks: list[torch.Tensor | None] = []
    all_fetches = _chained(Fetches.of_backward, call, k, v)
    parts = head_chunks_of(len(call.chunks), *operands, dlse)
    into = head_chunks_of(len(call.chunks), dq, dk, dv)
    last: _Chunk | None = None
    for chunk, fetches, (*of_chunk, out, lse, dlse_part), to in zip(call.chunks, all_fetches, parts, into):
        rest = out.contiguous(), lse.contiguous(), dlse_part
        pending = start(chunk, *of_chunk, *rest, fetches=fetches, after_first=last)
        if last is not None:
            last()
        dsinks.append(pending.grads.dsink)
        last = _Chunk(pending, to)
        del pending, rest
        if fetches.following is None or not fetches.following.have_started:
            last()  # nothing travels beside the next chunk, so gradients of two need not live at a time
    return Grads(dq, dk, dv, None if dsinks[0] is None else torch.cat(dsinks, dim=1))  # type: ignore[arg-type]


class _Chunk:
    """A chunk whose kernels are launched. Called, it waits for dk and dv and copies them where they belong, once."""

    def __init__(self, pending: PendingGrads, into: tuple[torch.Tensor, ...]) -> None:
        self._pending: PendingGrads | None = pending
        dq, *self._into = into
        dq.copy_(pending.grads.dq)
        pending.grads.dq = dq  # the sums are free from here on

    def __call__(self) -> None:
        if self._pending is None:
            return
        pending, self._pending = self._pending, None
        grads = pending.wait()
        for whole, part in zip(self._into, (grads.dk, grads.dv)):
            whole.copy_(part)


def _chained(
    make: Callable[[AttnCall, torch.Tensor, torch.Tensor], Fetches], call: AttnCall, k: torch.Tensor | None,
    v: torch.Tensor | None,
) -> list[Fetches]:  # fmt: skip
    """Those of each chunk, each of which begins the next one's."""
    found = [make(chunk, *part) for chunk, part in zip(call.chunks, head_chunks_of(len(call.chunks), k, v))]
    for one, following in zip(found, found[1:]):
        one.following = following
    return found
