# SPDX-License-Identifier: Apache-2.0
"""States of recurrent layers over the fragments of all ranks.

In a fragment, state_out = A state_in + B: B, ``(H, K, V)``, is what its last segment leaves of a zero state, and A is
the product of its tokens' transitions, as a number of each head ``(H,)``, a diagonal ``(H, K)``, or a matrix
``(H, K, K)``. These two are its summary. Pairs of them compose associatively, (A2, B2) after (A1, B1) is
(A2 A1, A2 B1 + B2), so that states follow from the summaries alone (Blelloch 1990, "Prefix sums and their
applications"; for recurrent layers Martin and Cundy 2018, arXiv:1709.04057). Every rank applies them in document order.

With G the gradients of incoming states, that of an outgoing state is what the same recurrence makes of (A^T, G) from
the other end; that of B is the same, and that of A its product with the incoming state.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

import torch

from magi_attention.common.infer import CuSeqlens
from magi_attention.common.plan_cache import Kind, on_gpu
from magi_attention.config.links import NCCL_BYTES_PER_S, NCCL_LATENCY_S
from magi_attention.errors import ContractError
from magi_attention.functional.recurrent.rows import Ints, RowExchange
from magi_attention.functional.recurrent.schedule import ChainStep, Gathered, Line, chain
from magi_attention.functional.tokens.layout import TokenLayout

Key = tuple[object, ...]
WAYS = ("auto", "gather", "chain")
_HOP_BYTES = NCCL_LATENCY_S * NCCL_BYTES_PER_S  # that a link moves while a collective begins
_LINES: Kind[Key, Line] = Kind("fragments in order", lambda line: [line.rank, line.number, line.takes, line.gives])
_GATHERED: Kind[Key, Gathered] = Kind("needed summaries", lambda x: [*x.needed, *x.steps])
_TENSORS: Kind[Key, list[list[torch.Tensor]]] = Kind("steps of states", on_gpu)
_CHAINS: Kind[Key, tuple[ChainStep, ...]] = Kind(
    "passes of states", lambda steps: [(*s.takers, *s.wanted) for s in steps]
)


def pass_states(
    transition: torch.Tensor, state: torch.Tensor, layout: TokenLayout, cu_seqlens: CuSeqlens | None = None,
    way: str = "auto",
) -> torch.Tensor:  # fmt: skip
    """See ``api.recurrent.pass_states``."""
    fragments = layout.plan.fragments(cu_seqlens)
    count = len(fragments.ranges[layout.rank])
    try:
        _check(transition, state, count, way)
    except Exception as exc:
        layout.transport.decline(exc, state, "pass_states")
        raise
    if not len(fragments.passes):
        return torch.zeros_like(state)
    key = None if cu_seqlens is None else tuple(fragments.cu_seqlens.tolist())
    return _apply(transition, state, _Passing(layout, key, way, False))


def _check(transition: torch.Tensor, state: torch.Tensor, count: int, way: str) -> None:
    if way not in WAYS:
        raise ContractError(f"way is {way!r}; give one of {', '.join(WAYS)}.")
    if state.dim() != 4 or state.shape[0] != count:
        raise ContractError(
            f"state has shape {tuple(state.shape)}; give (F, H, K, V) with F = {count}, the fragments of this rank: "
            "the final states of plan.fragments().last_segments(rank)."
        )
    heads, keys = state.shape[1:3]
    shapes = [(count, heads), (count, heads, keys), (count, heads, keys, keys)]
    if tuple(transition.shape) not in shapes:
        raise ContractError(
            f"transition has shape {tuple(transition.shape)} and state {tuple(state.shape)}; give a number of each "
            f"head {shapes[0]}, a diagonal {shapes[1]} or a matrix {shapes[2]}."
        )
    if transition.dtype != state.dtype or not state.is_floating_point():
        raise ContractError(
            f"transition is {transition.dtype} and state {state.dtype}; both want one floating-point dtype, as float32."
        )


class _Passing:
    """One direction of the exchange of a layout's states. ``key`` tells the documents apart."""

    def __init__(self, layout: TokenLayout, key: tuple[int, ...] | None, way: str, is_reverse: bool) -> None:
        self.layout, self.key, self.way, self.is_reverse = layout, key, way, is_reverse
        self.line = layout.cache.get(_LINES, (key, is_reverse), self._line)

    def _line(self) -> Line:
        return Line.of(self.layout.plan.fragments(self.key), self.is_reverse)

    def reversed(self) -> _Passing:
        return _Passing(self.layout, self.key, self.way, not self.is_reverse)

    @property
    def stage(self) -> str:
        return "states of fragments" + (", backward" if self.is_reverse else "")

    def gathered(self, rank: int) -> Gathered:
        name = (self.key, self.is_reverse, rank)
        return self.layout.cache.get(_GATHERED, name, lambda: Gathered.of(self.line, rank))

    def find(self, transition: torch.Tensor, state: torch.Tensor) -> torch.Tensor:
        """The states that come to this rank's fragments, zero where none does."""
        is_chain = self.way == "chain" or (self.way == "auto" and self._is_chain_less(transition, state))
        return (self._by_chain if is_chain else self._by_gather)(transition, state)

    def _is_chain_less(self, transition: torch.Tensor, state: torch.Tensor) -> bool:
        """Would the bytes of a chain, one state a step and each step the latency of a collective, be less than those
        that the rank which needs most summaries gets at once?"""
        of_state, of_transition = state[0].numel() * state.element_size(), transition[0].numel() * state.element_size()
        needed = [self.gathered(rank).needed.owner for rank in range(self.line.world)]
        most = max(int((owner != rank).sum()) for rank, owner in enumerate(needed))
        return self.line.steps * (of_state + _HOP_BYTES) < most * (of_state + of_transition) + _HOP_BYTES

    def _by_gather(self, transition: torch.Tensor, state: torch.Tensor) -> torch.Tensor:
        world = self.line.world
        exchange = RowExchange(
            self.layout, ("summaries", self.key, self.is_reverse), self.stage,
            lambda: [self.gathered(rank).needed for rank in range(world)],
        )  # fmt: skip
        got = exchange.move(torch.cat([transition.flatten(1), state.flatten(1)], dim=1))
        of_transition = transition[0].numel()
        a = got[:, :of_transition].unflatten(1, transition.shape[1:])
        b = got[:, of_transition:].unflatten(1, state.shape[1:])
        out, now = torch.zeros_like(state), None
        for at, ends, numbers in self._tensors("steps", state.device, lambda: self.gathered(self.layout.rank).steps):
            now = b[at] if now is None else apply_transition(a[at], now[: len(at)]) + b[at]
            out[numbers] = now[ends]
        return out

    def _by_chain(self, transition: torch.Tensor, state: torch.Tensor) -> torch.Tensor:
        name, out, given = ("chain", self.key, self.is_reverse), torch.zeros_like(state), state.clone()
        steps = self.layout.cache.get(_CHAINS, name, lambda: chain(self.line))
        taken = self._tensors("takers", state.device, lambda: [(s.takers[self.layout.rank],) for s in steps])
        for k, (step, (takers,)) in enumerate(zip(steps, taken)):
            exchange = RowExchange(self.layout, (*name, k), self.stage, partial(getattr, step, "wanted"))
            out[takers] = got = exchange.move(given)
            # The first fragment of a run gives in the first step alone, so it may end another run in any.
            given[takers] = apply_transition(transition[takers], got) + state[takers]
        return out

    def _tensors(
        self, name: str, device: torch.device, make: Callable[[], Iterable[Iterable[Ints]]]
    ) -> list[list[torch.Tensor]]:
        def moved() -> list[list[torch.Tensor]]:
            return [[torch.from_numpy(rows).to(device) for rows in arrays] for arrays in make()]

        return self.layout.cache.get(_TENSORS, (name, self.key, self.is_reverse, device), moved)


