# SPDX-License-Identifier: Apache-2.0
"""One-shot forms of 1.0.x: make a key and dispatch in one call. Deprecated, kept for existing callers."""

from __future__ import annotations

import warnings
from typing import Any

import torch

from magi_attention.api.keys.interface import dispatch, magi_attn_flex_key, magi_attn_varlen_key
from magi_attention.api.keys.key import DistAttnRuntimeKey
from magi_attention.errors import ContractError

_VARLEN_ORDER = ("num_heads_q", "num_heads_kv", "head_dim", "pad_size", "cp_group_or_mesh", "causal", "window_size")
_FLEX_ORDER = ("num_heads_q", "num_heads_kv", "head_dim", "pad_size", "cp_group_or_mesh", "dist_attn_config")


def magi_attn_varlen_dispatch(
    x: torch.Tensor, cu_seqlens_q: torch.Tensor, cu_seqlens_k: torch.Tensor, *args: Any, **kwargs: Any
) -> tuple[torch.Tensor, DistAttnRuntimeKey]:
    """``(local x, key)``: ``magi_attn_varlen_key`` and ``dispatch`` in one. Takes that function's arguments after
    the lengths, or the spelling of 1.0.x (``head_dim=, pad_size=, cp_group=, causal=, dist_attn_config=``)."""
    _warn("magi_attn_varlen_dispatch", "magi_attn_varlen_key")
    values = _arguments(_VARLEN_ORDER, args, kwargs)
    key = magi_attn_varlen_key(cu_seqlens_q, cu_seqlens_k, **values)
    return dispatch(x, key), key


def magi_attn_flex_dispatch(
    x: torch.Tensor, q_ranges, k_ranges, attn_mask_type, total_seqlen_q: int, total_seqlen_k: int, *args, **kwargs
) -> tuple[torch.Tensor, DistAttnRuntimeKey]:
    """``(local x, key)``: ``magi_attn_flex_key`` and ``dispatch`` in one; arguments as above."""
    _warn("magi_attn_flex_dispatch", "magi_attn_flex_key")
    values = _arguments(_FLEX_ORDER, args, kwargs)
    key = magi_attn_flex_key(q_ranges, k_ranges, attn_mask_type, total_seqlen_q, total_seqlen_k, **values)
    return dispatch(x, key), key


def _warn(old: str, new: str) -> None:
    warnings.warn(f"{old} is deprecated; call {new}(...) and dispatch(x, key).", DeprecationWarning, stacklevel=3)


def _arguments(order: tuple[str, ...], args: tuple, kwargs: dict) -> dict:
    if len(args) > len(order):
        raise ContractError(f"Too many positional arguments; after the mask come {', '.join(order)}.")
    values = dict(zip(order, args))
    twice = values.keys() & kwargs.keys()
    if twice:
        raise ContractError(f"{', '.join(sorted(twice))} given twice, by position and by name.")
    values.update(kwargs)
    for old in ("cp_group", "cp_mesh"):
        if old in values:
            values.setdefault("cp_group_or_mesh", values.pop(old))
    # Old calls name no heads; counts only matter to predicted bytes here.
    for name in ("num_heads_q", "num_heads_kv", "head_dim"):
        values.setdefault(name, 1)
    values["pad_size"] = 0
    if "cp_group_or_mesh" not in values:
        raise ContractError("No process group was given; pass cp_group_or_mesh=.")
    return values
