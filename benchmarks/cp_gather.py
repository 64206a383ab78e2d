# SPDX-License-Identifier: Apache-2.0
"""All-gather of keys and values, one kernel call over this rank's rows, reduce-scatter of their gradients.

The backward gathers again, because no training run can keep the keys and values of all ranks for every layer.
"""

from __future__ import annotations

import numpy as np
import torch
import torch.distributed as dist
from cp_kernel import PeerBase, Setting, State, Tensors
from cp_layout import Layout, share_of_documents

# Newer releases of torch rename both, and warn about the names below.
all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
reduce_scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


class AllGather(PeerBase):
    """Zigzag for masks that look back. Gradients travel and are summed in the dtype of the inputs."""

    def __init__(self, setting: Setting) -> None:
        layout = Layout(setting.case, setting.world)
        super().__init__(setting, layout.positions(setting.rank))
        self._slices = layout.local_slices(setting.rank)
        order = layout.natural_order()
        self._order = self._inverse = None
        if not np.array_equal(order, np.arange(len(order))):
            self._order, self._inverse = (torch.from_numpy(x).to(setting.device) for x in (order, np.argsort(order)))

    def forward(self, q, k, v) -> State:
        out, lse = self.kernel.final(q, *self._gather(k, v), self._slices)
        return State(out, (lse,))

    def backward(self, dout, state: State, q, k, v) -> Tensors:
        keys, values = self._gather(k, v)
        dq, dk, dv = self.kernel.final_grads(dout, q, keys, values, state.out, *state.kept, self._slices)
        return dq, *self._scatter(dk, dv, len(k))

    def _gather(self, *tensors: torch.Tensor) -> list[torch.Tensor]:
        """All ranks' rows in natural order."""
        found = [x.new_empty((len(x) * self.setting.world, *x.shape[1:])) for x in tensors]
        works = [all_gather(all_x, x, async_op=True) for all_x, x in zip(found, tensors)]
        for work in works:
            work.wait()
        return found if self._order is None else [x.index_select(0, self._order) for x in found]

    def _scatter(self, dk: torch.Tensor, dv: torch.Tensor, rows: int) -> list[torch.Tensor]:
        """This rank's rows of the sums over ranks."""
        sums = [x.new_empty((rows, *x.shape[1:])) for x in (dk, dv)]
        parts = [dk, dv] if self._inverse is None else [x.index_select(0, self._inverse) for x in (dk, dv)]
        works = [reduce_scatter(total, x, async_op=True) for total, x in zip(sums, parts)]
        for work in works:
            work.wait()
        return sums


class OneGpu(PeerBase):
    """An equal share of the case on one GPU, with no communication.

    Without documents: the rows that ring and all-gather give this rank, over all keys, so that the shares of the ranks
    add up to the case. With documents: as many consecutive tokens as a rank has, documents cut at both ends. Tokens per
    GPU are then those of the other implementations, and pairs a few less: rates count the pairs of the shares.
    """

    is_whole = False

    def __init__(self, setting: Setting) -> None:
        case, rank, world = setting.case, setting.rank, setting.world
        layout = Layout(case, world)
        if case.is_varlen:
            shares = [share_of_documents(case, part, world) for part in range(world)]
            positions = np.arange(shares[rank].seqlen) + case.seqlen * rank // world
            self._slices, self._keys = shares[rank].mask.slices, len(positions)
            self.area = sum(share.mask.area for share in shares)
        else:
            positions = layout.positions(rank)
            self._slices, self._keys = layout.local_slices(rank), layout.total
            self.area = case.mask.area
        super().__init__(setting, positions)
        self._kv: list[torch.Tensor] = []

    def forward(self, q, k, v) -> State:
        keys, values = self._fill(k, v)
        out, lse = self.kernel.final(q, keys, values, self._slices)
        return State(out, (lse,))

    def backward(self, dout, state: State, q, k, v) -> Tensors:
        return self.kernel.final_grads(dout, q, *self._fill(k, v), state.out, *state.kept, self._slices)

    def _fill(self, k: torch.Tensor, v: torch.Tensor) -> list[torch.Tensor]:
        """Keys and values of the right number, made at the first call; what they hold is of no importance."""
        if not self._kv:
            self._kv = [x.repeat(-(-self._keys // len(x)), 1, 1)[: self._keys].contiguous() for x in (k, v)]
        return self._kv

    def close(self) -> None:
        self._kv.clear()
