# SPDX-License-Identifier: Apache-2.0
"""The inverted lists: which lists read a key, in a fixed order, for gradients of keys that are the same bits always."""

from __future__ import annotations

import torch

from magi_attention.errors import UnsupportedError
from magi_attention.kernels.index_attn.types import PreparedIndices

CHUNK = 1 << 24  # entries that are sorted at a time, which take some 40 bytes each meanwhile
_INT32 = torch.iinfo(torch.int32).max


def with_readers(lists: PreparedIndices) -> PreparedIndices:
    """The same lists with ``readers`` and ``reader_begins``; those that have them, as they are.

    Raises:
        UnsupportedError: there are 2**31 entries or more, or as many keys times kv heads.
    """
    if lists.readers is not None:
        return lists
    check_readers(lists)
    readers, begins = readers_op(lists.rows, key_counts(lists), lists.total_k, lists.k_block_size, lists.k_start)
    return lists._replace(readers=readers, reader_begins=begins)


def check_readers(lists: PreparedIndices) -> None:
    """``UnsupportedError`` where ``with_readers`` cannot count the entries."""
    num_entries, rows = lists.rows.numel(), lists.total_k * lists.rows.shape[1]
    if max(num_entries, rows) >= _INT32:
        raise UnsupportedError(
            f"{num_entries} entries of {rows} keys times kv heads: a deterministic backward takes fewer than {_INT32} "
            "of each; split the queries, or set deterministic=False."
        )


def key_counts(lists: PreparedIndices) -> torch.Tensor:
    """Keys (L, Hk) int32 that each list sees. They are the first of those that it names, since lists ascend."""
    block, beyond = lists.k_block_size, -lists.total_k % lists.k_block_size
    if lists.k_start is None and lists.k_end is None:
        if block == 1:
            return lists.counts
        cut = (lists.rows == lists.total_k // block).any(-1) * beyond if beyond else 0
        return (lists.counts * block - cut).int()
    first = lists.rows.long() * block
    if lists.k_start is not None:
        first = first + lists.k_start[:, None, None]
    end = lists.total_k if lists.k_end is None else lists.k_end.clamp(max=lists.total_k)[:, None, None]
    return (end - first).clamp(0, block).masked_fill(lists.rows < 0, 0).sum(-1, dtype=torch.int32)


@torch.library.custom_op(
    "magi_attention::index_readers", mutates_args=(),
    schema="(Tensor rows, Tensor key_counts, SymInt total_k, SymInt k_block_size, Tensor? k_start) -> (Tensor, Tensor)",
)  # fmt: skip
def readers_op(
    rows: torch.Tensor, key_counts: torch.Tensor, total_k: int, k_block_size: int, k_start: torch.Tensor | None
) -> tuple[torch.Tensor, torch.Tensor]:
    """``(readers, reader_begins)`` of ``PreparedIndices``. A stable sort of so many lists at a time, whose entries are
    then put behind those of the lists before them."""
    num_lists, heads, width = rows.shape
    num_groups, device = _num_firsts(total_k, k_block_size, k_start is not None) * heads, rows.device
    step = max(CHUNK // max(heads * width, 1), 1)
    starts = range(0, num_lists, step)

    def groups_from(start: int) -> torch.Tensor:
        return _groups(rows, key_counts, num_groups, k_block_size, k_start, slice(start, start + step))

    counts = torch.zeros(num_groups + 1, dtype=torch.int64, device=device)  # the last: of entries that name no key
    for start in starts:
        groups = groups_from(start).long()
        counts.scatter_add_(0, groups, torch.ones_like(groups))
    begins = counts.cumsum(0) - counts
    next_at, readers = begins.clone(), rows.new_empty(rows.numel())
    ids = torch.arange(num_groups + 2, dtype=torch.int32, device=device)
    for start in starts:
        groups, order = groups_from(start).sort(stable=True)
        edges = torch.searchsorted(groups, ids)  # of each group in this chunk
        groups = groups.long()
        at = next_at[groups] - edges[groups] + torch.arange(len(groups), device=device)
        readers[at] = (order + start * heads * width).int()
        next_at += edges.diff()
    return readers, begins.int()


def _groups(
    rows: torch.Tensor, key_counts: torch.Tensor, num_groups: int, block: int, k_start: torch.Tensor | None, some: slice
) -> torch.Tensor:
    """By first key and kv head, the number of each entry's group, flattened int32; ``num_groups`` for entries that name
    no key."""
    _, heads, width = rows.shape
    first = rows[some]
    if k_start is not None:
        first = first * block + k_start[some, None, None].int()
    groups = first * heads + torch.arange(heads, dtype=torch.int32, device=rows.device)[:, None]
    place = torch.arange(width, device=rows.device)
    return torch.where(place * block < key_counts[some, :, None], groups, num_groups).flatten()


def _num_firsts(total_k: int, k_block_size: int, has_start: bool) -> int:
    """Keys at which a block may begin: any, where lists count from a start."""
    return total_k if has_start else -(-total_k // k_block_size)


@readers_op.register_fake
def _(
    rows: torch.Tensor, key_counts: torch.Tensor, total_k: int, k_block_size: int, k_start: torch.Tensor | None
) -> tuple[torch.Tensor, torch.Tensor]:
    num_firsts = _num_firsts(total_k, k_block_size, k_start is not None)
    return rows.new_empty(rows.numel()), rows.new_empty(num_firsts * rows.shape[1] + 1)


__all__ = ["check_readers", "key_counts", "readers_op", "with_readers"]
