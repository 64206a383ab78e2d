# SPDX-License-Identifier: Apache-2.0
"""Ulysses: ranks exchange tokens for heads, and each computes some heads of the whole sequence. USP puts it in a ring.

One all-to-all moves q, k and v together, one moves the result back.
"""

from __future__ import annotations

import numpy as np
import torch
import torch.distributed as dist
from cp_kernel import PeerBase, Setting, State, Tensors
from cp_layout import Layout
from cp_ring import RingPass
from peers import Unfit


class HeadExchange:
    """All-to-all over ``group`` between rows of all heads and all rows of some heads."""

    def __init__(self, group: dist.ProcessGroup) -> None:
        self._group, self._size = group, dist.get_world_size(group)

    def to_heads(self, *tensors: torch.Tensor) -> list[torch.Tensor]:
        """(T, H, D) each -> (ranks * T, H / ranks, D) each, as views of one buffer."""
        counts = [x.shape[1] // self._size for x in tensors]
        rows, _, dim = tensors[0].shape
        sent = tensors[0].new_empty((self._size, rows, sum(counts), dim))
        for part, x in zip(sent.split(counts, 2), tensors):
            part.copy_(x.unflatten(1, (self._size, -1)).transpose(0, 1))
        return list(self._exchange(sent).flatten(0, 1).split(counts, 1))

    def to_rows(self, *tensors: torch.Tensor) -> list[torch.Tensor]:
        """(ranks * T, H / ranks, D) each -> (T, H, D) each: the way back."""
        counts = [x.shape[1] for x in tensors]
        sent = (torch.cat(tensors, 1) if len(tensors) > 1 else tensors[0].contiguous()).unflatten(0, (self._size, -1))
        return [part.transpose(0, 1).flatten(1, 2) for part in self._exchange(sent).split(counts, 2)]

    def _exchange(self, sent: torch.Tensor) -> torch.Tensor:
        received = torch.empty_like(sent)
        dist.all_to_all_single(received, sent, group=self._group)
        return received


def check_heads(setting: Setting, size: int) -> None:
    if any(count % size for count in setting.heads):
        raise Unfit(f"{setting.heads[0]} query and {setting.heads[1]} kv heads do not divide over {size} ranks.")


class Ulysses(PeerBase):
    """Consecutive tokens; heads must divide over the ranks."""

    def __init__(self, setting: Setting) -> None:
        check_heads(setting, setting.world)
        rows, rest = divmod(setting.case.seqlen, setting.world)
        if rest:
            raise Unfit(f"{setting.case.seqlen} tokens do not divide over {setting.world} ranks.")
        super().__init__(setting, np.arange(rows) + setting.rank * rows)
        self._exchange = HeadExchange(dist.group.WORLD)
        self._slices = setting.case.mask.slices

    def forward(self, q, k, v) -> State:
        heads = self._exchange.to_heads(q, k, v)
        out, lse = self.kernel.final(*heads, self._slices)
        return State(self._exchange.to_rows(out)[0], (*heads, out, lse))

    def backward(self, dout, state: State, q, k, v) -> Tensors:
        (dout_heads,) = self._exchange.to_heads(dout)
        grads = self.kernel.final_grads(dout_heads, *state.kept, self._slices)
        dq, dk, dv = self._exchange.to_rows(*grads)
        return dq, dk, dv


class Usp(PeerBase):
    """Ulysses inside, a ring outside: neighbours exchange heads, and keys and values go round the others."""

    def __init__(self, setting: Setting) -> None:
        world, rank = setting.world, setting.rank
        inner = next((n for n in (4, 2) if world % n == 0 and world > n and setting.heads[1] % n == 0), None)
        if inner is None:
            raise Unfit(f"USP needs two factors above 1, of which one divides the heads; {world} ranks have none.")
        check_heads(setting, inner)
        outer = world // inner
        layout = Layout(setting.case, outer, multiple=inner)
        rows = layout.rows // inner
        mine = layout.positions(rank // inner)[rank % inner * rows :][:rows]
        super().__init__(setting, mine)
        inside = setting.groups.mine([[g * inner + i for i in range(inner)] for g in range(outer)])
        around = setting.groups.mine([[g * inner + i for g in range(outer)] for i in range(inner)])
        self._exchange, self._pass = HeadExchange(inside), RingPass(self.kernel, around, layout)
        self.details |= {"ulysses_size": inner, "ring_size": outer}

    def forward(self, q, k, v) -> State:
        heads = self._exchange.to_heads(q, k, v)
        out, lse = self._pass.forward(*heads)
        return State(self._exchange.to_rows(out)[0], (*heads, out, lse))

    def backward(self, dout, state: State, q, k, v) -> Tensors:
        (dout_heads,) = self._exchange.to_heads(dout)
        dq, dk, dv = self._exchange.to_rows(*self._pass.backward(dout_heads, *state.kept))
        return dq, dk, dv
