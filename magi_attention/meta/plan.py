# SPDX-License-Identifier: Apache-2.0
"""``Plan``: everything that a group of ranks has to know about one mask, as one value.

A plan is computed from (mask, number of ranks, configuration) on the CPU, without collectives, and is the same
on every rank. ``plan.rank(r)`` derives what rank ``r`` computes, sends and receives; any process may ask for
any rank. Coordinates are *global* tokens of the padded sequence unless called local.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass, field, fields
from functools import cached_property
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray

from magi_attention.common.group_spec import GroupSpec
from magi_attention.common.infer import CuSeqlens, documents
from magi_attention.common.intervals import Packing, merge_intervals, split_at, subtract_intervals, sum_by
from magi_attention.common.plan_cache import PlanCache
from magi_attention.common.slices import Q0, Q1, SliceTable, areas, merge
from magi_attention.common.two_level.nodes import Nodes
from magi_attention.config import OverlapConfig
from magi_attention.config.rates import MachineRates
from magi_attention.errors import ContractError
from magi_attention.meta.chunking import chunk_areas, chunk_bounds, split_by_chunk
from magi_attention.meta.fragments import Fragments
from magi_attention.meta.rank_plan import RankPlan, StagePlan, destinations, local_slices
from magi_attention.meta.solver.ownership import owners

T = TypeVar("T")
QUERY_MOVES = ("never", "auto", "always")  # may queries move, with their outputs, as well as keys and values?


@dataclass(frozen=True, eq=False)
class Plan:
    """Frozen, hashable and picklable; equality is by content (``fingerprint``).

    ``slices`` are the caller's, in padded coordinates (pad rows attend to nothing). ``partitions[r]`` are the
    chunk ids of rank r, ascending. ``stage_ranges[r][s]`` are the key ranges that rank r receives in stage s.
    ``degree`` 0 means that the one stage is fetched before a single kernel call. ``cu_seqlens`` are the mask's: where
    documents begin and end, for labels and positions; None where the mask does not know. ``query_moves`` is what was
    asked for, one of ``QUERY_MOVES``. ``assigned[r]`` are the slices ``(N, 5)`` that rank r computes, in global
    coordinates; None where each rank computes those of its own queries, so that only keys and values move. ``rates``
    are those that the plan was made for; None where it follows none. ``nodes``: which ranks share a node; None where
    that was not said.

    ``cache`` counts the arrays of the plan, and includes the caches of its slice tables and of what runs it.
    """

    slices: SliceTable
    total_tokens: int
    pad_size: int
    chunk_size: int
    cp_size: int
    partitions: tuple[tuple[int, ...], ...]
    degree: int
    stage_ranges: tuple[tuple[NDArray[np.int64], ...], ...]
    overlap: OverlapConfig
    uneven_shard: bool = False
    num_heads_q: int = 1
    num_heads_kv: int = 1
    head_dim: int = 1
    cu_seqlens: tuple[int, ...] | None = None
    query_moves: str = "never"
    assigned: tuple[NDArray[np.int64], ...] | None = None
    rates: MachineRates | None = None
    nodes: Nodes | None = None
    cache: PlanCache = field(init=False, repr=False, default_factory=PlanCache)

    def __post_init__(self) -> None:
        self.cache.include(self.slices.cache)
        self.cache.count("stages", self.stage_ranges)
        self.cache.count("assigned", self.assigned or ())

    # ---- identity -----------------------------------------------------------------------------------

    @cached_property
    def digests(self) -> dict[str, str]:
        """Hex digests of ``mask``, ``documents``, ``dispatch`` and ``stages``: where do two plans differ?"""
        mask, documents, dispatch, stages = found = [hashlib.blake2b(digest_size=16) for _ in range(4)]
        mask.update(repr(self.total_tokens).encode() + self.slices.array.tobytes())
        documents.update(b"none" if self.cu_seqlens is None else np.array(self.cu_seqlens, dtype=np.int64).tobytes())
        sizes = (self.pad_size, self.chunk_size, self.cp_size, self.uneven_shard)
        dispatch.update(repr(sizes if self.nodes is None else (*sizes, self.nodes.node_of)).encode())
        _update(dispatch, [np.array(chunks, dtype=np.int64) for chunks in self.partitions])
        stages.update(repr((self.degree, self.overlap, self.query_moves, self.rates)).encode())
        _update(stages, [ranges for stages_of_rank in self.stage_ranges for ranges in stages_of_rank])
        _update(stages, self.assigned or ())
        return dict(zip(("mask", "documents", "dispatch", "stages"), (digest.hexdigest() for digest in found)))

    @cached_property
    def fingerprint(self) -> str:
        """Hex digest of the whole content; equal on ranks that agree."""
        heads = (self.num_heads_q, self.num_heads_kv, self.head_dim)
        return hashlib.blake2b(repr((self.digests, heads)).encode(), digest_size=16).hexdigest()

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Plan) and self.fingerprint == other.fingerprint

    def __hash__(self) -> int:
        return hash(self.fingerprint)

    def __getstate__(self) -> dict[str, Any]:
        return {name: getattr(self, name) for name in _FIELDS}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state, cache=PlanCache())
        self.__post_init__()

    def __repr__(self) -> str:
        return (
            f"{type(self).__name__}({self.total_tokens} tokens, cp {self.cp_size}, {self.num_chunks} chunks of "
            f"{self.chunk_size}, degree {self.degree}, {self.fingerprint[:8]})"
        )

    # ---- sizes --------------------------------------------------------------------------------------

    @property
    def nbytes(self) -> int:
        """Bytes, on the host and on GPUs, of the plan's arrays and of all tables that were made from it."""
        return self.cache.nbytes

    @property
    def padded_tokens(self) -> int:
        return self.total_tokens + self.pad_size

    @cached_property
    def chunk_ranges(self) -> NDArray[np.int64]:
        """``(num_chunks, 2)`` token ranges."""
        return self._counted("chunk ranges", chunk_bounds(self.padded_tokens, self.chunk_size))

    @property
    def num_chunks(self) -> int:
        return len(self.chunk_ranges)

    @property
    def num_stages(self) -> int:
        return len(self.stage_ranges[0])

    @cached_property
    def rank_of_chunk(self) -> NDArray[np.int64]:
        return self._counted("rank of chunk", owners(self.partitions, self.num_chunks))

    @cached_property
    def local_start_of_chunk(self) -> NDArray[np.int64]:
        """First local row of every chunk on the rank that owns it."""
        start = np.empty(self.num_chunks, dtype=np.int64)
        for chunks in self.partitions:
            lengths = np.diff(self.chunk_ranges[list(chunks)], axis=1)[:, 0]
            start[list(chunks)] = np.cumsum(lengths) - lengths
        return self._counted("local start of chunk", start)

    @cached_property
    def shard_sizes(self) -> tuple[int, ...]:
        """Tokens per rank, pad included."""
        lengths = self.chunk_ranges[:, 1] - self.chunk_ranges[:, 0]
        return tuple(sum_by(self.rank_of_chunk, lengths, self.cp_size).tolist())

    def host_ranges(self, rank: int) -> NDArray[np.int64]:
        """Merged token ranges of a rank."""
        return merge_intervals(self.chunk_ranges[list(self.partitions[rank])])

    def position_array(self, rank: int) -> NDArray[np.int64]:
        """Global position of every local row, int64, pad rows beyond ``total_tokens`` included."""
        return Packing(self.host_ranges(rank)).positions()

    def document_bounds(
        self, rank: int, cu_seqlens: CuSeqlens | None = None
    ) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Global positions at which the document of every local row begins and ends, two int64 arrays; pad rows count
        to the last document.

        ``cu_seqlens`` as of ``Mask.varlen``, or None for the plan's own. ``ContractError`` if it has none.
        """
        cu = self._documents(cu_seqlens)
        after = np.searchsorted(cu, np.minimum(self.position_array(rank), self.total_tokens - 1), side="right")
        return cu[after - 1], cu[after]

    def fragments(self, cu_seqlens: CuSeqlens | None = None) -> Fragments:
        """The ranges of consecutive tokens that each rank holds, where documents begin in them, and which passes a
        state to which: for recurrent layers. A value on the CPU, for all ranks; asks no group. ``cu_seqlens`` as of
        ``document_bounds``."""
        return self._own_fragments if cu_seqlens is None else self._fragments_of(cu_seqlens)

    @cached_property
    def _own_fragments(self) -> Fragments:
        found = self._fragments_of(None)
        self.cache.count("fragments", found.ranges)
        return found

    def _fragments_of(self, cu_seqlens: CuSeqlens | None) -> Fragments:
        return Fragments(tuple(map(self.host_ranges, range(self.cp_size))), self._documents(cu_seqlens))

    def _documents(self, cu_seqlens: CuSeqlens | None) -> NDArray[np.int64]:
        known = self.cu_seqlens if cu_seqlens is None else documents(cu_seqlens, self.total_tokens)
        if known is None:
            raise ContractError(
                "The mask of this plan does not know its documents, so labels and positions could reach into the next "
                "one. Give cu_seqlens=[0, n0, n0 + n1, ...] here, or where the mask is made, as in "
                "Mask.from_slices(..., cu_seqlens=cu_seqlens); [0, total] is one document."
            )
        return np.array(known, dtype=np.int64)

    # ---- areas --------------------------------------------------------------------------------------

    def keep_pieces(self, pieces: NDArray[np.int64], chunk_of: NDArray[np.int64]) -> None:
        """Slices cut at chunks, and the chunk of each; without them they are cut where they are first wanted."""
        self.__dict__["_pieces"] = self._counted("pieces", (pieces, chunk_of))

    @cached_property
    def _pieces(self) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        pieces, chunk_of, _ = split_by_chunk(self.slices.array, self.chunk_ranges)
        return self._counted("pieces", (pieces, chunk_of))

    @cached_property
    def chunk_areas(self) -> NDArray[np.int64]:
        """Allowed pairs per chunk."""
        return self._counted("areas of chunks", chunk_areas(*self._pieces, self.num_chunks))

    @cached_property
    def areas(self) -> NDArray[np.int64]:
        """Allowed pairs that each rank computes."""
        if self.assigned is not None:
            found = np.array([int(areas(slices).sum()) for slices in self.assigned], dtype=np.int64)
        else:
            found = sum_by(self.rank_of_chunk, self.chunk_areas, self.cp_size)
        return self._counted("areas of ranks", found)

    @property
    def imbalance(self) -> float:
        """Area of the heaviest rank over the mean; 1 if nothing is allowed."""
        return float(self.areas.max() / self.areas.mean()) if self.areas.any() else 1.0

    # ---- communication ------------------------------------------------------------------------------

    @cached_property
    def _split_points(self) -> tuple[NDArray[np.int64], ...]:
        """Per stage, every coordinate at which some rank's request starts or ends, or ownership changes.

        Cutting all ranges there makes sender and receiver agree on the splits without talking.
        """
        stages = ([stages[s] for stages in self.stage_ranges] for s in range(self.num_stages))
        return self._counted("split points", tuple(map(self._edges, stages)))

    def _edges(self, ranges_of: Sequence[NDArray[np.int64]]) -> NDArray[np.int64]:
        """Where the ranges of all ranks start and end, those that they hold included."""
        edges = np.concatenate([self._host_edges, *(ranges.reshape(-1) for ranges in ranges_of)])
        edges.sort()  # much faster than np.unique is for many
        return edges[np.diff(edges, prepend=-1) > 0]

    @property
    def _host_edges(self) -> NDArray[np.int64]:
        """Where ranges that ranks hold start or end: where ownership changes, and the ends of the sequence."""
        bounds = self.chunk_ranges
        inner = bounds[1:, 0][np.diff(self.rank_of_chunk) != 0]
        return np.concatenate([bounds[:1, 0], inner, bounds[-1:, 1]])

    def owner_of(self, positions: NDArray[np.int64]) -> NDArray[np.int64]:
        """Rank that owns each global position."""
        return self.rank_of_chunk[positions // self.chunk_size]

    def comm_matrix(self, stage: int | None = None) -> NDArray[np.int64]:
        """Rows (tokens of K and V) that rank i sends to rank j, int64 ``(cp, cp)``; all stages by default."""
        matrix = np.zeros((self.cp_size, self.cp_size), dtype=np.int64)
        edges = self._host_edges
        for s in range(self.num_stages) if stage is None else [stage]:
            for rank, stages in enumerate(self.stage_ranges):
                cut = split_at(stages[s], edges)
                matrix[:, rank] += sum_by(self.owner_of(cut[:, 0]), cut[:, 1] - cut[:, 0], self.cp_size)
        return matrix

    @cached_property
    def stage_is_idle(self) -> tuple[bool, ...]:
        """True for stages in which no rank receives anything, so that nobody need call the collective."""
        return tuple(all(not len(stages[s]) for stages in self.stage_ranges) for s in range(self.num_stages))

    @cached_property
    def query_ranges(self) -> tuple[NDArray[np.int64], ...]:
        """Per rank the queries that it is sent, merged; all empty unless queries move."""
        if self.assigned is None:
            return (np.zeros((0, 2), dtype=np.int64),) * self.cp_size
        hosts = map(self.host_ranges, range(self.cp_size))
        found = (subtract_intervals(x[:, [Q0, Q1]], host) for x, host in zip(self.assigned, hosts))
        return self._counted("query ranges", tuple(found))

    @cached_property
    def _query_points(self) -> NDArray[np.int64]:
        """As ``_split_points``, of the cast of queries."""
        return self._counted("query points", self._edges(self.query_ranges))

    def query_matrix(self) -> NDArray[np.int64]:
        """Rows (tokens of Q) that rank i sends to rank j, int64 ``(cp, cp)``; as many of outputs come back."""
        matrix = np.zeros((self.cp_size, self.cp_size), dtype=np.int64)
        for rank, ranges in enumerate(self.query_ranges):
            cut = split_at(ranges, self._query_points)
            matrix[:, rank] = sum_by(self.owner_of(cut[:, 0]), cut[:, 1] - cut[:, 0], self.cp_size)
        return matrix

    def cast_spec(self, rank: int, stage: int) -> GroupSpec:
        """The group cast of ``stage`` as ``rank`` sees it."""
        return self._cast(rank, self._split_points[stage], [stages[stage] for stages in self.stage_ranges])

    def query_spec(self, rank: int) -> GroupSpec:
        """The group cast of queries as ``rank`` sees it."""
        return self._cast(rank, self._query_points, self.query_ranges)

    def _cast(self, rank: int, points: NDArray[np.int64], ranges_of: Sequence[NDArray[np.int64]]) -> GroupSpec:
        """Rank r receives ``ranges_of[r]``; all of these and what ranks hold are cut at ``points``."""
        received = split_at(ranges_of[rank], points)
        held = split_at(self.host_ranges(rank), points)
        return GroupSpec(
            rank,
            self.cp_size,
            tuple((held[:, 1] - held[:, 0]).tolist()),
            destinations(held, ranges_of),
            tuple((received[:, 1] - received[:, 0]).tolist()),
            tuple(self.owner_of(received[:, 0]).tolist()),
        )

    # ---- one rank -----------------------------------------------------------------------------------

    def rank(self, rank: int) -> RankPlan:
        """The part of ``rank``; computed on first use and kept."""
        if not 0 <= rank < self.cp_size:
            raise IndexError(f"rank {rank} is outside 0..{self.cp_size - 1}.")
        if rank not in self._ranks:
            self._ranks[rank] = self._make_rank(rank)
        return self._ranks[rank]

    @cached_property
    def _ranks(self) -> dict[int, RankPlan]:
        return {}

    def slices_of(self, rank: int) -> NDArray[np.int64]:
        """The slices that ``rank`` computes, ``(N, 5)`` in global coordinates."""
        return self.pieces_of(rank) if self.assigned is not None else merge(self.pieces_of(rank))

    def pieces_of(self, rank: int) -> NDArray[np.int64]:
        """The pairs of ``slices_of`` as slices with queries of one chunk: more of them, and quickly made."""
        if self.assigned is not None:
            return self.assigned[rank]
        pieces, chunk_of = self._pieces
        mine: NDArray[np.int64] = pieces[self.rank_of_chunk[chunk_of] == rank]
        return mine

    def _make_rank(self, rank: int) -> RankPlan:
        mine = self.slices_of(rank)
        host = Packing(self.host_ranges(rank))
        if self.assigned is not None:
            return self._make_rank_with_moves(rank, mine, host)
        stages = tuple(
            StagePlan(SliceTable(local_slices(mine, host, Packing(ranges))), ranges, self.cast_spec(rank, s))
            for s, ranges in enumerate(self.stage_ranges[rank])
        )
        return self._held(RankPlan(rank, host.ranges, SliceTable(local_slices(mine, host, host)), stages))

    def _make_rank_with_moves(self, rank: int, mine: NDArray[np.int64], host: Packing) -> RankPlan:
        (k_ranges,), q_ranges = self.stage_ranges[rank], self.query_ranges[rank]
        is_own = self.owner_of(mine[:, Q0]) == rank
        own, others = mine[is_own], mine[~is_own]
        q_pack, k_pack = Packing(q_ranges), Packing(k_ranges)
        behind = local_slices(others, q_pack, k_pack) + np.array([0, 0, host.length, host.length, 0])
        of_others = merge(np.concatenate([local_slices(others, q_pack, host), behind]))
        queries = StagePlan(SliceTable(of_others), q_ranges, self.query_spec(rank))
        stage = StagePlan(SliceTable(local_slices(own, host, k_pack)), k_ranges, self.cast_spec(rank, 0))
        return self._held(RankPlan(rank, host.ranges, SliceTable(local_slices(own, host, host)), (stage,), queries))

    def take_rank(self, part: RankPlan) -> None:
        """Holds a part that an equal plan, in another process, made for its rank."""
        self._ranks[part.rank] = self._held(part)

    def _held(self, part: RankPlan) -> RankPlan:
        """``part``, which the plan is about to hold."""
        queries = () if part.queries is None else (part.queries.slices.cache,)
        self.cache.count(f"rank {part.rank}", part.host_ranges)
        self.cache.include(part.cache, part.host.cache, *(stage.slices.cache for stage in part.stages), *queries)
        return part

    def _counted(self, name: str, arrays: T) -> T:
        """``arrays``, which the plan is about to hold."""
        self.cache.count(name, arrays)
        return arrays


# FSDP2 builds every dataclass among the arguments of a module anew, to cast its tensors. A plan must stay the object
# that holds what was made for it, so it does not look like one.
_FIELDS = tuple(f.name for f in fields(Plan) if f.init)
del Plan.__dataclass_fields__


def _update(digest: hashlib.blake2b, arrays: Sequence[NDArray[np.int64]]) -> None:
    """Adds the lengths and then the content of int64 arrays."""
    digest.update(np.array([len(array) for array in arrays], dtype=np.int64).tobytes())
    if arrays:
        digest.update(np.concatenate(arrays).tobytes())
