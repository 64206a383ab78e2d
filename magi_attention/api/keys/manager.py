# SPDX-License-Identifier: Apache-2.0
"""``RuntimeManager``: one key made ready to run; and the caches of keys, one per group."""

from __future__ import annotations

import weakref
from collections import OrderedDict
from functools import partial
from typing import Any

import numpy as np
import torch
from torch.distributed import ProcessGroup

from magi_attention.api.keys.attn_arg import AttnArg
from magi_attention.api.keys.dispatch_meta import (
    DispatchMeta,
    check_source_flags,
    dispatch_metas,
    make_dispatch_meta_from_qk_ranges,
    plan_of_metas,
    slice_table,
)
from magi_attention.api.keys.key import DistAttnRuntimeKey, GroupBound, group_ranks
from magi_attention.api.planning.group_nodes import is_hierarchical, node_levels, with_nodes
from magi_attention.api.policy import policy_from_flags
from magi_attention.comm.transport.process_groups import at_destruction, check_alive, is_destroyed
from magi_attention.comm.transport.torch import as_transport
from magi_attention.common.enum import AttnRole
from magi_attention.common.forward_meta import AttnForwardMeta
from magi_attention.common.intervals import Packing, as_intervals
from magi_attention.common.ranges import AttnRanges
from magi_attention.common.slices import SliceTable
from magi_attention.config import DistAttnConfig
from magi_attention.env import general
from magi_attention.env.snapshot import RuntimeFlags
from magi_attention.errors import ContractError, UnsupportedError
from magi_attention.functional.dist_attn import dist_attn
from magi_attention.functional.runtime import AttnRuntime
from magi_attention.functional.tokens import layout as token_layout
from magi_attention.kernels import default_registry
from magi_attention.meta.plan import Plan
from magi_attention.meta.planner import plan_by_head_groups

_WEIGHED = 2  # keys
_LEAST = 4  # keys that stay whatever their weight: layers of a model may take turns at masks


