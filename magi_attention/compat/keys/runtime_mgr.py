# SPDX-License-Identifier: Apache-2.0
"""``dist_attn_runtime_mgr``: keys and managers. They live in ``magi_attention.api``; the constructor is the published
one."""

from __future__ import annotations

from typing import Any

from magi_attention import env
from magi_attention.api.keys.dispatch_meta import DispatchMeta, check_source_flags
from magi_attention.api.keys.key import DistAttnRuntimeKey, init_dist_attn_runtime_key
from magi_attention.api.keys.manager import DistAttnRuntimeDict, RuntimeManager, init_dist_attn_runtime_mgr
from magi_attention.common.ranges import AttnRanges
from magi_attention.compat.comm.grpcoll import grpcoll_buffer_mgr
from magi_attention.compat.metas.builders import DistAttnSolver
from magi_attention.config import DistAttnConfig
from magi_attention.env.snapshot import RuntimeFlags, check_flag_comb
from magi_attention.errors import ContractError
from magi_attention.functional.runtime import AttnRuntime

__all__ = [
    "DistAttnRuntimeDict",
    "DistAttnRuntimeKey",
    "DistAttnRuntimeMgr",
    "check_flag_comb",
    "init_dist_attn_runtime_key",
    "init_dist_attn_runtime_mgr",
    "init_grpcoll_buffer_mgr",
]


def _attn_solver(manager: RuntimeManager) -> DistAttnSolver:
    """The solver in its published form, solved."""
    heads = (manager.num_heads_q, manager.num_heads_kv, manager.head_dim)
    solver = DistAttnSolver(*heads, manager.plan.overlap, manager.cp_group, manager.cp_mesh)
    solver.plan, solver.rank = manager.plan, manager.transport.rank
    return solver


# Published attributes are there on every manager, and the core has no use for this one.
setattr(RuntimeManager, "attn_solver", property(_attn_solver))  # noqa: B010


class _InstancesAreManagers(type):
    def __instancecheck__(cls, instance: Any) -> bool:
        return isinstance(instance, RuntimeManager)


class DistAttnRuntimeMgr(RuntimeManager, metaclass=_InstancesAreManagers):
    """A manager of what ``init_dist_attn_runtime_mgr`` or the solver made. Every manager is an instance of it."""

    def __init__(
        self,
        dispatch_meta_q: DispatchMeta,
        dispatch_meta_k: DispatchMeta,
        dist_attn_config: DistAttnConfig,
        attn_solver: Any,
        dist_attn_runtime: AttnRuntime,
        num_heads_q: int,
        num_heads_kv: int,
        head_dim: int,
        cp_group: Any,
        *,
        ref_q_ranges: AttnRanges,
        ref_k_ranges: AttnRanges,
        is_same_source: bool,
        is_q_permutable: bool,
        is_k_permutable: bool,
    ) -> None:
        check_source_flags(is_same_source, is_q_permutable, is_k_permutable)
        if dist_attn_runtime.head_groups > 1:
            raise ContractError(
                "The runtime is for head groups of their own (MAGI_ATTENTION_FLATTEN_HEAD_GROUPS=1), whose rows are "
                "not those of the metas; use the manager that init_dist_attn_runtime_mgr returned."
            )
        plan = dist_attn_runtime.plan
        held = [list(part) for part in plan.partitions]
        if dispatch_meta_q.partitions != held or dispatch_meta_k.partitions != held:
            raise ContractError("The dispatch metas are not those of the runtime; give the ones it was made with.")
        if (num_heads_q, num_heads_kv, head_dim) != (plan.num_heads_q, plan.num_heads_kv, plan.head_dim):
            raise ContractError(
                f"The runtime is for {plan.num_heads_q} query heads, {plan.num_heads_kv} key heads and head dim "
                f"{plan.head_dim}; give the same."
            )
        super().__init__(plan, cp_group, RuntimeFlags.from_env(), dist_attn_config, attn_solver.cp_mesh)
        self.dist_attn_runtime = dist_attn_runtime
        if (self.ref_q_ranges, self.ref_k_ranges) != (ref_q_ranges, ref_k_ranges):
            raise ContractError("ref_q_ranges and ref_k_ranges are not the mask of the runtime; give those.")


def init_grpcoll_buffer_mgr(
    comm_meta: Any, calc_meta: Any, attn_solver: Any, grpcoll_config: Any, cp_group: Any
) -> None:
    """Nothing to do unless native collectives are on, which then say that they need no buffers."""
    if env.comm.is_native_grpcoll_enable():
        grpcoll_buffer_mgr.initialize(group=cp_group, config=grpcoll_config)
