# SPDX-License-Identifier: Apache-2.0
"""Where each row of a group cast goes: a GroupSpec turned into row indices, once per plan.

On the wire rows are grouped by destination, ranks ascending; they arrive grouped by source, ranks ascending.
The group reduce walks the same layout backwards. Rows that a rank sends to itself never reach the wire.
"""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from magi_attention.common.group_spec import GroupSpec, rows_per_rank
from magi_attention.common.plan_cache import Kind, PlanCache, on_gpu
from magi_attention.errors import ContractError
from magi_attention.native.rows import ALL_ROWS, RowList, Terms, row_kernels

# index_copy_ lacks these dtypes; a move needs only their bits
_MOVED_AS = {
    torch.float8_e4m3fn: torch.int8,
    torch.float8_e5m2: torch.int8,
    torch.uint16: torch.int16,
    torch.uint32: torch.int32,
    torch.uint64: torch.int64,
}
_INDICES: Kind[tuple[str, torch.device], torch.Tensor] = Kind("row numbers", on_gpu)
_LISTS: Kind[tuple[str, torch.device], RowList] = Kind("row numbers for kernels", lambda listed: [listed.rows])
_CONTRIBUTIONS: Kind[torch.device, torch.Tensor] = Kind("contributions to rows", on_gpu)
_TERMS: Kind[tuple[torch.device, bool], Terms] = Kind("terms of sums", lambda terms: terms.tensors)


class Rows:
    """A list of row numbers; a run of consecutive rows is a view instead of a gather.

    The index tensor of each device is made at the first use and kept in ``cache``, as are launches that were prepared
    for these rows. It is the cache of the layout, which counts ``index`` and tells its lists apart by ``name``.
    """

    def __init__(self, index: np.ndarray, cache: PlanCache, name: str):
        self.index = np.ascontiguousarray(index, dtype=np.int64)
        self.count = int(self.index.size)
        is_run = self.count == 0 or bool((np.diff(self.index) == 1).all())
        self.start: int | None = (int(self.index[0]) if self.count else 0) if is_run else None
        self.cache, self.name = cache, name

    def listed(self, device: torch.device) -> RowList:
        """The row numbers as the CUDA kernels read them; made at the first use and kept."""

        def make() -> RowList:
            return RowList(torch.from_numpy(self.index.astype(np.int32)).to(device), self.count)

        return self.cache.get(_LISTS, (self.name, device), make)

    def on(self, device: torch.device) -> torch.Tensor:
        """The row numbers, (count,) int64."""
        return self.cache.get(_INDICES, (self.name, device), lambda: torch.from_numpy(self.index).to(device))

    def take(self, x: torch.Tensor) -> torch.Tensor:
        """These rows of ``x``, in this order: (count, ...); a view if they are consecutive."""
        if self.start is not None:
            return x.narrow(0, self.start, self.count)
        return x.index_select(0, self.on(x.device))

    def take_into(self, out: torch.Tensor, x: torch.Tensor) -> None:
        """``out.copy_(take(x))`` without a temporary where the dtypes agree."""
        if self.start is None and out.dtype == x.dtype:
            torch.index_select(x, 0, self.on(x.device), out=out)
        else:
            out.copy_(self.take(x))

    def put(self, out: torch.Tensor, x: torch.Tensor) -> None:
        """``out[these rows] = x``; no row may be listed twice."""
        if self.start is not None:
            out.narrow(0, self.start, self.count).copy_(x)
        elif out.dtype in _MOVED_AS:
            bits = _MOVED_AS[out.dtype]
            out.view(bits).index_copy_(0, self.on(out.device), x.to(out.dtype).view(bits))
        else:
            out.index_copy_(0, self.on(out.device), x.to(out.dtype))

    def add(self, out: torch.Tensor, x: torch.Tensor) -> None:
        """``out[these rows] += x``; no row may be listed twice, which makes it deterministic."""
        if self.start is not None:
            out.narrow(0, self.start, self.count).add_(x)
        else:
            out.index_add_(0, self.on(out.device), x.to(out.dtype))


def copy_rows(
    outputs: Sequence[torch.Tensor], inputs: Sequence[torch.Tensor], out_rows: Rows | None, in_rows: Rows | None
) -> None:
    """``y[out_rows] = x[in_rows]`` for each output and its input; None stands for rows 0, 1, 2 ...

    On a GPU one launch moves all of them. No row may be listed twice in ``out_rows``.
    """
    listed = in_rows if out_rows is None else out_rows
    assert listed is not None
    kernels = row_kernels(outputs[0])
    if kernels is not None:
        device = outputs[0].device
        pairs, lists = [], []
        for side, rows in ((outputs, out_rows), (inputs, in_rows)):
            is_run = rows is None or rows.start is not None
            lists.append(ALL_ROWS if is_run else rows.listed(device))  # type: ignore[union-attr]
            start = 0 if rows is None else rows.start
            pairs.append([x.narrow(0, start, listed.count) for x in side] if start else side)
        if kernels.copy(list(zip(*pairs)), *lists, listed.count):
            return
    for y, x in zip(outputs, inputs):
        if out_rows is None:
            in_rows.take_into(y.narrow(0, 0, listed.count), x)  # type: ignore[union-attr]
        else:
            out_rows.put(y, x.narrow(0, 0, listed.count) if in_rows is None else in_rows.take(x))


