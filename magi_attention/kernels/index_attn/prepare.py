# SPDX-License-Identifier: Apache-2.0
"""From lists of keys as callers choose them to lists as kernels read them: sorted, every key once."""

from __future__ import annotations

import torch
from torch.compiler import is_compiling

from magi_attention.env import general
from magi_attention.errors import ContractError
from magi_attention.kernels.index_attn import prepare_ffa
from magi_attention.kernels.index_attn.invert import CHUNK, Kept, with_readers
from magi_attention.kernels.index_attn.types import PreparedIndices

_INTEGERS = (torch.int32, torch.int64)
_LAST = torch.iinfo(torch.int32).max  # sorts behind every entry


def prepare_indices(
    indices: torch.Tensor, total_k: int, *, k_block_size: int = 1, k_start: torch.Tensor | None = None,
    k_end: torch.Tensor | None = None, q_block_size: int = 1, deterministic: bool = False,
) -> PreparedIndices:  # fmt: skip
    """Sorts lists of keys, once for all layers that share them and for every forward and backward.

    Args:
        indices: int32 or int64 (L, Hk, N): entries in any order. Negative ones are none, wherever they stand, and one
            that is there twice counts once. By default an entry is a row of k.
        total_k: rows of k.
        k_block_size: if above 1, entry b is the rows ``[b * k_block_size, (b + 1) * k_block_size)`` of k.
        k_start: integer (L,): rows are counted from here, 0 or more, as from the first key of the query's document.
        k_end: integer (L,): only rows before this one are seen, as for causal attention.
        q_block_size: queries that follow one another and share a list. There are L lists, one for each so many.
        deterministic: for calls with ``deterministic=True``: also inverts the lists, by a sort of all entries, which
            then take 4 bytes more each. Without it the first call on a GPU that a deterministic backward follows does
            so, and what is returned keeps them for all later calls, as long as nobody edits the lists. Give it for
            ``torch.compile`` and CUDA graphs, in which each backward inverts anew.

    Raises:
        ContractError: shapes or dtypes that do not fit together, and an entry that begins after the last key. On a GPU
            such entries count as none without an error, since looking would wait for the GPU; with
            ``MAGI_ATTENTION_SANITY_CHECK=1`` they are refused there too.
        UnsupportedError: with ``deterministic``, 2**31 entries or more.
    """
    _check_form(indices)
    if not 0 <= total_k < _LAST or k_block_size < 1 or q_block_size < 1:
        raise ContractError(
            f"total_k is {total_k}, block sizes are {q_block_size} and {k_block_size}; give 0 or more, and 1 or more."
        )
    k_start, k_end = _bound("k_start", k_start, indices), _bound("k_end", k_end, indices)
    rows, counts = prepare_op(indices, total_k, k_block_size, k_start)
    kept = None if is_compiling() else Kept()
    lists = PreparedIndices(rows, counts, total_k, k_block_size, k_start, k_end, q_block_size, kept=kept)
    return with_readers(lists) if deterministic else lists


