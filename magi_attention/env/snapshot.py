# SPDX-License-Identifier: Apache-2.0
"""``RuntimeFlags``: every behaviour that the environment can change, read once and then fixed.

A key stores it, so that a variable set later never changes what an existing key does.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from magi_attention.env import comm, general
from magi_attention.errors import ContractError

if TYPE_CHECKING:
    from magi_attention.common.enum import MagiAttentionKernelBackend, MagiAttentionPrecision


@dataclass(frozen=True)
class RuntimeFlags:
    """Frozen, hashable, picklable. ``kernel_backend`` is a ``MagiAttentionKernelBackend``; ``precision`` a
    ``MagiAttentionPrecision`` or None; SM margins count SMs; ``dsink_all_reduce_op`` is none, sum or avg;
    ``node_sizes`` are ranks per node, one for all nodes or one each, empty where the launcher or a mesh says it;
    ``node_transport`` is auto, nvshmem, gin or all_to_all.
    """

    kernel_backend: MagiAttentionKernelBackend
    is_kernel_backend_explicit: bool = False
    precision: MagiAttentionPrecision | None = None
    deterministic: bool = False
    hierarchical_comm: bool = False
    node_sizes: tuple[int, ...] = ()
    node_transport: str = "auto"
    qo_comm: bool = False
    native_grpcoll: bool = False
    stage_mode: str = "auto"
    flatten_head_groups: bool = False
    auto_range_merge: bool = False
    hide_tail_reduce: bool = False
    fwd_high_precision_reduce: bool = False
    bwd_high_precision_reduce: bool = False
    fwd_sm_margin: int = 4
    bwd_sm_margin: int = 4
    dsink_all_reduce_op: str = "none"
    sanity_check: bool = False
    max_connections_one: bool = False
    min_chunks_per_rank: int = 8
    head_chunks: int = 1

    @property
    def query_moves(self) -> str:
        """As of ``build_plan``. With head groups of their own queries move in the plan of these alone."""
        return "always" if self.qo_comm and not self.flatten_head_groups else "never"

    @classmethod
    def from_env(cls) -> RuntimeFlags:
        """Reads the environment now; ``ValueError`` or ``ContractError`` if a variable makes no sense."""
        return cls(
            kernel_backend=general.kernel_backend(),
            is_kernel_backend_explicit=general.is_kernel_backend_explicit(),
            precision=general.precision(),
            deterministic=general.is_deterministic_mode_enable(),
            hierarchical_comm=comm.is_hierarchical_comm_enable(),
            node_sizes=comm.node_sizes(),
            node_transport=comm.node_transport(),
            qo_comm=comm.is_qo_comm_enable(),
            native_grpcoll=comm.is_native_grpcoll_enable(),
            stage_mode=comm.stage_mode(),
            flatten_head_groups=general.is_flatten_head_groups_enable(),
            auto_range_merge=general.is_auto_range_merge_enable(),
            hide_tail_reduce=general.dist_attn_backward_hide_tail_reduce(),
            fwd_high_precision_reduce=comm.is_fwd_high_precision_reduce_enable(),
            bwd_high_precision_reduce=comm.is_bwd_high_precision_reduce_enable(),
            fwd_sm_margin=comm.ffa_fwd_sm_margin_save_for_comm(),
            bwd_sm_margin=comm.ffa_bwd_sm_margin_save_for_comm(),
            dsink_all_reduce_op=comm.dsink_all_reduce_op(),
            sanity_check=general.is_sanity_check_enable(),
            max_connections_one=general.is_cuda_device_max_connections_one(),
            min_chunks_per_rank=general.min_chunks_per_rank(),
            head_chunks=general.head_chunks(),
        )


_DETERMINISTIC = "MAGI_ATTENTION_DETERMINISTIC_MODE=1"
_HIERARCHICAL = "MAGI_ATTENTION_HIERARCHICAL_COMM=1"
_QO = "MAGI_ATTENTION_QO_COMM=1"
_FLATTEN = "MAGI_ATTENTION_FLATTEN_HEAD_GROUPS=1"
_HIDE_TAIL = "MAGI_ATTENTION_BWD_HIDE_TAIL_REDUCE=1"
_FA4 = "the fa4 kernel backend"
_FWD_FP32 = "MAGI_ATTENTION_FORWARD_HIGH_PRECISION_REDUCE=1"
_BWD_FP32 = "MAGI_ATTENTION_BACKWARD_HIGH_PRECISION_REDUCE=1"
_HEAD_CHUNKS = "MAGI_ATTENTION_HEAD_CHUNKS above 1"
_UNEVEN = "DispatchConfig(uneven_shard=True)"
_NO_OVERLAP = "OverlapConfig(degree=0)"

_EXCLUSIVE = (
    (_DETERMINISTIC, _FA4),
    (_HIERARCHICAL, _QO),
    (_HIERARCHICAL, _FLATTEN),
    (_QO, _FA4),
    (_QO, _HIDE_TAIL),
    (_QO, _NO_OVERLAP),
    (_FLATTEN, _FA4),
    (_FLATTEN, _HIDE_TAIL),
    (_FLATTEN, _NO_OVERLAP),
    (_FLATTEN, _UNEVEN),
    (_FLATTEN, _HEAD_CHUNKS),
    (_FWD_FP32, _FA4),
    (_BWD_FP32, _FA4),
)


def check_flag_comb(flags: RuntimeFlags, *, uneven_shard: bool = False, no_overlap: bool = False) -> None:
    """Rejects combinations that cannot work together.

    Args:
        flags: the snapshot to check.
        uneven_shard: the dispatch config asks for uneven shards.
        no_overlap: the overlap config has degree 0.
    Raises:
        ContractError: two settings exclude each other, or backend and precision do not fit.
    """
    backend = flags.kernel_backend.value
    active = {
        _DETERMINISTIC: flags.deterministic,
        _HIERARCHICAL: flags.hierarchical_comm,
        _QO: flags.qo_comm,
        _FLATTEN: flags.flatten_head_groups,
        _HIDE_TAIL: flags.hide_tail_reduce,
        _FA4: backend == "fa4",
        _FWD_FP32: flags.fwd_high_precision_reduce,
        _BWD_FP32: flags.bwd_high_precision_reduce,
        _HEAD_CHUNKS: flags.head_chunks > 1,
        _UNEVEN: uneven_shard,
        _NO_OVERLAP: no_overlap,
    }
    for first, second in _EXCLUSIVE:
        if active[first] and active[second]:
            raise ContractError(f"{first} and {second} exclude each other; drop one of them.")
    if flags.flatten_head_groups and not flags.qo_comm:
        raise ContractError(f"{_FLATTEN} needs {_QO}; set both or neither.")
    if backend in ("ffa", "fa4") and flags.precision is not None and flags.precision.value in ("fp32", "fp64"):
        raise ContractError(
            f"The {backend} kernel backend computes in bf16 or fp16, not in {flags.precision.value}; set "
            "MAGI_ATTENTION_PRECISION to bf16 or fp16, or MAGI_ATTENTION_KERNEL_BACKEND to sdpa or sdpa_ol."
        )
