# SPDX-License-Identifier: Apache-2.0
"""``DistAttnRuntimeKey``: what identifies one distributed attention, its group, and the arguments of its makers."""

from __future__ import annotations

import warnings
from dataclasses import dataclass, field, replace
from functools import cached_property
from operator import attrgetter
from typing import TYPE_CHECKING, Any, NoReturn

import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from magi_attention.comm.transport.base import Transport
from magi_attention.comm.transport.process_groups import check_member
from magi_attention.comm.transport.torch import as_transport
from magi_attention.common.enum import AttnMaskType
from magi_attention.common.ranges import AttnRanges
from magi_attention.common.scalars import as_int
from magi_attention.common.slices import type_codes
from magi_attention.config import DistAttnConfig
from magi_attention.env import comm
from magi_attention.env.snapshot import RuntimeFlags, check_flag_comb
from magi_attention.errors import ContractError, UnsupportedError
from magi_attention.functional.calls.attention_check import PlanMark

if TYPE_CHECKING:
    from typing import Self


class GroupBound:
    """A value of one process group, which never changes: a copy of a model that holds it runs in the same group."""

    def __copy__(self) -> Self:
        return self

    def __deepcopy__(self, memo: dict) -> Self:
        return self

    def __reduce_ex__(self, protocol: Any) -> NoReturn:
        raise UnsupportedError(
            f"A {type(self).__name__} cannot be pickled, because it belongs to a process group of this process. Keep "
            "what it was made of, that is the ranges (or cu_seqlens), mask types and configuration, and make a key of "
            "them where it is wanted; or keep a Plan (make_plan), which can be pickled. To save a module that holds a "
            "key, save its state_dict."
        )


@dataclass(frozen=True, eq=False)
class DistAttnRuntimeKey(GroupBound):
    """Frozen and hashable; equality is over all fields whose names have no underscore. Ranges and totals count pads.

    ``flags`` is the environment as it was when the key was made. ``dispatch_identity`` tells keys apart that
    borrow the dispatch of another mask: the partition they use, or None for a dispatch of their own. A key keeps
    its manager alive, so it stays usable for as long as it is held.
    """

    q_ranges: AttnRanges
    k_ranges: AttnRanges
    attn_mask_type: tuple[AttnMaskType, ...]
    total_seqlen_q: int
    total_seqlen_k: int
    num_heads_q: int
    num_heads_kv: int
    head_dim: int
    pad_size: int
    chunk_size: int
    cp_group: Any
    cp_mesh: Any
    dist_attn_config: DistAttnConfig
    flags: RuntimeFlags
    dispatch_identity: tuple[tuple[int, ...], ...] | None = None
    _manager: list = field(default_factory=list, repr=False)
    _facts: Any = field(default=None, repr=False)  # CompiledFacts of the manager
    _mark: PlanMark = field(default_factory=PlanMark, repr=False)

    @cached_property
    def _content(self) -> tuple:
        return (
            tuple(map(tuple, self.q_ranges.to_naive_ranges())),
            tuple(map(tuple, self.k_ranges.to_naive_ranges())),
            self.attn_mask_type,
            (self.total_seqlen_q, self.total_seqlen_k, self.num_heads_q, self.num_heads_kv, self.head_dim),
            (self.pad_size, self.chunk_size),
            self.cp_group,
            self.cp_mesh,
            self.dist_attn_config,
            self.flags,
            self.dispatch_identity,
        )

    @cached_property
    def _hash(self) -> int:
        return hash(self._content)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, DistAttnRuntimeKey) and self._content == other._content

    def __hash__(self) -> int:
        return self._hash

    @cached_property
    def cp_ranks(self) -> tuple[int, ...]:
        """Global ranks of the group, ascending; caches are kept per such tuple."""
        return group_ranks(self.cp_group)

    # Published names of what the configuration and the environment said.
    uneven_shard = property(attrgetter("dist_attn_config.dispatch_config.uneven_shard"))
    is_deterministic_mode_enable = property(attrgetter("flags.deterministic"))
    is_hierarchical_comm_enable = property(attrgetter("flags.hierarchical_comm"))
    is_qo_comm_enable = property(attrgetter("flags.qo_comm"))
    is_native_grpcoll_enable = property(attrgetter("flags.native_grpcoll"))
    is_flatten_head_groups_enable = property(attrgetter("flags.flatten_head_groups"))
    kernel_backend = property(attrgetter("flags.kernel_backend"))
    precision = property(attrgetter("flags.precision"))
    is_auto_range_merge_enable = property(attrgetter("flags.auto_range_merge"))


def group_ranks(cp_group_or_mesh: Any) -> tuple[int, ...]:
    """Global ranks of a group, or of a mesh, ascending."""
    if isinstance(cp_group_or_mesh, DeviceMesh):
        return tuple(sorted(cp_group_or_mesh.mesh.flatten().tolist()))
    return tuple(sorted(as_transport(cp_group_or_mesh).ranks))


