# SPDX-License-Identifier: Apache-2.0
"""Attention in one launch per direction over several nodes: ``nvlink.py`` where links differ.

Rows travel by an exchange over nodes, whose last memory is that of the attention kernels: they read OUT while it fills,
and write the gradients of remote keys where the reduce sends from. So nothing is copied out or merged. What the owner
gets is added to its own float32 sums in the order of the ranks, as in one NVLink domain.
"""

from __future__ import annotations

from typing import Any

import torch

from magi_attention.comm.collectives.wire import RowPack
from magi_attention.comm.exchange.beside import ExchangeBeside
from magi_attention.comm.exchange.group import ExchangeGroup
from magi_attention.comm.exchange.node_exchange import BLOCK_ROWS
from magi_attention.common.plan_cache import PlanCache
from magi_attention.common.two_level.transfers import TransferPlan
from magi_attention.functional.one_launch.base import OneLaunch, Shapes, arrival_pace
from magi_attention.kernels import Grads
from magi_attention.kernels.ffa.backend import FfaBackend
from magi_attention.kernels.ffa.peer_kv import RemoteKeys, RemoteMask, remote_params
from magi_attention.kernels.types import BackwardOperands, Final, Operands
from magi_attention.meta.one_launch.node_layout import NodeLayout, RankNodeLayout
from magi_attention.meta.plan import Plan

_BYTES_PER_S = 4e10  # roughly, of what a rank gets: a network card for each
_TABLES = ("arrivals", "owners", "target_rows", "senders", "summed", "summed_tiles", "summed_src_rows")


class NodeFusedAttention(OneLaunch):
    """Over the memory of exchanges of ``group``."""

    def __init__(self, plan: Plan, group: ExchangeGroup, high_precision_reduce: bool) -> None:
        layout = NodeLayout(plan, group.nodes, BLOCK_ROWS)
        self._node_part, self._transfers, self._group = layout.part(group.rank), layout.transfers, group
        super().__init__(self._node_part, high_precision_reduce)

    def forward(self, backend: FfaBackend, x: Operands) -> Final:
        group = self._group
        group.check(_FORWARD)
        launches, x = self._of(x)
        with group.ordered(is_beside=False) as turn:  # all of it is on the current stream, so the host waits for nobody
            launches.exchange.cast.copy_in((x.k, x.v))
            with backend.forward_fused(x, launches.forward) as ready:
                launches.exchange.cast.start(turn.stream)
                ready.launch()
            launches.exchange.cast.finish(turn.stream)
        group.check_if_done(_FORWARD)
        return ready.result

    def backward(self, backend: FfaBackend, x: BackwardOperands) -> Grads:
        group = self._group
        group.check(_BACKWARD)
        launches, x = self._of(x)
        cast, reduce = launches.exchange.cast, launches.exchange.reduce
        with group.ordered(is_beside=False) as turn:
            cast.copy_in((x.k, x.v))
            with backend.backward_fused(x, launches.backward) as ready:
                cast.start(turn.stream)
                ready.launch()
            grads = ready.result
            dsink = grads.dsink()
            reduce.run(turn.stream)
            sums, to = (grads.dk_sums, grads.dv_sums), (grads.dk.data_ptr(), grads.dv.data_ptr())
            launches.add(sums, to, 0, turn.stream)
            cast.finish(turn.stream)
            reduce.finish(turn.stream)
        group.check_if_done(_BACKWARD)
        return Grads(grads.dq, grads.dk, grads.dv, dsink)

    def _made(self, shapes: Shapes, wire: torch.dtype, before: Any) -> _Launches:
        return _Launches(self._node_part, self._transfers, shapes, wire, self._group)


_FORWARD, _BACKWARD = "attention forward over nodes", "attention backward over nodes"


class _Launches:
    """Prepared launches for one layout of k and v, over the memory of exchanges as it is now."""

    def __init__(
        self, part: RankNodeLayout, transfers: TransferPlan, shapes: Shapes, wire: torch.dtype, group: ExchangeGroup
    ) -> None:
        rows = [torch.empty((0, shapes.heads, dim), dtype=shapes.dtype) for dim in shapes.head_dims]
        packs, grads = ([RowPack.of([x], [dtype]) for x in rows] for dtype in (shapes.dtype, wire))
        self.exchange = exchange = ExchangeBeside(group, transfers, packs, grads, part.received)
        self._held = {name: torch.from_numpy(getattr(part, name)).to(shapes.device).contiguous() for name in _TABLES}
        at = {name: x.data_ptr() for name, x in self._held.items()}
        self._targets = [torch.tensor([p], dtype=torch.int64, device=shapes.device) for p in exchange.reduce.partials]
        self.add = exchange.own_sums(
            shapes.dtype, part.local_rows, at["summed_tiles"], at["summed_src_rows"], part.summed_src_rows.shape[1]
        )
        pace = arrival_pace(part, shapes, _BYTES_PER_S)
        mask = RemoteMask(part.slices, part.local_rows, part.base, part.arrivals, pace, len(part.summed_tiles))
        params = remote_params(  # the kernel sees a world of one rank, whose rows arrive
            mask, wire, rank=0, world=1, timeout_ms=exchange.timeout_ms, failed_peer=exchange.failed_peer,
            buffer=exchange.keys, k=exchange.cast.out[0], v=exchange.cast.out[1], arrivals=at["arrivals"],
            grads=exchange.sums, senders=at["senders"], owners=at["owners"], target_rows=at["target_rows"],
            dk_targets=self._targets[0].data_ptr(), dv_targets=self._targets[1].data_ptr(), summed=at["summed"],
        )  # fmt: skip
        self.forward, self.backward = (RemoteKeys(mask, params) for _ in range(2))
        self.cache = PlanCache()
        self.cache.count("tables", self._held, self._targets, exchange.held)
        self.cache.include(mask.cache)
        self.cache.include(exchange.cast.cache)

    def is_current(self) -> bool:
        """Is the memory still that for which this was prepared?"""
        return self.exchange.is_current()
