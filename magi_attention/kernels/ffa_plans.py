# SPDX-License-Identifier: Apache-2.0
"""Tile plans of masks that are given as range tensors, made on their device and remembered per tensor.

A remembered plan is used again only for the very same tensor objects (weak references, so a new tensor in reused
memory never matches), with the same version counters (so every in-place edit that torch knows of counts), the
same storage and the same stream. Edits that bypass torch, by a foreign kernel that got the raw address, are not
seen: pass new tensors then. While a CUDA graph is captured nothing is remembered and the planner becomes part
of the graph, so that a replay follows the ranges as they are then.
"""

from __future__ import annotations

import weakref
from typing import NamedTuple

import torch

from magi_attention.errors import ContractError, UnsupportedError
from magi_attention.kernels.tables import table_from_tensors
from magi_attention.native.ffa import FfaLibrary, FfaTile
from magi_attention.native.tile_plan import device_plan, plan_words

DEVICE_PLAN_BYTES = 64 * 2**20
_MAX_ENTRIES = 1024


class RangeTensors(NamedTuple):
    """A mask as tensors on the device of q: (N, 2), (N, 2) and (N,) or None for all FULL; integers."""

    q_ranges: torch.Tensor
    k_ranges: torch.Tensor
    types: torch.Tensor | None


class _Entry(NamedTuple):
    refs: tuple[weakref.ref | None, ...]
    state: tuple
    plan: torch.Tensor

    def is_true(self, mask: RangeTensors) -> bool:
        is_same = all(ref is None or ref() is x for ref, x in zip(self.refs, mask))  # the key tells a missing one
        return is_same and self.state == _state(mask)


def _state(mask: RangeTensors) -> tuple:
    """Changes with every edit that torch knows of."""
    return tuple((x._version, x.data_ptr(), x.shape) for x in mask if x is not None)


class RangePlans:
    """Makes and remembers plans for one kernel library. Entries go when a tensor of the mask does."""

    def __init__(self, library: FfaLibrary, on_host: bool = False) -> None:
        self._library = library
        self._on_host = on_host
        self._entries: dict[tuple, _Entry] = {}

    def find(
        self, mask: RangeTensors, total_q: int, total_k: int, tile: FfaTile, stream: int
    ) -> torch.Tensor | None:
        """A remembered plan that is still true, or None."""
        if any(x is not None and x.is_inference() for x in mask):
            return None
        entry = self._entries.get(_key(mask, total_q, total_k, tile, stream))
        return entry.plan if entry is not None and entry.is_true(mask) else None

    def get(
        self, mask: RangeTensors, total_q: int, total_k: int, tile: FfaTile, stream: int, capturing: bool
    ) -> torch.Tensor:
        """The plan, int32 on the device of the ranges; remembered unless in a graph or of an inference tensor."""
        if capturing or any(x is not None and x.is_inference() for x in mask):
            return self._produce(mask, total_q, total_k, tile, stream, capturing)
        kept = self.find(mask, total_q, total_k, tile, stream)
        if kept is not None:
            return kept
        # The state is taken first: an edit while the plan is being made must not be missed.
        key, state, entries = _key(mask, total_q, total_k, tile, stream), _state(mask), self._entries
        plan = self._produce(mask, total_q, total_k, tile, stream, capturing)
        if len(entries) >= _MAX_ENTRIES:
            entries.clear()
        refs = tuple(None if x is None else weakref.ref(x, lambda _: entries.pop(key, None)) for x in mask)
        entries[key] = _Entry(refs, state, plan)
        return plan

    def _produce(
        self, mask: RangeTensors, total_q: int, total_k: int, tile: FfaTile, stream: int, capturing: bool
    ) -> torch.Tensor:
        num_slices = mask.q_ranges.shape[0]
        num_tiles = -(-total_q // tile.tokens)
        # A slice adds at most one layer to a tile, which bounds the plan without looking at the ranges.
        words = plan_words(total_q, tile.tokens, num_tiles * num_slices)
        if num_slices and 4 * words <= DEVICE_PLAN_BYTES and (capturing or not self._on_host):
            q_ranges, k_ranges, types = (None if x is None else x.to(torch.int32).contiguous() for x in mask)
            plan = torch.empty(words, dtype=torch.int32, device=q_ranges.device)
            self._library.plan_on_device(
                q_ranges.data_ptr(), k_ranges.data_ptr(), None if types is None else types.data_ptr(), num_slices,
                total_q, total_k, tile, plan.data_ptr(), words, stream,
            )  # fmt: skip
            return plan
        if capturing:
            raise UnsupportedError(
                f"{num_slices} slices over {num_tiles} tiles are too many to plan inside a CUDA graph; give the mask "
                "as a SliceTable (magi_attention.api.Mask), planned before the capture."
            )
        # By way of the host, which waits for the device, checks every range and needs no more memory than used.
        return table_plan(table_from_tensors(*mask), total_q, total_k, tile, mask.q_ranges.device)


def _key(mask: RangeTensors, total_q: int, total_k: int, tile: FfaTile, stream: int) -> tuple:
    return (*map(id, mask), total_q, total_k, tile, stream)


def table_plan(slices, total_q: int, total_k: int, tile: FfaTile, device: torch.device) -> torch.Tensor:
    """The plan of a slice table on ``device``, kept with the table.

    Raises:
        ContractError: a slice reaches beyond the rows, or a CUDA graph is being captured and the plan is not made.
    """
    try:
        return device_plan(slices, total_q, total_k, tile.tokens, tile.groups, device)
    except RuntimeError as error:
        if "captur" not in str(error):
            raise
        raise ContractError(
            "The tile plan of this mask cannot be copied to the GPU while a CUDA graph is captured; run the call "
            "once before the capture."
        ) from error
