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
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from magi_attention.common.infer import CuSeqlens
from magi_attention.common.plan_cache import Kind, on_gpu
from magi_attention.errors import ContractError
from magi_attention.functional.recurrent.rows import RowExchange
from magi_attention.functional.tokens.layout import TokenLayout, table_tensor
from magi_attention.meta.fragments import Fragments
from magi_attention.meta.recurrent.schedule import ChainStep, Gathered, Line, chain
from magi_attention.meta.recurrent.tables import Ints, contiguous_fragments, whole_fragments
from magi_attention.meta.recurrent.ways import StateCounts

Key = tuple[object, ...]
WAYS = ("auto", "gather", "chain")
_COUNTS: Kind[Key, StateCounts] = Kind("counts of states", lambda _: [])
_FRAGMENTS: Kind[Key, Fragments] = Kind("fragments of a layer", lambda found: [found.cu_seqlens, *found.ranges])
_LINES: Kind[Key, Line] = Kind("fragments in order", lambda line: [line.rank, line.number, line.takes, line.gives])
_GATHERED: Kind[Key, Gathered] = Kind("needed summaries", lambda x: [*x.needed, *x.steps])
_TENSORS: Kind[Key, list[list[torch.Tensor]]] = Kind("steps of states", on_gpu)
_CHAINS: Kind[Key, tuple[ChainStep, ...]] = Kind(
    "passes of states", lambda steps: [(*s.takers, *s.wanted) for s in steps]
)


@dataclass(frozen=True, eq=False)
class Held:
    """What this rank holds while a layer runs, as number ``rank`` of ``fragments``: its own fragments ("states"), a
    contiguous shard, or all tokens ("heads"). ``key`` tells these and the documents apart."""

    layout: TokenLayout
    fragments: Fragments
    rank: int
    key: Key

    @classmethod
    def of(cls, layout: TokenLayout, way: str, cu_seqlens: CuSeqlens | None) -> Held:
        own = layout.plan.fragments(cu_seqlens)
        key = (way, None if cu_seqlens is None else tuple(own.cu_seqlens.tolist()))
        if way == "states":
            return cls(layout, own, layout.rank, key)
        make = {"contiguous": contiguous_fragments, "heads": whole_fragments}[way]
        found = layout.cache.get(_FRAGMENTS, key, lambda: make(layout.plan, cu_seqlens))
        return cls(layout, found, 0 if way == "heads" else layout.rank, key)


def pass_states(transition: torch.Tensor, state: torch.Tensor, held: Held, way: str = "auto") -> torch.Tensor:
    """See ``api.recurrent.pass_states``."""
    count = len(held.fragments.ranges[held.rank])
    try:
        _check(transition, state, count, way)
    except Exception as exc:
        held.layout.transport.decline(exc, state, "pass_states")
        raise
    if not len(held.fragments.passes):
        return torch.zeros_like(state)
    return _apply(transition, state, _Passing(held, way, False))


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
    """One direction of the exchange of states."""

    def __init__(self, held: Held, way: str, is_reverse: bool) -> None:
        self.held, self.layout, self.way, self.is_reverse = held, held.layout, way, is_reverse
        self.key = (*held.key, is_reverse)
        self.line = self.layout.cache.get(_LINES, self.key, lambda: Line.of(held.fragments, is_reverse))

    def reversed(self) -> _Passing:
        return _Passing(self.held, self.way, not self.is_reverse)

    @property
    def stage(self) -> str:
        return "states of fragments" + (", backward" if self.is_reverse else "")

    def gathered(self, rank: int) -> Gathered:
        return self.layout.cache.get(_GATHERED, (*self.key, rank), lambda: Gathered.of(self.line, rank))

    def find(self, transition: torch.Tensor, state: torch.Tensor) -> torch.Tensor:
        """The states that come to this rank's fragments, zero where none does."""
        way = self._cheaper(transition, state) if self.way == "auto" else self.way
        return (self._by_chain if way == "chain" else self._by_gather)(transition, state)

    def _cheaper(self, transition: torch.Tensor, state: torch.Tensor) -> str:
        counts = self.layout.cache.get(_COUNTS, self.key, lambda: StateCounts.of(self.line))
        return counts.cheaper(*(x[0].numel() * x.element_size() for x in (state, transition)))[0]

    def _by_gather(self, transition: torch.Tensor, state: torch.Tensor) -> torch.Tensor:
        world = self.line.world
        exchange = RowExchange(
            self.layout, ("summaries", *self.key), self.stage,
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
        name, out, given = ("chain", *self.key), torch.zeros_like(state), state.clone()
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
            return [[table_tensor(rows, device) for rows in arrays] for arrays in make()]

        return self.layout.cache.get(_TENSORS, (name, *self.key, device), moved)


def apply_transition(transition: torch.Tensor, state: torch.Tensor) -> torch.Tensor:
    """``A state`` for a number of each head, a diagonal or a matrix; ``state`` ``(..., H, K, V)``."""
    if transition.dim() == state.dim():
        return transition @ state
    return transition.reshape(*transition.shape, *[1] * (state.dim() - transition.dim())) * state


def _transposed(transition: torch.Tensor) -> torch.Tensor:
    return transition.mT if transition.dim() == 4 else transition


def _as_given(x: torch.Tensor) -> torch.autocast:
    """Products of states are of their own dtype: autocast would round each of them."""
    return torch.autocast(x.device.type, enabled=False)


class _PassStates(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, transition: torch.Tensor, state: torch.Tensor, passing: _Passing) -> torch.Tensor:
        with _as_given(state):
            ctx.passing, out = passing, passing.find(transition, state)
        ctx.save_for_backward(transition, out)
        return out

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        transition, came = ctx.saved_tensors
        passing: _Passing = ctx.passing
        with _as_given(grad):
            return _PassStates._gradients(ctx.needs_input_grad[0], transition, came, grad, passing)

    @staticmethod
    def _gradients(
        of_both: bool, transition: torch.Tensor, came: torch.Tensor, grad: torch.Tensor, passing: _Passing
    ) -> tuple[torch.Tensor | None, ...]:
        of_state = _apply(_transposed(transition), grad.contiguous(), passing.reversed())
        if not of_both:
            return None, of_state, None
        carries = passing.held.fragments.carries(passing.held.rank)
        carried = of_state * torch.from_numpy(carries).to(grad.device).view(-1, 1, 1, 1)
        if transition.dim() == 4:
            return carried @ came.mT, of_state, None
        of_transition = (carried * came).sum(dim=(-1, -2) if transition.dim() == 2 else -1)
        return of_transition, of_state, None


# With the types that torch does not give to ``apply``.
_apply: Callable[..., torch.Tensor] = _PassStates.apply
