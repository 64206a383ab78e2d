# SPDX-License-Identifier: Apache-2.0
"""Enumerations of the public API. Values are strings, always."""

from __future__ import annotations

from enum import Enum
from typing import Literal

from magi_attention.errors import ContractError

AttnSinkLayout = Literal["sh", "ssh", "shd"]
GroupReduceOp = Literal["sum", "avg", "lse"]


class AttnMaskType(Enum):
    """Shape of the allowed pairs inside one AttnSlice.

    The integer form used by kernels has bit 0 set where the lower-right diagonal bounds the keys
    (causal) and bit 1 where the upper-left diagonal does (inverse causal).
    """

    FULL = "full"
    CAUSAL = "causal"
    BICAUSAL = "bi_causal"
    INVCAUSAL = "inv_causal"

    def to_int_type(self) -> int:
        return _INT_OF_TYPE[self]

    @classmethod
    def from_int_type(cls, int_type: int) -> AttnMaskType:
        try:
            return _TYPE_OF_INT[int(int_type)]
        except KeyError:
            raise ContractError(
                f"{int_type} is no mask type; use 0 (full), 1 (causal), 2 (inv_causal) or 3 (bi_causal)."
            ) from None


_INT_OF_TYPE = {
    AttnMaskType.FULL: 0,
    AttnMaskType.CAUSAL: 1,
    AttnMaskType.INVCAUSAL: 2,
    AttnMaskType.BICAUSAL: 3,
}
_TYPE_OF_INT = {value: key for key, value in _INT_OF_TYPE.items()}


class AttnType(Enum):
    SELF_ATTN = "self_attn"
    CROSS_ATTN = "cross_attn"


class AttnRole(Enum):
    QUERY = "query"
    KEY = "key"
    VALUE = "value"


class AttnOverlapMode(Enum):
    STATIC = "static"
    DYNAMIC = "dynamic"


class DispatchAlgType(Enum):
    LOWER_BOUND = "lower_bound"
    DYNAMIC_PROGRAMMING = "dynamic_programming"
    BINARY_SEARCH = "binary_search"
    MIN_HEAP = "min_heap"
    TOPP_HEAP = "topp_heap"
    BACKTRACKING_PRUNING = "backtracing_pruning"  # the published value is spelled so
    RANDOM_SELECT = "random_select"
    SEQUENTIAL_SELECT = "sequential_select"
    BATCH_TOPP_HEAP = "batch_topp_heap"
    SORTED_SEQUENTIAL_SELECT = "sorted_sequential_select"
    LOCALITY = "locality"  # not a published one


class OverlapAlgType(Enum):
    UNIFORM = "uniform"
    GREEDY = "greedy"


class DynamicAttnAlgType(Enum):
    NON_COMMUNICATION_QO = "non_communication_qo"
    GREEDY_RANDOM_GRID = "greedy_random_grid"
    SIMPLEX_NETWORK_FLOW = "simplex_network_flow"
    FAST_SIMPLEX_NETWORK_FLOW = "fast_simplex_network_flow"
    BINARY_GREEDY = "binary_greedy"
    BINARY_GREEDY_PARALLEL = "binary_greedy_parallel"


class MagiAttentionKernelBackend(Enum):
    FFA = "ffa"
    SDPA = "sdpa"
    SDPA_OL = "sdpa_ol"
    FA4 = "fa4"


class MagiAttentionPrecision(Enum):
    BF16 = "bf16"
    FP16 = "fp16"
    FP32 = "fp32"
    FP64 = "fp64"

    def to_torch_dtype(self):
        import torch

        return {
            "bf16": torch.bfloat16,
            "fp16": torch.float16,
            "fp32": torch.float32,
            "fp64": torch.float64,
        }[self.value]


class GrpCollBufferName(Enum):
    GROUP_CAST_DEFAULT = "group_cast_default"
    GROUP_REDUCE_DEFAULT = "group_reduce_default"
    GROUP_CAST_QO = "group_cast_qo"
    GROUP_REDUCE_QO = "group_reduce_qo"