class RuntimeManager(GroupBound):
    """Moves tensors and runs attention for one key. Equality is by plan and configuration."""

    def __init__(
        self,
        plan: Plan,
        cp_group: Any,
        flags: RuntimeFlags,
        dist_attn_config: DistAttnConfig,
        cp_mesh: Any = None,
    ) -> None:
        self.plan = plan
        self.cp_group = cp_group
        self.cp_mesh = cp_mesh
        self.dist_attn_config = dist_attn_config
        self.flags = flags
        self.num_heads_q, self.num_heads_kv, self.head_dim = plan.num_heads_q, plan.num_heads_kv, plan.head_dim
        self.is_same_source = self.is_q_permutable = self.is_k_permutable = True
        self.is_cleared = False
        self.transport = as_transport(cp_group)
        self.layout = token_layout.TokenLayout(plan, self.transport)
        self.dispatch_meta_q, self.dispatch_meta_k = dispatch_metas(plan, self.transport.rank)
        hierarchy = node_levels(self.transport, cp_mesh, flags) if is_hierarchical(self.transport, flags) else None
        policy = policy_from_flags(flags)
        groups, computed = 1, plan
        if flags.flatten_head_groups and plan.cp_size > 1:
            groups, computed = plan.num_heads_kv, plan_by_head_groups(plan, "always")
            plan.cache.include(computed.cache)
        self.dist_attn_runtime = AttnRuntime(computed, self.transport, default_registry(), policy, hierarchy, groups)

    @property
    def nbytes(self) -> int:
        """Bytes of the tables that were made for the key, on the host and on GPUs."""
        return self.plan.nbytes

    # ---- moving rows --------------------------------------------------------------------------------

    def dispatch_qo(self, q_or_o: torch.Tensor) -> torch.Tensor:
        """This rank's rows of a padded global tensor."""
        return token_layout.shard(q_or_o, self.layout, is_padded=True)

    def undispatch_qo(self, q_or_o: torch.Tensor, is_partial_grad: bool = False) -> torch.Tensor:
        """The padded global tensor from this rank's rows."""
        return token_layout.gather(q_or_o, self.layout, is_partial_grad, keep_pad=True)

    def dispatch_kv(self, k_or_v: torch.Tensor) -> torch.Tensor:
        """As ``dispatch_qo``: keys lie where their queries do."""
        return self.dispatch_qo(k_or_v)

    def undispatch_kv(self, k_or_v: torch.Tensor, is_partial_grad: bool = False) -> torch.Tensor:
        """As ``undispatch_qo``."""
        return self.undispatch_qo(k_or_v, is_partial_grad)

    def roll(self, x: torch.Tensor, shift: int, dim: int) -> torch.Tensor:
        return token_layout.roll(x, self.layout, shift, dim)

    roll_simple = roll

    def get_position_ids(self, attn_role: AttnRole = AttnRole.QUERY) -> torch.Tensor:
        """int64 positions of the local rows, pad rows clipped to the last real token; on the GPU if there is one."""
        return token_layout.positions(self.layout, self.positions_on)

    @property
    def positions_on(self) -> torch.device:
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")

    # ---- attention ----------------------------------------------------------------------------------

    def calc_attn(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, sink: torch.Tensor | None = None,
        softmax_scale: float | None = None, softcap: float = 0.0, return_max_logits: bool = False,
    ) -> tuple[torch.Tensor, AttnForwardMeta]:  # fmt: skip
        """Local ``(out, meta)``; see ``magi_attention.api.calc_attn``."""
        out, *rest = dist_attn(q, k, v, self.dist_attn_runtime, sink, softmax_scale, softcap, return_max_logits)
        return out, AttnForwardMeta(*rest)

    def get_xattn_args(
        self,
        ref_xattn_q_ranges: AttnRanges,
        ref_xattn_k_ranges: AttnRanges,
        attn_mask_type,
        return_host_only: bool = False,
    ) -> AttnArg:
        """Slices of a cross-attention whose queries are dispatched like this key's and whose keys every rank holds.

        FULL only. ``ref_xattn_q_ranges[i]`` (global rows) sees ``ref_xattn_k_ranges[i]``. With
        ``return_host_only`` the q ranges count this rank's local rows; otherwise they are the global pieces of
        all ranks, in rank order. Rows of no q range attend to nothing. ``ContractError`` if this rank holds none.
        """
        types = slice_table(ref_xattn_q_ranges, ref_xattn_k_ranges, attn_mask_type).array[:, 4]
        if types.any():
            raise ContractError("get_xattn_args supports AttnMaskType.FULL only; give full slices.")
        q, k = as_intervals(ref_xattn_q_ranges.to_naive_ranges()), as_intervals(ref_xattn_k_ranges.to_naive_ranges())
        ranks = [self.transport.rank] if return_host_only else range(self.plan.cp_size)
        q_out, k_out = [], []
        for rank in ranks:
            host = Packing(self.plan.host_ranges(rank))
            for (start, end), keys in zip(q.tolist(), k.tolist()):
                low = np.maximum(host.ranges[:, 0], start)
                high = np.minimum(host.ranges[:, 1], end)
                pieces = np.stack([low, high], axis=1)[high > low]
                q_out += (host.localize(pieces) if return_host_only else pieces).tolist()
                k_out += [keys] * len(pieces)
        if not q_out:
            raise ContractError(
                f"None of the given q ranges meets the rows of rank {self.transport.rank}; give q ranges that "
                "cover the dispatched sequence."
            )
        return AttnArg(AttnRanges.from_ranges(q_out), AttnRanges.from_ranges(k_out), [0] * len(q_out))

    # ---- published attributes -----------------------------------------------------------------------

    @property
    def ref_q_ranges(self) -> AttnRanges:
        return AttnRanges.from_ranges(self.plan.slices.array[:, 0:2].tolist())

    @property
    def ref_k_ranges(self) -> AttnRanges:
        return AttnRanges.from_ranges(self.plan.slices.array[:, 2:4].tolist())

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, RuntimeManager):
            return False
        mine = (self.plan, self.transport.rank, self.flags, self.dist_attn_config)
        return mine == (other.plan, other.transport.rank, other.flags, other.dist_attn_config)

    __hash__ = object.__hash__


def init_dist_attn_runtime_mgr(
    q_ranges: AttnRanges,
    k_ranges: AttnRanges,
    attn_mask_type,
    total_seqlen_q: int,
    total_seqlen_k: int,
    num_heads_q: int,
    num_heads_kv: int,
    head_dim: int,
    chunk_size: int,
    cp_group: Any,
    cp_mesh: Any = None,
    dist_attn_config: DistAttnConfig | None = None,
    is_same_source: bool = True,
    is_q_permutable: bool = True,
    is_k_permutable: bool = True,
    ref_dispatch_meta_q: DispatchMeta | None = None,
    ref_dispatch_meta_k: DispatchMeta | None = None,
) -> RuntimeManager:
    """A manager for a padded mask. With both reference metas their partition is used and nothing is dispatched
    anew, so any partition of one's own (zig-zag, say) can be brought."""
    config = dist_attn_config or DistAttnConfig()
    check_source_flags(is_same_source, is_q_permutable, is_k_permutable)
    flags = RuntimeFlags.from_env()
    transport = as_transport(cp_group)
    config = with_nodes(config, cp_group, cp_mesh, flags)
    if (ref_dispatch_meta_q is None) != (ref_dispatch_meta_k is None):
        raise ContractError("Give both ref_dispatch_meta_q and ref_dispatch_meta_k, or neither.")
    meta = ref_dispatch_meta_q
    if meta is None:
        meta, _ = make_dispatch_meta_from_qk_ranges(
            q_ranges,
            k_ranges,
            attn_mask_type,
            total_seqlen_q,
            total_seqlen_k,
            chunk_size,
            transport.size,
            transport.rank,
            config.dispatch_config,
            uneven_shard=config.dispatch_config.uneven_shard,
        )
    elif ref_dispatch_meta_k.partitions != meta.partitions:
        raise UnsupportedError("Queries and keys must share one partition; the two reference metas differ.")
    slices: SliceTable = slice_table(q_ranges, k_ranges, attn_mask_type)
    heads = (num_heads_q, num_heads_kv, head_dim)
    plan = plan_of_metas(slices, meta, config.overlap_config, heads, flags.query_moves)
    return RuntimeManager(plan, cp_group, flags, config, cp_mesh)


