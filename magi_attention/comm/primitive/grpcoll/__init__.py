# SPDX-License-Identifier: Apache-2.0
"""Group collectives and their buffer manager under their published import path."""

from magi_attention.comm.gather import all2all_v, all_gather_v, scatter_v
from magi_attention.comm.group_collective import group_cast, group_reduce
from magi_attention.comm.primitive.grpcoll.buffer_mgr import (
    GrpCollBuffer,
    GrpCollBufferMgr,
    grpcoll_buffer_mgr,
)
from magi_attention.comm.work import GeneralWork, WorkWithPostProcessFn

__all__ = [
    "GeneralWork",
    "GrpCollBuffer",
    "GrpCollBufferMgr",
    "WorkWithPostProcessFn",
    "all2all_v",
    "all_gather_v",
    "group_cast",
    "group_reduce",
    "grpcoll_buffer_mgr",
    "scatter_v",
]
