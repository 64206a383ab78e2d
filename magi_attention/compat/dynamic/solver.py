# SPDX-License-Identifier: Apache-2.0
"""``DynamicAttnSolver``: an algorithm's solution in the published form of metas."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property
from typing import Any

import numpy as np

from magi_attention.comm.transport.torch import as_transport
from magi_attention.common.group_spec import GroupSpec
from magi_attention.common.intervals import Packing, split_at, subtract_intervals
from magi_attention.common.ranges import AttnRanges
from magi_attention.common.slices import K0, K1, Q0, Q1, MaskTypes, SliceTable, merge
from magi_attention.compat.dynamic.algorithms import DynamicAttnAlgorithm
from magi_attention.compat.metas import A2AVBasedGroupCollectiveArg, AttnArg, CalcMeta, CommMeta, DispatchMeta
from magi_attention.compat.metas.builders import slice_table
from magi_attention.compat.values.rectangles import AttnRectangles
from magi_attention.errors import ContractError
from magi_attention.meta.chunking import split_by_chunk
from magi_attention.meta.rank_plan import cut_by_windows, local_slices
from magi_attention.meta.solver.placement import Ints


class DynamicAttnSolver:
    """``solve``, then the metas of this rank: what is computed of local rows, and one remote stage.

    The rows of each rank come from ``dispatch_meta_q`` and ``_k``, or are ``host_ranges_q`` and ``_k`` (one entry for
    each rank), or equal parts of ``total_seqlen_q`` and ``_k``. Rank and size are ``cp_rank`` and ``cp_size``, or else
    those of the dispatch meta or of the group; nothing is sent to the group. With ``calc_local_range`` ranges of the
    calc meta count rows of buffers: local rows, and in the remote stage those received behind them, of queries and keys
    alike; without it they are global.

    Attributes: ``rect``, ``bucket_per_rank``, ``host_ranges_q``, ``host_ranges_k``, ``is_solved``. ``ContractError``:
    the rows or the rank are not told.
    """

    def __init__(
        self,
        algorithm: DynamicAttnAlgorithm,
        num_heads_q: int,
        num_heads_kv: int,
        head_dim: int,
        cp_group: Any,
        dispatch_meta_q: DispatchMeta | None = None,
        dispatch_meta_k: DispatchMeta | None = None,
        total_seqlen_q: int | None = None,
        total_seqlen_k: int | None = None,
        host_ranges_q: Sequence[AttnRanges] | None = None,
        host_ranges_k: Sequence[AttnRanges] | None = None,
        cp_rank: int | None = None,
        cp_size: int | None = None,
        cp_mesh: Any = None,
        calc_local_range: bool = True,
    ) -> None:
        self.algorithm, self.cp_group, self.cp_mesh = algorithm, cp_group, cp_mesh
        self.num_heads_q, self.num_heads_kv, self.head_dim = num_heads_q, num_heads_kv, head_dim
        self.num_heads_group, self.calc_local_range = 1, calc_local_range
        if dispatch_meta_q is not None and cp_rank is None and cp_size is None:
            cp_rank, cp_size = dispatch_meta_q.cp_rank, dispatch_meta_q.cp_size
        if cp_rank is None or cp_size is None:
            transport = as_transport(cp_group)
            cp_rank = transport.rank if cp_rank is None else cp_rank
            cp_size = transport.size if cp_size is None else cp_size
        self.cp_rank, self.cp_size = cp_rank, cp_size
        self.host_ranges_q = _hosts("q", cp_size, dispatch_meta_q, host_ranges_q, total_seqlen_q)
        self.host_ranges_k = _hosts("k", cp_size, dispatch_meta_k, host_ranges_k, total_seqlen_k)
        self.host_q_ranges_global, self.host_k_ranges_global = self.host_ranges_q[cp_rank], self.host_ranges_k[cp_rank]
        self.rect = AttnRectangles()
        self.bucket_per_rank = [AttnRectangles() for _ in range(cp_size)]
        self._is_solved = False

    def solve(self, q_ranges: AttnRanges, k_ranges: AttnRanges, attn_mask_type: MaskTypes) -> None:
        """Finds the rectangles of each rank. Pure: each rank finds the same."""
        table = slice_table(q_ranges, k_ranges, attn_mask_type).array
        self.rect = AttnRectangles.from_ranges(table[:, :2].tolist(), table[:, 2:4].tolist(), table[:, 4].tolist())
        hosts = self.host_ranges_q, self.host_ranges_k
        heads = self.num_heads_q, self.num_heads_kv, self.num_heads_group
        self.algorithm.solve(self.rect, *hosts, *heads, self.bucket_per_rank)
        self._is_solved = True
        for name in ("_needs", "_hosts_of"):
            self.__dict__.pop(name, None)

    @property
    def is_solved(self) -> bool:
        return self._is_solved

    def calc_area(self) -> list[int]:
        """Allowed pairs that each rank computes."""
        self._check_solved()
        return [bucket.area() for bucket in self.bucket_per_rank]

    def output_solve_result(
        self, visualize: bool = False, save_path: str | None = None, before_dispatch: bool = False
    ) -> None:
        """With ``visualize`` a picture of the rectangles by rank (``visualize_buckets``), else nothing. With
        ``before_dispatch`` rows and keys are drawn rank by rank, in place of their order in the sequence."""
        self._check_solved()
        if not visualize:
            return
        from magi_attention.compat.dynamic.pictures import draw_slices

        slices = [bucket.to_slices() for bucket in self.bucket_per_rank]
        if before_dispatch:
            slices = [np.concatenate(list(self._rank_by_rank(mine))) for mine in slices]
        draw_slices(slices, "DynamicAttnSolver buckets", save_path)

    def _rank_by_rank(self, slices: Ints) -> Any:
        start_q = 0
        for host_q in self._hosts_of[0]:
            start_k = 0
            for host_k in self._hosts_of[1]:
                yield self._between(slices, host_q, host_k) + np.array([start_q, start_q, start_k, start_k, 0])
                start_k += host_k.length
            start_q += host_q.length

    @staticmethod
    def _between(slices: Ints, q_pack: Packing, k_pack: Packing, is_local: bool = True) -> Ints:
        """The pairs of ``slices`` with queries in one packing and keys in the other, in their coordinates if asked."""
        if not len(q_pack.ranges) or not len(k_pack.ranges):
            return slices[:0]
        pieces, _, _ = split_by_chunk(slices, q_pack.ranges)
        return local_slices(pieces, q_pack, k_pack) if is_local else merge(cut_by_windows(pieces, k_pack.ranges)[0])

    def make_calc_meta(self) -> CalcMeta:
        """What this rank computes. ``ContractError`` before ``solve``."""
        self._check_solved()
        mine = self.bucket_per_rank[self.cp_rank].to_slices()
        host_q, host_k = (hosts[self.cp_rank] for hosts in self._hosts_of)
        more_q, more_k = (Packing(needs[self.cp_rank]) for needs in self._needs)
        parts = []
        for q, k in ((host_q, host_k), (host_q, more_k), (more_q, host_k), (more_q, more_k)):
            parts.append(self._between(mine, q, k, self.calc_local_range))
            if self.calc_local_range:
                parts[-1] += np.array(2 * [host_q.length * (q is more_q)] + 2 * [host_k.length * (k is more_k)] + [0])
        return CalcMeta(
            AttnArg.from_slices(SliceTable(parts[0])),
            [AttnArg.from_slices(SliceTable(merge(np.concatenate(parts[1:]))))],
            headdim=self.head_dim,
            seqlen_q_shard=host_q.length,
            seqlen_k_local=host_k.length,
            seqlen_k_per_remote_stage=[more_k.length],
        )

    def make_comm_meta(self) -> CommMeta:
        """What this rank sends and receives: keys, and queries, whose outputs go back by the transpose.
        ``ContractError`` before ``solve``."""
        self._check_solved()
        specs = [_cast(self.cp_rank, hosts, needs) for hosts, needs in zip(self._hosts_of, self._needs)]
        q, k = (A2AVBasedGroupCollectiveArg.from_spec(spec, self.cp_group) for spec in specs)
        rows_q, rows_k = (sum(spec.output_splits) for spec in specs)
        return CommMeta([rows_k], [k], [rows_q], [q], self.num_heads_q, self.num_heads_kv, self.head_dim)

    def _check_solved(self) -> None:
        if not self._is_solved:
            raise ContractError("The solver has no solution yet; call solve() first.")

    @cached_property
    def _hosts_of(self) -> tuple[list[Packing], list[Packing]]:
        """What each rank holds, of queries and of keys."""
        q, k = ([_ranges(host) for host in hosts] for hosts in (self.host_ranges_q, self.host_ranges_k))
        return [Packing(x) for x in q], [Packing(x) for x in k]

    @cached_property
    def _needs(self) -> tuple[list[Ints], list[Ints]]:
        """The ranges that each rank receives, of queries and of keys."""
        slices = [bucket.to_slices() for bucket in self.bucket_per_rank]
        q, k = (
            [subtract_intervals(mine[:, ends], host.ranges) for mine, host in zip(slices, hosts)]
            for ends, hosts in zip(([Q0, Q1], [K0, K1]), self._hosts_of)
        )
        return q, k


def _ranges(ranges: AttnRanges) -> Ints:
    return np.array(ranges.to_naive_ranges(), dtype=np.int64).reshape(-1, 2)


def _hosts(
    side: str, size: int, meta: DispatchMeta | None, hosts: Sequence[AttnRanges] | None, total: int | None
) -> list[AttnRanges]:
    if meta is not None:
        found = meta.host_ranges_per_rank
    elif hosts is not None:
        found = [ranges.merge() for ranges in hosts]
    elif total is not None:
        edges = [total * rank // size for rank in range(size + 1)]
        found = [AttnRanges.from_ranges([(a, b)] if b > a else []) for a, b in zip(edges[:-1], edges[1:])]
    else:
        raise ContractError(
            f"The solver does not know who holds which rows of {side}; give dispatch_meta_{side}, host_ranges_{side} "
            f"or total_seqlen_{side}."
        )
    if len(found) != size:
        raise ContractError(f"Rows of {side} of {len(found)} ranks for cp_size {size}; give those of each rank.")
    return found


def _cast(rank: int, hosts: Sequence[Packing], needs: Sequence[Ints]) -> GroupSpec:
    """The group cast in which rank r receives ``needs[r]``; all ranges are cut where one of any rank begins or ends."""
    edges = np.unique(np.concatenate([x.reshape(-1) for x in (*(host.ranges for host in hosts), *needs)]))

    def holders(ranges: Ints, of: Sequence[Ints]) -> list[tuple[int, ...]]:
        inside = [[bool(((a <= x) & (x < b)).any()) for x in ranges[:, 0]] for a, b in ((y[:, 0], y[:, 1]) for y in of)]
        return [tuple(np.flatnonzero(row).tolist()) for row in np.array(inside, dtype=bool).reshape(len(of), -1).T]

    held, received = split_at(hosts[rank].ranges, edges), split_at(needs[rank], edges)
    sources = [owner for (owner,) in holders(received, [host.ranges for host in hosts])]
    return GroupSpec(
        rank,
        len(hosts),
        tuple((held[:, 1] - held[:, 0]).tolist()),
        tuple(holders(held, needs)),
        tuple((received[:, 1] - received[:, 0]).tolist()),
        tuple(sources),
    )


__all__ = ["DynamicAttnSolver"]
