# SPDX-License-Identifier: Apache-2.0
"""The memory of all exchanges of a group: one piece on every rank, with one layout, so that a place is an offset.

Casts of all plans use the same memory, one after the other, and reduces other memory in the same way. A rank writes to
another one only when that has said that its last cast (or reduce) is over, whatever plan that was of.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from magi_attention.common.two_level.transfers import Region, TransferPlan
from magi_attention.errors import ContractError
from magi_attention.native.comm import abi as comm_abi

_ALIGN = 256
_WORD = 8


def _rounded(num_bytes: int) -> int:
    return -(-num_bytes // _ALIGN) * _ALIGN


@dataclass(frozen=True, slots=True)
class Regions:
    """Places of a cast or a reduce, in bytes from the begin of its memory, and the bytes of all. Rows may be of several
    tensors, each with places of its own: ``places[t]``."""

    places: tuple[dict[str, int], ...]
    num_bytes: int

    @classmethod
    def _of(cls, sizes: dict[str, int], row_bytes: Sequence[int]) -> Regions:
        places: list[dict[str, int]] = []
        at = 0
        for size in row_bytes:
            if size < 16 or size % 16:
                raise ContractError(f"Rows of {size} bytes cannot travel by puts; they must be multiples of 16 bytes.")
            places.append({})
            for name, rows in sizes.items():
                places[-1][name] = at
                at += _rounded(rows * size)
        return cls(tuple(places), at)

    @classmethod
    def of_cast(cls, plan: TransferPlan, row_bytes: Sequence[int]) -> Regions:
        """``input``, HELD and OUT. ``ContractError`` unless rows are multiples of 16 bytes."""
        inputs = max(part.input_rows for part in plan.ranks)
        rows = {"input": inputs, **_most(plan, Region.HELD, Region.OUT)}
        return cls._of(rows, row_bytes)

    @classmethod
    def of_reduce(cls, plan: TransferPlan, row_bytes: Sequence[int]) -> Regions:
        """``partials``, TERMS, ``sums`` and GRADS. ``ContractError`` unless rows are multiples of 16 bytes."""
        most = _most(plan, *Region)
        rows = {"partials": most["OUT"], "TERMS": most["TERMS"], "sums": most["HELD"], "GRADS": most["GRADS"]}
        return cls._of(rows, row_bytes)


def _most(plan: TransferPlan, *regions: Region) -> dict[str, int]:
    """Rows of a region on the rank that has most."""
    return {region.name: max(part.region_rows[region] for part in plan.ranks) for region in regions}


@dataclass(frozen=True, slots=True)
class Arena:
    """Room for ``num_signals`` signals of casts and as many of reduces, ``cast_bytes`` and ``reduce_bytes``.

    Signals count from credits, of casts and of reduces, one for each rank; behind these a signal of a cast and one of a
    reduce take turns, so that their numbers do not depend on the room.
    """

    world: int
    num_signals: int = 0
    cast_bytes: int = 0
    reduce_bytes: int = 0

    def joined(self, other: Arena) -> Arena:
        """With room for both."""
        return Arena(
            self.world,
            max(self.num_signals, other.num_signals),
            max(self.cast_bytes, other.cast_bytes),
            max(self.reduce_bytes, other.reduce_bytes),
        )

    # Words: whether a wait was in vain, epochs, those of buffers of one rank, signals, totals.
    @property
    def failed_at(self) -> int:
        return 0

    def epoch_at(self, of_reduce: bool) -> int:
        return _WORD * (1 + of_reduce)

    def control_at(self, of_reduce: bool) -> int:
        """Where the control words of a ``magi_symm_buffer`` of this rank alone begin, for attention beside a cast."""
        return _ALIGN + comm_abi.COMM_CONTROL_BYTES * of_reduce

    @property
    def signals_at(self) -> int:
        return _ALIGN + 2 * comm_abi.COMM_CONTROL_BYTES

    @property
    def totals_at(self) -> int:
        return self.signals_at + _rounded(_WORD * self._words)

    @property
    def cast_at(self) -> int:
        return self.totals_at + _rounded(_WORD * self._words)

    @property
    def reduce_at(self) -> int:
        return self.cast_at + _rounded(self.cast_bytes)

    @property
    def num_bytes(self) -> int:
        return self.reduce_at + _rounded(self.reduce_bytes)

    @property
    def _words(self) -> int:
        return 2 * (self.world + self.num_signals)

    def credit(self, of_reduce: bool, rank: int) -> int:
        """The signal by which ``rank`` says that its memory is free."""
        return of_reduce * self.world + rank

    def signal(self, of_reduce: bool, index: int) -> int:
        return 2 * (self.world + index) + of_reduce


def room_for(plan: TransferPlan, cast_bytes: int = 0, reduce_bytes: int = 0) -> Arena:
    """What a plan needs at least."""
    signals = max(max(len(part.cast_signals), len(part.reduce_signals)) for part in plan.ranks)
    return Arena(plan.nodes.world, signals, cast_bytes, reduce_bytes)
