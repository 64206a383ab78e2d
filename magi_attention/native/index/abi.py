# SPDX-License-Identifier: Apache-2.0
"""Mirrors of ``csrc/include/magi/index.h``, field by field under the same names."""

from __future__ import annotations

import ctypes
from ctypes import c_int32

from magi_attention.native import abi
from magi_attention.native.c_struct import divided, fields, strides

_SHAPE = "version dtype total_q total_k heads_q heads_kv head_dim head_dim_v q_block k_block max_entries"
_FWD_HEAD = f"""
    int32 {_SHAPE} sm_margin
    float softmax_scale
    int32 reserved
    int64 {strides('q k v out')}
"""


class IndexFwdParams(ctypes.Structure):
    """``magi_ffa_index_fwd_params``. Strides in elements, addresses as integers."""

    _fields_ = fields(_FWD_HEAD + """
        void* q k v out lse lists key_counts k_starts stream
    """)


class IndexFwdBlocksParams(ctypes.Structure):
    """``magi_ffa_index_fwd_blocks_params``. Strides in elements, addresses as integers."""

    _fields_ = fields(_FWD_HEAD + """
        void* q k v out lse lists counts workspace stream
    """)


class IndexBwdParams(ctypes.Structure):
    """``magi_ffa_index_bwd_params``. Strides in elements, addresses as integers."""

    _fields_ = fields(f"""
        int32 {_SHAPE} sm_margin list_begin list_end
        float softmax_scale
        int32 reserved
        int64 {strides('q k v out dout')}
        void* q k v out dout lse delta dq dk dv dk_partials dv_partials lists key_counts k_starts stream
    """)


class IndexBwdKeysParams(ctypes.Structure):
    """``magi_ffa_index_bwd_keys_params``. Strides in elements, addresses as integers."""

    _fields_ = fields(f"""
        int32 {_SHAPE} sm_margin num_head_splits
        float softmax_scale
        int64 {strides('q k v out dout')} workspace_bytes
        void* q k v out dout lse delta dq dk dv lists counts workspace stream
    """)


class IndexSumParams(ctypes.Structure):
    """``magi_ffa_index_sum_params``."""

    _fields_ = fields("""
        int32 version total_k heads_kv k_block max_entries num_tiles width has_starts list_begin list_end
        void* readers reader_begins key_counts partials sums stream
    """)


class IndexPrepareParams(ctypes.Structure):
    """``magi_ffa_index_prepare_params``."""

    _fields_ = fields("""
        int32 version num_lists heads_kv max_entries total_k k_block is_int64 num_words
        void* indices k_starts lists counts stream
    """)


class IndexerParams(ctypes.Structure):
    """``magi_ffa_indexer_params``. Strides in elements, addresses as integers."""

    _fields_ = fields("""
        int32 version dtype total_q total_k heads head_dim num_best block_size local_blocks chunk
        int64 q_stride_token q_stride_head k_stride_token
        void* q k weights k_start k_end scratch lists stream
    """)


class IndexerKlFwdParams(ctypes.Structure):
    """``magi_ffa_indexer_kl_fwd_params``. Strides in elements, addresses as integers."""

    _fields_ = fields("""
        int32 version dtype total_q total_k heads_q heads_kv head_dim heads_index head_dim_index max_entries sm_margin
        float softmax_scale
        int64 q_stride_token q_stride_head k_stride_token
        int64 q_index_stride_token q_index_stride_head k_index_stride_token
        void* q k lse q_index k_index weights lists counts targets divergence lse_index mass stream
    """)


class IndexerKlBwdParams(ctypes.Structure):
    """``magi_ffa_indexer_kl_bwd_params``. Strides in elements, addresses as integers."""

    _fields_ = fields("""
        int32 version dtype total_q total_k heads_index head_dim_index max_entries sm_margin query_begin query_end
        int64 q_index_stride_token q_index_stride_head k_index_stride_token
        void* q_index k_index weights lists counts targets lse_index mass grad dq_index dk_index dk_partials dweights
        void* stream
    """)


FWD_PREFIX_BYTES, FWD_TAIL = divided(IndexFwdParams, "q")
FWD_BLOCKS_PREFIX_BYTES, FWD_BLOCKS_TAIL = divided(IndexFwdBlocksParams, "q")
BWD_PREFIX_BYTES, BWD_TAIL = divided(IndexBwdParams, "q")
BWD_KEYS_PREFIX_BYTES, BWD_KEYS_TAIL = divided(IndexBwdKeysParams, "q")
SUM_PREFIX_BYTES, SUM_TAIL = divided(IndexSumParams, "readers")

# Parameters of launches are passed as bytes, whose address C sees.
FUNCTIONS: abi.Functions = {
    "magi_ffa_index_tiles": (c_int32, (c_int32, c_int32, c_int32, c_int32)),
    "magi_ffa_index_has_variant": (c_int32, (c_int32, c_int32, c_int32, c_int32)),
    "magi_ffa_index_fwd": (c_int32, (ctypes.c_char_p,)),
    "magi_ffa_index_fwd_blocks": (c_int32, (ctypes.c_char_p,)),
    "magi_ffa_index_bwd": (c_int32, (ctypes.c_char_p,)),
    "magi_ffa_index_bwd_keys": (c_int32, (ctypes.c_char_p,)),
    "magi_ffa_index_bwd_keys_workspace": (c_int32, (ctypes.c_char_p, abi.I64_PTR)),
    "magi_ffa_index_sum": (c_int32, (ctypes.c_char_p,)),
    "magi_ffa_index_prepare": (c_int32, (ctypes.POINTER(IndexPrepareParams),)),
    "magi_ffa_index_blocks": (c_int32, (ctypes.POINTER(IndexPrepareParams),)),
    "magi_ffa_indexer_topk": (c_int32, (ctypes.POINTER(IndexerParams),)),
    "magi_ffa_indexer_kl_fwd": (c_int32, (ctypes.POINTER(IndexerKlFwdParams),)),
    "magi_ffa_indexer_kl_bwd": (c_int32, (ctypes.POINTER(IndexerKlBwdParams),)),
}
