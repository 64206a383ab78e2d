# SPDX-License-Identifier: Apache-2.0
"""Ring attention: keys and values go round, one rank at a time, while each rank attends to those that it has.

The gradients of keys and values go round after them, one step behind, in float32, and come home with the last step.
"""

from __future__ import annotations

import torch
import torch.distributed as dist
from cp_kernel import Kernel, PeerBase, Setting, State, Tensors
from cp_layout import Layout

from magi_attention.common.slices import SliceTable
from magi_attention.kernels import Grads


class _Shift:
    """Sends ``x`` to the next rank of the group and receives as much from the one before."""

    def __init__(self, x: torch.Tensor, group: dist.ProcessGroup) -> None:
        rank, size = dist.get_rank(group), dist.get_world_size(group)
        after, before = (dist.get_global_rank(group, (rank + step) % size) for step in (1, -1))
        self._sent, self._received = x, torch.empty_like(x)  # both held until the exchange is over
        self._works = dist.batch_isend_irecv(
            [dist.P2POp(dist.isend, x, after, group), dist.P2POp(dist.irecv, self._received, before, group)]
        )

    def wait(self) -> torch.Tensor:
        for work in self._works:
            work.wait()
        return self._received


class RingPass:
    """Ring attention of the rows of one rank of ``group``; ``tables[s]`` are the slices of step s."""

    def __init__(self, kernel: Kernel, group: dist.ProcessGroup, layout: Layout) -> None:
        self._kernel, self._group = kernel, group
        size, rank = layout.parts, dist.get_rank(group)
        self._tables: list[SliceTable] = [layout.local_slices(rank, (rank - s) % size) for s in range(size)]

    def forward(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """out in q's dtype, and lse."""
        kv, partial = torch.stack([k, v]), None
        for step, table in enumerate(self._tables):
            shift = self._shift(kv) if step + 1 < len(self._tables) else None
            if partial is None or len(table):
                partial = self._kernel.add(partial, q, kv[0], kv[1], table)
            if shift:
                kv = shift.wait()
        return partial.out.to(q.dtype), partial.lse

    def backward(self, dout, q, k, v, out, lse) -> Tensors:
        kv, back = torch.stack([k, v]), None
        dq = torch.zeros_like(q, dtype=lse.dtype)
        for step, table in enumerate(self._tables):
            shift = self._shift(kv) if step + 1 < len(self._tables) else None
            dkv = torch.zeros_like(kv, dtype=lse.dtype)
            if len(table):
                self._kernel.add_grads(Grads(dq, dkv[0], dkv[1]), dout, q, kv[0], kv[1], out, lse, table)
            if back:
                dkv += back.wait()
            if len(self._tables) > 1:
                back = self._shift(dkv)
            if shift:
                kv = shift.wait()
        dkv = (back.wait() if back else dkv).to(k.dtype)
        return dq.to(q.dtype), dkv[0], dkv[1]

    def _shift(self, x: torch.Tensor) -> _Shift:
        return _Shift(x, self._group)


class Ring(PeerBase):
    """Each rank sends to the next; zigzag for masks that look back."""

    def __init__(self, setting: Setting) -> None:
        layout = Layout(setting.case, setting.world)
        super().__init__(setting, layout.positions(setting.rank))
        self._pass = RingPass(self.kernel, dist.group.WORLD, layout)

    def forward(self, q, k, v) -> State:
        out, lse = self._pass.forward(q, k, v)
        return State(out, (lse,))

    def backward(self, dout, state: State, q, k, v) -> Tensors:
        return self._pass.backward(dout, q, k, v, state.out, *state.kept)
