# SPDX-License-Identifier: Apache-2.0
"""Do all ranks mean the same? The one place that all calls pass which exchange data by a plan.

Ranks make their plans each for itself, so one that got another batch, or another environment, holds another plan.
Nothing in the exchange of rows would show that: sizes may fit by chance, and what comes out is wrong. So before a plan
moves its rows in a group, and before memory that ranks share is made for it, the ranks compare what they hold
(``comm/transport/consistency.py`` says how, and what it costs). On a CPU they do so in every call. On GPUs they do so
at the first use of each plan, and for attention once for each plan with the same heads, head dims, dtype, sinks and
settings; later calls go into a checksum that is compared now and then.

``AttnPolicy.check`` has ranks compare every call on GPUs, too, for which their hosts wait for one another.

In the capture of a CUDA graph nothing is compared. What is captured must have run before, as tables are copied to the
GPU at the first use; a plan that is new there is refused by a sentence.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import fields, replace
from functools import partial

import torch

from magi_attention.comm.transport.base import Transport
from magi_attention.comm.transport.consistency import CALLS, Record, Use
from magi_attention.common.slices import areas
from magi_attention.errors import ContractError
from magi_attention.kernels.dropout import Dropout
from magi_attention.meta.plan import Plan

# Labels of records. Those of a group follow from what stands before them, so the first that differs says enough.
_CALL, _PLAN = "call", "plan"
FORWARD, BACKWARD = "attention forward", "attention backward"
_HEADS = "heads that the plan was made for"
_OF_PLAN = (("tokens", "ranks"), ("mask",), ("documents",), ("dispatch",), ("stages",), (_HEADS,))
_ROWS, _SHIFT = "rows", "shift"
_MAX_LISTED = 4


def ensure_plan(
    plan: Plan, transport: Transport, x: torch.Tensor, stage: str, rows: torch.Tensor | None = None, shift: str = ""
) -> None:
    """Compares ``plan`` over the ranks. ``x`` is a tensor that is about to travel. ``rows``: x, where all ranks send
    rows of one dtype and shape. ``shift``: how a roll moves them, in words."""
    if not transport.knows(plan.fingerprint):
        refuse_capture(x)
    of_call = {} if rows is None else {_ROWS: f"{tuple(rows.shape[1:])} of {_name_of(rows.dtype)}"}
    if shift:
        of_call[_SHIFT] = shift
    make_record = partial(_record_of_call, plan, of_call)
    transport.agree(Use(plan.fingerprint, make_record, judge, stage, f"{stage} {of_call}"), x)


def use_of_call(
    plan: Plan, settings: str, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor,
    sink: torch.Tensor | None, scale: float, softcap: float, with_max: bool, dropout: Dropout | None,
) -> Use:  # fmt: skip
    """What may not differ between ranks in attention calls like this one."""
    shapes, sinks = _shapes(q, k, v), None if sink is None else sink.shape[0]
    name = repr((plan.fingerprint, *shapes, sinks, with_max, 0 if dropout is None else dropout.p, settings))
    of_call = {
        **dict(zip(("q heads", "k heads", "v heads", "dtype"), shapes)),
        "softmax scale": repr(scale),
        "softcap": repr(softcap),
        "sinks per head": "none" if sink is None else str(sink.shape[0]),
        "return of max logits": str(with_max),
        "dropout": "none" if dropout is None else f"p {dropout.p!r}",
        "settings": settings,
    }
    use = Use(name, partial(_record_of_call, plan, of_call), judge, FORWARD, f"{scale!r} {softcap!r}")
    return replace(use, also=(plan.fingerprint, use.of(BACKWARD).name))


def _record_of_call(plan: Plan, of_call: Record, stage: str) -> Record:
    return {_CALL: stage, **record_of(plan), **of_call}


def ensure_call(use: Use, transport: Transport, x: torch.Tensor, dropout: Dropout | None, is_checked: bool) -> None:
    """Compares an attention call over the ranks, before anything travels or memory is shared."""
    if not transport.knows(use.name):
        refuse_capture(x)
    transport.agree(use, x, "" if dropout is None else str(dropout), is_checked)


def refuse_capture(x: torch.Tensor) -> None:
    if x.is_cuda and torch.cuda.is_current_stream_capturing():
        raise ContractError(
            "The first use of this plan (or of these heads, dtype and settings with it) in its group falls into the "
            "capture of a CUDA graph, where ranks compare nothing and no table can be made; call it once before."
        )


def record_of(plan: Plan) -> Record:
    """What ranks have to agree about, in words."""
    mask, documents, dispatch, stages = (digest[:8] for digest in plan.digests.values())
    num_slices = len(plan.slices)
    pairs = int(areas(plan.slices.array).sum())
    return {
        "tokens": f"{plan.total_tokens:,}",
        "ranks": str(plan.cp_size),
        "mask": f"of {num_slices:,} slice{'s' * (num_slices != 1)} with {pairs:,} pairs (digest {mask})",
        "documents": "not said" if plan.cu_seqlens is None else f"{len(plan.cu_seqlens) - 1:,} (digest {documents})",
        "dispatch": f"in chunks of {plan.chunk_size:,} with {plan.pad_size:,} of padding (digest {dispatch})",
        "stages": f"of degree {plan.degree} (digest {stages})",
        _HEADS: f"{plan.num_heads_q}, {plan.num_heads_kv} of dim {plan.head_dim}",
        _PLAN: plan.fingerprint,
    }


def settings_in_words(policy: object) -> str:
    """The fields of a dataclass that differ from their defaults."""
    changed = [f"{f.name}={getattr(policy, f.name)!r}" for f in fields(policy) if getattr(policy, f.name) != f.default]  # type: ignore[arg-type]
    return ", ".join(changed) or "defaults"


def judge(records: Sequence[Record]) -> str:
    """The sentence for records, in rank order, that differ."""
    labels = list(dict.fromkeys(label for record in records for label in record))
    differing = [label for label in labels if len({record.get(label) for record in records}) > 1]
    if _CALL in differing:
        shown, what = [_CALL], "are in different calls"
        remedy = "Every rank of the group must make the same calls in the same order."
        if any(record.get(_CALL) == BACKWARD for record in records):
            remedy += " A rank without labels takes part in backward, too: let its loss be out.sum() * 0."
    elif _PLAN in differing:
        groups = [[label for label in group if label in differing] for group in _OF_PLAN]
        shown = next((group for group in groups if group), [_PLAN])
        if "tokens" in shown and "mask" in differing:
            shown.append("mask")
        what = "hold different plans"
        remedy = (
            "Make the plan (or key) from the same mask and configuration on every rank: all ranks of a "
            "context-parallel group need the same batch, so seed and shard the data loader by data-parallel rank."
        )
    elif differing == [CALLS]:
        shown, what = differing, "have called differently since they last compared plans"
        remedy = "Results since then are wrong. All ranks need the same batches in the same order."
    elif differing[0] in (_ROWS, _SHIFT):
        shown, what = differing, f"move tokens with different {' and '.join(differing)}"
        remedy = "Give tensors of one dtype and of one shape beside the tokens, and one shift, on every rank."
    else:
        shown, what = differing, f"call attention with different {' and '.join(differing)}"
        remedy = "Call it with the same heads, dtype, scale and settings (environment) on every rank."
    holders: dict[tuple[str, ...], list[int]] = {}
    for rank, record in enumerate(records):
        holders.setdefault(tuple(record.get(label, "none") for label in shown), []).append(rank)
    listed = [
        f"{_ranks(ranks)}: {', '.join(f'{label} {value}' for label, value in zip(shown, values))}"
        for values, ranks in list(holders.items())[:_MAX_LISTED]
    ]
    rest = len(holders) - len(listed)
    text = "; ".join(listed) + (f"; and {rest} more" if rest else "")
    where = records[0].get(_CALL, "")
    return f"The ranks of this group {what} ({text})" + (f", in {where}" if _CALL not in shown else "") + f". {remedy}"


def _shapes(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> tuple[str, ...]:
    return (*(f"{x.shape[1]} of dim {x.shape[2]}" for x in (q, k, v)), _name_of(q.dtype))


def _name_of(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _ranks(ranks: Sequence[int]) -> str:
    """``rank 1``, ``ranks 0-3, 6``."""
    runs: list[list[int]] = []
    for rank in ranks:
        if runs and rank == runs[-1][1] + 1:
            runs[-1][1] = rank
        else:
            runs.append([rank, rank])
    text = ", ".join(str(a) if a == b else f"{a}-{b}" for a, b in runs[:8]) + (", ..." if len(runs) > 8 else "")
    return f"rank{'s' * (len(ranks) > 1)} {text}"
