# SPDX-License-Identifier: Apache-2.0
"""``DispatchMeta``: which chunks each rank holds. May be built by hand to bring one's own partition."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import numpy as np

from magi_attention.common.enum import AttnRole, AttnType
from magi_attention.common.intervals import merge_intervals
from magi_attention.common.ranges import AttnRanges
from magi_attention.common.slices import MaskTypes, SliceTable
from magi_attention.config import DispatchConfig, OverlapConfig
from magi_attention.errors import ContractError, UnsupportedError
from magi_attention.meta.chunking import Cut, chunk_bounds, split_by_chunk
from magi_attention.meta.dispatch import solve_dispatch
from magi_attention.meta.plan import Plan
from magi_attention.meta.planner import PlanOptions, plan_for_partitions

if TYPE_CHECKING:
    import torch


@dataclass
class DispatchMeta:
    """Sizes are tokens of the padded sequence; ``shard_seqlen`` is this rank's count.

    ``partitions[r]`` are the chunk ids of rank r; ``partitions_perm_idxs`` all of them in rank order and
    ``partitions_unperm_idxs`` its inverse. Positions are clipped to ``max_valid_ids - 1``. In the uneven form
    ``chunk_actual_sizes`` and ``split_sizes`` hold the tokens per chunk and per rank.
    """

    attn_role: AttnRole
    attn_type: AttnType
    total_seqlen: int
    shard_seqlen: int
    max_valid_ids: int
    chunk_size: int
    num_chunks: int
    cp_rank: int
    cp_size: int
    partitions: list[list[int]]
    partitions_perm_idxs: list[int]
    partitions_unperm_idxs: list[int]
    chunk_actual_sizes: list[int] | None = None
    split_sizes: list[int] | None = None

    def __post_init__(self) -> None:
        if len(self.partitions) != self.cp_size:
            raise ContractError(f"{len(self.partitions)} partitions for cp_size {self.cp_size}; give one per rank.")
        for name in ("partitions_perm_idxs", "partitions_unperm_idxs"):
            if len(getattr(self, name)) != self.num_chunks:
                raise ContractError(
                    f"{name} has {len(getattr(self, name))} entries for {self.num_chunks} chunks; give one per chunk."
                )

    @property
    def host_ranges_per_rank(self) -> list[AttnRanges]:
        """Merged token ranges of every rank."""
        bounds = chunk_bounds(self.total_seqlen, self.chunk_size)
        return [AttnRanges.from_ranges(merge_intervals(bounds[list(p)]).tolist()) for p in self.partitions]

    @property
    def position_ids(self) -> torch.Tensor:
        """int64 tensor of this rank's positions; on the current GPU if there is one, else on the CPU."""
        import torch

        bounds = chunk_bounds(self.total_seqlen, self.chunk_size)
        parts = [np.arange(*bounds[c]) for c in self.partitions[self.cp_rank]]
        ids = np.minimum(np.concatenate(parts), self.max_valid_ids - 1)
        return torch.from_numpy(ids).to("cuda" if torch.cuda.is_available() else "cpu")


def slice_table(q_ranges: AttnRanges, k_ranges: AttnRanges, attn_mask_type: MaskTypes) -> SliceTable:
    """From the published triple; one type is used for all slices."""
    return SliceTable.from_ranges(q_ranges.to_naive_ranges(), k_ranges.to_naive_ranges(), attn_mask_type)


def check_source_flags(is_same_source: bool, is_q_permutable: bool, is_k_permutable: bool) -> None:
    """Only self-attention with freely permuted tokens exists."""
    if (is_same_source, is_q_permutable, is_k_permutable) == (True, True, True):
        return
    if is_same_source and is_q_permutable != is_k_permutable:
        raise ContractError(
            "is_same_source=True needs is_q_permutable and is_k_permutable to be equal: one sequence has one order."
        )
    raise UnsupportedError(
        "Only is_same_source=True, is_q_permutable=True, is_k_permutable=True is implemented (self-attention)."
    )


