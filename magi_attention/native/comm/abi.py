# SPDX-License-Identifier: Apache-2.0
"""Mirrors of ``csrc/include/magi/comm.h``, field by field under the same names, and the functions of what moves rows
between nodes."""

from __future__ import annotations

import ctypes
from ctypes import c_int32, c_int64, c_uint32, c_void_p

from magi_attention.native.abi import I32_PTR, Functions

COMM_VERSION = 6  # of the structs of comm.h
COMM_WAIT_WORDS = 3
COMM_CONTROL_BYTES = 4096
PAIR = c_int64 * 2


class CommEpoch(ctypes.Structure):
    """``magi_comm_epoch``."""

    _fields_ = [
        ("arena", c_void_p),
        ("epoch_at", c_int64),
        ("signals_at", c_int64),
        ("totals_at", c_int64),
        ("failed_at", c_int64),
        ("failed_peer", c_void_p),
        ("network", c_void_p),
        ("timeout_ms", c_uint32),
        ("reserved", c_int32),
    ]


class CommPutParams(ctypes.Structure):
    """``magi_comm_put_params``."""

    _fields_ = [
        *((name, c_int32) for name in ("version", "num_puts", "num_credits", "num_ctas")),
        ("epoch", CommEpoch),
        *((name, c_void_p) for name in ("puts", "credits", "stream")),
    ]


class CommRelayParams(ctypes.Structure):
    """``magi_comm_relay_params``."""

    _fields_ = [
        ("put", CommPutParams),
        ("num_groups", c_int32),
        ("reserved", c_int32),
        ("control_at", c_int64),
        ("clear_at", PAIR),
        ("clear_bytes", PAIR),
        ("begins", c_void_p),
        ("waits", c_void_p),
    ]


class CommWaitParams(ctypes.Structure):
    """``magi_comm_wait_params``."""

    _fields_ = [
        ("version", c_int32),
        ("num_waits", c_int32),
        ("epoch", CommEpoch),
        ("waits", c_void_p),
        ("stream", c_void_p),
    ]


class CommSumParams(ctypes.Structure):
    """``magi_comm_sum_params``."""

    _fields_ = [
        *((n, c_int32) for n in ("version", "num_blocks", "num_ctas", "row_values", "wire_dtype")),
        ("epoch", CommEpoch),
        *((name, c_void_p) for name in ("blocks", "waits", "begins", "terms", "stream")),
    ]


class CommEndParams(ctypes.Structure):
    """``magi_comm_end_params``."""

    _fields_ = [
        *((name, c_int32) for name in ("version", "num_ranks", "num_counted")),
        ("epoch", CommEpoch),
        ("ranks", c_void_p),
        ("counted", c_void_p),
        ("signal", c_int64),
        ("stream", c_void_p),
    ]


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
