# SPDX-License-Identifier: Apache-2.0
"""What calls of index attention with equal shapes, strides and options share, prepared once: parameters up to the
addresses, and what is allocated for each call. ``ffa`` packs the addresses behind them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import torch

from magi_attention.kernels.ffa.operands import DTYPES, log_copy, odd_strides, stride_fields
from magi_attention.kernels.index_attn.backward_choice import is_key_stationary
from magi_attention.kernels.index_attn.forward_choice import copies_blocks
from magi_attention.kernels.index_attn.invert import check_readers
from magi_attention.kernels.index_attn.types import IndexProblem, PreparedIndices
from magi_attention.native.index.calls import IndexLibrary

SHARES_BYTES = 1 << 29  # that a deterministic backward leaves in memory at a time, where a list does not need more
HEAD_SPLITS = 2  # parts of the query heads of a kv head, in which the key-stationary backward takes all tiles
Raw = Callable[[bytes], int]
# The tensors that a call fills have one element here, expanded: empty_like parses its arguments in half the time of
# empty.


@dataclass(frozen=True)
class ForwardLaunch:
    """``raw`` takes the ``prefix`` and a tail. ``work_like`` is there where whole blocks are copied."""

    library: IndexLibrary
    raw: Raw
    prefix: bytes
    out_like: torch.Tensor
    lse_like: torch.Tensor
    work_like: torch.Tensor | None
    takes_columns: bool  # the kernel takes a v, which is columns of k
    is_unusual: bool  # the kernel cannot read the operands as they are
    problem: IndexProblem  # held, so that its id, which is part of the key, stays taken


class SharesLaunch(NamedTuple):
    """A part of a deterministic backward: some lists leave shares, which are then added to dk and, if it is there, to
    dv. ``share_likes`` and ``sum_prefixes`` are for these."""

    prefix: bytes
    share_likes: tuple[torch.Tensor, ...]
    sum_prefixes: tuple[bytes, ...]


@dataclass(frozen=True)
class BackwardLaunch:
    """One of three: with ``work_like`` it is key-stationary, with ``parts`` deterministic, else one launch of
    ``prefix`` adds to float32 dk and dv in memory. ``grad_likes``: of dk and, if the kernel takes a v, of dv."""

    library: IndexLibrary
    prefix: bytes
    dq_like: torch.Tensor
    delta_like: torch.Tensor
    grad_likes: tuple[torch.Tensor, ...]
    work_like: torch.Tensor | None
    parts: tuple[SharesLaunch, ...]
    takes_columns: bool
    is_unusual: bool
    problem: IndexProblem


def prepare_forward(
    library: IndexLibrary, p: IndexProblem, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor | None,
    lists: PreparedIndices,
) -> ForwardLaunch:  # fmt: skip
    """Chooses the forward and fills its parameters.

    Raises:
        UnsupportedError: the lists have more entries than a deterministic backward, which will come, can count.
    """
    takes_columns = _takes_columns(library, p)
    operands = _operands(p, q, k, v, takes_columns)
    by_blocks = "v" in operands and copies_blocks(p, lists)
    if p.options.deterministic and p.needs_backward:
        check_readers(lists)
    out_like = q.new_empty(()).expand(*q.shape[:2], p.head_dim_v)
    out_strides = {"out_stride_token": q.shape[1] * p.head_dim_v, "out_stride_head": p.head_dim_v}
    fields = {**_shape(p, operands, lists), **stride_fields(**operands), **out_strides}
    prefix = (library.forward_blocks_prefix if by_blocks else library.forward_prefix)(**fields)
    work_like = q.new_empty((), dtype=torch.int32).expand(1 + lists.counts.numel()) if by_blocks else None
    return ForwardLaunch(
        library, library.forward_blocks_raw if by_blocks else library.forward_raw, prefix, out_like,
        _number(q).expand(q.shape[:2]), work_like, takes_columns, _is_odd(operands), p,
    )  # fmt: skip


def prepare_backward(
    library: IndexLibrary, p: IndexProblem, dout: torch.Tensor, q: torch.Tensor, k: torch.Tensor,
    v: torch.Tensor | None, out: torch.Tensor, lists: PreparedIndices, is_plain: bool,
) -> BackwardLaunch:  # fmt: skip
    """Chooses the backward and fills its parameters. ``is_plain``: dtypes and layouts of dout, out, lse and delta are
    those that kernels read."""
    takes_columns = _takes_columns(library, p)
    operands = {**_operands(p, q, k, v, takes_columns), "dout": dout}
    takes_v = "v" in operands
    fields = {**_shape(p, operands, lists), **stride_fields(**operands, out=out)}
    keys = tuple(operands[name] for name in ("k", "v") if name in operands)
    work_like: torch.Tensor | None = None
    parts: tuple[SharesLaunch, ...] = ()
    if takes_v and is_key_stationary(p, lists):
        prefix, num_bytes = library.backward_keys_prefix(**fields, num_head_splits=HEAD_SPLITS)
        work_like = q.new_empty((), dtype=torch.uint8).expand(num_bytes)
        like = q.new_empty(())
    else:
        num_lists, like = lists.rows.shape[0], _number(q)
        prefix = library.backward_prefix(**fields, list_begin=0, list_end=num_lists)
        if p.options.deterministic:
            tiles = library.tiles(q.shape[1], k.shape[1], lists.q_block_size, takes_v)
            parts = _parts(library, fields, lists, tiles, [x.shape[2] for x in keys], like)
    return BackwardLaunch(
        library, prefix, q.new_empty(()).expand(q.shape), _number(q).expand(q.shape[:2]),
        tuple(like.expand(x.shape) for x in keys), work_like, parts, takes_columns,
        _is_odd({**operands, "out": out}) or not is_plain, p,
    )  # fmt: skip


def _parts(
    library: IndexLibrary, fields: dict[str, int | float], lists: PreparedIndices, tiles: int, widths: list[int],
    like: torch.Tensor,
) -> tuple[SharesLaunch, ...]:  # fmt: skip
    """Ranges of lists whose shares fit into ``SHARES_BYTES``, one list at least."""
    num_lists, heads, entries = lists.rows.shape
    rows_of_list = heads * tiles * entries * lists.k_block_size
    step = max(SHARES_BYTES // max(4 * sum(widths) * rows_of_list, 1), 1)
    common = dict(
        total_k=lists.total_k, heads_kv=heads, k_block=lists.k_block_size, max_entries=entries, num_tiles=tiles,
        has_starts=int(lists.k_start is not None),
    )  # fmt: skip
    found = []
    for begin in range(0, num_lists, step):
        some = {"list_begin": begin, "list_end": min(begin + step, num_lists)}
        rows = (some["list_end"] - begin) * rows_of_list
        found.append(
            SharesLaunch(
                library.backward_prefix(**fields, **some), tuple(like.expand(rows, width) for width in widths),
                tuple(library.sum_prefix(**common, **some, width=width) for width in widths),
            )
        )  # fmt: skip
    return tuple(found)


def _takes_columns(library: IndexLibrary, p: IndexProblem) -> bool:
    """Is there a kernel that takes a v, for values that are columns of k? Else the kernel knows that they are."""
    return not p.has_v and library.has(DTYPES[p.dtype], p.head_dim, p.head_dim_v)


def _operands(
    p: IndexProblem, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor | None, takes_columns: bool
) -> dict[str, torch.Tensor]:
    if takes_columns:
        v = k[..., : p.head_dim_v]
    return {"q": q, "k": k, **({} if v is None else {"v": v})}


def _number(q: torch.Tensor) -> torch.Tensor:
    return q.new_empty((), dtype=torch.float32)


def _is_odd(operands: dict[str, torch.Tensor]) -> bool:
    odd = odd_strides(**{name: x for name, x in operands.items() if x.numel()})
    if odd:
        log_copy(odd)
    return bool(odd)


def _shape(p: IndexProblem, operands: dict[str, torch.Tensor], lists: PreparedIndices) -> dict[str, int | float]:
    return {
        "dtype": DTYPES[p.dtype], "total_q": len(operands["q"]), "total_k": len(operands["k"]),
        "heads_q": p.num_heads_q, "heads_kv": p.num_heads_kv, "head_dim": p.head_dim, "head_dim_v": p.head_dim_v,
        "max_entries": lists.rows.shape[2], "q_block": lists.q_block_size, "k_block": lists.k_block_size,
        "sm_margin": p.options.sm_margin, "softmax_scale": p.options.softmax_scale,
    }  # fmt: skip


__all__ = ["BackwardLaunch", "ForwardLaunch", "SharesLaunch", "prepare_backward", "prepare_forward"]