def dispatch_metas(plan: Plan, rank: int) -> tuple[DispatchMeta, DispatchMeta]:
    """The dispatch of a plan as metas for queries and keys; both hold the same partition."""
    perm = [chunk for part in plan.partitions for chunk in part]
    uneven = plan.uneven_shard
    both = [
        DispatchMeta(
            attn_role=role,
            attn_type=AttnType.SELF_ATTN,
            total_seqlen=plan.padded_tokens,
            shard_seqlen=plan.shard_sizes[rank],
            max_valid_ids=plan.total_tokens,
            chunk_size=plan.chunk_size,
            num_chunks=plan.num_chunks,
            cp_rank=rank,
            cp_size=plan.cp_size,
            partitions=[list(part) for part in plan.partitions],
            partitions_perm_idxs=perm,
            partitions_unperm_idxs=np.argsort(perm).tolist(),
            chunk_actual_sizes=np.diff(plan.chunk_ranges, axis=1)[:, 0].tolist() if uneven else None,
            split_sizes=list(plan.shard_sizes) if uneven else None,
        )
        for role in (AttnRole.QUERY, AttnRole.KEY)
    ]
    return both[0], both[1]


def make_dispatch_meta_from_qk_ranges(
    q_ranges: AttnRanges,
    k_ranges: AttnRanges,
    attn_mask_type: MaskTypes,
    total_seqlen_q: int,
    total_seqlen_k: int,
    chunk_size: int,
    cp_size: int,
    cp_rank: int,
    dispatch_config: DispatchConfig,
    is_same_source: bool = True,
    is_q_permutable: bool = True,
    is_k_permutable: bool = True,
    uneven_shard: bool = False,
) -> tuple[DispatchMeta, DispatchMeta]:
    """Solves the dispatch of a padded mask; without ``uneven_shard`` the chunks must divide over the ranks."""
    check_source_flags(is_same_source, is_q_permutable, is_k_permutable)
    if total_seqlen_q != total_seqlen_k:
        raise ContractError(f"total_seqlen_q {total_seqlen_q} != total_seqlen_k {total_seqlen_k}: self-attention only.")
    if not uneven_shard and total_seqlen_q % (chunk_size * cp_size):
        raise ContractError(
            f"{total_seqlen_q} tokens do not divide into chunks of {chunk_size} over {cp_size} ranks; pad by "
            "compute_pad_size(total, cp_size, chunk_size) or use uneven_shard."
        )
    slices = slice_table(q_ranges, k_ranges, attn_mask_type)
    bounds = chunk_bounds(total_seqlen_q, chunk_size)
    pieces, chunk_of, slice_of = split_by_chunk(slices.array, bounds)
    config = replace(dispatch_config, chunk_size=chunk_size, uneven_shard=uneven_shard)
    partitions = solve_dispatch(Cut(pieces, chunk_of, bounds), slice_of, cp_size, config)
    pad = padding_of(slices, total_seqlen_q)
    plan = plan_for_partitions(slices, total_seqlen_q - pad, pad, chunk_size, partitions, uneven_shard=uneven_shard)
    return dispatch_metas(plan, cp_rank)


def padding_of(slices: SliceTable, total: int) -> int:
    """Pad tokens of a mask extended by ``apply_padding``: its last slice is the pad rows with no keys."""
    if len(slices):
        q0, q1, k0, k1, _ = slices.array[-1].tolist()
        if q1 == total and (k0, k1) == (0, 0) and q0 > 0:
            return int(q1 - q0)
    return 0


def plan_of_metas(
    slices: SliceTable, meta: DispatchMeta, overlap: OverlapConfig, heads: tuple[int, int, int],
    query_moves: str = "never",
) -> Plan:  # fmt: skip
    """The plan of a padded mask under the partition of ``meta``."""
    return plan_for_partitions(
        slices,
        min(meta.max_valid_ids, meta.total_seqlen),
        meta.total_seqlen - min(meta.max_valid_ids, meta.total_seqlen),
        meta.chunk_size,
        meta.partitions,
        PlanOptions(*heads, query_moves=query_moves),
        overlap=overlap,
        uneven_shard=meta.chunk_actual_sizes is not None,
    )
