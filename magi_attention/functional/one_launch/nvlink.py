# SPDX-License-Identifier: Apache-2.0
"""One attention launch per direction in one NVLink domain, over local keys and those that arrive while it runs.

Forward: a few CTAs put this rank's rows into the buffers of the ranks that read them; the attention kernel starts
beside them and waits, tile by tile, for what it reads. Backward: the same, and the gradients of remote keys are
written to their owners as each tile is done; a last kernel adds them up, in the order of the ranks, in float32. So
results are the same bits on every run, all but dq, which is summed in no fixed order unless that is asked for.
"""

from __future__ import annotations

from typing import Any

import torch

from magi_attention.comm.symm.buffers import SymmGroup, symm_group
from magi_attention.common.plan_cache import PlanCache
from magi_attention.functional.ahead import AHEAD
from magi_attention.functional.one_launch.base import OneLaunch, Shapes, arrival_pace
from magi_attention.kernels import Grads
from magi_attention.kernels.ffa.backend import FfaBackend
from magi_attention.kernels.ffa.peer_kv import RemoteKeys, RemoteMask, remote_params
from magi_attention.kernels.types import BackwardOperands, Final, Operands
from magi_attention.meta.one_launch.fused_layout import FusedLayout, RankFusedLayout
from magi_attention.meta.plan import Plan

PUT_CTAS = 16
_BYTES_PER_S = 2.2e11  # roughly, of one rank's put
_TABLES = (
    *("transfers", "signals", "arrivals", "owners", "target_rows", "senders"),
    *("summed", "summed_tiles", "summed_src_rows"),
)  # of a part, on the device


class FusedAttention(OneLaunch):
    """Over the buffers of one NVLink domain."""

    def __init__(self, plan: Plan, transport: Any, high_precision_reduce: bool) -> None:
        ahead = plan.cache.find(AHEAD, transport.rank)
        self._fused_part: RankFusedLayout = (ahead and ahead.fused) or FusedLayout(plan).part(transport.rank)
        super().__init__(self._fused_part, high_precision_reduce)
        self._transport = transport

    def forward(self, backend: FfaBackend, x: Operands) -> Final:
        launches, x = self._of(x)
        stream = backend.runtime.stream(x.k.get_device())
        launches.check("attention forward")
        event = launches.group.enter(stream)
        try:
            with backend.forward_fused(x, launches.forward, event) as ready:
                ready.launch()  # with this rank's put
            return ready.result
        except BaseException:
            launches.group.exit_early(event)
            raise

    def backward(self, backend: FfaBackend, x: BackwardOperands) -> Grads:
        launches, x = self._of(x)
        stream = backend.runtime.stream(x.k.get_device())
        launches.check("attention backward")
        event = launches.group.enter(stream)
        try:
            with backend.backward_fused(x, launches.backward) as ready:
                ready.launch()
            grads = ready.result
            dsink = grads.dsink()
            sums, to = (grads.dk_sums, grads.dv_sums), (grads.dk.data_ptr(), grads.dv.data_ptr())
            launches.reduce(sums, to, event, stream)
        except BaseException:
            launches.group.exit_early(event)
            raise
        return Grads(grads.dq, grads.dk, grads.dv, dsink)

    def _made(self, shapes: Shapes, wire: torch.dtype, before: Launches | None) -> Launches:
        group = symm_group(self._transport, shapes.device) if before is None else before.group
        return Launches(self._fused_part, shapes, wire, group)


class Launches:
    """Prepared launches for one layout of k and v, over the buffers as they are now."""

    def __init__(self, part: RankFusedLayout, shapes: Shapes, wire: torch.dtype, group: SymmGroup) -> None:
        self.part, self.shapes, self.group = part, shapes, group
        self._rank_of_signal = part.rank_of_signal
        size, wire_size = shapes.dtype.itemsize, wire.itemsize
        row_k, row_v = shapes.row_values
        start = group.control_bytes
        self._bytes = (part.buffer_rows * (row_k + row_v) * size, part.grad_rows * (row_k + row_v) * wire_size)
        self.keys, self.grads = (group.buffer(name, n) for name, n in zip(("keys", "grads"), self._bytes))
        v_at, dv_at = start + part.buffer_rows * row_k * size, start + part.grad_rows * row_k * wire_size
        self._held = {name: torch.from_numpy(getattr(part, name)).to(shapes.device).contiguous() for name in _TABLES}
        at = {name: x.data_ptr() for name, x in self._held.items()}
        put_args: dict[str, Any] = {
            "num_tensors": 2, "num_transfers": len(part.transfers), "num_ctas": PUT_CTAS, "transfers": at["transfers"],
            "signals": at["signals"], "source_stride": [n * size for n in shapes.strides],
            "data_at": [start, v_at], "row_bytes": [row_k * size, row_v * size],
        }  # fmt: skip
        put, put_again = group.put(self.keys, **put_args), group.put(self.keys, self.grads, **put_args)
        self.reduce = group.reduce(
            self.grads, self.keys, wire, shapes.dtype, rows=part.summed_src_rows.shape[1], out_rows=part.local_rows,
            num_tensors=2, row_values=[row_k, row_v], tiles=at["summed_tiles"], src_rows=at["summed_src_rows"],
            data_at=[start, dv_at],
        )  # fmt: skip
        self._targets = [self.grads.addresses + offset for offset in (start, dv_at)]
        pace, num_summed = arrival_pace(part, shapes, _BYTES_PER_S), len(part.summed_tiles)
        mask = RemoteMask(part.slices, part.local_rows, part.base, part.arrivals, pace, num_summed)
        params = remote_params(  # also where nothing arrives, because other ranks may add to dk and dv
            mask, wire, rank=part.rank, world=part.world, timeout_ms=group.timeout_ms,
            failed_peer=group.failed_peer_address,
            buffer=self.keys.struct, k=self.keys.own + start, v=self.keys.own + v_at, arrivals=at["arrivals"],
            grads=self.grads.struct, senders=at["senders"], owners=at["owners"], target_rows=at["target_rows"],
            dk_targets=self._targets[0].data_ptr(), dv_targets=self._targets[1].data_ptr(), summed=at["summed"],
        )  # fmt: skip
        self.forward, self.backward = (RemoteKeys(mask, params, x.params) for x in (put, put_again))
        self.cache = PlanCache()
        self.cache.count("tables", self._held, self._targets)
        self.cache.include(mask.cache)

    def check(self, stage: str) -> None:
        """Raises ``PeerFailureError`` if a kernel waited in vain for another rank."""
        self.group.check(stage)
        self.group.rank_of_signal = self._rank_of_signal

    def is_current(self) -> bool:
        """Are the buffers still those for which this was prepared?"""
        return self.group.holds(self.keys) and self.group.holds(self.grads)
