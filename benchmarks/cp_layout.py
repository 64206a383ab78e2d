# SPDX-License-Identifier: Apache-2.0
"""Masks of the context-parallel benchmark, and how its peers spread a packed sequence over ranks.

The peers cut every document into as many pieces as there are ranks, or twice as many for masks that look back: rank r
then has pieces r and ``2 * ranks - 1 - r``, so that all ranks have the same number of tokens and of allowed pairs
(zigzag). A document is padded until its pieces are equal; pad rows attend to nothing. Coordinates here are those of
the padded sequence.
"""

from __future__ import annotations

from functools import cached_property

import numpy as np
from masks import ALL_NAMES, Case

from magi_attention.common.intervals import Packing
from magi_attention.common.slices import K0, K1, Q0, Q1, SliceTable, cut_q, trim
from magi_attention.meta.rank_plan import local_slices

# Documents of a long-context pre-training set: (first, last token count, number of documents).
_DOCUMENTS = (
    (0, 10, 30_254), (11, 50, 391_188), (51, 100, 699_596), (101, 200, 1_377_757), (201, 500, 3_794_735),
    (501, 1024, 3_316_785), (1025, 2048, 2_106_566), (2049, 4096, 988_525), (4097, 8192, 410_002),
    (8193, 16384, 173_574), (16385, 32768, 115_007), (32769, 65536, 18_428), (65537, 131072, 22_513),
    (131073, 196608, 18_284),
)  # fmt: skip
LONGEST_SHARE = 4  # no document is longer than a pack divided by this
LOOKS_BACK = ("causal", "varlen_causal", "sliding_window_causal", "varlen_block_causal")


def draw_packs(pack_tokens: int, packs: int, seed: int) -> list[tuple[int, ...]]:
    """Document lengths of ``packs`` packs of exactly ``pack_tokens`` tokens.

    Lengths are the middles of intervals, drawn by how many documents each holds. Those above a quarter of the pack are
    cut into pieces of that length. The pieces are shuffled and laid out one after another; one that crosses the end of
    a pack goes on in the next. Packs are shuffled, too.
    """
    rng = np.random.default_rng(seed)
    counts = np.array([count for *_, count in _DOCUMENTS], dtype=np.float64)
    middles = np.array([max((low + high) // 2, 1) for low, high, _ in _DOCUMENTS])
    longest = max(pack_tokens // LONGEST_SHARE, 1)
    pieces: list[int] = []
    while sum(pieces) < packs * pack_tokens:
        for length in rng.choice(middles, size=64, p=counts / counts.sum()).tolist():
            pieces += [longest] * (length // longest) + ([length % longest] if length % longest else [])
    rng.shuffle(pieces)
    found: list[tuple[int, ...]] = []
    rest = iter(pieces)
    left = 0
    for _ in range(packs):
        pack, room = [], pack_tokens
        while room:
            left = left or next(rest)
            pack.append(min(left, room))
            left, room = left - pack[-1], room - pack[-1]
        found.append(tuple(pack))
    return [found[i] for i in rng.permutation(packs)]


def make_cases(name: str, total: int, packs: int, seed: int) -> list[Case]:
    """Cases of mask ``name`` over ``total`` tokens: one, or ``packs`` of them with documents of their own."""
    if name not in ALL_NAMES:
        raise ValueError(f"Unknown mask {name!r}; use {', '.join(ALL_NAMES)}.")
    if not name.startswith("varlen"):
        return [Case(name, total, (total,))]
    return [Case(name, total, documents) for documents in draw_packs(total, packs, seed)]


class Layout:
    """Which rows each of ``parts`` ranks holds. Pieces are multiples of ``multiple`` tokens."""

    def __init__(self, case: Case, parts: int, multiple: int = 1) -> None:
        self.case, self.parts = case, parts
        self.is_zigzag = case.name in LOOKS_BACK and parts > 1
        pieces = parts * (2 if self.is_zigzag else 1)
        lengths = np.array(case.documents, dtype=np.int64)
        self._piece = -(-lengths // (pieces * multiple)) * multiple
        padded = self._piece * pieces
        self._start = np.cumsum(padded) - padded
        self.total = int(padded.sum())

    @property
    def rows(self) -> int:
        """The rows of one rank, pad rows included."""
        return self.total // self.parts

    @cached_property
    def _real_start(self) -> np.ndarray:
        lengths = np.array(self.case.documents, dtype=np.int64)
        return np.cumsum(lengths) - lengths

    def ranges(self, part: int) -> np.ndarray:
        """(n, 2) of the rows of one rank, ascending."""
        numbers = [part, 2 * self.parts - 1 - part] if self.is_zigzag else [part]
        starts = np.stack([self._start + number * self._piece for number in numbers], 1).reshape(-1)
        return np.stack([starts, starts + np.repeat(self._piece, len(numbers))], 1)

    def positions(self, part: int) -> np.ndarray:
        """(rows,) token of each row of one rank, -1 for pad rows."""
        return self.tokens(Packing(self.ranges(part)).positions())

    def tokens(self, padded: np.ndarray) -> np.ndarray:
        """Tokens at padded coordinates, -1 for pad rows."""
        document = np.searchsorted(self._start, padded, side="right") - 1
        offset = padded - self._start[document]
        is_pad = offset >= np.array(self.case.documents, dtype=np.int64)[document]
        return np.where(is_pad, -1, self._real_start[document] + offset)

    @cached_property
    def slices(self) -> np.ndarray:
        """The mask's slices in padded coordinates. No slice spans two documents."""
        found = trim(self.case.mask.slices.array)
        document = np.searchsorted(self._real_start, found[:, Q0], side="right") - 1
        found[:, [Q0, Q1, K0, K1]] += (self._start - self._real_start)[document, None]
        return found

    def local_slices(self, part: int, key_part: int | None = None) -> SliceTable:
        """Pairs of the rows of ``part`` with the keys of ``key_part``, or with all keys, which are then in natural
        order. Rows and keys count from 0 in what the ranks hold."""
        rows = Packing(self.ranges(part))
        keys = Packing(np.array([[0, self.total]]) if key_part is None else self.ranges(key_part))
        return SliceTable(local_slices(self._rows_of(part), rows, keys))

    def _rows_of(self, part: int) -> np.ndarray:
        """Slices cut to the rows of one rank."""
        slices = self.slices
        pieces = []
        for start, end in self.ranges(part).tolist():
            near = slices[(slices[:, Q0] < end) & (slices[:, Q1] > start)]
            pieces.append(cut_q(near, start, end)[0])
        return np.concatenate(pieces)

    def natural_order(self) -> np.ndarray:
        """(total,) where each row of the padded sequence is in the rows of all ranks, one rank after another."""
        order = np.concatenate([Packing(self.ranges(part)).positions() for part in range(self.parts)])
        return np.argsort(order)


def share_of_documents(case: Case, part: int, parts: int) -> Case:
    """Tokens ``[part, part + 1) * seqlen / parts`` of a varlen case, in which documents end at the cuts."""
    first, last = (case.seqlen * p // parts for p in (part, part + 1))
    bounds = np.clip(np.array(case.cu_seqlens), first, last)
    lengths = np.diff(bounds)
    return Case(case.name, last - first, tuple(int(n) for n in lengths[lengths > 0]))
