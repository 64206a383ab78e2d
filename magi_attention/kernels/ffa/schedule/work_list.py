# SPDX-License-Identifier: Apache-2.0
"""The work list of a backward that has about two work tiles for each SM, made by ``csrc/planner/schedule``."""

from __future__ import annotations

import ctypes
from typing import NamedTuple

import numpy as np

from magi_attention.native import abi
from magi_attention.native.loader import check, load
from magi_attention.native.tile_plan import TilePlan
from magi_attention.native.toolchain import PLANNER


class ListShape(NamedTuple):
    """``magi_schedule_shape``: what a work list depends on, besides the mask. ``group`` query heads share a kv head, a
    multiple of ``abi.LIST_SPLITS``; ``num_ctas`` of the ``num_sms`` of the device are left to the call."""

    heads_kv: int
    group: int
    num_sms: int
    num_ctas: int
    block_m: int


def work_list(plan: TilePlan, shape: ListShape) -> np.ndarray:
    """int32 words, a ``magi_work_list``, of a transposed plan.

    Raises:
        ContractError: the plan has no tiles, or a size is not positive. UnsupportedError: the planner library is not
            built.
    """
    library, needed = load(PLANNER), ctypes.c_int64()
    words = np.empty(_most_words(plan, shape), dtype=np.int32)
    arguments = plan.words.ctypes.data, bytes(abi.ScheduleShape(*shape)), words.ctypes.data, len(words)
    check(library, library.magi_bwd_work_list(*arguments, ctypes.byref(needed)), "Listing work tiles")
    return words[: needed.value]


def _most_words(plan: TilePlan, shape: ListShape) -> int:
    """As many as a list has if half of its tiles are split."""
    parts = abi.LIST_SPLITS * shape.heads_kv
    tiles: int = plan.header.num_tiles
    blocks: int = -(-plan.header.total_k // max(shape.block_m, 1))
    return 64 + parts * (8 * tiles + 4 * tiles + tiles + 2 * (blocks + tiles)) + blocks * (1 + -(-tiles // 32))
