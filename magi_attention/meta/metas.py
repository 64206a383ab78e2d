# SPDX-License-Identifier: Apache-2.0
"""The published builders, as views of plans: buckets, dispatch metas, calc and comm metas."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from magi_attention.common.enum import AttnMaskType, AttnRole, AttnType
from magi_attention.common.ranges import AttnRanges
from magi_attention.common.slices import MaskTypes, SliceTable
from magi_attention.config import DispatchConfig, OverlapConfig
from magi_attention.errors import ContractError, UnsupportedError
from magi_attention.meta.chunking import Cut, chunk_bounds, split_by_chunk
from magi_attention.meta.collection import (
    A2AVBasedGroupCollectiveArg,
    AttnArg,
    CalcMeta,
    CommMeta,
    DispatchMeta,
)
from magi_attention.meta.container import AttnBucket, AttnChunk, AttnSlice
from magi_attention.meta.dispatch import solve_dispatch
from magi_attention.meta.plan import Plan
from magi_attention.meta.planner import PlanOptions, plan_for_partitions


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


def make_global_bucket_from_qk_ranges(
    q_ranges: AttnRanges,
    k_ranges: AttnRanges,
    attn_mask_type: MaskTypes,
    num_chunks: int,
    chunk_size: int,
    chunk_actual_sizes: list[int] | None = None,
    sort: bool = True,
) -> AttnBucket:
    """All chunks with their slices. ``sort`` is accepted; slices are always taken in q order."""
    total = sum(chunk_actual_sizes) if chunk_actual_sizes else num_chunks * chunk_size
    bounds = chunk_bounds(total, chunk_size)
    if len(bounds) != num_chunks:
        raise ContractError(f"{total} tokens in chunks of {chunk_size} give {len(bounds)} chunks, not {num_chunks}.")
    pieces, chunk_of, slice_of = split_by_chunk(slice_table(q_ranges, k_ranges, attn_mask_type).array, bounds)
    chunks = [AttnChunk(i) for i in range(num_chunks)]
    for row, chunk, sample in zip(pieces, chunk_of.tolist(), slice_of.tolist()):
        chunks[chunk].q_slices.append(AttnSlice.from_row(row, len(chunks[chunk].q_slices)))
        chunks[chunk].sample_ids.append(sample)
    return AttnBucket(None, chunks)


def make_bucket_per_rank_from_qk_ranges(
    q_ranges: AttnRanges,
    k_ranges: AttnRanges,
    attn_mask_type: MaskTypes,
    dispatch_meta: DispatchMeta,
    sort: bool = True,
) -> list[AttnBucket]:
    """One bucket per rank of ``dispatch_meta``."""
    bucket = make_global_bucket_from_qk_ranges(
        q_ranges,
        k_ranges,
        attn_mask_type,
        dispatch_meta.num_chunks,
        dispatch_meta.chunk_size,
        dispatch_meta.chunk_actual_sizes,
        sort,
    )
    return [AttnBucket(r, [bucket.q_chunks[c] for c in part]) for r, part in enumerate(dispatch_meta.partitions)]


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


def calc_meta(plan: Plan, rank: int) -> CalcMeta:
    """What ``rank`` computes."""
    part = plan.rank(rank)
    return CalcMeta(
        AttnArg.from_slices(part.host),
        [AttnArg.from_slices(stage.slices) for stage in part.stages],
        no_overlap=plan.overlap.no_overlap,
        headdim=plan.head_dim,
        seqlen_q_shard=part.num_tokens,
        seqlen_k_local=part.num_tokens,
        seqlen_k_per_remote_stage=[stage.recv_rows for stage in part.stages],
    )


def comm_meta(plan: Plan, rank: int, group: Any = None) -> CommMeta:
    """What ``rank`` sends and receives."""
    stages = plan.rank(rank).stages
    return CommMeta(
        [stage.recv_rows for stage in stages],
        [A2AVBasedGroupCollectiveArg.from_spec(stage.cast, group) for stage in stages],
        [0] * len(stages),
        [],
        plan.num_heads_q,
        plan.num_heads_kv,
        plan.head_dim,
    )


class DistAttnSolver:
    """The static solver in its published form: ``solve``, then ``make_comm_meta`` and ``make_calc_meta``."""

    def __init__(
        self,
        num_heads_q: int,
        num_heads_kv: int,
        head_dim: int,
        overlap_config: OverlapConfig,
        cp_group: Any,
        cp_mesh: Any = None,
    ) -> None:
        self.heads = (num_heads_q, num_heads_kv, head_dim)
        self.overlap_config = overlap_config
        self.cp_group = cp_group
        self.cp_mesh = cp_mesh
        self.plan: Plan | None = None
        self.rank = 0

    def solve(
        self,
        q_ranges: AttnRanges,
        k_ranges: AttnRanges,
        attn_mask_type: MaskTypes,
        dispatch_meta_q: DispatchMeta,
        dispatch_meta_k: DispatchMeta,
    ) -> None:
        if dispatch_meta_q.partitions != dispatch_meta_k.partitions:
            raise ContractError("Queries and keys are dispatched differently; use one partition for both.")
        slices = slice_table(q_ranges, k_ranges, attn_mask_type)
        self.plan = plan_of_metas(slices, dispatch_meta_q, self.overlap_config, self.heads)
        self.rank = dispatch_meta_q.cp_rank

    @property
    def is_solved(self) -> bool:
        return self.plan is not None

    def _solved(self) -> Plan:
        if self.plan is None:
            raise ContractError("The solver has no solution yet; call solve() first.")
        return self.plan

    def make_calc_meta(self) -> CalcMeta:
        return calc_meta(self._solved(), self.rank)

    def make_comm_meta(self) -> CommMeta:
        return comm_meta(self._solved(), self.rank, self.cp_group)

    @classmethod
    def calc_split_alignment(cls, chunk_size: int, num_heads: int, head_dim: int, strategy: str = "min") -> int:
        """Tokens that native collectives move as one unit: a factor ``a`` of the chunk size with
        ``4096 <= num_heads * head_dim * a <= 8192`` (16-bit elements); the smallest or, with "max", the largest.
        Without one, 1."""
        hidden = num_heads * head_dim
        factors = [a for a in range(1, chunk_size + 1) if chunk_size % a == 0 and a * hidden <= 8192]
        good = [a for a in factors if a * hidden >= 4096]
        if good:
            return good[0] if strategy == "min" else good[-1]
        return 1


def make_attn_meta_from_dispatch_meta(
    q_ranges: AttnRanges,
    k_ranges: AttnRanges,
    attn_mask_type: Sequence[AttnMaskType],
    num_heads_q: int,
    num_heads_kv: int,
    head_dim: int,
    dispatch_meta_q: DispatchMeta,
    dispatch_meta_k: DispatchMeta,
    overlap_config: OverlapConfig,
    cp_group: Any,
    cp_mesh: Any = None,
) -> tuple[CommMeta, CalcMeta, DistAttnSolver]:
    """Comm meta, calc meta and the solver that made them."""
    solver = DistAttnSolver(num_heads_q, num_heads_kv, head_dim, overlap_config, cp_group, cp_mesh)
    solver.solve(q_ranges, k_ranges, attn_mask_type, dispatch_meta_q, dispatch_meta_k)
    return solver.make_comm_meta(), solver.make_calc_meta(), solver
