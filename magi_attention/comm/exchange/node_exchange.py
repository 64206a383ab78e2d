# SPDX-License-Identifier: Apache-2.0
"""Group casts over nodes, and their reduces, by one-sided transfers: ``docs/design/two_levels.md``.

A cast is one launch of puts, forwards among them, and a wait; a reduce is puts, sums of the node that go on to the
owner, and a wait. The owner then adds what arrived as if all-to-all-v had brought it. Epochs are counted in device
memory, so no argument changes between calls.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TypeVar

import numpy as np
import torch

from magi_attention.comm.collectives.layout import A2AVLayout, Rows, copy_rows
from magi_attention.comm.collectives.reduce import Contribution, accumulation_dtype, reduce_rows_lse
from magi_attention.comm.collectives.wire import Arrived, RowPack
from magi_attention.comm.exchange.arena import Regions, room_for
from magi_attention.comm.exchange.group import ExchangeGroup
from magi_attention.comm.exchange.launches import CODES, NUM_CTAS, Launches, rows_sent
from magi_attention.comm.exchange.tables import cast_tables, reduce_tables
from magi_attention.comm.transport.base import Work
from magi_attention.common.plan_cache import Kind, PlanCache
from magi_attention.common.two_level.transfers import Region, Sum, TransferPlan
from magi_attention.errors import ContractError
from magi_attention.native.comm import abi as comm_abi

_CAST, _REDUCE = "a group cast over nodes", "a group reduce over nodes"
L = TypeVar("L", bound=Launches)
BLOCK_ROWS = 128  # one CTA puts a block, so these are smaller than the network alone would want


def why_rows_stay(cast: RowPack, reduce: RowPack) -> str | None:
    """Why rows of these shapes cannot travel by an exchange, with sums on the way back; None if they can."""
    for pack in (cast, reduce):
        size = pack.width * pack.dtype.itemsize
        if size < 16 or size % 16:
            return f"Rows of {size} bytes cannot travel by puts; they must be multiples of 16 bytes."
    if reduce.dtype not in CODES or reduce.width % 8:
        return (
            f"Rows of {reduce.width} values of {reduce.dtype} cannot be added; they need a multiple of 8 values, all "
            "of bf16, fp16 or float32."
        )
    return None


class _Under:
    """An exchange under way, on the current stream or beside it. ``wait`` puts the current stream behind it; until then
    the tensors that it reads are kept."""

    def __init__(self, event: torch.cuda.Event | None, read: Sequence[torch.Tensor]) -> None:
        self._event, self._read = event, read

    def wait(self) -> None:
        if self._event is not None:
            self._event.wait()
        self._read = ()

    def is_completed(self) -> bool:
        return self._event is None or self._event.query()


class NodeExchange:
    """The cast and the reduce of ``plan``, which is of all ranks; the counterpart of ``start_fetch`` and
    ``start_reduce``. Calls of all ranks come in the same order. A launch has ``num_ctas`` at most."""

    def __init__(self, group: ExchangeGroup, plan: TransferPlan, num_ctas: int = NUM_CTAS) -> None:
        self.group, self.plan, self.num_ctas = group, plan, num_ctas
        self.cache = PlanCache()
        self.owner = _owner_layout(plan, group.rank)
        self.cache.include(self.owner.cache)
        part = plan.ranks[group.rank]
        self._sent = Rows(rows_sent(part), self.cache, "rows sent")
        self._out = Rows(np.arange(part.region_rows[Region.OUT]), self.cache, "rows of the output")

    def start_cast(
        self, inputs: Sequence[torch.Tensor], is_beside: bool = True
    ) -> tuple[Work, Callable[[], list[torch.Tensor]]]:
        """Rows (input rows, ...) as the plan's specs have them, to (output rows, ...) in order of the output, which the
        second result gives after the wait.

        Up to three tensors, of any dtypes whose rows together are a multiple of 16 bytes. With ``is_beside`` the
        current stream goes on until it waits.
        """
        pack = RowPack.of(inputs, [x.dtype for x in inputs])
        launches = self._prepared(_CASTS, pack, _Cast)
        with self.group.ordered(is_beside) as turn:
            outputs = launches.run(inputs, self._sent, self._out, turn.stream)
        self.group.check_if_done(_CAST)
        return _Under(turn.work, inputs), lambda: outputs

    def start_reduce(
        self, inputs: Sequence[torch.Tensor], dtypes: Sequence[torch.dtype], op: str = "sum", is_beside: bool = True
    ) -> tuple[Work, Callable[[], Arrived]]:
        """Sends rows (output rows, ...) back where the cast had them from, in ``dtypes`` on the wire. After the wait
        the second result gives what arrived, for ``reduce_arrived`` by "sum" or "lse".

        The ranks of a node add theirs first, in their order and in float32, so of each other node one row arrives. With
        ``op`` "lse" the last tensor is the lse (rows, heads) that weights the others (rows, heads, dim), and may be of
        another dtype.
        """
        pack = RowPack.of(inputs, dtypes)
        launches: _Reduce | _LseReduce
        if op == "lse":
            launches = self._prepared(_LSE_REDUCES, pack, _LseReduce)
        else:
            launches = self._prepared(_REDUCES, pack, _Reduce)
        local = [self.owner.self_out.take(x) for x in inputs] if self.owner.has_local_rows else []
        with self.group.ordered(is_beside) as turn:
            arrived = launches.run(inputs, self._out, turn.stream)
        self.group.check_if_done(_REDUCE)
        return _Under(turn.work, inputs), lambda: Arrived(self.owner, arrived, pack, local)

    def _prepared(
        self, kind: Kind[RowPack, L], pack: RowPack, make: Callable[[ExchangeGroup, TransferPlan, RowPack, int], L]
    ) -> L:
        self.group.check(_CAST if kind is _CASTS else _REDUCE)
        found = self.cache.find(kind, pack)
        if found is None or not found.is_current():
            self.cache.pop(kind, pack)
            found = self.cache.get(kind, pack, lambda: make(self.group, self.plan, pack, self.num_ctas))
        return found


def _owner_layout(plan: TransferPlan, rank: int) -> A2AVLayout:
    """Rows of GRADS as rows that all-to-all-v brings."""
    part, none = plan.ranks[rank], np.zeros(0, np.int64)
    recvs = [part.own_rows if sender == rank else none for sender in range(len(part.returns))]
    return A2AVLayout(rank, len(part.returns), part.input_rows, part.region_rows[Region.OUT], part.returns, recvs)


class _Cast(Launches):
    def __init__(self, group: ExchangeGroup, plan: TransferPlan, pack: RowPack, num_ctas: int) -> None:
        row_bytes = (pack.width * pack.dtype.itemsize,)
        group.reserve(room_for(plan, cast_bytes=Regions.of_cast(plan, row_bytes).num_bytes))
        super().__init__(group, False, num_ctas)
        self.pack = pack
        tables = cast_tables(plan, group.rank, self.arena, row_bytes)
        (places,) = tables.places
        self._input = self.columns(pack, places["input"], tables.input_rows)
        self._output = self.columns(pack, places[Region.OUT.name], tables.output_rows)
        self._put, self._wait = self.put(tables.puts, tables.credits), self.wait(tables.waits)
        self._end = self.end(tables)

    def run(self, inputs: Sequence[torch.Tensor], sent: Rows, out: Rows, stream: int) -> list[torch.Tensor]:
        verbs = self.group.verbs
        copy_rows(self._input, inputs, sent, sent)
        self.launch(verbs.put, self._put, stream)
        self.launch(verbs.wait, self._wait, stream)
        outputs = [torch.empty(x.shape, dtype=x.dtype, device=x.device) for x in self._output]
        copy_rows(outputs, self._output, out, out)
        self.launch(verbs.end, self._end, stream)
        return outputs


class _ReduceLaunches(Launches):
    """What both kinds of reduces begin and end with."""

    def __init__(self, group: ExchangeGroup, plan: TransferPlan, pack: RowPack, num_ctas: int) -> None:
        row_bytes = (pack.width * pack.dtype.itemsize,)
        group.reserve(room_for(plan, reduce_bytes=Regions.of_reduce(plan, row_bytes).num_bytes))
        super().__init__(group, True, num_ctas)
        self.pack = pack
        self.tables = tables = reduce_tables(plan, group.rank, self.arena, row_bytes)
        (places,) = tables.places
        self._partials = self.columns(pack, places["partials"], tables.output_rows)
        self._grads = self.rows(pack, places[Region.GRADS.name], plan.ranks[group.rank].region_rows[Region.GRADS])
        self._put, self._wait = self.put(tables.puts, tables.credits), self.wait(tables.waits)
        self._end = self.end(tables)

    def send(self, partials: Sequence[torch.Tensor], out: Rows, stream: int) -> None:
        """Puts partial rows: to their owners on this node, and to the carriers of other nodes."""
        copy_rows(self._partials, partials, out, out)
        self.launch(self.group.verbs.put, self._put, stream)

    def receive(self, stream: int) -> torch.Tensor:
        """What came for this rank's rows, (rows, width)."""
        self.launch(self.group.verbs.wait, self._wait, stream)
        arrived = self._grads.clone()
        self.launch(self.group.verbs.end, self._end, stream)
        return arrived


