# SPDX-License-Identifier: Apache-2.0
"""The inverted lists: which lists read a key, in a fixed order, for gradients of keys that are the same bits always."""

from __future__ import annotations

import torch
from torch.compiler import is_compiling

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


class Kept:
    """The inverted lists of prepared ones, made at the first call that a deterministic backward follows, and held as
    long as these. ``made``: how often. Lists that were edited in place are inverted anew.

    Under CUDA graph capture each call inverts for itself: what a capture allocates is filled by replays alone, and a
    replay has to read the lists as they then are.
    """

    def __init__(self) -> None:
        self.made = 0
        self._stamp: tuple[object, ...] | None = None
        self._held: tuple[torch.Tensor, ...] = ()  # by the stamp, so that their addresses stay theirs
        self._readers: tuple[torch.Tensor, torch.Tensor] | None = None
        self._stream: torch.cuda.Stream | None = None
        self._is_made: torch.cuda.Event | None = None

    def __reduce__(self) -> tuple[type[Kept], tuple[()]]:
        """A copy, which is for copied lists, has nothing yet."""
        return Kept, ()

    def of(self, lists: PreparedIndices) -> PreparedIndices:
        """``with_readers``, by what is kept of these lists."""
        held = tuple(x for x in (lists.rows, lists.counts, lists.k_start, lists.k_end) if x is not None)
        if lists.readers is not None or not all(_can_be_kept(x) for x in held):
            return with_readers(lists)
        stream = torch.cuda.current_stream(lists.rows.device) if lists.rows.is_cuda else None
        names = lists.k_start is None, lists.k_end is None, lists.total_k, lists.k_block_size
        stamp = (*names, *((x.data_ptr(), x.shape, x._version) for x in held))
        if self._readers is None or stamp != self._stamp:
            inverted = with_readers(lists)
            assert inverted.readers is not None and inverted.reader_begins is not None
            self.made += 1
            self._readers, self._stamp, self._held = (inverted.readers, inverted.reader_begins), stamp, held
            self._stream, self._is_made = stream, None if stream is None else stream.record_event()
        elif stream is not None and stream != self._stream:
            assert self._is_made is not None
            stream.wait_event(self._is_made)
            for x in self._readers:
                x.record_stream(stream)
        return lists._replace(readers=self._readers[0], reader_begins=self._readers[1])


def _can_be_kept(x: torch.Tensor) -> bool:
    """Is it a tensor with values that counts its edits, and are these no part of a graph?"""
    is_captured = x.is_cuda and torch.cuda.is_current_stream_capturing()
    return type(x) is torch.Tensor and not (x.is_meta or x.is_inference() or is_captured)


def with_kept_readers(lists: PreparedIndices) -> PreparedIndices:
    """``with_readers`` ahead of a call, where the lists can keep them. Others are inverted by each backward."""
    return lists if lists.kept is None or is_compiling() else lists.kept.of(lists)


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
    """``(readers, reader_begins)`` of ``PreparedIndices``. A stable sort of so many lists at a time; where these are
    not all, the chunks are then merged. Nothing is scattered: torch would sort all entries by where they go, under
    ``torch.use_deterministic_algorithms``."""
    num_lists, heads, width = rows.shape
    num_groups, device = _num_firsts(total_k, k_block_size, k_start is not None) * heads, rows.device
    step = max(CHUNK // max(heads * width, 1), 1)
    found, edges = rows.new_empty(rows.numel()), []
    for start in range(0, max(num_lists, 1), step):
        some = slice(start, start + step)
        groups, order = _groups(rows, key_counts, num_groups, k_block_size, k_start, some).sort(stable=True)
        begin = start * heads * width
        torch.add(order, begin, out=order)
        found[begin : begin + len(order)] = order
        low = _lowest(num_groups)
        ids = torch.arange(low, low + num_groups + 1, device=device).to(groups.dtype)
        edges.append(torch.searchsorted(groups, ids, out_int32=True))  # of each group in this chunk
    if len(edges) == 1:
        return found, edges[0]
    return _merged(found, torch.stack(edges, 1), step * heads * width)


def _merged(found: torch.Tensor, edges: torch.Tensor, size: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Readers and where groups begin, from chunks of ``size`` entries that are sorted by group, and ``edges`` (groups +
    1, chunks): where groups begin in each, the last one being of entries that name no key."""
    num_chunks, device = edges.shape[1], edges.device
    starts = torch.arange(num_chunks, device=device) * size
    ends = torch.cat((edges[1:].long(), (found.numel() - starts).clamp(max=size)[None]))
    lengths = (ends - edges).flatten()
    begins = lengths.cumsum(0) - lengths  # of each piece: of one group and chunk
    shifts = (edges + starts).flatten() - begins
    readers = torch.empty_like(found)
    for at in range(0, found.numel(), CHUNK):
        places = torch.arange(at, min(at + CHUNK, found.numel()), device=device)
        piece = torch.searchsorted(begins, places, right=True, out_int32=True) - 1
        readers[at : at + CHUNK] = found[places + shifts[piece]]
    return readers, begins[::num_chunks].int()


def _groups(
    rows: torch.Tensor, key_counts: torch.Tensor, num_groups: int, block: int, k_start: torch.Tensor | None, some: slice
) -> torch.Tensor:
    """By first key and kv head, the number of each entry's group, flattened, from ``_lowest`` on; the one behind the
    last for entries that name no key. In 16 bits where they fit: the sort then moves half as many bytes."""
    _, heads, width = rows.shape
    groups, low = rows[some], _lowest(num_groups)
    if k_start is not None:
        groups = groups * block + k_start[some, None, None].int()
    if heads > 1:
        groups = groups * heads + torch.arange(heads, dtype=torch.int32, device=rows.device)[:, None]
    is_seen = torch.arange(0, width * block, block, device=rows.device) < key_counts[some, :, None]
    groups = groups.add(low).to(torch.int16) if low else groups
    return groups.masked_fill(~is_seen, low + num_groups).flatten()


def _lowest(num_groups: int) -> int:
    """The number of the first group: below 0 where all numbers then have 16 bits."""
    return -(2**15) if num_groups < 2**16 else 0


def _num_firsts(total_k: int, k_block_size: int, has_start: bool) -> int:
    """Keys at which a block may begin: any, where lists count from a start."""
    return total_k if has_start else -(-total_k // k_block_size)


@readers_op.register_fake
def _(
    rows: torch.Tensor, key_counts: torch.Tensor, total_k: int, k_block_size: int, k_start: torch.Tensor | None
) -> tuple[torch.Tensor, torch.Tensor]:
    num_firsts = _num_firsts(total_k, k_block_size, k_start is not None)
    return rows.new_empty(rows.numel()), rows.new_empty(num_firsts * rows.shape[1] + 1)


__all__ = ["Kept", "check_readers", "key_counts", "readers_op", "with_kept_readers", "with_readers"]
