# SPDX-License-Identifier: Apache-2.0
"""The published builders, as views of plans: buckets, and metas of what a rank computes and exchanges."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from magi_attention.api.keys.dispatch_meta import (
    DispatchMeta,
    make_dispatch_meta_from_qk_ranges,
    plan_of_metas,
    slice_table,
)
from magi_attention.common.enum import AttnMaskType
from magi_attention.common.ranges import AttnRanges
from magi_attention.common.slices import MaskTypes
from magi_attention.compat.metas.buckets import AttnBucket, AttnChunk, AttnSlice
from magi_attention.compat.metas.calc_meta import AttnArg, CalcMeta
from magi_attention.compat.metas.comm_meta import A2AVBasedGroupCollectiveArg, CommMeta
from magi_attention.config import OverlapConfig
from magi_attention.errors import ContractError
from magi_attention.meta.chunking import chunk_bounds, split_by_chunk
from magi_attention.meta.plan import Plan

__all__ = [
    "DistAttnSolver",
    "calc_meta",
    "comm_meta",
    "make_attn_meta_from_dispatch_meta",
    "make_bucket_per_rank_from_qk_ranges",
    "make_dispatch_meta_from_qk_ranges",
    "make_global_bucket_from_qk_ranges",
    "slice_table",
]


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
        """How many tokens native collectives move at once.

        A factor ``a`` of the chunk size with ``4096 <= num_heads * head_dim * a <= 8192`` (16-bit elements), the
        smallest or, with "max", the largest; 1 if no factor is in that range.
        """
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
