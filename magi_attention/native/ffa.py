# SPDX-License-Identifier: Apache-2.0
"""The attention kernels behind a small object: one method per C function, statuses as exceptions."""

from __future__ import annotations

import ctypes
from typing import NamedTuple

from magi_attention.errors import UnsupportedError
from magi_attention.native import abi
from magi_attention.native.families import SM90, Family
from magi_attention.native.loader import check, find, load


class FfaTile(NamedTuple):
    """``tokens`` queries per tile in ``groups`` row groups, ``pack`` query heads side by side in its rows."""

    tokens: int
    groups: int
    pack: int


# The smaller tile of head dim 128 takes 1.035 of the time for as many rows (docs/log/ffa_forward.md). Where the larger
# one takes two rounds, the counts can differ by a third, and by a ninth with more rounds. Five rounds in place of four
# gain up to 5% under documents, eight in place of six lose 7% (docs/log/heads.md).
_FEW, _FEW_IF_EVEN = 0.85, 0.94


class ForwardTiles(NamedTuple):
    """Tiles of one forward: ``many``, which is faster for each row, and ``few``, with fewer rows, which spreads few
    tiles over more SMs; None if there is none."""

    many: FfaTile
    few: FfaTile | None = None

    def of(self, queries: int, heads_q: int, num_sms: int, is_even: bool = False) -> FfaTile:
        """``few`` where it takes enough less, counted in rows that an SM works on one after another. ``is_even``: all
        tiles cost the same. Where they do not, short ones fill the gaps of the last round, so the count must gain more.
        """
        if self.few is None:
            return self.many
        many, few = (self._rows(tile, queries, heads_q, num_sms) for tile in (self.many, self.few))
        return self.few if few <= (_FEW_IF_EVEN if is_even else _FEW) * many else self.many

    @staticmethod
    def _rows(tile: FfaTile, queries: int, heads_q: int, num_sms: int) -> float:
        """Where there are SMs enough for several parts of each work tile, tiles are split along the keys."""
        work_tiles = max(-(-queries // tile.tokens) * (heads_q // tile.pack), 1)
        rounds = -(-work_tiles // num_sms) if work_tiles > num_sms else 1 / (num_sms // work_tiles)
        return rounds * tile.tokens * tile.pack


class BackwardNeeds(NamedTuple):
    """Bytes of the workspace, and of the order that may be kept; whether a call takes a work list; and else ``tail``:
    how many of the work tiles at the end of the plan's are split, into how many parts."""

    workspace: int
    order: int
    takes_list: bool
    tail: tuple[int, int]


class FfaLibrary:
    """Calls of one loaded kernel library. Addresses are integers; nothing is allocated here."""

    def __init__(self, library: ctypes.CDLL) -> None:
        self._library = library
        # (params as bytes) -> status; the bare function, because this call is on the path of every layer.
        self.forward_raw = library.magi_ffa_fwd
        self.backward_raw = library.magi_ffa_bwd
        # The same with magi_ffa_remote and magi_symm_put_params as bytes behind, the forward with an event; None where
        # kernels do not run beside exchanges.
        self.forward_remote_raw = getattr(library, "magi_ffa_fwd_remote", None)
        self.backward_remote_raw = getattr(library, "magi_ffa_bwd_remote", None)
        self.forward_address = ctypes.cast(library.magi_ffa_fwd, ctypes.c_void_p).value  # for native callers

    @classmethod
    def ahead(cls, family: Family = SM90) -> FfaLibrary:
        """The library of ``family`` built ahead; ``UnsupportedError`` if there is none, or none that can be used."""
        return cls(load(family.library))

    @staticmethod
    def is_ahead(family: Family = SM90) -> bool:
        """Is a library of ``family`` built ahead, whether it can be used or not?"""
        try:
            return find(family.library) is not None
        except UnsupportedError:  # in a wheel that does not fit
            return True

    def has(self, kind: str, dtype: int, head_dim: int, head_dim_v: int) -> bool:
        """Is there a kernel of ``kind`` "fwd" or "bwd" whose tile holds these head dims?"""
        number = abi.FWD if kind == "fwd" else abi.BWD
        return bool(self._library.magi_ffa_has_variant(number, dtype, head_dim, head_dim_v))

    def tiles(self, dtype: int, heads_q: int, heads_kv: int, head_dim: int, head_dim_v: int) -> ForwardTiles:
        """The tiles of the forward kernel for these shapes; ``UnsupportedError`` if there is none."""
        got = [ctypes.c_int32() for _ in range(3)]
        shape = dtype, heads_q, heads_kv, head_dim, head_dim_v
        status = self._library.magi_ffa_fwd_tile(*shape, *map(ctypes.byref, got))
        self.check(status, "Attention forward")
        groups, few, pack = (x.value for x in got)
        return ForwardTiles(*(FfaTile(64 * n // pack, n, pack) if n else None for n in (groups, few)))  # type: ignore[arg-type]

    def prefix(self, **fields: int | float) -> tuple[bytes, int]:
        """The leading part of ``magi_ffa_fwd_params``, all but the addresses; and the workspace it needs, in bytes.

        For the current device, because the workspace depends on how many multiprocessors there are.
        """
        need = ctypes.c_int64()
        params = abi.FfaFwdParams(version=abi.ABI_VERSION, **fields)
        self.check(self._library.magi_ffa_fwd_workspace(bytes(params), ctypes.byref(need)), "Attention forward")
        params.workspace_bytes = need.value
        return bytes(params)[: abi.FFA_FWD_PREFIX_BYTES], need.value

    def backward_tile(self, head_dim: int, head_dim_v: int) -> FfaTile:
        """The tile of keys that the backward wants, for plans of the transposed mask."""
        got = [ctypes.c_int32() for _ in range(2)]
        status = self._library.magi_ffa_bwd_tile(head_dim, head_dim_v, *map(ctypes.byref, got))
        self.check(status, "Attention backward")
        return FfaTile(got[0].value, got[1].value, 1)

    def backward_prefix(self, **fields: int | float) -> tuple[bytes, BackwardNeeds]:
        """The leading part of ``magi_ffa_bwd_params``, all but the addresses; and what a call needs."""
        needs = (ctypes.c_int64 * 5)()
        params = abi.FfaBwdParams(version=abi.ABI_VERSION, **fields)
        self.check(self._library.magi_ffa_bwd_workspace(bytes(params), needs), "Attention backward")
        params.workspace_bytes = needs[0]
        prefix = bytes(params)[: abi.FFA_BWD_PREFIX_BYTES]
        return prefix, BackwardNeeds(needs[0], needs[1], bool(needs[2]), (needs[3], needs[4]))

    def transpose_on_device(
        self, q_ranges: int, k_ranges: int, types: int | None, num_slices: int, total_q: int, total_k: int,
        row_ranges: int, column_ranges: int, new_types: int, stream: int,
    ) -> None:  # fmt: skip
        """Launches the transposition of a mask: from int32 (n, 2), (n, 2), (n,) to (3n, 2), (3n, 2), (3n,)."""
        arguments = (num_slices, total_q, total_k, row_ranges, column_ranges, new_types, stream)
        status = self._library.magi_tile_transpose_device(q_ranges, k_ranges, types, *arguments)
        self.check(status, "Transposing the mask on the device")

    def plan_on_device(
        self, q_ranges: int, k_ranges: int, types: int | None, num_slices: int, total_q: int, total_k: int,
        tile: FfaTile, plan: int, plan_words: int, stream: int,
    ) -> None:  # fmt: skip
        """Launches the planner; ranges are addresses of int32 (n, 2) and types of int32 (n,) on the device."""
        arguments = (num_slices, total_q, total_k, tile.tokens, tile.groups, plan, plan_words, stream)
        status = self._library.magi_tile_plan_device(q_ranges, k_ranges, types, *arguments)
        self.check(status, "Planning tiles on the device")

    def use_small_tiles(self, use: bool) -> None:
        """Whether GPUs of more shared memory run the tiles of those with 99 KB. Portable kernels; for the process."""
        self._library.magi_ffa_use_small_tiles(int(use))

    def check(self, status: int, what: str) -> None:
        check(self._library, status, what)