class _Reduce(_ReduceLaunches):
    """Sums of the node by a kernel: it sends on one block while the next is on its way."""

    def __init__(self, group: ExchangeGroup, plan: TransferPlan, pack: RowPack, num_ctas: int) -> None:
        if pack.dtype not in CODES or pack.width % 8:
            raise ContractError(why_rows_stay(pack, pack) or f"Rows of {pack.dtype} cannot be added.")
        super().__init__(group, plan, pack, num_ctas)
        self._node_sum = self.sum(self.tables.node_sums[0], pack)

    def run(self, partials: Sequence[torch.Tensor], out: Rows, stream: int) -> torch.Tensor:
        self.send(partials, out, stream)
        self.launch(self.group.verbs.sum, self._node_sum, stream)
        return self.receive(stream)


class _LseReduce(_ReduceLaunches):
    """Sums of the node with weights, by torch: it sends on when all terms are there."""

    def __init__(self, group: ExchangeGroup, plan: TransferPlan, pack: RowPack, num_ctas: int) -> None:
        super().__init__(group, plan, pack, num_ctas)
        part, tables, (places,) = plan.ranks[group.rank], self.tables, self.tables.places
        self._node_wait = self.wait(tables.node_waits)
        self._back = self.put(tables.backs, np.zeros((0, comm_abi.COMM_WAIT_WORDS), np.int64))
        self._terms = self.columns(pack, places[Region.TERMS.name], part.region_rows[Region.TERMS])
        self._held = self.columns(pack, places["sums"], part.region_rows[Region.HELD])
        self.cache = PlanCache()
        self._slots = _slots(_joined([block.add for block in part.blocks]), self.cache)

    def run(self, partials: Sequence[torch.Tensor], out: Rows, stream: int) -> torch.Tensor:
        self.send(partials, out, stream)
        self.launch(self.group.verbs.wait, self._node_wait, stream)
        sums = [torch.empty(x.shape, dtype=accumulation_dtype(x.dtype), device=x.device) for x in self._held]
        *data, lse = sums
        lse_terms: list[Contribution] = [(rows, terms.take(self._terms[-1])) for rows, terms in self._slots]
        for i, (y, column) in enumerate(zip(data, self._terms)):
            of_y: list[Contribution] = [(rows, terms.take(column)) for rows, terms in self._slots]
            is_last = i == len(data) - 1
            reduce_rows_lse(y, lse if is_last else lse.clone(), of_y, lse_terms, acc_reduce=False)
        for column, x in zip(self._held, sums):
            column.copy_(x)
        self.launch(self.group.verbs.put, self._back, stream)
        return self.receive(stream)


def _joined(sums: Sequence[Sum]) -> Sum:
    """The rows of all, one after another."""
    counts = np.concatenate([np.zeros(1, np.int64), *(np.diff(s.begins) for s in sums)])
    return Sum(np.cumsum(counts), np.concatenate([np.zeros(0, np.int64), *(s.terms for s in sums)]))


def _slots(add: Sum, cache: PlanCache) -> list[tuple[Rows, Rows]]:
    """The first term of every row that has one, the second ones, and so on: (rows, terms)."""
    counts, found = np.diff(add.begins), []
    for k in range(int(counts.max(initial=0))):
        rows = np.flatnonzero(counts > k)
        terms = add.terms[add.begins[rows] + k]
        found.append((Rows(rows, cache, f"rows {k}"), Rows(terms, cache, f"terms {k}")))
    return found


_CASTS: Kind[RowPack, _Cast] = Kind("launches of casts over nodes", lambda made: made.held)
_REDUCES: Kind[RowPack, _Reduce] = Kind("launches of reduces over nodes", lambda made: made.held)
_LSE_REDUCES: Kind[RowPack, _LseReduce] = Kind("launches of reduces by lse over nodes", lambda made: made.held)