def init_dist_attn_runtime_key(
    q_ranges: AttnRanges,
    k_ranges: AttnRanges,
    attn_mask_type,
    total_seqlen_q: int,
    total_seqlen_k: int,
    num_heads_q: int,
    num_heads_kv: int,
    head_dim: int,
    pad_size: int,
    chunk_size: int,
    cp_group: Any,
    cp_mesh: Any,
    dist_attn_config: DistAttnConfig,
    dispatch_identity: tuple[tuple[int, ...], ...] | None = None,
) -> DistAttnRuntimeKey:
    """A key with the environment's settings filled in; ranges are copied. ``ContractError`` for settings that
    exclude each other."""
    flags = RuntimeFlags.from_env()
    check_flag_comb(
        flags,
        uneven_shard=dist_attn_config.dispatch_config.uneven_shard,
        no_overlap=dist_attn_config.overlap_config.no_overlap,
    )
    return DistAttnRuntimeKey(
        q_ranges=q_ranges.clone(),
        k_ranges=k_ranges.clone(),
        attn_mask_type=tuple(normalize_types(attn_mask_type, len(q_ranges))),
        total_seqlen_q=as_int(total_seqlen_q, "total_seqlen_q"),
        total_seqlen_k=as_int(total_seqlen_k, "total_seqlen_k"),
        num_heads_q=as_int(num_heads_q, "num_heads_q"),
        num_heads_kv=as_int(num_heads_kv, "num_heads_kv"),
        head_dim=as_int(head_dim, "head_dim"),
        pad_size=as_int(pad_size, "pad_size"),
        chunk_size=as_int(chunk_size, "chunk_size"),
        cp_group=cp_group,
        cp_mesh=cp_mesh,
        dist_attn_config=dist_attn_config,
        flags=flags,
        dispatch_identity=dispatch_identity,
    )


def normalize_types(attn_mask_type, count: int) -> list[AttnMaskType]:
    """One enum per slice from a name, code or enum, or a sequence of them."""
    types = [AttnMaskType.from_int_type(code) for code in type_codes(attn_mask_type, count)]
    if len(types) != count:
        raise ContractError(f"{len(types)} mask types for {count} slices; give one, or one per slice.")
    return types


def check_ranges(q_ranges: AttnRanges, k_ranges: AttnRanges) -> None:
    """``ContractError`` unless these are as many ranges of queries as of keys, and at least one."""
    for name, ranges in (("q_ranges", q_ranges), ("k_ranges", k_ranges)):
        if not isinstance(ranges, AttnRanges):
            raise ContractError(
                f"{name} is {type(ranges).__name__}; wrap pairs as AttnRanges.from_ranges([[0, n], ...]). Tensors to "
                "dispatch are passed to dispatch(x, key), not to the key maker."
            )
    if len(q_ranges) == 0:
        raise ContractError("q_ranges is empty; give at least one slice (an empty range is allowed).")
    if len(q_ranges) != len(k_ranges):
        raise ContractError(f"{len(q_ranges)} q ranges but {len(k_ranges)} k ranges; give one k range per q range.")


def with_chunk_size(config: DistAttnConfig, chunk_size: int | None, pad_size: int) -> DistAttnConfig:
    """``config`` with the deprecated arguments of a key maker, whose caller is warned."""
    if pad_size:
        warnings.warn(
            "pad_size is ignored: the pad is computed, see key.pad_size. Pass 0.", DeprecationWarning, stacklevel=3
        )
    if chunk_size is None:
        return config
    warnings.warn("chunk_size= is deprecated; use DispatchConfig(chunk_size=...).", DeprecationWarning, stacklevel=3)
    old = config.dispatch_config
    if old.chunk_size is not None and old.chunk_size != chunk_size:
        raise ContractError(
            f"chunk_size={chunk_size} contradicts DispatchConfig(chunk_size={old.chunk_size}); give it once."
        )
    dispatch_config = replace(old, chunk_size=chunk_size)
    return DistAttnConfig(dispatch_config, config.overlap_config, config.grpcoll_config)


_NO_NODES = (
    "MAGI_ATTENTION_HIERARCHICAL_COMM=1 needs to know which ranks share a node; pass a 2-D DeviceMesh (inter-node, "
    "intra-node), set MAGI_ATTENTION_NODE_SIZE, or start the ranks by torchrun."
)


def resolve_group(cp_group_or_mesh: Any, flags: RuntimeFlags) -> tuple[Any, DeviceMesh | None]:
    """``(group, mesh)`` from a process group or a 1-D or 2-D mesh; the group of a mesh is its flattened one.

    ``ContractError`` for a mesh of more dims and, with hierarchical communication, for anything but a 2-D mesh
    (inter-node, intra-node) where nothing else says which ranks share a node.
    """
    needs_mesh = flags.hierarchical_comm and not flags.node_sizes and comm.launcher_node() is None
    if isinstance(cp_group_or_mesh, DeviceMesh):
        mesh = cp_group_or_mesh
        if mesh.get_coordinate() is None:
            raise ContractError(
                f"This process (global rank {dist.get_rank()}) is not in the device mesh {mesh.mesh.tolist()}. Only "
                "its members may call; leave the call out on other ranks."
            )
        if mesh.ndim > 2:
            raise ContractError(f"The mesh has {mesh.ndim} dims; give a 1-D mesh or a 2-D one (inter, intra).")
        if needs_mesh and mesh.ndim != 2:
            raise ContractError(_NO_NODES)
        return (mesh.get_group() if mesh.ndim == 1 else mesh._flatten().get_group()), mesh
    if isinstance(cp_group_or_mesh, (dist.ProcessGroup, Transport)):
        if needs_mesh:
            raise ContractError(_NO_NODES)
        return cp_group_or_mesh, None
    check_member(cp_group_or_mesh)
    raise ContractError(f"cp_group_or_mesh is {type(cp_group_or_mesh).__name__}; pass a ProcessGroup or a DeviceMesh.")
