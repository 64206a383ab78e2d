# SPDX-License-Identifier: Apache-2.0
"""From slices to a ``Plan``: chunk, dispatch, find remote keys, group them into stages."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple, cast

import numpy as np
from numpy.typing import NDArray

from magi_attention.common.enum import AttnOverlapMode, OverlapAlgType
from magi_attention.common.intervals import Packing, sum_by
from magi_attention.common.scalars import as_int
from magi_attention.common.slices import K0, K1, Q1, SliceTable, areas, check_countable
from magi_attention.common.two_level.nodes import Nodes
from magi_attention.config import DispatchConfig, DistAttnConfig, OverlapConfig, UniformOverlapAlg
from magi_attention.config.rates import MachineRates
from magi_attention.errors import ContractError
from magi_attention.meta.chunking import (
    Cut,
    chunk_bounds,
    pad_size,
    resolve_chunk_size,
    split_by_chunk,
)
from magi_attention.meta.dispatch import (
    Partitions,
    check_partitions,
    dispatch_by_nodes,
    has_few_runs,
    knows_no_nodes,
    solve_dispatch,
)
from magi_attention.meta.moves import Dispatched, with_moves
from magi_attention.meta.plan import Plan
from magi_attention.meta.rank_plan import remote_areas
from magi_attention.meta.solver.overlap_solver import OverlapSolver, OverlapStageCost, uniform_stages
from magi_attention.meta.solver.ownership import owners, remote_keys

DEFAULT_MIN_CHUNKS_PER_RANK = 8
MIN_REFINED_CHUNK = 64  # tokens; below this a kernel tile would span chunks
_MOST_HALVINGS, _LEAST_NODE_CHUNK = 2, 128  # of chunks that the ranks of a node cannot share; tokens


def check_heads(num_heads_q: int, num_heads_kv: int, head_dim: int) -> tuple[int, int, int]:
    """The three as plain ints; ``ContractError`` unless all are positive and query heads divide over key heads."""
    num_heads_q, num_heads_kv = as_int(num_heads_q, "num_heads_q"), as_int(num_heads_kv, "num_heads_kv")
    head_dim = as_int(head_dim, "head_dim")
    if min(num_heads_q, num_heads_kv, head_dim) < 1:
        raise ContractError(
            f"num_heads_q {num_heads_q}, num_heads_kv {num_heads_kv}, head_dim {head_dim}: all must be >= 1."
        )
    if num_heads_q % num_heads_kv:
        raise ContractError(
            f"{num_heads_q} query heads do not divide over {num_heads_kv} key heads; "
            "num_heads_q must be a multiple of num_heads_kv."
        )
    return num_heads_q, num_heads_kv, head_dim


@dataclass(frozen=True)
class PlanOptions:
    """What a plan keeps and counts by, however its dispatch is found.

    Head counts and head dim enter predicted bytes and times, and whether queries move. ``cu_seqlens`` (as of ``Mask``)
    are kept for labels and positions. ``query_moves``: "never", "always", or "auto", where they save ``LEAST_TIME`` of
    the modelled time, by ``rates`` or those assumed of H100 GPUs. ``ContractError`` for bad head counts.
    """

    num_heads_q: int = 1
    num_heads_kv: int = 1
    head_dim: int = 1
    cu_seqlens: tuple[int, ...] | None = None
    query_moves: str = "never"
    rates: MachineRates | None = None
    plan_type: type[Plan] = Plan

    def __post_init__(self) -> None:
        names = ("num_heads_q", "num_heads_kv", "head_dim")
        for name, value in zip(names, check_heads(*self.heads)):
            object.__setattr__(self, name, value)

    @property
    def heads(self) -> tuple[int, int, int]:
        return self.num_heads_q, self.num_heads_kv, self.head_dim

    @classmethod
    def of(cls, plan: Plan) -> PlanOptions:
        """Those that ``plan`` was made with."""
        heads = plan.num_heads_q, plan.num_heads_kv, plan.head_dim
        return cls(*heads, plan.cu_seqlens, plan.query_moves, plan.rates, type(plan))


_DEFAULTS = PlanOptions()


def build_plan(
    slices: SliceTable,
    total_tokens: int,
    cp_size: int,
    options: PlanOptions = _DEFAULTS,
    *,
    config: DistAttnConfig | None = None,
    min_chunks_per_rank: int = DEFAULT_MIN_CHUNKS_PER_RANK,
    balance: float | None = None,
) -> Plan:
    """Plans self-attention of ``total_tokens`` tokens over ``cp_size`` ranks.

    ``slices`` are in unpadded coordinates. Without ``uneven_shard`` the sequence is padded at its end to a
    multiple of ``chunk_size * cp_size``, with it only as far as every rank needs a chunk; pad rows attend to nothing.
    With ``balance`` (1.02, say) and no chunk size
    in the config, chunks are halved until the heaviest rank is within that factor of the mean, or halving no
    longer helps. Rates of the options complete the config, too (``MachineRates.config``).
    Errors: ``ContractError`` for slices beyond the total; ``DispatchError`` for a rank without chunks.
    """
    total_tokens, cp_size = as_int(total_tokens, "total_tokens"), as_int(cp_size, "cp_size")
    config = config or DistAttnConfig()
    if options.rates is not None:
        config = options.rates.config(config, *options.heads)
    _check_ends(slices, total_tokens)
    dispatch = config.dispatch_config
    chunk = resolve_chunk_size(total_tokens, cp_size, dispatch.chunk_size, min_chunks_per_rank)
    if balance is not None and dispatch.chunk_size is None:
        unaware = replace(dispatch, nodes=None)  # type: ignore[arg-type]
        choice = _refine(slices, total_tokens, cp_size, chunk, unaware, balance)
        choice = _by_nodes(slices, total_tokens, choice, dispatch)
    else:
        choice = _dispatch(_cut(slices, total_tokens, cp_size, chunk, dispatch), cp_size, dispatch)
    may_dispatch = dispatch.max_fragments is None
    choice, assigned = with_moves(choice, options.heads, options.query_moves, options.rates, may_dispatch=may_dispatch)
    nodes = Nodes.of_config(dispatch.nodes, cp_size)
    return _finish(slices, total_tokens, choice, options, config.overlap_config, assigned, dispatch.uneven_shard, nodes)


class _Chunks(NamedTuple):
    """A sequence in chunks of ``chunk`` tokens, and the slice of each piece."""

    chunk: int
    pad: int
    cut: Cut
    slice_of: NDArray[np.int64]


def _cut(slices: SliceTable, total: int, cp_size: int, chunk: int, config: DispatchConfig) -> _Chunks:
    pad = pad_size(total, cp_size, chunk, config.uneven_shard)
    bounds = chunk_bounds(total + pad, chunk)
    pieces, chunk_of, slice_of = split_by_chunk(slices.array, bounds)
    return _Chunks(chunk, pad, Cut(pieces, chunk_of, bounds), slice_of)


def _imbalance(heaviest: int, cut: Cut, cp_size: int) -> float:
    return heaviest * cp_size / max(int(cut.work.sum()), 1)


def _dispatch(chunks: _Chunks, cp_size: int, config: DispatchConfig) -> Dispatched:
    partitions = solve_dispatch(chunks.cut, chunks.slice_of, cp_size, config)
    return _dispatched(chunks.cut, chunks.chunk, chunks.pad, partitions)


def _dispatched(cut: Cut, chunk: int, pad: int, partitions: Partitions) -> Dispatched:
    heaviest = int(sum_by(owners(partitions, len(cut.bounds)), cut.work, len(partitions)).max())
    return Dispatched(chunk, pad, cut, partitions, _imbalance(heaviest, cut, len(partitions)))


def _refine(
    slices: SliceTable, total: int, cp_size: int, chunk: int, config: DispatchConfig, balance: float
) -> Dispatched:
    """Halves the chunk while that helps; short chunks cost locality, so not further than needed. Where one chunk is
    above ``balance`` nothing is dispatched, unless shorter chunks are no better than that chunk."""
    too_large: list[_Chunks] = []
    best: Dispatched | None = None
    while True:
        chunks = _cut(slices, total, cp_size, chunk, config)
        chunk = -(-chunks.chunk // 2)
        is_last = chunks.chunk // 2 < MIN_REFINED_CHUNK
        if _imbalance(int(chunks.cut.work.max()), chunks.cut, cp_size) > balance and not is_last:
            too_large.append(chunks)
            continue
        found = _dispatch(chunks, cp_size, config)
        if best is None or found.imbalance < best.imbalance:
            best = found
        if best.imbalance <= balance or is_last:
            break
    for chunks in reversed(too_large):
        if _imbalance(int(chunks.cut.work.max()), chunks.cut, cp_size) <= best.imbalance:
            found = _dispatch(chunks, cp_size, config)
            best = found if found.imbalance <= best.imbalance else best
    return best


def _by_nodes(slices: SliceTable, total: int, choice: Dispatched, config: DispatchConfig) -> Dispatched:
    """``choice``, or a dispatch that knows which ranks share a node, of the longest chunks with which there is one:
    short chunks are easier to share out within a node."""
    world, given = len(choice.partitions), choice.cut
    unaware = knows_no_nodes(given, choice.partitions, config)
    if unaware is None:
        return choice
    found, is_shared = dispatch_by_nodes(given, unaware, config)
    if found is not None and has_few_runs(found, len(given.bounds), config):
        return _dispatched(given, choice.chunk, choice.pad, check_partitions(found, len(given.bounds), world))
    for halvings in range(1, _MOST_HALVINGS + 1):
        chunk = -(-choice.chunk // 2**halvings)
        if is_shared or chunk < _LEAST_NODE_CHUNK:
            break
        _, pad, cut, _ = _cut(slices, total, world, chunk, config)
        found, is_shared = dispatch_by_nodes(cut, unaware, config)
        if found is not None and has_few_runs(found, len(cut.bounds), config):
            return _dispatched(cut, chunk, pad, check_partitions(found, len(cut.bounds), world))
    return choice


def plan_for_partitions(
    slices: SliceTable,
    total_tokens: int,
    pad_size: int,
    chunk_size: int,
    partitions: Sequence[Sequence[int]],
    options: PlanOptions = _DEFAULTS,
    *,
    overlap: OverlapConfig | None = None,
    uneven_shard: bool = False,
    nodes: Nodes | None = None,
    head_groups: int = 1,
) -> Plan:
    """The plan of a mask under a given dispatch: another plan's, or the caller's own (zig-zag, say). ``nodes``: which
    ranks share a node, if that is known. ``head_groups``: as many equal parts of the sequence, one behind the other,
    are the head groups of one (``plan_by_head_groups``)."""
    total_tokens, pad_size = as_int(total_tokens, "total_tokens"), as_int(pad_size, "pad_size")
    chunk_size = as_int(chunk_size, "chunk_size", at_least=1)
    _check_ends(slices, total_tokens + pad_size)
    bounds = chunk_bounds(total_tokens + pad_size, chunk_size)
    checked = check_partitions(partitions, len(bounds), len(partitions))
    choice = Dispatched(chunk_size, pad_size, Cut.of(slices.array, bounds), checked, 1.0)
    _, assigned = with_moves(choice, options.heads, options.query_moves, options.rates, False, head_groups)
    overlap = overlap or OverlapConfig()
    return _finish(slices, total_tokens, choice, options, overlap, assigned, uneven_shard, nodes)


def plan_by_head_groups(plan: Plan, query_moves: str) -> Plan:
    """The same mask for each kv head and its query heads apart: a sequence of ``num_heads_kv`` times the tokens, one
    group behind the other, with one kv head. Whoever holds a token holds it in all groups; who computes what is chosen
    for each group, so groups may go to ranks of their own. ``ContractError``: uneven shards."""
    groups, tokens, chunks = plan.num_heads_kv, plan.padded_tokens, plan.num_chunks
    if tokens % plan.chunk_size:
        raise ContractError(
            f"{tokens} tokens are no multiple of the chunk size {plan.chunk_size}, and head groups of their own need "
            "whole chunks; drop uneven_shard."
        )
    shift = np.repeat(np.arange(groups), len(plan.slices)) * tokens
    slices = np.tile(plan.slices.array, (groups, 1)) + shift[:, None] * np.array([1, 1, 1, 1, 0])
    return plan_for_partitions(
        SliceTable(slices),
        groups * tokens,
        0,
        plan.chunk_size,
        [[group * chunks + chunk for group in range(groups) for chunk in part] for part in plan.partitions],
        PlanOptions(plan.num_heads_q // groups, head_dim=plan.head_dim, query_moves=query_moves),
        nodes=plan.nodes,
        head_groups=groups,
    )


def _check_ends(slices: SliceTable, total: int) -> None:
    check_countable(slices.array, total, total)
    if len(slices) and int(slices.array[:, [Q1, K1]].max()) > total:
        i = int(np.argmax(slices.array[:, [Q1, K1]].max(axis=1)))
        q0, q1, k0, k1, _ = slices.array[i].tolist()
        raise ContractError(
            f"Slice {i} (q [{q0}, {q1}), k [{k0}, {k1})) reaches beyond the {total} tokens of the sequence; "
            "raise the total or cut the range."
        )


def _finish(
    slices: SliceTable, total: int, choice: Dispatched, options: PlanOptions, overlap: OverlapConfig,
    assigned: tuple[NDArray[np.int64], ...] | None, uneven_shard: bool, nodes: Nodes | None,
) -> Plan:  # fmt: skip
    """Stage ranges of every rank, at one degree common to all."""
    cut, partitions = choice.cut, choice.partitions
    pieces, bounds = cut.pieces, cut.bounds
    world, owner = len(partitions), owners(partitions, len(bounds))
    if assigned is None:
        computed, rank_of = pieces, owner[cut.chunk_of]
    else:
        computed, rank_of = np.concatenate(assigned), np.repeat(np.arange(world), [len(x) for x in assigned])
    remotes = _split_by_rank(*remote_keys(computed[:, [K0, K1]], rank_of, bounds, owner), world)
    degree: int
    stage_ranges: tuple[tuple[NDArray[np.int64], ...], ...]
    if world == 1:
        degree, stage_ranges = 0, ((),)
    elif assigned is not None or overlap.no_overlap:
        degree, stage_ranges = int(assigned is not None), tuple((ranges,) for ranges in remotes)
    else:
        packed = [Packing(ranges) for ranges in remotes] if overlap.degree != 1 else []
        degree = _common_degree(overlap, computed, rank_of, bounds, partitions, packed)
        if degree == 1:
            stage_ranges = tuple((ranges,) for ranges in remotes)
        else:
            stage_ranges = tuple(_stages(overlap, remote, degree) for remote in packed)
    plan = options.plan_type(
        slices, total, choice.pad, choice.chunk, world, partitions, degree, stage_ranges, overlap, uneven_shard,
        *options.heads, options.cu_seqlens, options.query_moves, assigned, options.rates, nodes,
    )  # fmt: skip
    plan.keep_pieces(pieces, cut.chunk_of)
    return plan


def _split_by_rank(rows: NDArray[np.int64], rank_of: NDArray[np.int64], world: int) -> list[NDArray[np.int64]]:
    """The rows of each rank, in their order; by one sort, as ranks may be a thousand."""
    order = np.argsort(rank_of, kind="stable")
    ends = np.searchsorted(rank_of[order], np.arange(world + 1)).tolist()
    ordered = rows[order]
    return [ordered[a:b] for a, b in zip(ends[:-1], ends[1:])]


def overlap_chunk(remote_rows: int, overlap: OverlapConfig) -> int:
    """Rows of one overlap chunk: at least ``min_chunk_size`` and at most ``max_num_chunks`` chunks."""
    return max(overlap.min_chunk_size, -(-remote_rows // overlap.max_num_chunks))


def _common_degree(
    overlap: OverlapConfig, pieces: NDArray[np.int64], rank_of: NDArray[np.int64], bounds: NDArray[np.int64],
    partitions: Sequence[Sequence[int]], remotes: Sequence[Packing],
) -> int:  # fmt: skip
    if overlap.mode == AttnOverlapMode.STATIC:
        assert overlap.degree is not None, "OverlapConfig asks STATIC for a degree"
        return overlap.degree
    solver = OverlapSolver(overlap.alg)
    degrees = []
    by_rank = _split_by_rank(pieces, rank_of, len(partitions))
    for mine, chunks, remote in zip(by_rank, partitions, remotes):
        costs = stage_costs(overlap, mine, Packing(bounds[list(chunks)]), remote)
        best, _ = solver.solve(costs, None, overlap.dynamic_max_degree)
        degrees.append(best.overlap_degree)
    return max(degrees)


def stage_costs(
    overlap: OverlapConfig, mine: NDArray[np.int64], host: Packing, remote: Packing
) -> list[OverlapStageCost]:
    """Predicted cost of the host (entry 0) and of every overlap chunk of one rank."""
    chunk = overlap_chunk(remote.length, overlap)
    remote_area = remote_areas(mine, remote, chunk) if remote.length else np.zeros(0, dtype=np.int64)
    host_area = int(areas(mine).sum() - remote_area.sum())
    costs = [OverlapStageCost(0.0, overlap.calc_cost_factor * host_area)]
    for i, area in enumerate(remote_area.tolist()):
        rows = min(chunk, remote.length - i * chunk)
        costs.append(OverlapStageCost(overlap.comm_cost_factor * rows, overlap.calc_cost_factor * area))
    return costs


def _stages(overlap: OverlapConfig, remote: Packing, degree: int) -> tuple[NDArray[np.int64], ...]:
    """Key ranges of every stage of one rank: runs of overlap chunks, in the algorithm's order."""
    chunk = overlap_chunk(remote.length, overlap)
    count = -(-remote.length // chunk)
    alg = overlap.alg
    parts: Sequence[Sequence[int]]
    if alg.type != OverlapAlgType.UNIFORM or cast(UniformOverlapAlg, alg).random_costs:
        zero = [OverlapStageCost(0.0, 0.0)] * (count + 1)
        parts = OverlapSolver(overlap.alg).solve(zero, degree)[0].partitions
    else:
        parts = [range(start, stop) for start, stop in uniform_stages(count + 1, degree)]
    out = []
    for part in parts:
        index = np.array([i - 1 for i in part if i], dtype=np.int64)
        packed = np.stack([index * chunk, np.minimum((index + 1) * chunk, remote.length)], axis=1)
        out.append(remote.globalize(packed) if len(packed) else packed)
    return tuple(out)
