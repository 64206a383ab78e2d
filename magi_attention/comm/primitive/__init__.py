# SPDX-License-Identifier: Apache-2.0
"""The collectives under their published import path."""

from magi_attention.comm.gather import (
    all2all_v,
    all_gather_fwd_reduce_scatter_bwd,
    all_gather_fwd_scatter_bwd,
    all_gather_v,
    reduce_scatter_v,
    scatter_fwd_all_gather_bwd,
    scatter_v,
)
from magi_attention.comm.primitive.grpcoll import (
    GrpCollBuffer,
    GrpCollBufferMgr,
    group_cast,
    group_reduce,
    grpcoll_buffer_mgr,
)
from magi_attention.comm.work import GeneralWork, WorkWithPostProcessFn

__all__ = [
    "GeneralWork",
    "GrpCollBuffer",
    "GrpCollBufferMgr",
    "WorkWithPostProcessFn",
    "all2all_v",
    "all_gather_fwd_reduce_scatter_bwd",
    "all_gather_fwd_scatter_bwd",
    "all_gather_v",
    "group_cast",
    "group_reduce",
    "grpcoll_buffer_mgr",
    "reduce_scatter_v",
    "scatter_fwd_all_gather_bwd",
    "scatter_v",
]
