# SPDX-License-Identifier: Apache-2.0
"""Operand handling shared by the reference backends: layouts, coverage, checks, merging into ``init``.

Layout names: ``_HGTD`` is (kv heads, query heads per kv head, tokens, head dim), ``_HTD`` (kv heads,
tokens, head dim), both contiguous and in the accumulation dtype.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import ParamSpec, TypeVar

import numpy as np
import torch

from magi_attention.common.plan_cache import Kind
from magi_attention.common.slices import K0, K1, Q0, Q1, SliceTable, trim
from magi_attention.errors import ContractError
from magi_attention.kernels.reference.correction import correct_attn_out_lse, correct_attn_out_lse_with_sink
from magi_attention.kernels.types import BackwardOperands, Grads, Operands, Partial, Problem, accumulation_dtype

_ENDS: Kind[None, tuple[int, int]] = Kind("ends of the slices")
_UNSEEN: Kind[tuple[int, int], tuple[np.ndarray | None, np.ndarray | None]] = Kind("rows without a pair")
_P = ParamSpec("_P")
_R = TypeVar("_R")
_DELTA_VALUES = 1 << 24  # of out, that are taken at a time
FLOAT_DTYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64)


def as_kernel(method: Callable[_P, _R]) -> Callable[_P, _R]:
    """A method of PyTorch functions that acts as a kernel does: without autograd, and in its own dtypes under autocast,
    which would compute each product in half precision."""

    @functools.wraps(method)
    def run(*args: _P.args, **kwargs: _P.kwargs) -> _R:
        given = (x.q if isinstance(x, (Operands, BackwardOperands)) else x for x in (*args, *kwargs.values()))
        device = next(x.device.type for x in given if isinstance(x, torch.Tensor))
        with torch.no_grad(), torch.autocast(device, enabled=False):
            return method(*args, **kwargs)

    return run


def reference_why_not(problem: Problem) -> str | None:
    """The only limits of the torch backends: floating dtypes and whole query head groups."""
    if problem.dtype not in FLOAT_DTYPES:
        return f"The torch backends compute float16, bfloat16, float32 and float64, not {problem.dtype}."
    if problem.num_heads_kv == 0 or problem.num_heads_q % problem.num_heads_kv:
        return f"{problem.num_heads_q} query heads are no multiple of {problem.num_heads_kv} kv heads."
    return None


def check_operands(x: Operands | BackwardOperands) -> None:
    """Raises ``ContractError`` if shapes do not fit or a slice reaches beyond the rows of q or k."""
    q, k, v, slices = x.q, x.k, x.v, x.slices
    ok = q.dim() == k.dim() == v.dim() == 3 and k.shape[:2] == v.shape[:2] and q.shape[2] == k.shape[2]
    if not ok or k.shape[1] == 0 or q.shape[1] % k.shape[1]:
        raise ContractError(
            f"q {tuple(q.shape)}, k {tuple(k.shape)}, v {tuple(v.shape)} do not fit; give (tokens, heads, "
            "head dim) each, equal tokens and heads of k and v, and query heads a multiple of kv heads."
        )
    ends = slices.cache.get(_ENDS, None, lambda: _ends(slices))
    for name, end, have in (("q", ends[0], q.shape[0]), ("k", ends[1], k.shape[0])):
        if end > have:
            raise ContractError(f"A slice reaches {name} row {end}, but there are only {have}; shorten its range.")


def _ends(slices: SliceTable) -> tuple[int, int]:
    live = trim(slices.array)
    return (int(live[:, Q1].max()), int(live[:, K1].max())) if len(live) else (0, 0)


def unseen_rows(slices: SliceTable, total_q: int, total_k: int) -> tuple[np.ndarray | None, np.ndarray | None]:
    """Query rows that see no key and key rows that no query sees: index arrays, or None if there are none.

    What stands in such rows must not matter, not even NaN, but a weight of 0 does not remove a NaN from a
    matrix product. So the backends overwrite these rows with 0.
    """

    def find() -> tuple[np.ndarray | None, np.ndarray | None]:
        live = trim(slices.array)  # every row and every key of a trimmed slice has a partner
        found = []
        for start, end, total in ((Q0, Q1, total_q), (K0, K1, total_k)):
            depth = np.zeros(total + 1, dtype=np.int64)
            np.add.at(depth, live[:, start], 1)
            np.add.at(depth, live[:, end], -1)
            rows = np.flatnonzero(np.cumsum(depth[:-1]) == 0)
            found.append(rows if len(rows) else None)
        return found[0], found[1]

    return slices.cache.get(_UNSEEN, (total_q, total_k), find)


def heads_first(x_THD: torch.Tensor, num_kv_heads: int, blank: np.ndarray | None = None) -> torch.Tensor:
    """(T, H, D) of any strides as a fresh contiguous (kv heads, group, T, D); rows ``blank`` become 0."""
    tokens, heads, dim = x_THD.shape
    group = heads // num_kv_heads
    x_HGTD = torch.empty((num_kv_heads, group, tokens, dim), dtype=accumulation_dtype(x_THD.dtype), device=x_THD.device)
    x_HGTD.copy_(x_THD.reshape(tokens, num_kv_heads, group, dim).permute(1, 2, 0, 3))
    if blank is not None:
        x_HGTD[:, :, torch.from_numpy(blank).to(x_THD.device)] = 0
    return x_HGTD


def tokens_first(x_HGTD: torch.Tensor) -> torch.Tensor:
    """(kv heads, group, T, ...) as contiguous (T, heads, ...)."""
    heads, group, tokens = x_HGTD.shape[:3]
    moved = x_HGTD.movedim(2, 0)
    return moved.reshape(tokens, heads * group, *x_HGTD.shape[3:]).contiguous()


def finish_forward(new: Partial, x: Operands, init: Partial | None) -> Partial:
    """Adds the sink to ``new``, then merges ``new`` into ``init`` in place if there is one."""
    if x.sink is not None:
        new.out, new.lse = correct_attn_out_lse_with_sink(new.out, new.lse, x.sink, x.options.sink_layout, inplace=True)
    if init is None:
        return new
    _check_buffers(("out", init.out, new.out), ("lse", init.lse, new.lse))
    correct_attn_out_lse(init.out, init.lse, new.out, new.lse, inplace=True)
    if new.max_logits is not None:
        if init.max_logits is None:
            init.max_logits = new.max_logits
        else:
            torch.maximum(init.max_logits, new.max_logits, out=init.max_logits)
    return init


def finish_backward(new: Grads, init: Grads | None) -> Grads:
    """Adds ``new`` to ``init`` in place if there is one."""
    if init is None:
        return new
    _check_buffers(("dq", init.dq, new.dq), ("dk", init.dk, new.dk), ("dv", init.dv, new.dv))
    init.dq.add_(new.dq)
    init.dk.add_(new.dk)
    init.dv.add_(new.dv)
    if new.dsink is not None:
        init.dsink = new.dsink if init.dsink is None else init.dsink.add_(new.dsink)
    return init


def _check_buffers(*triples: tuple[str, torch.Tensor, torch.Tensor]) -> None:
    for name, have, want in triples:
        if have.shape != want.shape or have.dtype != want.dtype:
            raise ContractError(
                f"The accumulation buffer {name} is {tuple(have.shape)} {have.dtype}; "
                f"make it {tuple(want.shape)} {want.dtype}."
            )


def row_delta(out: torch.Tensor, dout: torch.Tensor, delta: torch.Tensor | None) -> torch.Tensor:
    """``sum_d out * dout`` (Tq, Hq) in the accumulation dtype, unless given."""
    acc = accumulation_dtype(out.dtype)
    return (out.to(acc) * dout.to(acc)).sum(-1) if delta is None else delta.to(acc)


def delta_with_dlse(
    out: torch.Tensor, dout: torch.Tensor, lse: torch.Tensor, dlse: torch.Tensor | None
) -> torch.Tensor | None:
    """``sum_d out * dout - dlse`` (Tq, Hq) in the accumulation dtype; None without ``dlse``, the gradient of lse.

    A logit moves lse by its weight p, so its gradient is ``p * (dp - delta + dlse)``, and that of a sink
    ``p * (dlse - delta)``: wherever a backward uses delta, less dlse is all that it has to know of dlse. A row that
    sees nothing gets 0, whatever its dout and dlse hold. Rows are taken in blocks, so that no float copy of all of out
    is made.
    """
    if dlse is None:
        return None
    acc = accumulation_dtype(out.dtype)
    # The slope of a loss at -inf may be inf or NaN.
    delta = dlse.to(acc).masked_fill(lse == float("-inf"), 0.0).neg_()
    rows = max(_DELTA_VALUES // max(out[0].numel(), 1), 1) if len(out) else 1
    for part, out_part, dout_part in zip(delta.split(rows), out.split(rows), dout.split(rows)):
        part += (out_part.to(acc) * dout_part.to(acc)).masked_fill_(out_part == 0, 0.0).sum(-1)
    return delta