def lists_of_blocks(blocks: torch.Tensor, q_block_size: int, k_block_size: int, total_k: int) -> PreparedIndices:
    """The lists of a block mask, made on its device without waiting for it.

    ``blocks`` bool (Hk, query blocks, key blocks): whether all queries of a block see all keys of another.
    """
    if blocks.dim() != 3 or blocks.dtype != torch.bool or blocks.shape[2] != -(-total_k // k_block_size):
        raise ContractError(
            f"blocks are {tuple(blocks.shape)} {blocks.dtype} for {total_k} keys in blocks of {k_block_size}; give "
            f"bool (kv heads, query blocks, {-(-total_k // k_block_size)} key blocks)."
        )
    rows, counts = blocks_op(blocks.transpose(0, 1).contiguous())
    return PreparedIndices(rows, counts, total_k, k_block_size, q_block_size=q_block_size)


@torch.library.custom_op(
    "magi_attention::index_of_blocks", mutates_args=(), schema="(Tensor blocks) -> (Tensor, Tensor)"
)  # fmt: skip
def blocks_op(blocks: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """``(rows, counts)`` of ``PreparedIndices`` of blocks (query blocks, Hk, key blocks)."""
    library = prepare_ffa.library_of(blocks)
    if library is not None:
        return prepare_ffa.of_blocks(library, blocks)
    counts = blocks.sum(-1, dtype=torch.int32)
    width = blocks.shape[2]
    place = torch.where(blocks, blocks.cumsum(-1) - 1, width)
    packed = torch.full((*blocks.shape[:2], width + 1), -1, dtype=torch.int32, device=blocks.device)
    packed.scatter_(-1, place, torch.arange(width, dtype=torch.int32, device=blocks.device).expand(blocks.shape))
    return packed[..., :-1].contiguous(), counts


@blocks_op.register_fake
def _(blocks: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    return blocks.new_empty(blocks.shape, dtype=torch.int32), blocks.new_empty(blocks.shape[:2], dtype=torch.int32)


def check_lists(indices: torch.Tensor, total_k: int) -> None:
    """Raises ``ContractError`` as ``prepare_indices`` does for lists of rows of k."""
    _check_form(indices)
    if not indices.is_cuda or general.is_sanity_check_enable():
        _refuse(indices, indices >= total_k, total_k, 1)


def check_tensor(indices: object, taken: str = "") -> None:
    """``ContractError`` for lists that are no tensor. ``taken``: what else the caller takes."""
    if not isinstance(indices, torch.Tensor):
        given = type(indices).__name__
        raise ContractError(
            f"indices are a {given}; give a tensor, int32 or int64 (queries, kv heads, keys){taken}. Lists of unequal "
            "length are filled up with -1."
        )


def _check_form(indices: torch.Tensor) -> None:
    check_tensor(indices)
    if indices.dim() != 3 or indices.dtype not in _INTEGERS:
        raise ContractError(
            f"indices are {tuple(indices.shape)} {indices.dtype}; give int32 or int64 (queries, kv heads, keys)."
        )


def _bound(name: str, x: torch.Tensor | None, indices: torch.Tensor) -> torch.Tensor | None:
    if x is None:
        return None
    if x.dim() != 1 or x.shape[0] != indices.shape[0] or x.dtype not in _INTEGERS:
        raise ContractError(f"{name} is {tuple(x.shape)} {x.dtype}; give int64 ({indices.shape[0]},), one per query.")
    return x.to(indices.device, torch.int64)


@torch.library.custom_op(
    "magi_attention::index_prepare", mutates_args=(),
    schema="(Tensor indices, SymInt total_k, SymInt k_block_size, Tensor? k_start) -> (Tensor, Tensor)",
)  # fmt: skip
def prepare_op(
    indices: torch.Tensor, total_k: int, k_block_size: int, k_start: torch.Tensor | None
) -> tuple[torch.Tensor, torch.Tensor]:
    """``(rows, counts)`` of ``PreparedIndices``."""
    is_checked = not indices.is_cuda or general.is_sanity_check_enable()
    library = prepare_ffa.library_of(indices)
    if library is not None and not is_checked and prepare_ffa.can_prepare(total_k, k_block_size):
        return prepare_ffa.prepare(library, indices, total_k, k_block_size, k_start)
    rows = indices.new_empty(indices.shape, dtype=torch.int32)
    counts = indices.new_empty(indices.shape[:2], dtype=torch.int32)
    step = max(CHUNK // max(indices.shape[1] * indices.shape[2], 1), 1)
    for begin in range(0, indices.shape[0], step):
        part = slice(begin, begin + step)
        start = 0 if k_start is None else k_start[part, None, None]
        # No product of an entry, which may be anything here.
        is_beyond = indices[part] >= (total_k - start + k_block_size - 1) // k_block_size
        if is_checked:
            _refuse(indices[part], is_beyond & (indices[part] >= 0), total_k, k_block_size)
        rows[part], counts[part] = _sorted_sets(indices[part].masked_fill(is_beyond, -1))
    return rows, counts


def _sorted_sets(entries: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Each list ascending, each entry once, then -1; and how many it has. Negative entries are none."""
    entries = entries.masked_fill(entries < 0, _LAST).int().sort(dim=-1).values
    is_kept = entries != _LAST
    is_kept[..., 1:] &= entries[..., 1:] != entries[..., :-1]
    # Each kept entry goes behind those before it, and all others into one more column, which is dropped.
    place = torch.where(is_kept, is_kept.cumsum(-1) - 1, entries.shape[2])
    packed = entries.new_full((*entries.shape[:2], entries.shape[2] + 1), -1)
    return packed.scatter_(-1, place, entries)[..., :-1], is_kept.sum(-1, dtype=torch.int32)


def _refuse(indices: torch.Tensor, is_bad: torch.Tensor, total_k: int, block: int) -> None:
    if not bool(is_bad.any()):
        return
    worst = int(indices[is_bad].max())
    blocks = f" in blocks of {block}" if block > 1 else ""
    raise ContractError(f"An attention index is {worst}{blocks}, but k has only {total_k} rows.")


@prepare_op.register_fake
def _(
    indices: torch.Tensor, total_k: int, k_block_size: int, k_start: torch.Tensor | None
) -> tuple[torch.Tensor, torch.Tensor]:
    return indices.new_empty(indices.shape, dtype=torch.int32), indices.new_empty(indices.shape[:2], dtype=torch.int32)
