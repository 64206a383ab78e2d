# SPDX-License-Identifier: Apache-2.0
"""Stage mode ``fused``: one attention launch per direction, over local keys and those that arrive while it runs.

Forward: a few CTAs put this rank's rows into the buffers of the ranks that read them; the attention kernel starts
beside them and waits, tile by tile, for what it reads. Backward: the same, and the gradients of remote keys are
written to their owners as each tile is done; a last kernel adds them up, in the order of the ranks, in float32. So
results are the same bits on every run, all but dq, which is summed in no fixed order unless that is asked for.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch

from magi_attention.comm.symm.buffers import SymmGroup, symm_group
from magi_attention.common.plan_cache import Kind, PlanCache
from magi_attention.functional.ahead import AHEAD
from magi_attention.kernels import AttnOptions, Grads
from magi_attention.kernels.ffa.arrival import Pace
from magi_attention.kernels.ffa.backend import FfaBackend
from magi_attention.kernels.ffa.peer_kv import RemoteKeys, RemoteMask, remote_params
from magi_attention.meta.fused_layout import FusedLayout, RankFusedLayout, RankLayout
from magi_attention.meta.plan import Plan

PUT_CTAS = 16
# Rough speeds: of one rank's put, and of one multiprocessor at work, forward and backward.
_PUT_BYTES_PER_S, _START_SECONDS, _FLOPS, _FLOPS_BACKWARD = 2.2e11, 1e-5, 5e12, 4.3e12
_TABLES = (
    *("transfers", "signals", "arrivals", "owners", "target_rows", "senders"),
    *("summed", "summed_tiles", "summed_src_rows"),
)  # of a part, on the device
_L2_GROUP_BYTES = 33 * 2**20  # of keys and values of the heads that are worked on at a time: fwd/launch.cuh


@dataclass(frozen=True)
class Shapes:
    """What of k and v the launches depend on."""

    device: torch.device
    dtype: torch.dtype
    heads_q: int
    heads: int
    head_dims: tuple[int, int]
    strides: tuple[int, int]  # from token to token, elements

    @property
    def row_values(self) -> tuple[int, int]:
        return self.heads * self.head_dims[0], self.heads * self.head_dims[1]


class OneLaunch(ABC):
    """A plan on one rank, ready for attention in one launch, over whatever links. Partial dk and dv travel in k's
    dtype, or in float32."""

    def __init__(self, part: RankLayout, high_precision_reduce: bool) -> None:
        self.part = part
        self._wire = torch.float32 if high_precision_reduce else None
        self.cache = PlanCache()
        self.cache.count("part", part.arrays)
        self.cache.include(part.slices.cache)

    @abstractmethod
    def forward(
        self, backend: FfaBackend, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, options: AttnOptions,
        sink: torch.Tensor | None,
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:  # fmt: skip
        """``(out in q's dtype, lse, max_logits)``."""

    @abstractmethod
    def backward(
        self, backend: FfaBackend, dout: torch.Tensor, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor,
        out: torch.Tensor, lse: torch.Tensor, options: AttnOptions, sink: torch.Tensor | None,
    ) -> Grads:  # fmt: skip
        """dq, dk, dv in the inputs' dtype."""

    @abstractmethod
    def _made(self, shapes: Shapes, wire: torch.dtype, before: Any) -> Any:
        """Launches with ``cache`` and ``is_current()``; ``before``: those that are void now, or None."""

    def _of(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> tuple[Any, torch.Tensor, torch.Tensor]:
        """The launches, and k and v as bulk copies take them: those of a layout that is known as they are."""
        key = _layout(q, k, v)
        found = self.cache.find(LAUNCHES, key)
        if found is None or (k.data_ptr() | v.data_ptr()) & 15:
            k, v = _rows(k), _rows(v)
            key = _layout(q, k, v)
            found = self.cache.find(LAUNCHES, key)
        if found is None or not found.is_current():
            strides = (k.stride(0), v.stride(0))
            shapes = Shapes(k.device, k.dtype, q.shape[1], k.shape[1], (k.shape[2], v.shape[2]), strides)
            made = self._made(shapes, k.dtype if self._wire is None else self._wire, found)
            self.cache.include(made.cache)
            self.cache.pop(LAUNCHES, key)
            found = self.cache.get(LAUNCHES, key, lambda: made)
        return found, k, v


class FusedAttention(OneLaunch):
    """Over the buffers of one NVLink domain."""

    def __init__(self, plan: Plan, transport: Any, high_precision_reduce: bool) -> None:
        ahead = plan.cache.find(AHEAD, transport.rank)
        self._fused_part: RankFusedLayout = (ahead and ahead.fused) or FusedLayout(plan).part(transport.rank)
        super().__init__(self._fused_part, high_precision_reduce)
        self._transport = transport

    def forward(
        self, backend: FfaBackend, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, options: AttnOptions,
        sink: torch.Tensor | None,
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:  # fmt: skip
        launches, k, v = self._of(q, k, v)
        stream = backend.runtime.stream(k.get_device())
        launches.check("attention forward")
        event = launches.group.enter(stream)
        try:
            return backend.forward_fused(q, k, v, launches.forward, options, sink, event)
        except BaseException:
            launches.group.exit_early(event)
            raise

    def backward(
        self, backend: FfaBackend, dout: torch.Tensor, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor,
        out: torch.Tensor, lse: torch.Tensor, options: AttnOptions, sink: torch.Tensor | None,
    ) -> Grads:  # fmt: skip
        launches, k, v = self._of(q, k, v)
        stream = backend.runtime.stream(k.get_device())
        launches.check("attention backward")
        event = launches.group.enter(stream)
        try:
            grads = backend.backward_fused(dout, q, k, v, out, lse, launches.backward, options, sink)
            sums, to = (grads.dk_sums, grads.dv_sums), (grads.dk.data_ptr(), grads.dv.data_ptr())
            launches.reduce(sums, to, event, stream)
        except BaseException:
            launches.group.exit_early(event)
            raise
        return Grads(grads.dq, grads.dk, grads.dv, grads.dsink)

    def _made(self, shapes: Shapes, wire: torch.dtype, before: Launches | None) -> Launches:
        group = symm_group(self._transport, shapes.device) if before is None else before.group
        return Launches(self._fused_part, shapes, wire, group)


class PreparedFused(NamedTuple):
    """``attention`` and the backend that runs it."""

    attention: OneLaunch
    backend: FfaBackend


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
        pace, num_summed = arrival_pace(part, shapes, _PUT_BYTES_PER_S), len(part.summed_tiles)
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


LAUNCHES: Kind[tuple[object, ...], Any] = Kind("launches, by what of q, k and v they depend on")


def arrival_pace(part: RankLayout, shapes: Shapes, bytes_per_s: float) -> Pace:
    """When keys arrive at a rank that gets so many bytes in a second."""
    row_bytes = sum(shapes.row_values) * shapes.dtype.itemsize
    pair, group = 2 * sum(shapes.head_dims), shapes.heads_q // shapes.heads  # flops
    kept = max(1, _L2_GROUP_BYTES // max(part.total_keys * row_bytes // shapes.heads, 1))
    return Pace(
        _START_SECONDS + part.signal_rows * row_bytes / bytes_per_s, pair / _FLOPS, 2.5 * pair / _FLOPS_BACKWARD,
        heads=group, l2_group_heads=min(kept, shapes.heads) * group,
    )  # fmt: skip


def _layout(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> tuple[object, ...]:
    """What of them launches depend on, but for the addresses."""
    return k.device, k.dtype, q.shape[1], k.shape, k.stride(), v.shape, v.stride()


def _rows(x: torch.Tensor) -> torch.Tensor:
    """``x`` with whole rows one after another: (T, H, D) whose heads and dims are dense, at addresses that bulk copies
    take."""
    token, head, dim = x.stride()
    is_row = dim == 1 and (head == x.shape[2] or x.shape[1] == 1)
    is_fine = is_row and not token % 8 and not x.data_ptr() & 15
    return x if is_fine else x.clone(memory_format=torch.contiguous_format)
