# SPDX-License-Identifier: Apache-2.0
"""Configuration of distributed attention: frozen, hashable, picklable values, checked when made.

A config holds what the caller decided and nothing else; environment variables never change one. The
mistakes that the published API reported by ``AssertionError`` raise ``ContractError`` (which is one).
"""

from __future__ import annotations

from magi_attention.config.dispatch import (
    BatchToppHeapDispatchAlg,
    BSDispatchAlg,
    BTPDispatchAlg,
    DispatchAlg,
    DispatchConfig,
    DPDispatchAlg,
    LBDispatchAlg,
    LocalityDispatchAlg,
    MinHeapDispatchAlg,
    RandomSelectDispatchAlg,
    SequentialDispatchAlg,
    SortedSequentialSelectAlg,
    ToppHeapDispatchAlg,
)
from magi_attention.config.dist_attn import DistAttnConfig
from magi_attention.config.grpcoll import GrpCollConfig, GrpCollKernelConfig
from magi_attention.config.overlap import GreedyOverlapAlg, OverlapAlg, OverlapConfig, UniformOverlapAlg

__all__ = [
    "BSDispatchAlg",
    "BTPDispatchAlg",
    "BatchToppHeapDispatchAlg",
    "DPDispatchAlg",
    "DispatchAlg",
    "DispatchConfig",
    "DistAttnConfig",
    "GreedyOverlapAlg",
    "GrpCollConfig",
    "GrpCollKernelConfig",
    "LBDispatchAlg",
    "LocalityDispatchAlg",
    "MinHeapDispatchAlg",
    "OverlapAlg",
    "OverlapConfig",
    "RandomSelectDispatchAlg",
    "SequentialDispatchAlg",
    "SortedSequentialSelectAlg",
    "ToppHeapDispatchAlg",
    "UniformOverlapAlg",
]
