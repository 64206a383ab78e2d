# SPDX-License-Identifier: Apache-2.0
"""Mirrors of ``csrc/include/magi/schedule.h``, field by field under the same names."""

from __future__ import annotations

import ctypes
from ctypes import c_int32, c_int64, c_void_p

TRAVERSAL_WRAP = 2**12 - 1  # of magi_work_tile
LIST_SPLITS = 4  # parts of the query heads of a kv head in a work list
WIDE_BLOCK_M = 80  # queries of an m-block whose work tiles the host lists


class WorkTile(ctypes.Structure):
    """``magi_work_tile``: 8 int32 words."""

    _fields_ = [
        *((n, c_int32) for n in ("tile", "head_kv", "split", "num_splits", "m_begin", "m_end", "num_descending")),
        ("partial", c_int32),
    ]


class WorkListHeader(ctypes.Structure):
    """``magi_work_list``: 16 int32 words at the start of a work list."""

    _fields_ = [
        *((n, c_int32) for n in ("num_work_tiles", "num_partials", "num_entries", "num_blocks_at_once", "tile_words")),
        *((f"words_{n}", c_int32) for n in ("work_tiles", "partials", "left", "blocks", "tiles_of_block", "entries")),
        ("words_total", c_int32),
        ("reserved", c_int32 * 4),
    ]


class Partial(ctypes.Structure):
    """``magi_partial``: 4 int32 words."""

    _fields_ = [(name, c_int32) for name in ("tile", "head_kv", "num_splits", "reserved")]


class ListEntry(ctypes.Structure):
    """``magi_list_entry``: 2 int32 words."""

    _fields_ = [(name, c_int32) for name in ("block", "part")]


class ScheduleProblem(ctypes.Structure):
    """``magi_schedule_problem``."""

    _fields_ = [
        *((n, c_int32) for n in ("kind", "total_q", "total_k", "local_k", "heads_q", "heads_kv", "head_dim")),
        *((n, c_int32) for n in ("head_dim_v", "head_units", "num_sms", "num_ctas", "is_deterministic", "is_plain")),
        *((n, c_int32) for n in ("is_remote", "has_diagonal", "is_all_causal", "takes_list", "tail_work_tiles")),
        *((n, c_int32) for n in ("tail_parts", "keeps_plan_order")),
        ("area", c_int64),
    ]


class ScheduleChoice(ctypes.Structure):
    """``magi_schedule_choice``: 10 int32 words."""

    _fields_ = [
        *((n, c_int32) for n in ("block_m", "num_head_splits", "first_writer", "by_document", "split_begin")),
        *((n, c_int32) for n in ("split_end", "num_splits", "min_blocks", "direct_dq_store", "reserved")),
    ]


class Waits(ctypes.Structure):
    """``magi_waits``."""

    _fields_ = [
        *((name, c_int64) for name in ("num_work_tiles", "num_counters")),
        *((name, c_void_p) for name in ("step_begin", "counter", "target")),
        *((name, c_int32) for name in ("num_ctas", "reserved")),
    ]
