# SPDX-License-Identifier: Apache-2.0
"""Getters of the communication variables. Each reads the environment when called."""

from __future__ import annotations

from magi_attention.env import registry
from magi_attention.env.general import is_cuda_device_max_connections_one


def is_hierarchical_comm_enable() -> bool:
    return registry.get("MAGI_ATTENTION_HIERARCHICAL_COMM")


def node_sizes() -> tuple[int, ...]:
    """Ranks of each node, or of every node if it is one number; () where MAGI_ATTENTION_NODE_SIZE is unset.

    ``ValueError`` for anything but numbers of at least 1 with commas between them.
    """
    text = registry.get("MAGI_ATTENTION_NODE_SIZE").strip()
    parts = text.split(",") if text else []
    if not all(part.strip().isdecimal() and int(part) > 0 for part in parts):
        raise ValueError(
            f"MAGI_ATTENTION_NODE_SIZE={text!r} is no number of ranks; give one such as 8, or one per node, as 8,8,4."
        )
    return tuple(int(part) for part in parts)


def node_transport() -> str:
    """``nvshmem``, ``gin``, ``all_to_all``, or ``auto``: the first that all ranks of a group have."""
    return registry.get("MAGI_ATTENTION_NODE_TRANSPORT")


def launcher_node() -> int | None:
    """Number of this process's node as torchrun gave it; None under another launcher."""
    return registry.get("GROUP_RANK")


def launcher_node_size() -> int | None:
    """Ranks of this process's node as torchrun gave it; None under another launcher."""
    return registry.get("LOCAL_WORLD_SIZE")


def _sm_margin(name: str) -> int:
    value = registry.get(name)
    if is_native_grpcoll_enable():
        return 0  # native collectives reserve their SMs themselves
    if value is None:
        return 0 if is_cuda_device_max_connections_one() else 4
    return value


def ffa_fwd_sm_margin_save_for_comm() -> int:
    """SMs that forward kernels leave free; by default 4, or 0 with one connection or native collectives."""
    return _sm_margin("MAGI_ATTENTION_FFA_FORWARD_SM_MARGIN")


def ffa_bwd_sm_margin_save_for_comm() -> int:
    """SMs that backward kernels leave free; by default 4, or 0 with one connection or native collectives."""
    return _sm_margin("MAGI_ATTENTION_FFA_BACKWARD_SM_MARGIN")


def is_qo_comm_enable() -> bool:
    return registry.get("MAGI_ATTENTION_QO_COMM")


def is_fwd_high_precision_reduce_enable() -> bool:
    return registry.get("MAGI_ATTENTION_FORWARD_HIGH_PRECISION_REDUCE")


def is_bwd_high_precision_reduce_enable() -> bool:
    return registry.get("MAGI_ATTENTION_BACKWARD_HIGH_PRECISION_REDUCE")


def is_native_grpcoll_enable() -> bool:
    return registry.get("MAGI_ATTENTION_NATIVE_GRPCOLL")


def stage_mode() -> str:
    """``fused`` with MAGI_ATTENTION_NATIVE_GRPCOLL=1, ``staged`` with 0, and ``auto`` where nothing is said."""
    if not registry.is_set("MAGI_ATTENTION_NATIVE_GRPCOLL"):
        return "auto"
    return "fused" if is_native_grpcoll_enable() else "staged"


def dsink_all_reduce_op() -> str:
    """``none``, ``sum`` or ``avg``."""
    return registry.get("MAGI_ATTENTION_DSINK_ALL_REDUCE_OP")
