# SPDX-License-Identifier: Apache-2.0
"""The collectives as ``comm.primitive`` and ``comm.primitive.grpcoll`` name them."""

from magi_attention.comm.collectives.gather import (
    all2all_v,
    all_gather_fwd_reduce_scatter_bwd,
    all_gather_fwd_scatter_bwd,
    all_gather_v,
    reduce_scatter_v,
    scatter_fwd_all_gather_bwd,
    scatter_v,
)
from magi_attention.comm.collectives.group import group_cast, group_reduce
from magi_attention.comm.collectives.work import GeneralWork, WorkWithPostProcessFn
from magi_attention.compat.comm.grpcoll import GrpCollBuffer, GrpCollBufferMgr, grpcoll_buffer_mgr

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
