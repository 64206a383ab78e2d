# SPDX-License-Identifier: Apache-2.0
"""Mirrors of ``csrc/include/magi/schedule.h``, field by field under the same names."""

from __future__ import annotations

import ctypes

from magi_attention.native.c_struct import fields

TRAVERSAL_WRAP = 2**12 - 1  # of magi_work_tile
LIST_SPLITS = 4  # parts of the query heads of a kv head in a work list
WIDE_BLOCK_M = 80  # queries of an m-block whose work tiles the host lists


class WorkTile(ctypes.Structure):
    """``magi_work_tile``: 8 int32 words."""

    _fields_ = fields("int32 tile head_kv split num_splits m_begin m_end num_descending partial")


class WorkListHeader(ctypes.Structure):
    """``magi_work_list``: 16 int32 words at the start of a work list."""

    _fields_ = fields("""
        int32 num_work_tiles num_partials num_entries num_blocks_at_once tile_words words_work_tiles
        int32 words_partials words_left words_blocks words_tiles_of_block words_entries words_total
        int32[4] reserved
    """)


class Partial(ctypes.Structure):
    """``magi_partial``: 4 int32 words."""

    _fields_ = fields("int32 tile head_kv num_splits reserved")


class ListEntry(ctypes.Structure):
    """``magi_list_entry``: 2 int32 words."""

    _fields_ = fields("int32 block part")


class ScheduleProblem(ctypes.Structure):
    """``magi_schedule_problem``."""

    _fields_ = fields("""
        int32 kind total_q total_k local_k heads_q heads_kv head_dim head_dim_v head_units num_sms num_ctas
        int32 is_deterministic is_plain is_remote has_diagonal is_all_causal takes_list tail_work_tiles
        int32 tail_parts keeps_plan_order
        int64 area
    """)


class ScheduleChoice(ctypes.Structure):
    """``magi_schedule_choice``: 10 int32 words."""

    _fields_ = fields("""
        int32 block_m num_head_splits first_writer by_document split_begin split_end num_splits min_blocks
        int32 direct_dq_store reserved
    """)


class Waits(ctypes.Structure):
    """``magi_waits``."""

    _fields_ = fields("""
        int64 num_work_tiles num_counters
        void* step_begin counter target
        int32 num_ctas reserved
    """)
