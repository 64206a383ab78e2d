# SPDX-License-Identifier: Apache-2.0
"""Mirrors of ``csrc/include/magi/index.h``, field by field under the same names."""

from __future__ import annotations

import ctypes
from ctypes import c_float, c_int32, c_int64, c_void_p

from magi_attention.native import abi

_SHAPE = ("version", "dtype", "total_q", "total_k", "heads_q", "heads_kv", "head_dim", "head_dim_v")
_LISTS = ("q_block", "k_block", "max_entries")


def _strides(*names: str) -> list[tuple[str, type]]:
    return [(f"{name}_stride_{dim}", c_int64) for name in names for dim in ("token", "head")]


class IndexFwdParams(ctypes.Structure):
    """``magi_ffa_index_fwd_params``. Strides in elements, addresses as integers."""

    _fields_ = [
        *((name, c_int32) for name in (*_SHAPE, *_LISTS, "sm_margin")),
        ("softmax_scale", c_float),
        ("reserved", c_int32),
        *_strides("q", "k", "v", "out"),
        *((name, c_void_p) for name in ("q", "k", "v", "out", "lse", "lists", "key_counts", "k_starts", "stream")),
    ]


class IndexFwdBlocksParams(ctypes.Structure):
    """``magi_ffa_index_fwd_blocks_params``. Strides in elements, addresses as integers."""

    _fields_ = [
        *((name, c_int32) for name in (*_SHAPE, *_LISTS, "sm_margin")),
        ("softmax_scale", c_float),
        ("reserved", c_int32),
        *_strides("q", "k", "v", "out"),
        *((name, c_void_p) for name in ("q", "k", "v", "out", "lse", "lists", "counts", "workspace", "stream")),
    ]


class IndexBwdParams(ctypes.Structure):
    """``magi_ffa_index_bwd_params``. Strides in elements, addresses as integers."""

    _fields_ = [
        *((name, c_int32) for name in (*_SHAPE, *_LISTS, "sm_margin", "list_begin", "list_end")),
        ("softmax_scale", c_float),
        ("reserved", c_int32),
        *_strides("q", "k", "v", "out", "dout"),
        *((name, c_void_p) for name in ("q", "k", "v", "out", "dout", "lse", "delta", "dq", "dk", "dv")),
        *((name, c_void_p) for name in ("dk_partials", "dv_partials", "lists", "key_counts", "k_starts", "stream")),
    ]


class IndexBwdKeysParams(ctypes.Structure):
    """``magi_ffa_index_bwd_keys_params``. Strides in elements, addresses as integers."""

    _fields_ = [
        *((name, c_int32) for name in (*_SHAPE, *_LISTS, "sm_margin", "num_head_splits")),
        ("softmax_scale", c_float),
        *_strides("q", "k", "v", "out", "dout"),
        *((name, c_void_p) for name in ("q", "k", "v", "out", "dout", "lse", "delta", "dq", "dk", "dv")),
        *((name, c_void_p) for name in ("lists", "counts", "workspace")),
        ("workspace_bytes", c_int64),
        ("stream", c_void_p),
    ]


class IndexSumParams(ctypes.Structure):
    """``magi_ffa_index_sum_params``."""

    _fields_ = [
        *((name, c_int32) for name in ("version", "num_rows", "width", "reserved")),
        *((name, c_void_p) for name in ("begins", "entries", "partials", "sums", "stream")),
    ]


class IndexPrepareParams(ctypes.Structure):
    """``magi_ffa_index_prepare_params``."""

    _fields_ = [
        *((name, c_int32) for name in ("version", "num_lists", "heads_kv", "max_entries", "total_k", "k_block")),
        *((name, c_int32) for name in ("is_int64", "num_words")),
        *((name, c_void_p) for name in ("indices", "k_starts", "lists", "counts", "stream")),
    ]


FUNCTIONS: abi.Functions = {
    "magi_ffa_index_tiles": (c_int32, (c_int32, c_int32, c_int32, c_int32)),
    "magi_ffa_index_has_variant": (c_int32, (c_int32, c_int32, c_int32, c_int32)),
    "magi_ffa_index_fwd": (c_int32, (ctypes.POINTER(IndexFwdParams),)),
    "magi_ffa_index_fwd_blocks": (c_int32, (ctypes.POINTER(IndexFwdBlocksParams),)),
    "magi_ffa_index_bwd": (c_int32, (ctypes.POINTER(IndexBwdParams),)),
    "magi_ffa_index_bwd_keys": (c_int32, (ctypes.POINTER(IndexBwdKeysParams),)),
    "magi_ffa_index_bwd_keys_workspace": (
        c_int32,
        (ctypes.POINTER(IndexBwdKeysParams), ctypes.POINTER(c_int64)),
    ),
    "magi_ffa_index_sum": (c_int32, (ctypes.POINTER(IndexSumParams),)),
    "magi_ffa_index_prepare": (c_int32, (ctypes.POINTER(IndexPrepareParams),)),
    "magi_ffa_index_blocks": (c_int32, (ctypes.POINTER(IndexPrepareParams),)),
}
