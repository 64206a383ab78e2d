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
    refs: tuple[weakref.ref, weakref.ref, weakref.ref | None]
    state: tuple
    plan: torch.Tensor
    address: int

    def is_true(self, q_ranges: torch.Tensor, k_ranges: torch.Tensor, types: torch.Tensor | None) -> bool:
        ref_q, ref_k, ref_types = self.refs
        is_same = ref_q() is q_ranges and ref_k() is k_ranges and (types is None or ref_types() is types)
        return is_same and self.state == _state(q_ranges, k_ranges, types)


def _state(q_ranges: torch.Tensor, k_ranges: torch.Tensor, types: torch.Tensor | None) -> tuple:
    """Changes with every edit that torch knows of. Spelled out, because it is on the path of every call."""
    if types is None:
        return (
            q_ranges._version, q_ranges.data_ptr(), q_ranges.shape,
            k_ranges._version, k_ranges.data_ptr(), k_ranges.shape,
        )  # fmt: skip
    return (
        q_ranges._version, q_ranges.data_ptr(), q_ranges.shape, k_ranges._version, k_ranges.data_ptr(),
        k_ranges.shape, types._version, types.data_ptr(), types.shape,
    )  # fmt: skip


class RangePlans:
    """Makes and remembers plans for one kernel library. Entries go when a tensor of the mask does."""

    def __init__(self, library: FfaLibrary, on_host: bool = False) -> None:
        self._library = library
        self._on_host = on_host
        self._entries: dict[tuple, _Entry] = {}

    @staticmethod
    def size_key(total_q: int, total_k: int, tile: FfaTile) -> str:
        """The part of a key that tells sizes. A text, because a text's hash is computed once."""
        return f"{total_q} {total_k} {tile.tokens} {tile.groups}"

    def find(
        self, q_ranges: torch.Tensor, k_ranges: torch.Tensor, types: torch.Tensor | None, size_key: str, stream: int
    ) -> int | None:
        """Address of a remembered plan that is still true, or None."""
        entry = self._entries.get((id(q_ranges), id(k_ranges), id(types), size_key, stream))
        return entry.address if entry is not None and entry.is_true(q_ranges, k_ranges, types) else None

    def get(
        self, mask: RangeTensors, total_q: int, total_k: int, tile: FfaTile, stream: int, capturing: bool
    ) -> torch.Tensor:
        """The plan, int32 on the device of the ranges; remembered unless in a graph or of an inference tensor."""
        live = tuple(x for x in mask if x is not None)
        if capturing or any(x.is_inference() for x in live):
            return self._produce(mask, total_q, total_k, tile, stream, capturing)
        key = (id(mask[0]), id(mask[1]), id(mask[2]), self.size_key(total_q, total_k, tile), stream)
        entries = self._entries
        entry = entries.get(key)
        if entry is not None and entry.is_true(*mask):
            return entry.plan
        # The state is taken first: an edit while the plan is being made must not be missed.
        state = _state(*mask)
        plan = self._produce(mask, total_q, total_k, tile, stream, capturing)
        if len(entries) >= _MAX_ENTRIES:
            entries.clear()
        refs = tuple(None if x is None else weakref.ref(x, lambda _: entries.pop(key, None)) for x in mask)
        entries[key] = _Entry(refs, state, plan, plan.data_ptr())
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
