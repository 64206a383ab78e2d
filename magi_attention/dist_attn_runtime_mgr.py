# compatibility alias
# SPDX-License-Identifier: Apache-2.0
"""Published import path of keys and managers; they live in ``magi_attention.api``."""

from magi_attention.api.key import DistAttnRuntimeKey, init_dist_attn_runtime_key
from magi_attention.api.manager import DistAttnRuntimeDict, DistAttnRuntimeMgr, init_dist_attn_runtime_mgr
from magi_attention.env.snapshot import check_flag_comb

__all__ = [
    "DistAttnRuntimeDict",
    "DistAttnRuntimeKey",
    "DistAttnRuntimeMgr",
    "check_flag_comb",
    "init_dist_attn_runtime_key",
    "init_dist_attn_runtime_mgr",
]