def apply_transition(transition: torch.Tensor, state: torch.Tensor) -> torch.Tensor:
    """``A state`` for a number of each head, a diagonal or a matrix; ``state`` ``(..., H, K, V)``."""
    if transition.dim() == state.dim():
        return transition @ state
    return transition.reshape(*transition.shape, *[1] * (state.dim() - transition.dim())) * state


def _transposed(transition: torch.Tensor) -> torch.Tensor:
    return transition.mT if transition.dim() == 4 else transition


class _PassStates(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, transition: torch.Tensor, state: torch.Tensor, passing: _Passing) -> torch.Tensor:
        ctx.passing, out = passing, passing.find(transition, state)
        ctx.save_for_backward(transition, out)
        return out

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        transition, came = ctx.saved_tensors
        passing: _Passing = ctx.passing
        of_state = _apply(_transposed(transition), grad.contiguous(), passing.reversed())
        if not ctx.needs_input_grad[0]:
            return None, of_state, None
        fragments, rank = passing.layout.plan.fragments(passing.key), passing.layout.rank
        carried = of_state * torch.from_numpy(fragments.carries(rank)).to(grad.device).view(-1, 1, 1, 1)
        if transition.dim() == 4:
            return carried @ came.mT, of_state, None
        of_transition = (carried * came).sum(dim=(-1, -2) if transition.dim() == 2 else -1)
        return of_transition, of_state, None


# With the types that torch does not give to ``apply``.
_apply: Callable[..., torch.Tensor] = _PassStates.apply

__all__ = ["WAYS", "apply_transition", "pass_states"]
