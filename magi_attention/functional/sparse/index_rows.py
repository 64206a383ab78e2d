# SPDX-License-Identifier: Apache-2.0
"""Index attention over a context-parallel group: the rows of keys and values that this rank's lists name are fetched.

A *row* is one kv head of one token, k (D,) and v (Dv,): heads choose for themselves, and whole tokens would carry the
rows of heads that did not choose them. Which rows are needed is known at run time only. So each call

1. marks the rows of other ranks that are needed, each once, and tells all ranks how many it needs from whom,
2. asks their owners for them and fetches k and v in one message,
3. attends locally, over its own rows and behind them those that came, by lists that name these.

The backward returns the gradients of fetched rows in one message; an owner adds them in rank order to its own, in
float32. The host waits for the GPU once, for the counts of step 1, which say how large the messages are.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from magi_attention.comm.transport.base import mark_reported
from magi_attention.common.forward_meta import AttnForwardMeta
from magi_attention.common.plan_cache import Kind, on_gpu
from magi_attention.common.scalars import as_int
from magi_attention.errors import ContractError
from magi_attention.functional.calls.autocast import cast_operands
from magi_attention.functional.calls.inputs import (
    check_devices,
    check_qkv,
    check_tensors,
    refuse_dtensor,
    width_of_values,
)
from magi_attention.functional.sparse.index_attn import attend_lists
from magi_attention.functional.tokens.layout import TokenLayout
from magi_attention.kernels.double_backward import once_differentiable
from magi_attention.kernels.index_attn import PreparedIndices, prepare_indices
from magi_attention.kernels.index_attn.prepare import check_lists, check_tensor
from magi_attention.kernels.reference.correction import check_sink
from magi_attention.kernels.types import accumulation_dtype

_STARTS: Kind[torch.device, torch.Tensor] = Kind("first rows of shards", on_gpu)
_MAX_LISTED = 4
_INT32 = torch.iinfo(torch.int32).max
_FAILED = -2  # in place of max_rows


@dataclass(frozen=True, eq=False)
class IndexExchange:
    """Which rows cross between ranks for some lists, as ``prepare_index_exchange`` found out.

    ``lists`` are for queries (T * Hk, G heads), where ``is_joined`` (T, Hq heads), and the rows of this rank, (T * Hk)
    of them, with the fetched ones behind. ``requests`` int64: rows of this rank that others fetch, ``sent_counts[r]``
    of them by rank r; ``got_counts[r]`` rows are fetched from rank r.
    """

    lists: PreparedIndices
    num_heads_kv: int
    requests: torch.Tensor
    sent_counts: tuple[int, ...]
    got_counts: tuple[int, ...]
    is_joined: bool = False


def make_exchange(
    indices: torch.Tensor | PreparedIndices, layout: TokenLayout, max_rows: int | None = None,
    failure: ContractError | None = None, is_joined: bool = False,
) -> IndexExchange:  # fmt: skip
    """``prepare_index_exchange`` by the layout of a plan. What is wrong on one rank, here or before (``failure``), is
    told to all with the numbers of rows, so that all raise alike and the group goes on."""
    if isinstance(indices, PreparedIndices):
        indices = _keys_of(indices)
    world, me = layout.transport.size, layout.rank
    with layout.exchange(_tensor_of(indices), "index attention, lists of keys", are_rows=False):
        wanted = None
        if failure is None:
            try:
                wanted = _wanted_rows(indices, layout, max_rows)
            except ContractError as exc:
                failure = exc
        table = _tell(None if wanted is None else wanted.told, layout, indices)
        _raise_of_all(table, failure, layout)
    assert wanted is not None
    _check_bounds(table)
    got, sent = tuple(table[me][:world]), tuple(row[me] for row in table)
    items, before, starts, heads = wanted.items, wanted.before, wanted.starts, indices.shape[1]
    own_rows = layout.num_local * heads
    with layout.transport.guard("index attention, requests"):
        place = torch.where(wanted.is_needed, before - 1, sum(got)).long()
        rows = torch.empty(sum(got) + 1, dtype=torch.int64, device=items.device)
        rows.scatter_(0, place, torch.arange(len(place), device=items.device))
        rows = rows[:-1] - torch.repeat_interleave(starts[:-1], wanted.told[:-1], output_size=sum(got))
        requests = rows.new_empty(sum(sent))
        layout.transport.all_to_all_v(requests, rows, sent, got).wait()
        fetched = own_rows + place[items.clamp(min=0)]
        rows = torch.where(items < 0, -1, torch.where(wanted.is_own, items - starts[me], fetched))
        rows = rows.flatten(1)[:, None] if is_joined else rows.flatten(0, 1)[:, None]
        lists = prepare_indices(rows, own_rows + sum(got))
    return IndexExchange(lists, heads, requests, sent, got, is_joined)


def _keys_of(lists: PreparedIndices) -> torch.Tensor:
    """The keys of prepared lists, (queries, kv heads, keys): those of blocks one by one, and -1 for none."""
    if lists.is_plain and lists.q_block_size == 1:
        return lists.rows
    size, rows = lists.k_block_size, lists.rows.repeat_interleave(lists.q_block_size, 0)
    start = 0 if lists.k_start is None else lists.k_start.repeat_interleave(lists.q_block_size)[:, None, None, None]
    stop = lists.total_k if lists.k_end is None else lists.k_end.repeat_interleave(lists.q_block_size)[:, None, None]
    keys = (start + rows[..., None] * size + torch.arange(size, device=rows.device)).flatten(2)
    is_none = (rows < 0).repeat_interleave(size, 2)
    return keys.masked_fill(is_none | (keys >= stop), -1)


@dataclass(frozen=True)
class _Wanted:
    """Rows that the lists of this rank name. ``items``: as of ``_items``; ``is_own``: held by this rank. By row of all
    shards, with one more for what is fetched from nobody: ``is_needed`` from other ranks, and ``before``, how many are
    up to here. ``starts``: first row of each shard. ``told``: how many rows of each rank, then max_rows or -1."""

    items: torch.Tensor
    is_own: torch.Tensor
    is_needed: torch.Tensor
    before: torch.Tensor
    starts: torch.Tensor
    told: torch.Tensor


def _wanted_rows(indices: torch.Tensor, layout: TokenLayout, max_rows: int | None) -> _Wanted:
    bound = -1 if max_rows is None else min(as_int(max_rows, "max_rows", at_least=0), _INT32)
    refuse_dtensor("indices", indices)
    check_tensor(indices)
    items = _items(indices, layout)
    heads = indices.shape[1]
    starts = _starts(layout, indices.device) * heads
    own_start, own_rows = sum(layout.plan.shard_sizes[: layout.rank]) * heads, layout.num_local * heads
    is_own = (items >= own_start) & (items < own_start + own_rows)
    is_needed = torch.zeros(layout.plan.padded_tokens * heads + 1, dtype=torch.bool, device=items.device)
    is_needed.index_fill_(0, torch.where(is_own, -1, items).flatten() % len(is_needed), True)
    is_needed[-1] = False
    before = is_needed.cumsum(0, dtype=torch.int32)
    counts = torch.cat([before.new_zeros(1), before])[starts].diff()
    told = torch.cat([counts, counts.new_tensor([bound])])
    return _Wanted(items, is_own, is_needed, before, starts, told)


def _tensor_of(indices: object) -> torch.Tensor:
    """What travels is int64, on the device of ``indices``, or of a CPU where these are no tensor."""
    return indices if isinstance(indices, torch.Tensor) else torch.empty(0, dtype=torch.int64)


def _items(indices: torch.Tensor, layout: TokenLayout) -> torch.Tensor:
    """int64 like ``indices``: each entry as a row among those of all shards put one after another; -1 for none."""
    plan = layout.plan
    check_lists(indices, plan.total_tokens)
    if indices.shape[0] != layout.num_local or indices.shape[1] == 0:
        raise ContractError(
            f"indices are {tuple(indices.shape)}, and rank {layout.rank} holds {layout.num_local} of "
            f"{plan.total_tokens} tokens (+{plan.pad_size} pad); give lists (rows of plan.shard, kv heads, keys)."
        )
    is_pad = layout.index("local", indices.device) >= plan.total_tokens
    is_none = (indices < 0) | (indices >= plan.total_tokens) | is_pad[:, None, None]
    places = layout.index("natural", indices.device)[indices.masked_fill(is_none, 0).long()]
    items = places * indices.shape[1] + torch.arange(indices.shape[1], device=indices.device)[:, None]
    return items.masked_fill(is_none, -1)


def _starts(layout: TokenLayout, device: torch.device) -> torch.Tensor:
    """int64 (ranks + 1,): first row of each shard among those of all shards put one after another, and their end."""

    def make() -> torch.Tensor:
        return torch.tensor([0, *layout.plan.shard_sizes]).cumsum(0).to(device)

    return layout.cache.get(_STARTS, device, make)


def _tell(told: torch.Tensor | None, layout: TokenLayout, indices: object) -> list[list[int]]:
    """How many rows each rank fetches from every rank, and its ``max_rows`` or -1: a list for each rank. A rank with
    None has failed: its list ends in ``_FAILED``."""
    world = layout.transport.size
    if told is None:
        told = torch.full((world + 1,), _FAILED, dtype=torch.int32, device=_tensor_of(indices).device)
    table: list[list[int]] = layout.transport.all_gather_v(told, [world + 1] * world).view(world, -1).tolist()
    return table


def _raise_of_all(table: list[list[int]], failure: ContractError | None, layout: TokenLayout) -> None:
    """The same ``ContractError`` on every rank, if one of them has failed."""
    failed = [r for r, row in enumerate(table) if row[-1] == _FAILED]
    if not failed:
        return
    texts = layout.transport.all_gather_object(None if failure is None else str(failure))
    if len(table) == 1 and failure is not None:
        raise failure
    listed = " ".join(f"Rank {r}: {texts[r]}" for r in failed[:_MAX_LISTED])
    rest = f" And {len(failed) - _MAX_LISTED} more ranks." if len(failed) > _MAX_LISTED else ""
    error = ContractError(f"{listed}{rest} Nothing was sent, and the group goes on.")
    mark_reported(error)
    raise error from failure


def _check_bounds(table: list[list[int]]) -> None:
    """Raises on every rank alike, from what all know."""
    over = [(r, sum(row[:-1]), row[-1]) for r, row in enumerate(table) if 0 <= row[-1] < sum(row[:-1])]
    if not over:
        return
    listed = "; ".join(
        f"rank {r} needs {need:,} rows of other ranks, {need - bound:,} more than its max_rows of {bound:,}"
        for r, need, bound in over[:_MAX_LISTED]
    )
    rest = f"; and {len(over) - _MAX_LISTED} more ranks" if len(over) > _MAX_LISTED else ""
    raise ContractError(
        f"Index attention would fetch too many rows (one kv head of one token each): {listed}{rest}. Nothing was sent. "
        "Raise max_rows, or choose fewer keys of other ranks."
    )


class _Fetch(torch.autograd.Function):
    """Rows of this rank, then those of others: tensors (T, Hk, D) of any head dims become (T * Hk + fetched, 1, D)."""

    @staticmethod
    def forward(
        ctx: Any, exchange: IndexExchange, layout: TokenLayout, *tensors: torch.Tensor
    ) -> tuple[torch.Tensor, ...]:
        ctx.exchange, ctx.layout, ctx.shapes = exchange, layout, [x.shape for x in tensors]
        own = [x.flatten(0, 1) for x in tensors]
        sent = torch.cat([x[exchange.requests] for x in own], dim=1)
        got = sent.new_empty((sum(exchange.got_counts), sent.shape[1]))
        with layout.transport.guard("index attention, rows"):
            layout.transport.all_to_all_v(got, sent, exchange.got_counts, exchange.sent_counts).wait()
        parts = got.split([x.shape[1] for x in own], dim=1)
        return tuple(torch.cat([x, part])[:, None] for x, part in zip(own, parts))

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        exchange, layout, shapes = ctx.exchange, ctx.layout, ctx.shapes
        num_own = shapes[0][0] * shapes[0][1]
        sent = torch.cat([x[num_own:, 0] for x in grads], dim=1)
        got = sent.new_empty((sum(exchange.sent_counts), sent.shape[1]))
        with layout.transport.guard("index attention, gradients of rows"):
            layout.transport.all_to_all_v(got, sent, exchange.sent_counts, exchange.got_counts).wait()
        parts = got.split([x.shape[2] for x in grads], dim=1)
        total = [_sum_rows(x[:num_own, 0], part, exchange.requests) for x, part in zip(grads, parts)]
        total = [x.view(shape) for x, shape in zip(total, shapes)]
        return None, None, *once_differentiable(total, grads)


def _sum_rows(own: torch.Tensor, received: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
    """``own`` with ``received`` added at ``rows``, in their order always; rounded once."""
    acc = accumulation_dtype(own.dtype)
    total = own.to(acc, copy=True)
    if total.is_cuda:  # where index_add_ adds in any order, and this one sorts
        total.index_put_((rows,), received.to(acc), accumulate=True)
    else:
        total.index_add_(0, rows, received.to(acc))
    return total.to(own.dtype)


fetch_rows: Callable[..., tuple[torch.Tensor, ...]] = _Fetch.apply  # exchange, layout, tensors of one dtype


def attend_index(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor | None, indices: torch.Tensor | PreparedIndices | IndexExchange,
    layout: TokenLayout, *, head_dim_v: int | None, sink: torch.Tensor | None, softmax_scale: float | None,
    softcap: float, deterministic: bool, max_rows: int | None, is_joined: bool = False,
) -> tuple[torch.Tensor, AttnForwardMeta]:  # fmt: skip
    """``api.attend_index`` by the layout of a plan."""
    failure, width = None, 0
    if isinstance(indices, PreparedIndices):
        indices = _keys_of(indices)
    try:
        check_tensors(q=q, k=k, v=k if v is None else v)
        q, k, v = cast_operands(q, k, v)
        width = width_of_values(k, v, head_dim_v)
        _check(q, k, k if v is None else v, sink, layout, is_joined)
        _check_lists(indices, k, is_joined)
    except ContractError as exc:
        failure = exc
    if not isinstance(indices, IndexExchange):
        is_movable = isinstance(indices, torch.Tensor) and isinstance(q, torch.Tensor)
        indices = indices.to(q.device) if is_movable else indices
        indices = make_exchange(indices, layout, max_rows, failure, is_joined)
    elif failure is not None:
        with layout.transport.guard("index attention, input check"):
            raise failure
    tokens, heads = k.shape[0], 1 if is_joined else k.shape[1]
    group = q.shape[1] // heads
    keys, *values = fetch_rows(indices, layout, k, *([] if v is None else [v]))
    if sink is not None:  # of each kv head's own query heads, as all rows have these heads then
        sink = sink.unflatten(1, (heads, group)).transpose(0, 1)
        sink = sink.expand(tokens, *sink.shape).flatten(0, 1)
    out, meta = attend_lists(
        q.reshape(tokens * heads, group, q.shape[2]), keys, values[0] if values else None, indices.lists,
        head_dim_v=width, sink=sink, sink_layout="ssh", softmax_scale=softmax_scale, softcap=softcap,
        deterministic=deterministic, sm_margin=0, return_max_logits=False,
    )  # fmt: skip
    return out.view(*q.shape[:2], width), AttnForwardMeta(meta.lse.view(q.shape[:2]))  # type: ignore[union-attr]


def _check_lists(indices: torch.Tensor | IndexExchange, k: torch.Tensor, is_joined: bool) -> None:
    if not isinstance(indices, IndexExchange):
        check_tensor(indices, ", or what prepare_index_exchange made")
        if indices.shape[1:2] != k.shape[1:2]:
            raise ContractError(f"indices are {tuple(indices.shape)} for {k.shape[1]} kv heads; give a list for each.")
        return
    wanted = k.shape[0] * (1 if is_joined else k.shape[1])
    if len(indices.lists.counts) != wanted or indices.num_heads_kv != k.shape[1] or indices.is_joined != is_joined:
        raise ContractError(
            f"The exchange is for {indices.num_heads_kv} kv heads, {len(indices.lists.counts)} lists of this rank and "
            f"is_joined={indices.is_joined}, and k is {tuple(k.shape)} with is_joined={is_joined}; prepare an exchange "
            "of these lists."
        )


def _check(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, sink: torch.Tensor | None, layout: TokenLayout, is_joined: bool
) -> None:
    for name, x in (("q", q), ("k", k), ("v", v)):
        refuse_dtensor(name, x)
    check_qkv(q, *(x[:, :1] if is_joined and x.dim() == 3 and x.shape[1] else x for x in (k, v)))
    check_devices(q, sink=sink)
    if sink is not None:
        check_sink(sink, q.shape[0], q.shape[1])
    if q.shape[0] != layout.num_local or k.shape[0] != layout.num_local:
        raise ContractError(
            f"q has {q.shape[0]} rows and k {k.shape[0]}, and rank {layout.rank} holds {layout.num_local} of "
            f"{layout.plan.total_tokens} tokens (+{layout.plan.pad_size} pad); give the rows of plan.shard."
        )
