# SPDX-License-Identifier: Apache-2.0
"""Attention of a few kv heads at a time: less memory for rows that travel and for partial results.

Every chunk of heads is a call of its own over the same plan, one behind the other in the order of the heads, so
results of a given number of chunks do not depend on arrival times. What a call keeps for its backward is that of all
heads: q, k, v, out and lse.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from magi_attention.functional.heads.groups import head_chunks_of
from magi_attention.functional.runtime import AttnCall
from magi_attention.functional.stages.query_moves import Forward


def forward_by_head_chunks(
    run: Callable[..., Forward], call: AttnCall, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor,
    sink: torch.Tensor | None,
) -> Forward:  # fmt: skip
    """``run(chunk, q, k, v, sink)`` for each of ``call.chunks``, joined."""
    count = len(call.chunks)
    out = q.new_empty(*q.shape[:2], v.shape[2])
    lse: torch.Tensor | None = None
    logits = []
    parts = head_chunks_of(count, q, k, v, sink, out)
    for i, (chunk, (*operands, out_part)) in enumerate(zip(call.chunks, parts)):
        got = run(chunk, *operands)
        out_part.copy_(got.out)
        if lse is None:
            lse = got.lse.new_empty(*q.shape[:2])
        lse[:, i * got.lse.shape[1] : (i + 1) * got.lse.shape[1]] = got.lse
        logits.append(got.max_logits)
        del got  # or it would live while the next chunk is computed
    assert lse is not None
    return Forward(out, lse, None if logits[0] is None else torch.cat(logits))  # type: ignore[arg-type]


def backward_by_head_chunks(
    run: Callable[..., tuple[torch.Tensor | None, ...]], call: AttnCall, dout: torch.Tensor, q: torch.Tensor,
    k: torch.Tensor, v: torch.Tensor, sink: torch.Tensor | None, out: torch.Tensor, lse: torch.Tensor,
    dlse: torch.Tensor | None,
) -> tuple[torch.Tensor | None, ...]:  # fmt: skip
    """``(dq, dk, dv, dsink or None)`` of all heads."""
    grads = [torch.empty(x.shape, dtype=x.dtype, device=x.device) for x in (q, k, v)]
    dsinks = []
    parts = head_chunks_of(len(call.chunks), dout, q, k, v, sink, out, lse, dlse, *grads)
    for chunk, (dout_part, q_part, k_part, v_part, sink_part, out_part, lse_part, dlse_part, *into) in zip(
        call.chunks, parts
    ):
        operands = (dout_part, q_part, k_part, v_part, sink_part, out_part.contiguous(), lse_part.contiguous())
        *found, dsink = run(chunk, *operands, (), dlse_part)
        for whole, part in zip(into, found):
            whole.copy_(part)
        dsinks.append(dsink)
        del operands, found
    return (*grads, None if sink is None else torch.cat(dsinks, dim=1))  # type: ignore[arg-type]


__all__ = ["backward_by_head_chunks", "forward_by_head_chunks"]
