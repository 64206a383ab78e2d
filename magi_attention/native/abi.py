# SPDX-License-Identifier: Apache-2.0
"""Mirrors of ``csrc/include/magi/abi.h``: constants and structs, field by field under the same names."""

from __future__ import annotations

import ctypes
import struct
from ctypes import c_int32, c_int64, c_void_p
from typing import Any

from magi_attention.native.c_struct import divided, fields, strides

ABI_VERSION = 31
HOST_VERSION = 1  # of the Python module _magi_host, whose launches also follow ABI_VERSION

OK, INVALID_ARGUMENT, UNSUPPORTED, CUDA_ERROR, CAPACITY = range(5)
BF16, FP16, FP32 = range(3)
DQ_ATOMIC, DQ_DETERMINISTIC, DQ_FIRST_WRITER = range(3)
FWD, BWD = range(2)

KEY_BLOCK_SIZES = (64, 80, 96, 112, 128)  # of ``num_key_blocks`` of a plan
SEGMENT_WORDS = 32  # int32 words of a layer record before its (lo, hi) pairs


class TilePlanHeader(ctypes.Structure):
    """``magi_tile_plan_header``: 28 int32 words at the start of a plan."""

    _fields_ = fields(f"""
        int32 version total_q total_k tile_tokens num_groups num_tiles num_segments segment_words words_tiles
        int32 words_order words_records words_total status has_unseen words_first_order words_work_tiles
        int64[{len(KEY_BLOCK_SIZES)}] num_key_blocks
        int32[2] reserved
    """)


class TileDesc(ctypes.Structure):
    """``magi_tile_desc``: 8 int32 words."""

    _fields_ = fields("""
        int32 token0 num_tokens segment_begin num_segments cost num_blocks
        int32[2] reserved
    """)


class SegmentGroup(ctypes.Structure):
    """Key ranges of one row group in a layer."""

    _fields_ = fields("int32 visit_lo visit_hi full_lo full_hi")


class TileSegment(ctypes.Structure):
    """``magi_tile_segment``: 32 int32 words, before the pairs of the tokens."""

    _fields_ = fields("""
        int32 visit_lo visit_hi source arrival has_unseen
        int32[3] reserved
        SegmentGroup[3] group
        int32[12] reserved2
    """, SegmentGroup=SegmentGroup)


class Dropout(ctypes.Structure):
    """``magi_dropout``."""

    _fields_ = fields("""
        void* q_positions k_positions
        uint32 seed_q seed_head seed_k threshold
        float scale
        int32 reserved
    """)


class FfaFwdParams(ctypes.Structure):
    """``magi_ffa_fwd_params``. Strides in elements, addresses as integers."""

    _fields_ = fields(f"""
        int32 version dtype out_dtype total_q total_k heads_q heads_kv head_dim head_dim_v pack tile_tokens
        int32 accumulate sm_margin sink_count sink_per_row
        float softmax_scale softcap
        int32 has_dropout split_tiles split_parts split_blocks reserved
        int64 {strides('q k v out')} workspace_bytes
        void* q k v out lse max_logits sink plan workspace stream dropout
    """)


FFA_FWD_PREFIX_BYTES, FFA_FWD_POINTERS = divided(FfaFwdParams, "q")


class Pairs(ctypes.Structure):
    """``magi_pairs``."""

    _fields_ = fields("""
        int64 num_pairs
        int32 num_queries num_keys world reserved
        void* query key area query_cost query_owner key_cost key_owner
    """)


class FfaBwdParams(ctypes.Structure):
    """``magi_ffa_bwd_params``. Strides in elements, addresses as integers."""

    _fields_ = fields(f"""
        int32 version dtype grad_dtype total_q total_k heads_q heads_kv head_dim head_dim_v accumulate sm_margin
        float softmax_scale softcap
        int32 dq_mode block_m num_head_splits split_begin split_end splits_per_split_tile direct_dq_store
        int32 has_dropout
        int64 {strides('q k v out dout')} workspace_bytes
        void* q k v out dout lse delta dq dk dv plan workspace work_list order
        int64 order_is_made
        void* stream dropout
    """)


FFA_BWD_PREFIX_BYTES, FFA_BWD_POINTERS = divided(FfaBwdParams, "q")


class SymmBuffer(ctypes.Structure):
    """``magi_symm_buffer``."""

    _fields_ = fields("void* own of_rank")


