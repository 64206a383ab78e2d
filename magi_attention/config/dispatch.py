# SPDX-License-Identifier: Apache-2.0
"""Dispatch algorithms and ``DispatchConfig``."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from operator import attrgetter
from typing import ClassVar

from magi_attention.common.enum import DispatchAlgType
from magi_attention.common.scalars import as_int
from magi_attention.config.checks import Algorithm, check_fraction, is_instance, set_ints
from magi_attention.errors import ContractError


@dataclass(frozen=True)
class DispatchAlg(Algorithm):
    """How n chunks with known areas are given to k ranks so that the largest load is small.

    Use one of the subclasses. The four flags describe the answer: is it the best one, does it come with
    partitions (or only with a bound), has every rank the same number of chunks, and do chunks with
    common keys tend to go to the same rank.
    """

    _example = "for example MinHeapDispatchAlg()"
    _is_partitions_returned: ClassVar[bool] = True
    _is_equal_num_workloads: ClassVar[bool] = False
    _is_affinity_considered: ClassVar[bool] = False

    is_partitions_returned = property(attrgetter("_is_partitions_returned"))
    is_equal_num_workloads = property(attrgetter("_is_equal_num_workloads"))
    is_affinity_considered = property(attrgetter("_is_affinity_considered"))


@dataclass(frozen=True)
class LBDispatchAlg(DispatchAlg):
    """The lower bound ``total / k``, for analysis; it gives no partitions."""

    _type = DispatchAlgType.LOWER_BOUND
    _is_partitions_returned = False


@dataclass(frozen=True)
class DPDispatchAlg(DispatchAlg):
    """The exact smallest maximum by dynamic programming over subsets, for analysis; no partitions."""

    _type = DispatchAlgType.DYNAMIC_PROGRAMMING
    _is_optimal = True
    _is_partitions_returned = False


@dataclass(frozen=True)
class BSDispatchAlg(DispatchAlg):
    """Binary search on the load limit with exact feasibility; any number of chunks per rank."""

    _type = DispatchAlgType.BINARY_SEARCH
    _is_optimal = True


@dataclass(frozen=True)
class BTPDispatchAlg(DispatchAlg):
    """Backtracking with pruning under equal chunk counts; needs ``n % k == 0``."""

    _type = DispatchAlgType.BACKTRACKING_PRUNING
    _is_optimal = True
    _is_equal_num_workloads = True


@dataclass(frozen=True)
class MinHeapDispatchAlg(DispatchAlg):
    """Largest chunk first, each to the least loaded rank with fewer than ``ceil(n / k)`` chunks."""

    _type = DispatchAlgType.MIN_HEAP


@dataclass(frozen=True)
class LocalityDispatchAlg(DispatchAlg):
    """The default: runs of chunks of one document, so that few rows travel.

    It tries contiguous blocks, with some chunks swapped until areas are equal, and ranks that are filled one after
    another with a run of chunks of much work and one of little. The heaviest rank is at most 1% above the least area
    that it can have, the mean or the largest chunk, or no heavier than MinHeap's; and neither the rank that fetches
    most nor all together fetch more rows than MinHeap's would. The cost of a partition is the area of the heaviest rank
    and ``row_cost`` for each row of keys and values that a rank fetches: the number of pairs of query and key, over all
    query heads, that are computed while one row travels. MinHeap's partition stays where less than 1.5% of its cost is
    saved. 150 is right for 8 query heads on a kv head and NVLink; 1,000 without grouped queries.

    Where ``DispatchConfig.nodes`` says which ranks share a node, nodes are filled before ranks. That partition is taken
    if it is as balanced, all ranks fetch no more rows, and fewer of them cross the network.
    """

    row_cost: float = 150.0

    _type = DispatchAlgType.LOCALITY
    _is_affinity_considered = True

    def __post_init__(self) -> None:
        if not self.row_cost >= 0:
            raise ContractError(f"LocalityDispatchAlg.row_cost is {self.row_cost}; give a number of pairs >= 0.")


@dataclass(frozen=True)
class ToppHeapDispatchAlg(DispatchAlg):
    """As MinHeap with ``n / k`` chunks per rank, preferring ranks that share keys.

    Among the ``max(1, ceil(k * top_p))`` least loaded ranks the one closest by affinity takes the chunk.
    """

    top_p: float = 0.0

    _type = DispatchAlgType.TOPP_HEAP
    _is_equal_num_workloads = True
    _is_affinity_considered = True

    def __post_init__(self) -> None:
        check_fraction("ToppHeapDispatchAlg", "top_p", self.top_p)


@dataclass(frozen=True)
class BatchToppHeapDispatchAlg(DispatchAlg):
    """As ToppHeap, with the candidate ranks renewed once per ``num_of_select_chunk`` chunks."""

    top_p: float = 0.0
    num_of_select_chunk: int = 1

    _type = DispatchAlgType.BATCH_TOPP_HEAP
    _is_equal_num_workloads = True
    _is_affinity_considered = True

    def __post_init__(self) -> None:
        check_fraction("BatchToppHeapDispatchAlg", "top_p", self.top_p)
        set_ints(self, "num_of_select_chunk", at_least=1)


@dataclass(frozen=True)
class RandomSelectDispatchAlg(DispatchAlg):
    """A random permutation cut into equal blocks. ``seed`` makes all ranks draw the same one."""

    seed: int = 0

    _type = DispatchAlgType.RANDOM_SELECT
    _is_equal_num_workloads = True


@dataclass(frozen=True)
class SequentialDispatchAlg(DispatchAlg):
    """Contiguous blocks; the first ``n % k`` ranks get one chunk more."""

    _type = DispatchAlgType.SEQUENTIAL_SELECT


@dataclass(frozen=True)
class SortedSequentialSelectAlg(DispatchAlg):
    """Sample after sample by area; a sample spreads over ranks in runs of ``ratio * its chunks``."""

    allocation_ratio: float = 1.0

    _type = DispatchAlgType.SORTED_SEQUENTIAL_SELECT
    _is_equal_num_workloads = True

    def __post_init__(self) -> None:
        check_fraction("SortedSequentialSelectAlg", "allocation_ratio", self.allocation_ratio)


@dataclass(frozen=True)
class DispatchConfig:
    """How the sequence is cut into chunks and the chunks are given to ranks.

    Args:
        chunk_size: tokens per chunk, an upper bound; None lets the key maker choose.
        uneven_shard: ranks may own different numbers of tokens, with no padding unless tokens are fewer than ranks.
        alg: the dispatch algorithm.
        nodes: which ranks share a node, for LocalityDispatchAlg: the number of ranks in each, as 8, or the node of each
            rank, as (0, 0, 0, 1, 1). None where that is not known.
        max_fragments: at most so many ranges of consecutive tokens a rank, for layers that pass states from one to the
            next (``plan.fragments()``); None for any number. Where the algorithm's ranks hold more, runs of chunks are
            shared out by their areas; ``plan.imbalance`` says how evenly.
    Raises:
        ContractError: chunk_size, nodes or max_fragments not positive, or uneven_shard with an algorithm of equal
            counts.
    """

    chunk_size: int | None = None
    uneven_shard: bool = False
    alg: DispatchAlg = field(default_factory=LocalityDispatchAlg)
    nodes: int | tuple[int, ...] | None = None
    max_fragments: int | None = None

    def __post_init__(self) -> None:
        if self.chunk_size is not None:
            set_ints(self, "chunk_size", at_least=1)
        if isinstance(self.nodes, Sequence):
            nodes = tuple(as_int(node, "A node of DispatchConfig.nodes") for node in self.nodes)
            object.__setattr__(self, "nodes", nodes)
        elif self.nodes is not None:
            set_ints(self, "nodes", at_least=1)
        if self.max_fragments is not None:
            set_ints(self, "max_fragments", at_least=1)
        if not is_instance(self.alg, DispatchAlg):
            raise ContractError(f"DispatchConfig.alg is {self.alg!r}; give for example MinHeapDispatchAlg().")
        if self.uneven_shard and self.alg.is_equal_num_workloads:
            raise ContractError(
                f"{type(self.alg).__name__} gives every rank the same number of chunks, which uneven_shard "
                "does not promise; use MinHeapDispatchAlg, SequentialDispatchAlg or BSDispatchAlg."
            )
