# SPDX-License-Identifier: Apache-2.0
"""``Mask``: which query may see which key, as disjoint AttnSlices over one packed sequence."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, cast

import numpy as np
from numpy.typing import NDArray

from magi_attention.common import infer
from magi_attention.common.disjoint import check_disjoint, disjoint_table, overlap_of
from magi_attention.common.infer import CuSeqlens
from magi_attention.common.scalars import as_bools, as_int, as_int_array, as_window
from magi_attention.common.slices import (
    CAUSAL,
    FULL,
    MaskTypes,
    SliceTable,
    check_countable,
    empty_slices,
    merge,
    to_dense,
)
from magi_attention.errors import ContractError

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True)
class Mask:
    """Immutable attention mask of ``total_q`` queries by ``total_k`` keys (token counts).

    Build one with a constructor below; ``slices`` is what plans and kernels read. Slices must be disjoint:
    ``make_plan`` proves it by ``check``, which names two that are not.

    ``cu_seqlens`` says which tokens form a document, which attention does not need, but labels and positions do:
    ``(0, n0, n0 + n1, ...)``, empty documents left out, or None where the constructor cannot know. ``full``, ``causal``
    and ``sliding_window`` are one document. It counts in equality.
    """

    slices: SliceTable
    total_q: int
    total_k: int
    name: str = "slices"
    cu_seqlens: tuple[int, ...] | None = None

    def __post_init__(self) -> None:
        for name in ("total_q", "total_k"):
            object.__setattr__(self, name, as_int(getattr(self, name), name))
        object.__setattr__(self, "cu_seqlens", self._documents())
        check_countable(self.slices.array, self.total_q, self.total_k)
        array = self.slices.array
        for axis, end, total in (("q", 1, self.total_q), ("k", 3, self.total_k)):
            if total < 0:
                raise ContractError(f"total_{axis} is {total}; it counts tokens and must be >= 0.")
            bad = np.flatnonzero(array[:, end] > total)
            if len(bad):
                i = int(bad[0])
                raise ContractError(
                    f"Slice {i} has {axis} range [{array[i, end - 1]}, {array[i, end]}), beyond the "
                    f"{total} {axis} tokens; raise the total or cut the range."
                )

    def _documents(self) -> tuple[int, ...] | None:
        if self.cu_seqlens is None:
            return None
        if self.total_q != self.total_k:
            raise ContractError(
                f"cu_seqlens are given for {self.total_q} queries and {self.total_k} keys; documents belong to "
                "masks of one sequence, so leave cu_seqlens out."
            )
        return infer.documents(self.cu_seqlens, self.total_q)

    # ---- constructors -----------------------------------------------------------------------------

    @classmethod
    def full(cls, total: int, total_k: int | None = None) -> Mask:
        """Every query sees every key."""
        return cls._one_slice(total, total_k, FULL, "full")

    @classmethod
    def causal(cls, total: int, total_k: int | None = None) -> Mask:
        """Query i sees keys up to ``i + total_k - total`` (bottom-right alignment)."""
        return cls._one_slice(total, total_k, CAUSAL, "causal")

    @classmethod
    def varlen(
        cls,
        cu_seqlens: CuSeqlens,
        cu_seqlens_k: CuSeqlens | None = None,
        *,
        causal: bool = False,
        window: tuple[int, int] = (-1, -1),
        global_prefix: int = 0,
    ) -> Mask:
        """Packed documents that never see each other.

        ``cu_seqlens`` is ``[0, n0, n0 + n1, ...]`` (list, array or tensor). ``window=(left, right)`` and
        ``global_prefix`` apply inside every document; a causal window is ``window=(w, 0)``. With other
        ``cu_seqlens_k`` the mask is of two sequences and knows no documents.
        """
        cu_q = infer.as_cu_seqlens(cu_seqlens)
        cu_k = cu_q if cu_seqlens_k is None else infer.as_cu_seqlens(cu_seqlens_k, "cu_seqlens_k")
        array = infer.varlen_slices(cu_q, cu_k, causal, window, global_prefix)
        name = "varlen window" if as_window(window) != (-1, -1) else f"varlen {'causal' if causal else 'full'}"
        documents = _unchecked(cu_q) if np.array_equal(cu_q, cu_k) else None
        return cls(disjoint_table(array), int(cu_q[-1]), int(cu_k[-1]), name, documents)

    @classmethod
    def from_lengths(
        cls,
        lengths: CuSeqlens,
        lengths_k: CuSeqlens | None = None,
        *,
        causal: bool = False,
        window: tuple[int, int] = (-1, -1),
        global_prefix: int = 0,
    ) -> Mask:
        """``varlen`` of documents given by their lengths ``[n0, n1, ...]`` (list, array or tensor of tokens, >= 0)."""
        cu_k = None if lengths_k is None else infer.cumulative(lengths_k, "lengths_k")
        return cls.varlen(
            infer.cumulative(lengths), cu_k, causal=causal, window=window, global_prefix=global_prefix
        )

    @classmethod
    def sliding_window(cls, total: int, window: tuple[int, int], *, global_prefix: int = 0) -> Mask:
        """Query i sees keys ``i - left .. i + right``, and of the first ``global_prefix`` keys those
        up to ``i + right``; -1 is unlimited."""
        mask = cls.varlen([0, total], window=window, global_prefix=global_prefix)
        return replace(mask, name="sliding window")

    @classmethod
    def block_causal(cls, cu_seqlens: CuSeqlens | int, block: int) -> Mask:
        """Every document is cut into blocks; a block sees its document up to its own end (video frames).

        ``cu_seqlens`` may also be one total length.
        """
        cu = _as_documents(cu_seqlens)
        block = as_int(block, "block")
        if block < 1:
            raise ContractError(f"block is {block}; give the block length in tokens, >= 1.")
        rows = [
            (start, min(start + block, end), first, min(start + block, end), FULL)
            for first, end in zip(cu[:-1].tolist(), cu[1:].tolist())
            for start in range(first, end, block)
        ]
        return cls._from_rows(rows, "block causal", int(cu[-1]), cu)

    @classmethod
    def causal_with_blocks(
        cls, cu_seqlens: CuSeqlens | int, blocks: Iterable[Iterable[int]], *, window: tuple[int, int] = (-1, 0)
    ) -> Mask:
        """Causal documents in which the tokens of a block see each other in both directions (images in a text).

        ``blocks`` are half-open token ranges of the packed sequence, in any order, each inside one document, disjoint.
        A block is one image, for instance; tokens after it see it as they see any token. ``window=(w, 0)`` leaves w
        keys before a query, those of its block included; behind it the query sees its block to the end, as in the
        sliding layers of Gemma 3. ``cu_seqlens`` may be one total length.
        """
        cu = _as_documents(cu_seqlens)
        array = infer.causal_slices_with_blocks(cu, blocks, window)
        return cls(disjoint_table(array), int(cu[-1]), int(cu[-1]), "causal with blocks", _unchecked(cu))

    @classmethod
    def prefix_lm(cls, cu_seqlens: CuSeqlens | int, prefix: int | Sequence[int]) -> Mask:
        """In every document the first ``prefix`` tokens see each other; the rest is causal.

        ``cu_seqlens`` may be one total length; ``prefix`` one length for all documents or one for each.
        """
        cu = _as_documents(cu_seqlens)
        lengths = np.diff(cu)
        prefixes = as_int_array(prefix, "prefix")
        if prefixes.shape not in ((), lengths.shape):
            raise ContractError(
                f"prefix has shape {prefixes.shape} for {len(lengths)} documents; give one length, or one for each."
            )
        prefixes = np.broadcast_to(prefixes, lengths.shape)
        if (prefixes < 0).any() or (prefixes > lengths).any():
            raise ContractError(
                f"A prefix lies outside 0..document length ({prefixes.tolist()[:8]} for {lengths.tolist()[:8]})."
            )
        rows = []
        for start, end, p in zip(cu[:-1].tolist(), cu[1:].tolist(), prefixes.tolist()):
            rows.append((start, start + p, start, start + p, FULL))
            rows.append((start + p, end, start, end, CAUSAL))
        return cls._from_rows(rows, "prefix lm", int(cu[-1]), cu)

    @classmethod
    def shared_question(cls, cu_seqlens: CuSeqlens) -> Mask:
        """Document 0 is a question: documents 0 and 1 form one causal block, every later document is
        causal on itself and sees the whole question.

        The last token of the question has as many next tokens as there are answers, so the mask knows no documents
        for labels.
        """
        cu = infer.as_cu_seqlens(cu_seqlens).tolist()
        rows = [(0, cu[min(2, len(cu) - 1)], 0, cu[min(2, len(cu) - 1)], CAUSAL)]
        for start, end in zip(cu[2:-1], cu[3:]):
            rows += [(start, end, 0, cu[1], FULL), (start, end, start, end, CAUSAL)]
        return cls._from_rows(rows, "shared question", cu[-1])

    @classmethod
    def prefix_tree(cls, lengths: Sequence[int], parents: Sequence[int]) -> Mask:
        """Nodes stored one after another; a node is causal on itself and sees all of its ancestors.

        ``parents[i]`` is the index of an earlier node, or -1 for a root. A node's last token has as many next tokens
        as the node has children, so the mask knows no documents for labels.
        """
        lengths, parents = as_int_array(lengths, "lengths").tolist(), as_int_array(parents, "parents").tolist()
        if len(lengths) != len(parents):
            raise ContractError(f"{len(lengths)} lengths but {len(parents)} parents; give one per node.")
        size, parent = np.array(lengths, dtype=np.int64), np.array(parents, dtype=np.int64)
        number = np.arange(len(parent))
        wrong = np.flatnonzero((parent < -1) | (parent >= number) | (size < 0))
        if len(wrong):
            first = int(wrong[0])
            raise ContractError(
                f"Node {first} has parent {parents[first]} and length {lengths[first]}; "
                "parents are earlier nodes or -1 and lengths are >= 0."
            )
        bounds = np.concatenate([[0], np.cumsum(size)])
        depth, pairs = np.zeros(len(size), dtype=np.int64), [(number, number)]
        node, above = number, parent
        while (is_below := above >= 0).any():
            node, above = node[is_below], above[is_below]
            depth[node] += 1
            pairs.append((node, above))
            above = parent[above]
        rows = np.empty((int(depth.sum()) + len(size), 5), dtype=np.int64)
        last = np.cumsum(depth + 1) - 1  # a node's own slice; its ancestors are before it, the root first
        for distance, (node, seen) in enumerate(pairs):
            columns = (bounds[node], bounds[node + 1], bounds[seen], bounds[seen + 1])
            kind = np.full(len(node), FULL if distance else CAUSAL)
            rows[last[node] - distance] = np.stack([*columns, kind], axis=1)
        return cls(disjoint_table(rows), int(bounds[-1]), int(bounds[-1]), "prefix tree", _unchecked(None))

    @classmethod
    def block_sparse(
        cls,
        blocks: NDArray[np.generic] | torch.Tensor | Sequence[Sequence[bool]],
        q_sizes: int | Sequence[int],
        k_sizes: int | Sequence[int] | None = None,
    ) -> Mask:
        """``blocks[i, j]`` says whether all queries of block i see all keys of block j, for all heads alike.

        Args:
            blocks: boolean (query blocks, key blocks), or the integers 0 and 1, an array or a tensor.
            q_sizes: tokens of a query block, one number for all or one for each.
            k_sizes: the same of key blocks; None where they are as the query blocks.
        Raises:
            ContractError: sizes below 1, or not as many as blocks; blocks of other values.
        """
        array = as_bools(blocks, "blocks")
        if array.ndim != 2:
            raise ContractError(f"blocks has shape {array.shape}; give one row for each query block.")
        q = _block_bounds(q_sizes, array.shape[0], "q_sizes")
        k = _block_bounds(q_sizes if k_sizes is None else k_sizes, array.shape[1], "k_sizes")
        edges = np.diff(np.pad(array, ((0, 0), (1, 1))).astype(np.int8), axis=1)
        (row, first), (_, end) = np.nonzero(edges == 1), np.nonzero(edges == -1)  # runs of blocks, row by row
        rows = np.stack([q[row], q[row + 1], k[first], k[end], np.full(len(row), FULL)], axis=1).astype(np.int64)
        return cls(disjoint_table(merge(rows)), int(q[-1]), int(k[-1]), "block sparse")

    @classmethod
    def from_slices(
        cls,
        q_ranges: Iterable[Iterable[int]],
        k_ranges: Iterable[Iterable[int]],
        types: MaskTypes = FULL,
        total_q: int | None = None,
        total_k: int | None = None,
        cu_seqlens: CuSeqlens | None = None,
    ) -> Mask:
        """From half-open ranges and types (names, codes or enums; one for all or one each).

        Totals default to the largest range end. ``cu_seqlens`` says where documents begin and end, for labels and
        positions; the slices are not changed by it.
        """
        table = SliceTable.from_ranges(q_ranges, k_ranges, types)
        ends = table.array[:, [1, 3]].max(axis=0).tolist() if len(table) else [0, 0]
        total_q = ends[0] if total_q is None else total_q
        total_k = max(total_q, ends[1]) if total_k is None else total_k
        return cls(table, total_q, total_k, cu_seqlens=_unchecked(cu_seqlens))

    @classmethod
    def from_dense(
        cls, mask: NDArray[np.generic] | torch.Tensor | Sequence[Sequence[bool]], cu_seqlens: CuSeqlens | None = None
    ) -> Mask:
        """Exact slices of a matrix (array or tensor) of booleans, or of the integers 0 and 1, True where attention is
        allowed; ``cu_seqlens`` as of ``from_slices``. ``ContractError`` for floats: of a mask that is added to logits
        (0 and -inf) give ``mask == 0``."""
        array = as_bools(mask, "mask")
        table = disjoint_table(infer.dense_slices(array))
        total_q, total_k = array.shape
        return cls(table, total_q, total_k, "dense", _unchecked(cu_seqlens))

    @classmethod
    def batched(cls, masks: Sequence[Mask]) -> Mask:
        """The samples of a batch packed one after another; none sees another. Documents are those of the samples,
        and are known if all samples know theirs."""
        parts, q, k, documents = [empty_slices()], 0, 0, [0]
        for mask in masks:
            parts.append(mask.slices.array + np.array([q, q, k, k, 0]))
            documents += [q + end for end in (mask.cu_seqlens or ())[1:]]
            q, k = q + mask.total_q, k + mask.total_k
        knows = all(mask.cu_seqlens is not None for mask in masks)
        is_disjoint = all(overlap_of(mask.slices) is None for mask in masks)
        table = (disjoint_table if is_disjoint else SliceTable)(np.concatenate(parts))
        return cls(table, q, k, "batched", tuple(documents) if knows else None)

    @classmethod
    def _one_slice(cls, total: int, total_k: int | None, kind: int, name: str) -> Mask:
        total = as_int(total, "total")
        total_k = total if total_k is None else as_int(total_k, "total_k")
        if min(total, total_k) < 0:
            raise ContractError("A total is negative; totals count tokens and must be >= 0.")
        array = as_int_array([[0, total, 0, total_k, kind]], "total")
        return cls(disjoint_table(array), total, total_k, name, (0, total) if total == total_k else None)

    @classmethod
    def _from_rows(
        cls, rows: Sequence[Sequence[int]], name: str, total: int, cu_seqlens: CuSeqlens | None = None
    ) -> Mask:
        array = np.array(rows, dtype=np.int64).reshape(-1, 5)
        return cls(disjoint_table(array), total, total, name, _unchecked(cu_seqlens))

    # ---- reading ----------------------------------------------------------------------------------

    @property
    def area(self) -> int:
        """Number of allowed (query, key) pairs; exact for disjoint slices."""
        return self.slices.area

    def to_dense(self) -> NDArray[np.bool_]:
        """Boolean ``(total_q, total_k)``, True where attention is allowed."""
        return to_dense(self.slices.array, self.total_q, self.total_k)

    def check(self) -> Mask:
        """Raises ``ContractError`` naming two slices that share a pair; returns itself otherwise. Plans check so, once
        for each mask; what other constructors than ``from_slices`` make is disjoint."""
        check_disjoint(self.slices)
        return self


def _unchecked(cu_seqlens: CuSeqlens | None) -> tuple[int, ...] | None:
    """For the type checker only: ``__post_init__`` checks any form of them and makes the tuple."""
    return cast("tuple[int, ...] | None", cu_seqlens)


def _block_bounds(sizes: int | Sequence[int], count: int, name: str) -> NDArray[np.int64]:
    """Where each of ``count`` blocks begins, and the total."""
    given = as_int_array(sizes, name)
    if given.shape not in ((), (count,)) or (given < 1).any():
        raise ContractError(
            f"{name} has {given.size} sizes, the smallest {given.min() if given.size else 'none'}, for {count} blocks; "
            "give one size of 1 token or more for all, or one for each."
        )
    return np.concatenate([[0], np.cumsum(np.broadcast_to(given, (count,)))]).astype(np.int64)


def _as_documents(cu_seqlens: CuSeqlens | int) -> NDArray[np.int64]:
    """Cumulative lengths as of ``as_cu_seqlens``, or one total length."""
    is_total = np.isscalar(cu_seqlens) or getattr(cu_seqlens, "ndim", None) == 0
    return infer.as_cu_seqlens([0, as_int(cu_seqlens, "total")] if is_total else cu_seqlens)
