# SPDX-License-Identifier: Apache-2.0
"""Enumerations of the public API. Values are strings, always.

Members are compared by value, so that members made before and after a reload of this module are the same to
every caller. Arguments are read with ``NameOfEnum.of(argument)``, never with ``isinstance`` or ``is``.
"""

from __future__ import annotations

from enum import Enum
from numbers import Integral
from typing import TYPE_CHECKING, Any, Literal, cast

from magi_attention.errors import ContractError

if TYPE_CHECKING:
    from typing import Self

    import torch

AttnSinkLayout = Literal["sh", "ssh", "shd"]
GroupReduceOp = Literal["sum", "avg", "lse"]


class ValueEnum(Enum):
    """Enumeration whose members equal those of the same class in another copy of this module."""

    @classmethod
    def of(cls, value: Any) -> Self:
        """The member given as itself, as a member of another copy of the class, or by its value.

        Raises:
            ContractError: it is none of these.
        """
        try:
            return cls(value.value if _is_copy(type(value), cls) else value)
        except ValueError:
            names = ", ".join(repr(member.value) for member in cls)
            raise ContractError(f"Unknown {cls.__name__} {value!r}; use one of {names}.") from None

    def __eq__(self, other: object) -> bool:
        return self is other or (_is_copy(type(other), type(self)) and self.value == cast(ValueEnum, other).value)

    # The name, as for every Enum: equal in all copies.
    __hash__ = Enum.__hash__


def _is_copy(kind: type, of: type) -> bool:
    return (kind.__module__, kind.__qualname__) == (of.__module__, of.__qualname__)


class AttnMaskType(ValueEnum):
    """Shape of the allowed pairs inside one AttnSlice.

    The integer form used by kernels has bit 0 set where the lower-right diagonal bounds the keys
    (causal) and bit 1 where the upper-left diagonal does (inverse causal).
    """

    FULL = "full"
    CAUSAL = "causal"
    BICAUSAL = "bi_causal"
    INVCAUSAL = "inv_causal"

    @classmethod
    def of(cls, value: Any) -> AttnMaskType:
        """As ``ValueEnum.of``, and from an integer form, NumPy's integers included."""
        return cls.from_int_type(int(value)) if isinstance(value, Integral) else super().of(value)

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


class AttnType(ValueEnum):
    SELF_ATTN = "self_attn"
    CROSS_ATTN = "cross_attn"


class AttnRole(ValueEnum):
    QUERY = "query"
    KEY = "key"
    VALUE = "value"


class AttnOverlapMode(ValueEnum):
    STATIC = "static"
    DYNAMIC = "dynamic"


class DispatchAlgType(ValueEnum):
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


class OverlapAlgType(ValueEnum):
    UNIFORM = "uniform"
    GREEDY = "greedy"


class DynamicAttnAlgType(ValueEnum):
    NON_COMMUNICATION_QO = "non_communication_qo"
    GREEDY_RANDOM_GRID = "greedy_random_grid"
    SIMPLEX_NETWORK_FLOW = "simplex_network_flow"
    FAST_SIMPLEX_NETWORK_FLOW = "fast_simplex_network_flow"
    BINARY_GREEDY = "binary_greedy"
    BINARY_GREEDY_PARALLEL = "binary_greedy_parallel"
    QUERY_MOVES = "query_moves"  # not a published one


class MagiAttentionKernelBackend(ValueEnum):
    FFA = "ffa"
    SDPA = "sdpa"
    SDPA_OL = "sdpa_ol"
    FA4 = "fa4"
    CUDNN_FLEX = "cudnn_flex"


class MagiAttentionPrecision(ValueEnum):
    BF16 = "bf16"
    FP16 = "fp16"
    FP32 = "fp32"
    FP64 = "fp64"

    def to_torch_dtype(self) -> torch.dtype:
        import torch

        return {
            "bf16": torch.bfloat16,
            "fp16": torch.float16,
            "fp32": torch.float32,
            "fp64": torch.float64,
        }[self.value]


class GrpCollBufferName(ValueEnum):
    # Spelled as published.
    GroupCastDefault = "group_cast_default"
    GroupReduceDefault = "group_reduce_default"
    GroupCastQO = "group_cast_qo"
    GroupReduceQO = "group_reduce_qo"