class A2AVLayout:
    """Row indices of one rank for one group cast (and for the group reduce that is its transpose).

    ``send``            rows of the cast's input in wire order, without those for this rank itself
    ``send_counts[r]``  rows for rank r; 0 for this rank
    ``recv``            rows of the cast's output in order of arrival
    ``recv_counts[r]``  rows from rank r; 0 for this rank
    ``self_in/out``     rows copied locally, in input and output
    ``segments``        for the reduce, ranks ascending: (rows of the cast's input, offset in the wire
                        buffer or None for the local ones)
    """

    def __init__(
        self,
        rank: int,
        world: int,
        input_rows: int,
        output_rows: int,
        sends: Sequence[np.ndarray],
        recvs: Sequence[np.ndarray],
        num_contributions: np.ndarray | None = None,
    ):
        """``sends[r]``: rows of the input for rank r; ``recvs[r]``: rows of the output from rank r.

        ``num_contributions``: for each row of the input how many contributions its terms in the reduce hold, where
        these are sums already; by default each term is one.
        """
        if sends[rank].size != recvs[rank].size:
            raise ContractError(
                f"Rank {rank} sends {sends[rank].size} rows to itself but expects {recvs[rank].size}; the "
                "splits and index lists do not belong together."
            )
        none = np.zeros(0, np.int64)
        remote = [none if r == rank else rows for r, rows in enumerate(sends)]
        arriving = [none if r == rank else rows for r, rows in enumerate(recvs)]
        self.rank, self.world = rank, world
        self.input_rows, self.output_rows = int(input_rows), int(output_rows)
        self.cache = PlanCache()
        self.send, self.send_counts = self._rows(np.concatenate(remote), "send"), [int(r.size) for r in remote]
        self.recv, self.recv_counts = self._rows(np.concatenate(arriving), "recv"), [int(r.size) for r in arriving]
        self.self_in, self.self_out = self._rows(sends[rank], "self in"), self._rows(recvs[rank], "self out")
        self.segments: list[tuple[Rows, int | None]] = []
        at = 0
        for r, rows in enumerate(sends):
            if rows.size:
                self.segments.append((self._rows(rows, f"segment {r}"), None if r == rank else at))
            at += self.send_counts[r]
        self.are_terms_sums = num_contributions is not None
        if num_contributions is None:
            num_contributions = np.zeros(self.input_rows, np.int64)
            for rows in sends:
                num_contributions[rows] += 1
        self._num_contributions = num_contributions
        self._begin()

    def _begin(self) -> None:
        # What ``comm.symm.collective`` prepared, by the buffers of a group, with which it goes.
        self.exchanges: weakref.WeakKeyDictionary[Any, Any] = weakref.WeakKeyDictionary()
        listed = (self.send, self.recv, self.self_in, self.self_out, *(rows for rows, _ in self.segments))
        self.cache.count("rows", self._num_contributions, *(rows.index for rows in listed))

    def __getstate__(self) -> dict[str, Any]:
        return {name: value for name, value in self.__dict__.items() if name != "exchanges"}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._begin()

    def _rows(self, index: np.ndarray, name: str) -> Rows:
        return Rows(index, self.cache, name)

    @classmethod
    def from_spec(
        cls,
        spec: GroupSpec,
        output_map: np.ndarray | None = None,
        output_rows: int | None = None,
        num_contributions: np.ndarray | None = None,
    ) -> A2AVLayout:
        """``output_map[i]`` is the row of the real output buffer (``output_rows`` long) that row i of the
        spec's output stands for; by default the two are the same."""
        sends = rows_per_rank(spec.input_splits, spec.dst_indices, spec.world)
        recvs = rows_per_rank(spec.output_splits, [(s,) for s in spec.src_index], spec.world)
        if output_map is not None:
            recvs = [output_map[rows] for rows in recvs]
        num_out = spec.output_rows if output_rows is None else output_rows
        return cls(spec.rank, spec.world, spec.input_rows, num_out, sends, recvs, num_contributions)

    def contributions(self, device: torch.device) -> torch.Tensor:
        """How many contributions reach each row of the cast's input in the reduce: (input_rows,) int64."""
        return self.cache.get(_CONTRIBUTIONS, device, lambda: torch.from_numpy(self._num_contributions).to(device))

    @property
    def has_local_rows(self) -> bool:
        """Does this rank send rows to itself?"""
        return self.self_in.count > 0

    def terms(self, device: torch.device, of_all_rows: bool) -> Terms:
        """Which rows of the reduce's wire buffer are added to which rows of its output, ranks ascending.

        ``of_all_rows``: the terms list all output rows, else those that something is added to. Local rows are none of
        them.
        """

        def make() -> Terms:
            on_device = [
                None if x is None else torch.from_numpy(x.astype(np.int32)).to(device)
                for x in self._list_terms(of_all_rows)
            ]
            return Terms(*on_device)  # type: ignore[arg-type]

        return self.cache.get(_TERMS, (device, of_all_rows), make)

    def _list_terms(self, of_all_rows: bool) -> tuple[np.ndarray | None, np.ndarray, np.ndarray]:
        wire = [(rows.index, at) for rows, at in self.segments if at is not None]
        none = np.zeros(0, np.int64)
        targets = np.concatenate([none, *(rows for rows, _ in wire)])
        sources = np.concatenate([none, *(np.arange(at, at + rows.size) for rows, at in wire)])
        order = np.argsort(targets, kind="stable")  # why stable: terms of a row stay in the order of the ranks
        counts = np.bincount(targets, minlength=self.input_rows)
        touched = None if of_all_rows else np.flatnonzero(counts)
        if touched is not None:
            counts = counts[touched]
        return touched, np.concatenate([[0], np.cumsum(counts)]), sources[order]
