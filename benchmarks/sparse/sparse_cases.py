# SPDX-License-Identifier: Apache-2.0
"""Sparse patterns of the benchmark: which blocks, or which single keys, each query sees.

    b128_random_0.1     each row of blocks of 128 tokens keeps a tenth of the blocks, drawn
    b64_window          a window of an eighth of the blocks, and two that see and are seen by all
    b128_video          tokens in tiles along time, height and width: tiles at most one away, and the first frame
    index_2048          each query keeps 2,048 keys, drawn
    dsa_2048            DSA's form: the same among the keys up to the query, and values are columns of the keys
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from functools import cached_property
from typing import ClassVar, Protocol

import numpy as np
import torch

from magi_attention.api import Mask, PreparedIndices, prepare_indices

NAMES = (
    "b128_random_0.1", "index_2048", "dsa_2048", "b128_window", "b128_video", "b64_random_0.1", "b128_random_0.5",
    "b64_window", "b64_video", "b64_random_0.5", "b128_random_0.05", "b64_random_0.05", "b128_random_0.2",
    "b64_random_0.2",
)  # fmt: skip
_BLOCKS = r"b(?P<block>\d+)_(?:(?P<pattern>window|video)|random_(?P<share>0?\.\d+|1))"
_FORM = re.compile(rf"(?:{_BLOCKS}|(?P<kind>index|dsa)_(?P<keys>\d+))$")
DSA_HEAD_DIMS = (576, 512)  # of keys, and of the values in their first columns
_WINDOW_SHARE, _GLOBAL_BLOCKS = 1 / 8, 2


class SparseCase(Protocol):
    """``area`` counts (query, key) pairs of one query head; all heads see the same. ``head_dim_v``: where it is not
    None, values are the first so many columns of the keys, and v is None."""

    name: str
    seqlen: int
    head_dim_v: int | None

    @property
    def area(self) -> int: ...

    def seen(self, rows: torch.Tensor) -> torch.Tensor:
        """Boolean (rows, seqlen) on the device of ``rows``: the keys that these queries see."""
        ...


@dataclass(frozen=True)
class BlockCase:
    name: str
    seqlen: int
    block: int
    blocks: np.ndarray  # boolean (blocks, blocks)

    @property
    def area(self) -> int:
        return int(self.blocks.sum()) * self.block**2

    @cached_property
    def mask(self) -> Mask:
        return Mask.block_sparse(self.blocks, self.block)

    is_varlen = False  # for peers that take documents
    head_dim_v: ClassVar[None] = None

    def seen(self, rows: torch.Tensor) -> torch.Tensor:
        table = torch.from_numpy(self.blocks).to(rows.device)
        return table[rows // self.block].repeat_interleave(self.block, 1)


@dataclass(frozen=True)
class IndexCase:
    name: str
    seqlen: int
    indices: torch.Tensor  # int32 (seqlen, 1, keys), distinct but for -1, on the CPU
    head_dim_v: int | None = None

    @property
    def area(self) -> int:
        return int((self.indices >= 0).sum())

    def lists(self, device: torch.device) -> PreparedIndices:
        return prepare_indices(self.indices.to(device), self.seqlen)

    def seen(self, rows: torch.Tensor) -> torch.Tensor:
        keys = self.indices[rows.cpu(), 0].long().to(rows.device)
        found = torch.zeros((len(rows), self.seqlen + 1), dtype=torch.bool, device=rows.device)
        return found.scatter_(1, keys.where(keys >= 0, self.seqlen), True)[:, :-1]


def parse(name: str, seqlen: int) -> re.Match:
    """The parts of a name as above; ``ValueError`` for other names and lengths that are no whole number of blocks."""
    form = _FORM.match(name)
    if form is None:
        raise ValueError(f"{name!r} is no pattern; give one such as {', '.join(NAMES[:5])}.")
    if form["block"] and (int(form["block"]) == 0 or seqlen % int(form["block"])):
        raise ValueError(f"{seqlen} tokens are no whole number of blocks of {form['block']}; give a multiple.")
    return form


def make_case(name: str, seqlen: int, seed: int = 0) -> BlockCase | IndexCase:
    """The case of a name; errors as of ``parse``."""
    form = parse(name, seqlen)
    if form["keys"]:
        is_dsa = form["kind"] == "dsa"
        keys = _drawn_keys(seqlen, min(int(form["keys"]), seqlen), seed, is_causal=is_dsa)
        return IndexCase(name, seqlen, keys, DSA_HEAD_DIMS[1] if is_dsa else None)
    block = int(form["block"])
    count = seqlen // block
    if form["share"]:
        blocks = _drawn_blocks(count, float(form["share"]), seed)
    else:
        blocks = (_window if form["pattern"] == "window" else _video)(count)
    return BlockCase(name, seqlen, block, blocks)


def _drawn_keys(seqlen: int, keys: int, seed: int, is_causal: bool) -> torch.Tensor:
    """One key of each of ``keys`` stretches of equal length, so that drawing takes no sort of all keys.

    A query that sees fewer keys than that keeps all of them, and has -1 for stretches without a key.
    """
    generator = torch.Generator().manual_seed(seed)
    seen = torch.arange(1, seqlen + 1)[:, None] if is_causal else seqlen
    bounds = torch.arange(keys + 1) * seen // keys
    lengths, share = bounds.diff(), torch.rand((seqlen, keys), generator=generator)
    drawn = bounds[..., :-1] + (share * lengths).long()
    return drawn.masked_fill_(lengths == 0, -1).int()[:, None]


def _drawn_blocks(count: int, share: float, seed: int) -> np.ndarray:
    kept = max(1, round(share * count))
    order = np.random.default_rng(seed).random((count, count)).argsort(axis=1)
    blocks = np.zeros((count, count), dtype=bool)
    np.put_along_axis(blocks, order[:, :kept], True, axis=1)
    return blocks


def _window(count: int) -> np.ndarray:
    place = np.arange(count)
    blocks = abs(place[:, None] - place) <= max(1, int(count * _WINDOW_SHARE / 2))
    blocks[:_GLOBAL_BLOCKS] = blocks[:, :_GLOBAL_BLOCKS] = True
    return blocks


def tiles_of(count: int) -> tuple[int, int, int]:
    """``count`` as a product of three numbers as alike as can be, the smallest first."""
    found = [
        (a, b, count // (a * b)) for a in range(1, count + 1) if count % a == 0
        for b in range(a, count // a + 1) if count // a % b == 0 and b <= count // (a * b)
    ]  # fmt: skip
    return min(found, key=lambda sides: sides[2] - sides[0])


def _video(count: int) -> np.ndarray:
    place = np.stack(np.unravel_index(np.arange(count), tiles_of(count)), axis=-1)
    is_near = (abs(place[:, None] - place) <= 1).all(-1)
    return is_near | (place[None, :, 0] == 0)
