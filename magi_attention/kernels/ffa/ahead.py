# SPDX-License-Identifier: Apache-2.0
"""Tile plans and schedules of the CUDA kernels, made before the call that wants them, where no GPU need be."""

from __future__ import annotations

from typing import Any, NamedTuple

from magi_attention.common.plan_cache import Kind
from magi_attention.common.slices import SliceTable
from magi_attention.kernels.ffa.schedule import SCHEDULES, schedule_of
from magi_attention.kernels.types import AttnOptions
from magi_attention.native.ffa import FfaTile, ForwardTiles
from magi_attention.native.planner.tile_plan import HOST_PLANS, TilePlan

Kept = tuple[SliceTable, int, Any, Any]  # a slice table, and number of the kind, key and value of one of its tables
_KINDS: tuple[Kind[Any, Any], ...] = (HOST_PLANS, SCHEDULES)


class KernelTiles(NamedTuple):
    """What tile plans and schedules depend on besides the mask: numbers alone, which can be sent to processes that see
    no GPU. ``heads`` and ``head_dims``: (query, kv), and (of q and k, of v). ``is_portable``: these kernels choose no
    schedule. ``is_fused``: attention over several ranks takes one launch for each direction."""

    forward: ForwardTiles
    backward: FfaTile
    heads: tuple[int, int]
    head_dims: tuple[int, int]
    num_sms: int
    options: AttnOptions
    is_portable: bool = False
    is_fused: bool = False

    def make(self, slices: SliceTable, queries: int, keys: int, local_keys: int) -> None:
        """Makes the tables of ``slices`` over so many rows; they lie in its cache. The first ``local_keys``
        keys are the rank's own, mostly all of them; the others arrive while the kernel runs."""
        is_even = keys == local_keys and slices.even_rows >= queries
        forward = self.forward.of(queries, self.heads[0], self.num_sms, is_even)
        for tile, is_transposed in ((forward, False), (self.backward, True)):
            TilePlan.of_table(slices, queries, keys, tile.tokens, tile.groups, is_transposed, is_kept=True)
        if not self.is_portable:
            q_shape = queries, self.heads[0], self.head_dims[0]
            v_shape = local_keys, self.heads[1], self.head_dims[1]
            schedule_of(q_shape, v_shape, slices, keys, keys != local_keys, self.options, self.num_sms)


def kept_tables(slices: SliceTable) -> list[Kept]:
    """What ``KernelTiles.make`` has left in the cache of ``slices``, for another process."""
    return [(slices, i, key, value) for i, kind in enumerate(_KINDS) for key, value in slices.cache.items(kind)]


def take_tables(tables: list[Kept]) -> None:
    """Puts tables of another process where calls look for them."""
    for slices, i, key, value in tables:
        slices.cache.put(_KINDS[i], key, value)


__all__ = ["Kept", "KernelTiles", "kept_tables", "take_tables"]