class FfaRemote(ctypes.Structure):
    """``magi_ffa_remote``: keys that other ranks put while a kernel runs."""

    _fields_ = fields("""
        int32 version rank world local_keys base rows wire_dtype
        uint32 timeout_ms
        int32 num_signals reserved
        SymmBuffer buffer
        void* k v arrivals failed_peer
        SymmBuffer grads
        void* senders owners target_rows dk_targets dv_targets summed dk_sums dv_sums
    """, SymmBuffer=SymmBuffer)


FFA_REMOTE_PREFIX_BYTES, FFA_REMOTE_TAIL = divided(FfaRemote, "dk_sums")


# ---- symm.h: exchanges within one NVLink domain ----
SYMM_WORD_BYTES = 32
SYMM_TENSORS = 3
SYMM_SIGNALS_PER_RANK = 32
SYMM_REDUCE_ROWS = 16
SYMM_FAILED_SIGNAL = 65536


class SymmPutParams(ctypes.Structure):
    """``magi_symm_put_params``. What a call changes comes last, see ``SYMM_PUT_TAIL``."""

    _fields_ = fields(f"""
        int32 version rank world num_tensors num_transfers num_ctas
        uint32 timeout_ms
        int32 reserved
        SymmBuffer buffer also_free
        void* transfers signals
        int64[{SYMM_TENSORS}] source_stride data_at row_bytes
        void* failed_peer
        void*[{SYMM_TENSORS}] source
        void* stream
    """, SymmBuffer=SymmBuffer)


class SymmUnpackParams(ctypes.Structure):
    """``magi_symm_unpack_params``. What a call changes comes last, see ``SYMM_UNPACK_TAIL``."""

    _fields_ = fields(f"""
        int32 version rank world num_tensors num_transfers num_ctas
        uint32 timeout_ms
        int32 reserved
        SymmBuffer buffer
        void* transfers
        int64[{SYMM_TENSORS}] data_at row_bytes out_stride
        void* failed_peer
        void*[{SYMM_TENSORS}] out
        void* stream
    """, SymmBuffer=SymmBuffer)


class SymmRecvReduceParams(ctypes.Structure):
    """``magi_symm_recv_reduce_params``. What a call changes comes last, see ``SYMM_RECV_REDUCE_TAIL``."""

    _fields_ = fields(f"""
        int32 version rank world rows num_tensors num_ctas wire_dtype base_dtype out_dtype
        int32[{SYMM_TENSORS}] row_values
        uint32 timeout_ms
        int32 reserved
        SymmBuffer buffer
        void* src_rows needed_signals signals
        int64[{SYMM_TENSORS}] data_at own_stride
        void* failed_peer
        void*[{SYMM_TENSORS}] own base out
        void* stream
    """, SymmBuffer=SymmBuffer)


class SymmReduceParams(ctypes.Structure):
    """``magi_symm_reduce_params``. What a call changes comes last, see ``SYMM_REDUCE_TAIL``."""

    _fields_ = fields(f"""
        int32 version rank world rows num_tensors wire_dtype base_dtype out_dtype
        int32[{SYMM_TENSORS}] row_values
        uint32 timeout_ms
        int32 out_rows reserved
        SymmBuffer buffer put_buffer
        void* tiles src_rows
        int64[{SYMM_TENSORS}] data_at
        void* failed_peer
        void*[{SYMM_TENSORS}] base out
        void* event stream
    """, SymmBuffer=SymmBuffer)


SYMM_PUT_PREFIX_BYTES, SYMM_PUT_TAIL = divided(SymmPutParams, "source")
SYMM_UNPACK_PREFIX_BYTES, SYMM_UNPACK_TAIL = divided(SymmUnpackParams, "out")
SYMM_RECV_REDUCE_PREFIX_BYTES, SYMM_RECV_REDUCE_TAIL = divided(SymmRecvReduceParams, "own")
SYMM_REDUCE_PREFIX_BYTES, SYMM_REDUCE_TAIL = divided(SymmReduceParams, "base")

I32_PTR = ctypes.POINTER(c_int32)
I64_PTR = ctypes.POINTER(c_int64)

