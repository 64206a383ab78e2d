# SPDX-License-Identifier: Apache-2.0
"""Group casts over nodes, and their reduces, by one-sided transfers: ``docs/design/two_levels.md``.

A cast is one launch of puts, forwards among them, and a wait; a reduce is puts, sums of the node that go on to the
owner, a wait, and the sum of the owner. Epochs are counted in device memory, so no argument changes between calls.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from magi_attention.comm.collectives.layout import Rows
from magi_attention.comm.collectives.reduce import Contribution, accumulation_dtype, reduce_rows_lse
from magi_attention.comm.collectives.wire import RowPack
from magi_attention.comm.exchange.arena import Regions, room_for
from magi_attention.comm.exchange.group import ExchangeGroup
from magi_attention.comm.exchange.tables import CastTables, ReduceTables, SumTable, Table, cast_tables, reduce_tables
from magi_attention.comm.transport.base import DoneWork, Work
from magi_attention.common.plan_cache import Kind, PlanCache
from magi_attention.common.two_level.transfers import Region, Sum, TransferPlan
from magi_attention.errors import ContractError
from magi_attention.native import abi

NUM_CTAS = 16
BLOCK_ROWS = 128  # one CTA puts a block, so these are smaller than the network alone would want
_CODES = {torch.bfloat16: abi.BF16, torch.float16: abi.FP16, torch.float32: abi.FP32}


def why_rows_stay(cast: RowPack, reduce: RowPack) -> str | None:
    """Why rows of these shapes cannot travel by an exchange, with sums on the way back; None if they can."""
    for pack in (cast, reduce):
        size = pack.width * pack.dtype.itemsize
        if size < 16 or size % 16:
            return f"Rows of {size} bytes cannot travel by puts; they must be multiples of 16 bytes."
    if reduce.dtype not in _CODES or reduce.width % 8:
        return (
            f"Rows of {reduce.width} values of {reduce.dtype} cannot be added; they need a multiple of 8 values, all "
            "of bf16, fp16 or float32."
        )
    return None


class NodeExchange:
    """The cast and the reduce of ``plan``, which is of all ranks. Calls of all ranks come in the same order."""

    def __init__(self, group: ExchangeGroup, plan: TransferPlan) -> None:
        self.group, self.plan = group, plan
        self.cache = PlanCache()

    def cast(self, inputs: Sequence[torch.Tensor], is_beside: bool = False) -> tuple[list[torch.Tensor], Work]:
        """Rows (input rows, ...) as the plan's specs have them, to (output rows, ...) in order of the output.

        Up to three tensors, of any dtypes whose rows together are a multiple of 16 bytes. ``is_beside``: the current
        stream goes on and has to ``wait`` before it reads the outputs; the inputs must live until then.
        """
        pack, group = RowPack.of(inputs, [x.dtype for x in inputs]), self.group
        group.check("a group cast over nodes")
        found = self.cache.find(_CASTS, pack)
        if found is None or not found.is_current():
            self.cache.pop(_CASTS, pack)
            found = self.cache.get(_CASTS, pack, lambda: _Cast(group, self.plan, pack))
        with group.ordered(is_beside) as turn:
            outputs = found.run(inputs)
        group.check_if_done("a group cast over nodes")
        return outputs, turn.work or DoneWork()

    def reduce(
        self, partials: Sequence[torch.Tensor], outputs: Sequence[torch.Tensor], wire: Sequence[torch.dtype],
        op: str = "sum", is_beside: bool = False,
    ) -> Work:  # fmt: skip
        """Adds to ``outputs`` (input rows, ...) what all ranks have for them in ``partials`` (output rows, ...).

        ``wire``: dtype of each on the wire. The ranks of a node add theirs first, in their order and in float32; an
        owner adds its own, those of its node and the sums of other nodes, senders ascending. With ``op`` "lse" the last
        tensor of both is the lse (rows, heads) that weights the others (rows, heads, dim), also of other dtypes.
        ``is_beside``: as of ``cast``.
        """
        pack, group = RowPack.of(partials, wire), self.group
        group.check("a group reduce over nodes")
        kind = _LSE_REDUCES if op == "lse" else _REDUCES
        found = self.cache.find(kind, pack)
        if found is None or not found.is_current():
            made = _LseReduce if op == "lse" else _Reduce
            self.cache.pop(kind, pack)
            found = self.cache.get(kind, pack, lambda: made(group, self.plan, pack))
        with group.ordered(is_beside) as turn:
            found.run(partials, outputs)
        group.check_if_done("a group reduce over nodes")
        return turn.work or DoneWork()


class _Launches:
    """Parameters of launches, prepared for the arena as it is now."""

    def __init__(self, group: ExchangeGroup, of_reduce: bool, pack: RowPack) -> None:
        self.group, self.arena, self.memory, self.pack = group, group.arena, group.memory, pack
        self.epoch, self.credit = group.epoch(of_reduce), self.arena.credit(of_reduce, group.rank)
        self.held: list[torch.Tensor] = []  # tables that launches point to

    def is_current(self) -> bool:
        return self.group.arena is self.arena

    def put(self, puts: Table, credits: Table) -> abi.CommPutParams:
        counts = len(puts), len(credits), NUM_CTAS
        lists = self._upload(puts), self._upload(credits)
        return abi.CommPutParams(abi.COMM_VERSION, *counts, self.epoch, *lists, None)

    def wait(self, waits: Table) -> abi.CommWaitParams:
        return abi.CommWaitParams(abi.COMM_VERSION, len(waits), self.epoch, self._upload(waits), None)

    def end(self, tables: CastTables | ReduceTables) -> abi.CommEndParams:
        counts = len(tables.free_for), len(tables.counted)
        lists = self._upload(tables.free_for), self._upload(tables.counted)
        return abi.CommEndParams(abi.COMM_VERSION, *counts, self.epoch, *lists, self.credit, None)

    def sum(self, table: SumTable, wire: int, out: int, result: torch.Tensor, accumulate: bool) -> abi.CommSumParams:
        fields = len(table.blocks), NUM_CTAS, self.pack.width, wire, out, accumulate
        lists = [self._upload(rows) for rows in table]
        return abi.CommSumParams(abi.COMM_VERSION, *fields, self.epoch, *lists, result.data_ptr(), None)

    def _upload(self, table: np.ndarray) -> int:
        self.held.append(torch.from_numpy(np.ascontiguousarray(table)).to(self.memory.device))
        return self.held[-1].data_ptr()

    def view(self, at: int, rows: int) -> list[torch.Tensor]:
        """Rows of a region, each tensor of the pack a view of them."""
        pack, size = self.pack, rows * self.pack.width * self.pack.dtype.itemsize
        return pack.columns(self.memory[at : at + size].view(pack.dtype).view(rows, pack.width))


class _Cast(_Launches):
    def __init__(self, group: ExchangeGroup, plan: TransferPlan, pack: RowPack) -> None:
        row_bytes = pack.width * pack.dtype.itemsize
        group.reserve(room_for(plan, cast_bytes=Regions.of_cast(plan, row_bytes).num_bytes))
        super().__init__(group, False, pack)
        tables = cast_tables(plan, group.rank, self.arena, row_bytes)
        self._input = self.view(tables.places["input"], tables.input_rows)
        self._output = self.view(tables.places[Region.OUT.name], tables.output_rows)
        self._put, self._wait = self.put(tables.puts, tables.credits), self.wait(tables.waits)
        self._end = self.end(tables)

    def run(self, inputs: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        group, verbs = self.group, self.group.verbs
        for column, x in zip(self._input, inputs, strict=True):
            column.copy_(x)
        group.launch(verbs.put, self._put)
        group.launch(verbs.wait, self._wait)
        outputs = [column.clone(memory_format=torch.contiguous_format) for column in self._output]
        group.launch(verbs.end, self._end)
        return outputs


class _ReduceLaunches(_Launches):
    """What both kinds of reduces begin and end with."""

    def __init__(self, group: ExchangeGroup, plan: TransferPlan, pack: RowPack) -> None:
        row_bytes = pack.width * pack.dtype.itemsize
        group.reserve(room_for(plan, reduce_bytes=Regions.of_reduce(plan, row_bytes).num_bytes))
        super().__init__(group, True, pack)
        self.tables = tables = reduce_tables(plan, group.rank, self.arena, row_bytes, pack.dtype.itemsize)
        self.partials = self.view(tables.places["partials"], tables.output_rows)
        self._put, self.wait_grads = self.put(tables.puts, tables.credits), self.wait(tables.waits)
        self.end_epoch = self.end(tables)

    def send(self, partials: Sequence[torch.Tensor]) -> None:
        """To carriers and to owners in the own node."""
        for column, x in zip(self.partials, partials, strict=True):
            column.copy_(x)
        self.group.launch(self.group.verbs.put, self._put)


class _Reduce(_ReduceLaunches):
    """Sums by the kernels: a node sends on one block while the next is on its way."""

    def __init__(self, group: ExchangeGroup, plan: TransferPlan, pack: RowPack) -> None:
        if pack.dtype not in _CODES or pack.width % 8:
            raise ContractError(why_rows_stay(pack, pack) or f"Rows of {pack.dtype} cannot be added.")
        super().__init__(group, plan, pack)
        code, tables = _CODES[pack.dtype], self.tables
        shape = tables.input_rows, pack.width
        self.sums = torch.empty(shape, dtype=torch.float32, device=self.memory.device)
        self._spans = [self.sums[:, begin:end] for begin, end in pack.spans]
        self._node_sum = self.sum(tables.node_sums, code, code, self.memory, False)
        self._owner_sum = self.sum(tables.owner_sums, code, abi.FP32, self.sums, True)

    def run(self, partials: Sequence[torch.Tensor], outputs: Sequence[torch.Tensor]) -> None:
        group, verbs = self.group, self.group.verbs
        self.send(partials)
        group.launch(verbs.sum, self._node_sum)
        for span, y in zip(self._spans, outputs, strict=True):
            span.copy_(y.reshape(span.shape))
        group.launch(verbs.wait, self.wait_grads)
        group.launch(verbs.sum, self._owner_sum)
        for span, y in zip(self._spans, outputs):
            y.copy_(span.reshape(y.shape))
        group.launch(verbs.end, self.end_epoch)


class _LseReduce(_ReduceLaunches):
    """Sums with weights, by torch and in the same order: a node sends on when all of its terms are there."""

    def __init__(self, group: ExchangeGroup, plan: TransferPlan, pack: RowPack) -> None:
        super().__init__(group, plan, pack)
        part, tables = plan.ranks[group.rank], self.tables
        held, _, terms, grads = part.region_rows
        self._node_wait = self.wait(tables.node_waits)
        self._back = self.put(tables.backs, np.zeros((0, abi.COMM_WAIT_WORDS), np.int64))
        self._terms = self.view(tables.places[Region.TERMS.name], terms)
        self._held = self.view(tables.places["sums"], held)
        self._grads = self.view(tables.places[Region.GRADS.name], grads)
        self.cache = PlanCache()
        self._node_slots = _slots(_joined([block.add for block in part.blocks]), self.cache, "node")
        # Rows of what came back, followed by those of this rank.
        add = Sum(part.add.begins, np.where(part.add.terms >= 0, part.add.terms, grads - 1 - part.add.terms))
        self._owner_slots = _slots(add, self.cache, "owner")

    def run(self, partials: Sequence[torch.Tensor], outputs: Sequence[torch.Tensor]) -> None:
        group, verbs = self.group, self.group.verbs
        self.send(partials)
        group.launch(verbs.wait, self._node_wait)
        sums = [torch.empty(x.shape, dtype=accumulation_dtype(x.dtype), device=x.device) for x in self._held]
        _reduce_by_lse(sums, self._terms, self._node_slots, acc_reduce=False)
        for column, x in zip(self._held, sums):
            column.copy_(x)
        group.launch(verbs.put, self._back)
        group.launch(verbs.wait, self.wait_grads)
        came_back = [torch.cat(pair) for pair in zip(self._grads, self.partials)]
        _reduce_by_lse(outputs, came_back, self._owner_slots, acc_reduce=True)
        group.launch(verbs.end, self.end_epoch)


def _joined(sums: Sequence[Sum]) -> Sum:
    """The rows of all, one after another."""
    counts = np.concatenate([np.zeros(1, np.int64), *(np.diff(s.begins) for s in sums)])
    return Sum(np.cumsum(counts), np.concatenate([np.zeros(0, np.int64), *(s.terms for s in sums)]))


def _slots(add: Sum, cache: PlanCache, name: str) -> list[tuple[Rows, Rows]]:
    """The first term of every row that has one, the second ones, and so on: (rows, terms)."""
    counts, found = np.diff(add.begins), []
    for k in range(int(counts.max(initial=0))):
        rows = np.flatnonzero(counts > k)
        terms = add.terms[add.begins[rows] + k]
        found.append((Rows(rows, cache, f"{name} rows {k}"), Rows(terms, cache, f"{name} terms {k}")))
    return found


def _reduce_by_lse(
    outputs: Sequence[torch.Tensor], columns: Sequence[torch.Tensor], slots: list[tuple[Rows, Rows]], acc_reduce: bool
) -> None:
    """The last of both is the lse."""
    *data, lse = outputs
    lse_terms: list[Contribution] = [(rows, terms.take(columns[-1])) for rows, terms in slots]
    for i, (y, column) in enumerate(zip(data, columns)):
        is_last = i == len(data) - 1  # why: every output is weighted by the lse before the reduce
        taken: list[Contribution] = [(rows, terms.take(column)) for rows, terms in slots]
        reduce_rows_lse(y, lse if is_last else lse.clone(), taken, lse_terms, acc_reduce)


_CASTS: Kind[RowPack, _Cast] = Kind("launches of casts over nodes", lambda made: made.held)
_REDUCES: Kind[RowPack, _Reduce] = Kind("launches of reduces over nodes", lambda made: [*made.held, made.sums])
_LSE_REDUCES: Kind[RowPack, _LseReduce] = Kind("launches of reduces by lse over nodes", lambda made: made.held)