class DistAttnRuntimeDict(OrderedDict):
    """Managers by key, least recently used first. Reading, writing and asking ``in`` all count as use.

    Those least recently used go when there are more than ``max_size``, or when the tables of all, on the host and on
    GPUs, take more than ``max_bytes`` (None for any): with a mask of its own in every step they would fill the GPU.
    Whoever holds a key holds its manager.
    """

    def __init__(self, max_size: int, max_bytes: int | None = None) -> None:
        super().__init__()
        self.max_size, self.max_bytes = max_size, max_bytes
        self._bytes: dict[int, int] = {}  # of each manager's tables, by its id

    def __getitem__(self, key):
        value = super().__getitem__(key)
        self.move_to_end(key)
        return value

    def get(self, key, default=None):
        return self[key] if OrderedDict.__contains__(self, key) else default

    def __contains__(self, key) -> bool:
        found = super().__contains__(key)
        if found:
            self.move_to_end(key)
        return found

    def __setitem__(self, key, value) -> None:
        if self.max_bytes is not None:
            self._weigh()
        super().__setitem__(key, value)
        self.move_to_end(key)
        while len(self) > max(self.max_size, 1):  # the newest entry stays whatever the limit
            self._drop_oldest()
        while len(self) > _LEAST and self.max_bytes is not None and sum(self._bytes.values()) > self.max_bytes:
            self._drop_oldest()

    def _drop_oldest(self) -> None:
        self.drop(next(iter(self)))

    def drop(self, key: DistAttnRuntimeKey) -> None:
        """Forgets a key that is there."""
        self._bytes.pop(id(self.pop(key)), None)

    def _weigh(self) -> None:
        """Tables are made when a key is first used, so the newest keys are weighed when another one comes."""
        managers = list(self.values())
        self._bytes = {id(manager): self._bytes.get(id(manager), 0) for manager in managers}
        for manager in managers[-_WEIGHED:]:
            self._bytes[id(manager)] = manager.nbytes

    def get_most_recent_key(self):
        return next(reversed(self)) if len(self) else None


def _drop_destroyed(cached: weakref.ref[DistAttnRuntimeDict]) -> None:
    """Drops the keys of groups that were destroyed: with each go its threads and file handles."""
    found = cached()
    for key in [] if found is None else list(found.keys()):
        if isinstance(key.cp_group, ProcessGroup) and is_destroyed(key.cp_group):
            found.drop(key)  # type: ignore[union-attr]


class DistAttnRuntimeDictManager:
    """One ``DistAttnRuntimeDict`` per group; groups are told apart by their global ranks.

    ``max_size_per_group``: by default what ``MAGI_ATTENTION_DIST_ATTN_RUNTIME_DICT_SIZE`` says when a group is new.
    """

    def __init__(self, max_size_per_group: int | None = None) -> None:
        self._max_size = max_size_per_group
        self._dicts: dict[tuple[int, ...], DistAttnRuntimeDict] = {}

    def _dict(self, ranks: tuple[int, ...]) -> DistAttnRuntimeDict:
        if ranks not in self._dicts:
            size = general.dist_attn_runtime_dict_size() if self._max_size is None else self._max_size
            self._dicts[ranks] = DistAttnRuntimeDict(size, general.dist_attn_runtime_dict_mib() * 2**20 or None)
        return self._dicts[ranks]

    def get(self, key: DistAttnRuntimeKey, default=None):
        return self._dict(key.cp_ranks).get(key, default)

    def __contains__(self, key) -> bool:
        return key in self._dict(key.cp_ranks)

    def __getitem__(self, key) -> RuntimeManager:
        return self._dict(key.cp_ranks)[key]

    def __setitem__(self, key, manager: RuntimeManager) -> None:
        manager.is_cleared = False
        cached = self._dict(key.cp_ranks)
        group = key.cp_group
        if isinstance(group, ProcessGroup):
            check_alive(group)
            if not any(other.cp_group is group for other in cached.keys()):
                at_destruction(group, partial(_drop_destroyed, weakref.ref(cached)))
        cached[key] = manager

    def keys(self, cp_group: Any = None) -> list:
        """Keys of one group, or of all."""
        if cp_group is not None:
            return list(self._dict(group_ranks(cp_group)).keys())
        return [key for cached in self._dicts.values() for key in cached.keys()]

    def get_most_recent_key(self, cp_group: Any):
        return self._dict(group_ranks(cp_group)).get_most_recent_key()

    def clear(self, cp_group: Any = None) -> None:
        """Drops the managers of one group or of all; backward passes under way keep what they need."""
        dicts = list(self._dicts.values()) if cp_group is None else [self._dict(group_ranks(cp_group))]
        for cached in dicts:
            for manager in cached.values():
                manager.is_cleared = True
            cached.clear()
