# SPDX-License-Identifier: Apache-2.0
"""A cast of K and V over nodes beside attention that reads what arrives while it runs, and the reduce of the gradients
that attention leaves: ``docs/design/two_levels.md``.

Nothing is copied out. OUT of the cast is where attention reads, and ``partials`` of the reduce is where it writes, each
of K and of V dense. To attention the exchange is a buffer of one rank, whose signals are the groups of OUT.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from magi_attention.comm.collectives.layout import Rows, copy_rows
from magi_attention.comm.collectives.wire import RowPack
from magi_attention.comm.exchange.arena import Regions, room_for
from magi_attention.comm.exchange.group import ExchangeGroup
from magi_attention.comm.exchange.launches import CODES, NUM_CTAS, Launches, rows_sent
from magi_attention.comm.exchange.tables import CastTables, ReduceTables, cast_tables, reduce_tables
from magi_attention.common.plan_cache import PlanCache
from magi_attention.common.two_level.transfers import Region, TransferPlan
from magi_attention.native import abi
from magi_attention.native.comm import abi as comm_abi
from magi_attention.native.comm.symm import Reduce


class ExchangeBeside:
    """``cast`` and ``reduce``, prepared for the arena as it is now.

    ``rows`` are the packs of K and V, ``grads`` of their gradients on the wire, one tensor each. Rows of OUT from
    ``received`` on are sent by nobody; they are zero when attention reads.
    """

    def __init__(
        self, group: ExchangeGroup, plan: TransferPlan, rows: Sequence[RowPack], grads: Sequence[RowPack],
        received: int, num_ctas: int = NUM_CTAS,
    ) -> None:  # fmt: skip
        cast_bytes, reduce_bytes = ([pack.width * pack.dtype.itemsize for pack in packs] for packs in (rows, grads))
        room = Regions.of_cast(plan, cast_bytes).num_bytes, Regions.of_reduce(plan, reduce_bytes).num_bytes
        arena = group.reserve(room_for(plan, *room))  # of both, as what is prepared is void when it grows
        self.group = group
        self.cast = _Cast(group, plan, cast_tables(plan, group.rank, arena, cast_bytes), rows, received, num_ctas)
        self.reduce = _Reduce(group, reduce_tables(plan, group.rank, arena, reduce_bytes), grads, num_ctas)
        # Attention gives up when a wait of the exchange was in vain, which names the rank that is missing. It never is
        # the first: a cast waits for credits, for the blocks that it forwards, and for one group after the other.
        waits = 3 + self.cast.num_groups
        self.timeout_ms = min(waits * group.timeout_ms, 2**31 - 1)
        self.failed_peer: int = self.cast.epoch.failed_peer
        # Addresses of both buffers as all ranks have them: attention looks at one, the sum of what ranks add at each.
        controls = self.cast.control, self.reduce.control
        self._own = [torch.full((group.world,), at, dtype=torch.int64, device=group.device) for at in controls]
        self.keys, self.sums = (abi.SymmBuffer(at, own.data_ptr()) for at, own in zip(controls, self._own))
        self.held = [*self.cast.held, *self.reduce.held, *self._own]

    def is_current(self) -> bool:
        """Is the arena still that for which this was prepared?"""
        return self.cast.is_current()

    def own_sums(self, out: torch.dtype, out_rows: int, tiles: int, src_rows: int, rows: int) -> Reduce:
        """What adds rows of GRADS to float32 sums of this rank, in the order of the ranks, and ends the epochs of both
        buffers. ``tiles`` and ``src_rows``, (world, rows), are addresses, as ``magi_symm_reduce_params`` has them."""
        packs, places = self.reduce.packs, self.reduce.places
        begins = [p[Region.GRADS.name] - self.group.arena.control_at(True) for p in places]
        return Reduce(
            rank=0, world=self.group.world, timeout_ms=self.timeout_ms, failed_peer=self.failed_peer, rows=rows,
            out_rows=out_rows, num_tensors=len(packs), wire_dtype=CODES[packs[0].dtype], base_dtype=abi.FP32,
            out_dtype=CODES[out], row_values=[pack.width for pack in packs], buffer=self.sums, put_buffer=self.keys,
            tiles=tiles, src_rows=src_rows, data_at=begins,
        )  # fmt: skip


class _Cast(Launches):
    def __init__(
        self, group: ExchangeGroup, plan: TransferPlan, tables: CastTables, packs: Sequence[RowPack], received: int,
        num_ctas: int,
    ) -> None:  # fmt: skip
        super().__init__(group, False, num_ctas)
        self.cache = PlanCache()
        self._sent = Rows(rows_sent(plan.ranks[group.rank]), self.cache, "rows sent")
        inputs = [self.columns(p, at["input"], tables.input_rows) for p, at in zip(packs, tables.places)]
        self._input = [column for columns in inputs for column in columns]
        self.num_groups = len(tables.begins) - 1
        self.out = [self.memory.data_ptr() + at[Region.OUT.name] for at in tables.places]
        control_at = self.arena.control_at(False)
        self.control = self.memory.data_ptr() + control_at
        row_bytes = [pack.width * pack.dtype.itemsize for pack in packs]
        ends = [at[Region.OUT.name] + received * size for at, size in zip(tables.places, row_bytes)]
        behind = [(tables.output_rows - received) * size for size in row_bytes]
        both = comm_abi.PAIR
        self._relay = comm_abi.CommRelayParams(
            self.put(tables.puts, tables.credits), self.num_groups, 0, control_at, both(*ends), both(*behind),
            self.upload(tables.begins), self.upload(tables.waits),
        )  # fmt: skip
        self._end = self.end(tables)

    def copy_in(self, inputs: Sequence[torch.Tensor]) -> None:
        """Rows of k and v (input rows, ...), from where puts can send them."""
        copy_rows(self._input, inputs, self._sent, self._sent)

    def start(self, stream: int) -> None:
        """Right before the attention kernel, which starts when all of its CTAs are at work."""
        self._relay.put.stream = stream
        self.group.verbs.relay(self._relay)

    def finish(self, stream: int) -> None:
        """Behind the last read of OUT."""
        self.launch(self.group.verbs.end, self._end, stream)


class _Reduce(Launches):
    def __init__(self, group: ExchangeGroup, tables: ReduceTables, packs: Sequence[RowPack], num_ctas: int) -> None:
        super().__init__(group, True, num_ctas)
        self.packs, self.places = list(packs), tables.places
        self.partials = [self.memory.data_ptr() + at["partials"] for at in tables.places]
        self.control = self.memory.data_ptr() + self.arena.control_at(True)
        self._put, self._wait = self.put(tables.puts, tables.credits), self.wait(tables.waits)
        self._sums = [self.sum(table, pack) for table, pack in zip(tables.node_sums, packs)]
        self._end = self.end(tables)

    def run(self, stream: int) -> None:
        """Behind attention, which has written the partials: until GRADS is here."""
        verbs = self.group.verbs
        self.launch(verbs.put, self._put, stream)
        for node_sum in self._sums:
            self.launch(verbs.sum, node_sum, stream)
        self.launch(verbs.wait, self._wait, stream)

    def finish(self, stream: int) -> None:
        """Behind the last read of GRADS."""
        self.launch(self.group.verbs.end, self._end, stream)
