# SPDX-License-Identifier: Apache-2.0
"""Attention dropout that knows nothing of layouts: a pair goes or stays by (seed, head, query position, key position).

    stays  =  last(mix(mix(q ^ seed_q) ^ mix(head ^ seed_head)) ^ mix(k ^ seed_k))  >=  p * 2**32

``q`` and ``k`` are positions in the whole sequence, ``mix`` is the finaliser of MurmurHash3 over 32 bits, ``last`` a
shorter one, because it alone is computed for each pair, and the three seeds come from the user's by SplitMix64. Weights
after the softmax, those of pairs that stay, are divided by 1 - p. So all world sizes, chunk sizes and stages, forward
and backward, drop the same pairs, and nothing of it is stored.
"""

from __future__ import annotations

import ctypes
from dataclasses import dataclass
from functools import cached_property, lru_cache

import torch

from magi_attention.common.scalars import as_float, as_int
from magi_attention.errors import ContractError
from magi_attention.native import abi

_MASK32, _MASK64 = 2**32 - 1, 2**64 - 1


@dataclass(frozen=True)
class Dropout:
    """Dropout of one call: ``p`` in (0, 1), the share of pairs that go; ``seed``, any integer."""

    p: float
    seed: int

    @property
    def threshold(self) -> int:
        return min(round(self.p * 2**32), _MASK32)

    @property
    def scale(self) -> float:
        return 1 / (1 - self.p)


@lru_cache(maxsize=1024)  # the layers of a step ask for the same in forward and backward
def dropout_of(p: float, seed: int | None) -> Dropout | None:
    """What a user asks for; None for ``p`` 0. ``ContractError`` for what is no probability or no seed."""
    share = as_float(p, "dropout_p")
    if not 0 <= share < 1:
        raise ContractError(f"dropout_p is {share}; give the share of weights that go, at least 0 and below 1.")
    if not share:
        return None
    if seed is None:
        raise ContractError(
            f"dropout_p is {share} without dropout_seed; give an integer, the same on all ranks and another one for "
            "each layer and step."
        )
    return Dropout(share, as_int(seed, "dropout_seed"))


@lru_cache(maxsize=1024)
def _seeds(seed: int) -> tuple[int, int, int]:
    """SplitMix64 (Steele, Lea, Flood 2014), the upper half of three numbers."""
    found, state = [], seed & _MASK64
    for _ in range(3):
        state = (state + 0x9E3779B97F4A7C15) & _MASK64
        z = (state ^ (state >> 30)) * 0xBF58476D1CE4E5B9 & _MASK64
        z = (z ^ (z >> 27)) * 0x94D049BB133111EB & _MASK64
        found.append((z ^ (z >> 31)) >> 32)
    return found[0], found[1], found[2]


def _mix(x: torch.Tensor) -> torch.Tensor:
    """The hash of int64 values below 2**32, which are overwritten."""
    x ^= x >> 16
    x *= 0x85EBCA6B
    x &= _MASK32
    x ^= x >> 13
    x *= 0xC2B2AE35  # may wrap around; the lower half is right all the same
    x &= _MASK32
    x ^= x >> 16
    return x


def _last(x: torch.Tensor) -> torch.Tensor:
    """The last step of the hash, for what is mixed already; overwrites it."""
    x *= 0x85EBCA6B
    x &= _MASK32
    x ^= x >> 15
    x *= 0xC2B2AE35
    x &= _MASK32
    return x


@dataclass(frozen=True, eq=False)
class DropoutMask:
    """Dropout over the rows of one kernel call: ``q_positions`` (Tq,) and ``k_positions`` (Tk,), int32 and contiguous,
    on the device of q, say where the rows of q and k lie in the whole sequence."""

    dropout: Dropout
    q_positions: torch.Tensor
    k_positions: torch.Tensor

    def check(self, q: torch.Tensor, k: torch.Tensor) -> None:
        for name, x, rows in (("q", self.q_positions, q), ("k", self.k_positions, k)):
            if x.shape != rows.shape[:1] or x.dtype != torch.int32 or x.device != rows.device or not x.is_contiguous():
                raise ContractError(
                    f"{name}_positions of the dropout are {tuple(x.shape)} {x.dtype} on {x.device}; give int32 "
                    f"({rows.shape[0]},) on {rows.device}, contiguous."
                )

    def weights(self, heads: int, q_rows: slice = slice(None), k_rows: slice = slice(None)) -> torch.Tensor:
        """(heads, q rows, k rows) float64: 0 for pairs that go, ``scale`` for others."""
        seed_q, seed_head, seed_k = _seeds(self.dropout.seed)
        of_q = _mix(self.q_positions[q_rows].long() ^ seed_q)
        of_head = _mix(torch.arange(heads, device=of_q.device) ^ seed_head)
        of_k = _mix(self.k_positions[k_rows].long() ^ seed_k)
        of_row = _mix(of_head[:, None] ^ of_q)
        stays = _last(of_row[..., None] ^ of_k) >= self.dropout.threshold
        return stays.double().mul_(self.dropout.scale)

    @cached_property
    def _params(self) -> abi.Dropout:
        drop = self.dropout
        return abi.Dropout(
            self.q_positions.data_ptr(), self.k_positions.data_ptr(), *_seeds(drop.seed), drop.threshold, drop.scale
        )

    @property
    def address(self) -> int:
        """Where a ``magi_dropout`` lies, which lives as long as this object."""
        return ctypes.addressof(self._params)


__all__ = ["Dropout", "DropoutMask", "dropout_of"]
