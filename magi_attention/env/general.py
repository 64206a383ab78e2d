# SPDX-License-Identifier: Apache-2.0
"""Getters of the general variables. Each reads the environment when called."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

from magi_attention.env import registry
from magi_attention.errors import ContractError

if TYPE_CHECKING:
    from magi_attention.common.enum import MagiAttentionKernelBackend, MagiAttentionPrecision


def log_level() -> int:
    """Level for ``logging``; an unknown name means WARN."""
    return getattr(logging, registry.get("MAGI_ATTENTION_LOG_LEVEL"))


def is_sanity_check_enable() -> bool:
    return registry.get("MAGI_ATTENTION_SANITY_CHECK")


def is_flatten_head_groups_enable() -> bool:
    return registry.get("MAGI_ATTENTION_FLATTEN_HEAD_GROUPS")


def kernel_backend() -> MagiAttentionKernelBackend:
    """The backend asked for, FFA if none is.

    Raises:
        ValueError: unknown name.
        ContractError: more than one of KERNEL_BACKEND, SDPA_BACKEND and FA4_BACKEND is given.
    """
    from magi_attention.common.enum import MagiAttentionKernelBackend

    asked = _asked_backends()
    if len(asked) > 1:
        raise ContractError(f"{' and '.join(asked)} are both set; keep MAGI_ATTENTION_KERNEL_BACKEND only.")
    if "MAGI_ATTENTION_SDPA_BACKEND" in asked:
        return MagiAttentionKernelBackend.SDPA
    if "MAGI_ATTENTION_FA4_BACKEND" in asked:
        return MagiAttentionKernelBackend.FA4
    return MagiAttentionKernelBackend(registry.get("MAGI_ATTENTION_KERNEL_BACKEND"))


def is_kernel_backend_explicit() -> bool:
    """Did the user ask for a backend, rather than get the default?"""
    return bool(_asked_backends())


def _asked_backends() -> list[str]:
    asked = ["MAGI_ATTENTION_KERNEL_BACKEND"] if registry.is_set("MAGI_ATTENTION_KERNEL_BACKEND") else []
    return asked + [
        name for name in ("MAGI_ATTENTION_SDPA_BACKEND", "MAGI_ATTENTION_FA4_BACKEND") if registry.get(name)
    ]


def precision() -> MagiAttentionPrecision | None:
    """The precision to cast to, or None to compute in the dtype of the tensors."""
    from magi_attention.common.enum import MagiAttentionPrecision

    value = registry.get("MAGI_ATTENTION_PRECISION")
    return None if value is None else MagiAttentionPrecision(value)


def is_cuda_device_max_connections_one() -> bool:
    return registry.get("CUDA_DEVICE_MAX_CONNECTIONS") == 1


def is_deterministic_mode_enable() -> bool:
    return registry.get("MAGI_ATTENTION_DETERMINISTIC_MODE")


def index_forward() -> str:
    """``auto``, ``gather`` or ``blocks``: how the forward of index attention brings the keys of a list."""
    return registry.get("MAGI_ATTENTION_INDEX_FORWARD")


def index_backward() -> str:
    """``auto``, ``queries`` or ``keys``: what a CTA of the backward of index attention keeps."""
    return registry.get("MAGI_ATTENTION_INDEX_BACKWARD")


def is_profile_mode_enable() -> bool:
    return registry.get("MAGI_ATTENTION_PROFILE_MODE")


def is_auto_range_merge_enable() -> bool:
    return registry.get("MAGI_ATTENTION_AUTO_RANGE_MERGE")


def is_cat_gqa_enable() -> bool:
    return registry.get("MAGI_ATTENTION_CATGQA")


def dist_attn_backward_hide_tail_reduce() -> bool:
    return registry.get("MAGI_ATTENTION_BWD_HIDE_TAIL_REDUCE")


def dist_attn_runtime_dict_size() -> int:
    """How many keys are kept per process group."""
    return registry.get("MAGI_ATTENTION_DIST_ATTN_RUNTIME_DICT_SIZE")


def dist_attn_runtime_dict_mib() -> int:
    """How much memory the tables of the kept keys of a process group may take, host and GPU together; 0 for any."""
    return registry.get("MAGI_ATTENTION_DIST_ATTN_RUNTIME_DICT_MIB")


def min_chunks_per_rank() -> int:
    """Every rank gets at least about so many chunks, which bounds the chunk size from above."""
    return registry.get("MAGI_ATTENTION_MIN_CHUNKS_PER_RANK")


def head_chunks() -> int:
    """In so many parts kv heads go through communication and attention, to save memory."""
    return registry.get("MAGI_ATTENTION_HEAD_CHUNKS")


def rates_file() -> str:
    """File in which `magi tune` keeps what it measured; empty if unset."""
    return registry.get("MAGI_ATTENTION_RATES_FILE")


def is_cpp_backend_enable() -> bool:
    return registry.get("MAGI_ATTENTION_CPP_BACKEND")


def remote_debug_ranks() -> str:
    """``false``, ``true`` (rank 0), ``all`` or a comma list of ranks."""
    return registry.get("MAGI_ATTENTION_ENABLE_REMOTE_DEBUG").strip().lower()
