# SPDX-License-Identifier: Apache-2.0
"""What a rank sends and receives per stage, in the published form."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from magi_attention.common.group_spec import GroupSpec

# argument of a cast -> that of the reduce which is its transpose
_OTHER_SIDE = {
    "input_split_sizes": "output_split_sizes", "output_split_sizes": "input_split_sizes",
    "dst_indices": "src_indices", "src_index": "dst_index", "group": "group",
}  # fmt: skip


@dataclass
class GroupCollectiveArg:
    """Arguments of one group cast and of the group reduce that is its transpose; sizes in rows.

    ``packed_times=2`` stands for K and V put one after the other along the rows.
    """

    input_split_size_list: list[int]
    output_split_size_list: list[int]
    dst_indices_list: list[list[int]]
    src_index_list: list[int]
    rank: int
    world_size: int
    group: Any = None
    device_mesh: Any = None
    deterministic: bool = False
    split_alignment: int = 1
    packed_times: int = 1

    @classmethod
    def from_spec(cls, spec: GroupSpec, group: Any = None, **kwargs: Any) -> GroupCollectiveArg:
        return cls(
            list(spec.input_splits),
            list(spec.output_splits),
            [list(dst) for dst in spec.dst_indices],
            list(spec.src_index),
            spec.rank,
            spec.world,
            group,
            **kwargs,
        )

    def to_spec(self) -> GroupSpec:
        return GroupSpec.make(
            self.rank,
            self.world_size,
            self.input_split_size_list * self.packed_times,
            self.dst_indices_list * self.packed_times,
            self.output_split_size_list * self.packed_times,
            self.src_index_list * self.packed_times,
        )

    def to_group_cast_args(self) -> dict[str, Any]:
        """Keyword arguments of ``group_cast``."""
        n = self.packed_times
        return {
            "input_split_sizes": self.input_split_size_list * n,
            "output_split_sizes": self.output_split_size_list * n,
            "dst_indices": self.dst_indices_list * n,
            "src_index": self.src_index_list * n,
            "group": self.group,
        }

    def to_group_reduce_args(self) -> dict[str, Any]:
        """Keyword arguments of ``group_reduce``: the same with both sides exchanged."""
        return {_OTHER_SIDE[name]: value for name, value in self.to_group_cast_args().items()}


class A2AVBasedGroupCollectiveArg(GroupCollectiveArg):
    """The all-to-all-v form; the layout is prepared by the runtime."""


class NativeGroupCollectiveArg(GroupCollectiveArg):
    """Arguments of the native collectives, which take the plain ones here."""


@dataclass
class CommMeta:
    """Group collectives of one rank, one per remote stage; those of queries, whose outputs go back by the transpose,
    only where queries move."""

    num_remote_kv_tokens_per_stage: list[int]
    kv_group_collective_args_list: list[GroupCollectiveArg]
    num_remote_qo_tokens_per_stage: list[int]
    qo_group_collective_args_list: list[GroupCollectiveArg]
    num_heads_q: int = 1
    num_heads_kv: int = 1
    head_dim: int = 1

    @property
    def overlap_degree(self) -> int:
        return len(self.num_remote_kv_tokens_per_stage)