Functions = dict[str, tuple[Any, tuple[Any, ...]]]
# function -> (result, arguments). Parameter structs are passed as bytes, whose address C sees.
PLANNER_FUNCTIONS: Functions = {
    "magi_tile_plan_words": (c_int64, (c_int32, c_int32, c_int64)),
    "magi_tile_plan_host": (
        c_int32,
        (c_void_p, c_int64, c_int32, c_int32, c_int32, c_int32, c_void_p, c_int64, I64_PTR),
    ),
    "magi_tile_plan_check": (c_int32, (c_void_p, c_int64, c_void_p, c_int64)),
    "magi_tile_transpose_host": (c_int32, (c_void_p, c_int64, c_void_p)),
    "magi_tile_strips_host": (c_int32, (c_void_p, c_int64, c_int32, c_void_p, I64_PTR)),
    "magi_vertex_cover": (c_int32, (c_int32, c_int32, *[c_void_p] * 2, c_int64, *[c_void_p] * 4)),
    "magi_balance_pairs": (c_int32, (c_void_p, c_int64, c_int64, c_void_p)),
    "magi_improve_pairs": (c_int32, (c_void_p, c_int64, c_void_p)),
    "magi_schedule": (
        c_int32, (c_void_p, c_int64, c_void_p, c_void_p, c_void_p, c_void_p, c_int64, I64_PTR),
    ),
    "magi_schedule_room": (c_int64, (c_void_p, c_int64, c_void_p)),
    "magi_schedule_check": (c_int32, (c_void_p, c_int64, c_int64, c_int32, c_int32)),
    "magi_waits_check": (c_int32, (c_void_p,)),
}
FFA_FUNCTIONS: Functions = {
    "magi_ffa_has_variant": (c_int32, (c_int32, c_int32, c_int32, c_int32)),
    "magi_ffa_fwd_tile": (c_int32, (*(c_int32,) * 5, I32_PTR, I32_PTR, I32_PTR)),
    "magi_ffa_fwd_workspace": (c_int32, (ctypes.c_char_p, I64_PTR)),
    "magi_ffa_fwd": (c_int32, (ctypes.c_char_p,)),
    "magi_ffa_bwd_tile": (c_int32, (c_int32, c_int32, I32_PTR, I32_PTR)),
    "magi_ffa_bwd_workspace": (c_int32, (ctypes.c_char_p, I64_PTR)),
    "magi_ffa_bwd": (c_int32, (ctypes.c_char_p,)),
    "magi_tile_transpose_device": (
        c_int32,
        (c_void_p, c_void_p, c_void_p, c_int32, c_int32, c_int32, c_void_p, c_void_p, c_void_p, c_void_p),
    ),
    "magi_tile_plan_device": (
        c_int32,
        (c_void_p, c_void_p, c_void_p, c_int32, c_int32, c_int32, c_int32, c_int32, c_void_p, c_int64, c_void_p),
    ),
}
# In libraries whose attention runs beside exchanges over NVLink.
REMOTE_FUNCTIONS: Functions = {
    "magi_ffa_fwd_remote": (c_int32, (ctypes.c_char_p, ctypes.c_char_p, ctypes.c_char_p, c_void_p)),
    "magi_ffa_bwd_remote": (c_int32, (ctypes.c_char_p, ctypes.c_char_p, ctypes.c_char_p)),
    "magi_symm_control_bytes": (c_int64, (c_int32,)),
    "magi_symm_put": (c_int32, (ctypes.c_char_p,)),
    "magi_symm_unpack": (c_int32, (ctypes.c_char_p,)),
    "magi_symm_recv_reduce": (c_int32, (ctypes.c_char_p,)),
    "magi_symm_reduce": (c_int32, (ctypes.c_char_p,)),
}
# In libraries of portable kernels.
PORTABLE_FUNCTIONS: Functions = {"magi_ffa_use_small_tiles": (None, (c_int32,))}
# From rows.h: in the attention library, in those that are built ahead. Structs are packed by their parts.
RAW = -1  # in place of a dtype
ROWS_ALL, ROWS_INT32, RANGES_INT32, RANGES_INT64 = range(4)
ROW_PARTS = 4
ROW_RANGES = 2048
ROW_LIST = struct.Struct("=2iQ")
ROW_PART = struct.Struct("=2i3q2Q")
ROW_COPY = struct.Struct("=2iq")  # then two lists, the stream, the parts
ROW_FILL = struct.Struct("=2iQ3q")  # then a list, out, the stream
ROW_REDUCE = struct.Struct("=2iq2i3Q")  # then the stream, the parts
ROW_MERGE = struct.Struct("=2iq2i3Q")  # then the stream, ROW_MERGE_LSE, one part
ROW_MERGE_LSE = struct.Struct("=2Q2q")
ROW_FUNCTIONS: Functions = {
    name: (c_int32, (ctypes.c_char_p,))
    for name in ("magi_row_copy", "magi_row_fill", "magi_row_reduce", "magi_row_merge")
}
COMMON_FUNCTIONS: Functions = {
    "magi_last_error": (ctypes.c_char_p, ()),
    "magi_abi_version": (c_int32, ()),
    "magi_build_info": (ctypes.c_char_p, ()),
}
