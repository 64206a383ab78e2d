# SPDX-License-Identifier: Apache-2.0
"""Attention kernels: one interface, several backends, and the operations around them."""

from magi_attention.kernels.reference.sdpa import SdpaBackend
from magi_attention.kernels.reference.sdpa_online import SdpaOnlineBackend
from magi_attention.kernels.registry import Registry, default_registry
from magi_attention.kernels.rows.merge import merge_ranges
from magi_attention.kernels.rows.ops import range_fill_, range_gather, range_reduce
from magi_attention.kernels.types import (
    AttnOptions,
    Backend,
    BackwardOperands,
    Grads,
    Operands,
    Partial,
    Problem,
    accumulation_dtype,
)

__all__ = [
    "AttnOptions",
    "Backend",
    "BackwardOperands",
    "Grads",
    "Operands",
    "Partial",
    "Problem",
    "Registry",
    "SdpaBackend",
    "SdpaOnlineBackend",
    "accumulation_dtype",
    "default_registry",
    "merge_ranges",
    "range_fill_",
    "range_gather",
    "range_reduce",
]
