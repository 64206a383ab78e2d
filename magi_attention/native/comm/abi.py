# SPDX-License-Identifier: Apache-2.0
"""Mirrors of ``csrc/include/magi/comm.h``, field by field under the same names, and the functions of what moves rows
between nodes."""

from __future__ import annotations

import ctypes
from ctypes import c_int32, c_int64, c_void_p

from magi_attention.native.abi import I32_PTR, Functions
from magi_attention.native.c_struct import fields

COMM_VERSION = 6  # of the structs of comm.h
COMM_WAIT_WORDS = 3
COMM_CONTROL_BYTES = 4096
PAIR = c_int64 * 2  # of the two arrays of a relay


class CommEpoch(ctypes.Structure):
    """``magi_comm_epoch``."""

    _fields_ = fields("""
        void* arena
        int64 epoch_at signals_at totals_at failed_at
        void* failed_peer network
        uint32 timeout_ms
        int32 reserved
    """)


class CommPutParams(ctypes.Structure):
    """``magi_comm_put_params``."""

    _fields_ = fields("""
        int32 version num_puts num_credits num_ctas
        CommEpoch epoch
        void* puts credits stream
    """, CommEpoch=CommEpoch)


class CommRelayParams(ctypes.Structure):
    """``magi_comm_relay_params``."""

    _fields_ = fields("""
        CommPutParams put
        int32 num_groups reserved
        int64 control_at
        int64[2] clear_at clear_bytes
        void* begins waits
    """, CommPutParams=CommPutParams)


class CommWaitParams(ctypes.Structure):
    """``magi_comm_wait_params``."""

    _fields_ = fields("""
        int32 version num_waits
        CommEpoch epoch
        void* waits stream
    """, CommEpoch=CommEpoch)


class CommSumParams(ctypes.Structure):
    """``magi_comm_sum_params``."""

    _fields_ = fields("""
        int32 version num_blocks num_ctas row_values wire_dtype
        CommEpoch epoch
        void* blocks waits begins terms stream
    """, CommEpoch=CommEpoch)


class CommEndParams(ctypes.Structure):
    """``magi_comm_end_params``."""

    _fields_ = fields("""
        int32 version num_ranks num_counted
        CommEpoch epoch
        void* ranks counted
        int64 signal
        void* stream
    """, CommEpoch=CommEpoch)


COMM_FUNCTIONS: Functions = {
    "magi_comm_versions": (None, (I32_PTR, I32_PTR)),
    "magi_comm_unique_id_bytes": (c_int32, ()),
    "magi_comm_unique_id": (c_int32, (c_void_p,)),
    "magi_comm_join": (c_int32, (c_void_p, c_int32, c_int32)),
    "magi_comm_has_joined": (c_int32, ()),
    "magi_comm_leave": (c_int32, ()),
    "magi_comm_alloc": (c_int32, (c_int64, ctypes.POINTER(c_void_p))),
    "magi_comm_free": (c_int32, (c_void_p,)),
    "magi_comm_put_signal": (c_int32, (c_void_p, c_void_p, c_int64, c_void_p, ctypes.c_uint64, c_int32, c_void_p)),
    "magi_comm_wait_signal": (c_int32, (c_void_p, ctypes.c_uint64, c_void_p)),
    "magi_comm_put": (c_int32, (ctypes.POINTER(CommPutParams),)),
    "magi_comm_relay": (c_int32, (ctypes.POINTER(CommRelayParams),)),
    "magi_comm_wait": (c_int32, (ctypes.POINTER(CommWaitParams),)),
    "magi_comm_sum": (c_int32, (ctypes.POINTER(CommSumParams),)),
    "magi_comm_end": (c_int32, (ctypes.POINTER(CommEndParams),)),
}
_EXCHANGE = ("magi_comm_put", "magi_comm_relay", "magi_comm_wait", "magi_comm_sum", "magi_comm_end")
GIN_FUNCTIONS: Functions = {
    "magi_gin_versions": (None, (I32_PTR, I32_PTR)),
    "magi_gin_join": (c_int32, (c_void_p, ctypes.POINTER(c_void_p))),
    "magi_gin_leave": (c_int32, (c_void_p,)),
    "magi_gin_alloc": (c_int32, (c_void_p, c_int64, ctypes.POINTER(c_void_p), ctypes.POINTER(c_void_p))),
    "magi_gin_free": (c_int32, (c_void_p,)),
    **{name: COMM_FUNCTIONS[name] for name in _EXCHANGE},
}
