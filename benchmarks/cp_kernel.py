# SPDX-License-Identifier: Apache-2.0
"""What all peers of the context-parallel benchmark share: one kernel, one shape of a peer, few helpers.

Shapes of one rank (T its rows, H heads, D head dim)::

    q, dq, out, dout (T, Hq, D)    k, v, dk, dv (T, Hk, D)    lse (T, Hq)
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

import numpy as np
import torch
import torch.distributed as dist
from masks import Case

from magi_attention.common.slices import SliceTable
from magi_attention.kernels import AttnOptions, Grads, Partial, Problem, default_registry
from magi_attention.kernels.types import BackwardOperands, Operands

Tensors = tuple[torch.Tensor, torch.Tensor, torch.Tensor]
Calls = list[Callable[[], Any]]


class State(NamedTuple):
    """What a forward keeps for its backward."""

    out: torch.Tensor
    kept: tuple = ()


@dataclass(frozen=True)
class Setting:
    """One case on this rank. ``chunk_size`` is that of our dispatch; None leaves it to the plan."""

    case: Case
    rank: int
    world: int
    heads: tuple[int, int]
    head_dim: int
    dtype: torch.dtype
    device: torch.device
    kernel: Kernel
    groups: Groups
    chunk_size: int | None = None


class Peer(Protocol):
    """One implementation made ready for one case. ``positions`` (T,) are the tokens of its rows, -1 for pad rows."""

    positions: np.ndarray
    is_whole: bool  # the ranks together compute the attention of the case, nothing less
    uses_autograd: bool
    details: dict[str, Any]

    def forward(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> State: ...

    def backward(self, dout: torch.Tensor, state: State, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> Tensors:
        """(dq, dk, dv); only where autograd is not used."""
        ...

    def kernel_calls(
        self, dout: torch.Tensor, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor
    ) -> tuple[Calls, Calls] | None:
        """Kernel calls of this rank's forward and backward, without communication; None if they cannot be told."""
        ...

    def close(self) -> None: ...


class PeerBase:
    """A peer that calls ``setting.kernel`` and nothing else: its kernel calls are recorded from one pass."""

    is_whole = True
    uses_autograd = False

    def __init__(self, setting: Setting, positions: np.ndarray) -> None:
        self.setting, self.kernel, self.positions = setting, setting.kernel, positions
        self.details: dict[str, Any] = {"rows": len(positions), "pad_rows": int((positions < 0).sum())}

    def kernel_calls(self, dout, q, k, v) -> tuple[Calls, Calls] | None:
        with self.kernel.recorded() as forward_calls:
            state = self.forward(q, k, v)  # type: ignore[attr-defined]
        with self.kernel.recorded() as backward_calls:
            self.backward(dout, state, q, k, v)  # type: ignore[attr-defined]
        return forward_calls, backward_calls

    def close(self) -> None:
        """Nothing to give back."""


class Kernel:
    """The attention kernel of ours that fits the tensors, called in the same four ways by all peers."""

    def __init__(self, heads: tuple[int, int], head_dim: int, dtype: torch.dtype, device: torch.device) -> None:
        self.options = AttnOptions(head_dim**-0.5)
        q, k = (torch.empty(1, h, head_dim, dtype=dtype, device=device) for h in heads)
        problem = Problem.of(q, k, k, self.options, needs_backward=True)
        self.backend, _ = default_registry().select(problem)
        self._has_final = hasattr(self.backend, "forward_final")
        self._record: Calls | None = None

    @contextmanager
    def recorded(self) -> Iterator[Calls]:
        """Collects what is called meanwhile, to be called again. Sums then run over what is there already, which costs
        the same."""
        calls: Calls = []
        self._record = calls
        try:
            yield calls
        finally:
            self._record = None

    def _run(self, call: Callable[[], Any]) -> Any:
        if self._record is not None:
            self._record.append(call)
        return call()

    def final(self, q, k, v, slices: SliceTable) -> tuple[torch.Tensor, torch.Tensor]:
        """out in q's dtype and lse, to which nothing will be added."""

        def call() -> tuple[torch.Tensor, torch.Tensor]:
            if self._has_final:
                return self.backend.forward_final(Operands(q, k, v, slices, self.options))[:2]
            partial = self.backend.forward(Operands(q, k, v, slices, self.options))
            return partial.out.to(q.dtype), partial.lse

        return self._run(call)

    def final_grads(self, dout, q, k, v, out, lse, slices: SliceTable) -> Tensors:
        """dq, dk, dv in q's dtype."""

        def call() -> Tensors:
            if self._has_final:
                grads = self.backend.backward_final(BackwardOperands(dout, q, k, v, out, lse, slices, self.options))
                return grads.dq, grads.dk, grads.dv
            grads = self.backend.backward(BackwardOperands(dout, q, k, v, out, lse, slices, self.options))
            return grads.dq.to(q.dtype), grads.dk.to(q.dtype), grads.dv.to(q.dtype)

        return self._run(call)

    def add(self, partial: Partial | None, q, k, v, slices: SliceTable) -> Partial:
        """Attention to further keys, merged by lse into ``partial`` (float32) inside the kernel."""
        return self._run(lambda: self.backend.forward(Operands(q, k, v, slices, self.options), partial))

    def add_grads(self, grads: Grads, dout, q, k, v, out, lse, slices: SliceTable) -> None:
        """Gradients of these keys, added to ``grads`` (float32) inside the kernel."""
        self._run(lambda: self.backend.backward(BackwardOperands(dout, q, k, v, out, lse, slices, self.options), grads))


class Groups:
    """Process groups by the ranks in them. All ranks make all groups, once, in the same order."""

    def __init__(self) -> None:
        self._made: dict[tuple[int, ...], dist.ProcessGroup] = {}

    def mine(self, partition: list[list[int]]) -> dist.ProcessGroup:
        """The group of ``partition``, which all ranks give alike, that holds this rank."""
        rank, mine = dist.get_rank(), None
        for ranks in map(tuple, partition):
            if len(ranks) == dist.get_world_size():
                self._made.setdefault(ranks, dist.group.WORLD)
            elif ranks not in self._made:
                self._made[ranks] = dist.new_group(list(ranks))
            if rank in ranks:
                mine = self._made[ranks]
        if mine is None:
            raise ValueError(f"No group of {partition} holds rank {rank}; give each rank one.")
        return mine


def select_rows(x: torch.Tensor, positions: np.ndarray) -> torch.Tensor:
    """Rows of a global tensor; pad rows (position -1) are 0."""
    index = torch.from_numpy(positions).to(x.device)
    rows = x.index_select(0, index.clamp(min=0))
    return rows.masked_fill_((index < 0).view(-1, *[1] * (x.dim() - 1)), 0)
