# SPDX-License-Identifier: Apache-2.0
"""The ways to run a recurrent layer over the ranks of a plan, by the bytes that they move.

| way | what moves |
|---|---|
| states | the states of documents that cross the borders of fragments |
| contiguous | inputs to consecutive shards, outputs back, and the states that cross the borders of shards |
| heads | inputs to all tokens of a part of the heads, and outputs back |

A backward pass moves the same rows once more, the other way, and the states of the reversed sequence.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from magi_attention.common.infer import CuSeqlens
from magi_attention.config.links import NCCL_BYTES_PER_S, NCCL_LATENCY_S
from magi_attention.errors import ContractError
from magi_attention.meta.plan import Plan
from magi_attention.meta.recurrent.schedule import Gathered, Line, chain
from magi_attention.meta.recurrent.tables import contiguous_fragments, from_contiguous, to_contiguous

WAYS = ("states", "contiguous", "heads")
_EXCHANGE_BYTES = NCCL_LATENCY_S * NCCL_BYTES_PER_S  # that a link moves while a collective begins


class _Kind(NamedTuple):
    """A kind of layer: tensors of the size of keys, which queries are one of; is a decay of each key or of a head; has
    it a beta or a step of each head; dims of a transition; is the decay an input of the kernel, moving by heads."""

    keys: int
    has_key_decay: bool
    has_number: bool
    dims: int
    takes_decay: bool = True


_LAYERS = {
    "gated_delta": _Kind(2, False, True, 2),
    "kda": _Kind(2, True, True, 2),
    "rwkv7": _Kind(4, True, False, 2),
    "gla": _Kind(2, True, False, 1),
    "mamba2": _Kind(2, False, True, 0, takes_decay=False),
}


@dataclass(frozen=True)
class Traffic:
    """What a forward, or a backward, moves. ``busiest``: bytes that come to the rank which gets most, summed over
    exchanges that wait for one another. ``total``: bytes of all ranks."""

    exchanges: int = 0
    busiest: int = 0
    total: int = 0

    def __add__(self, other: Traffic) -> Traffic:
        return Traffic(self.exchanges + other.exchanges, self.busiest + other.busiest, self.total + other.total)

    def numbers(self) -> dict[str, int]:
        return {"exchanges": self.exchanges, "busiest_bytes": self.busiest, "bytes": self.total}

    @property
    def cost(self) -> float:
        """Bytes, an exchange counted as those that a link moves in the latency of a collective."""
        return self.busiest + self.exchanges * _EXCHANGE_BYTES


@dataclass(frozen=True)
class StateCounts:
    """What passes between fragments: ``summaries`` of other ranks' fragments that each rank needs, by one exchange; and
    ``chain``, the states that each rank takes in each step ``(steps, ranks)``."""

    summaries: tuple[int, ...]
    chain: tuple[tuple[int, ...], ...]

    @classmethod
    def of(cls, line: Line) -> StateCounts:
        needed = [Gathered.of(line, rank).needed.owner for rank in range(line.world)]
        steps = tuple(tuple(map(len, step.takers)) for step in chain(line))
        return cls(tuple(int((owner != rank).sum()) for rank, owner in enumerate(needed)), steps)

    def gathered(self, state: int, transition: int) -> Traffic:
        """With the bytes of a state and of a transition."""
        one = state + transition
        return Traffic(int(any(self.summaries)), max(self.summaries) * one, sum(self.summaries) * one)

    def chained(self, state: int) -> Traffic:
        most, total = sum(map(max, self.chain)), sum(map(sum, self.chain))
        return Traffic(len(self.chain), most * state, total * state)

    def cheaper(self, state: int, transition: int) -> tuple[str, Traffic]:
        """"gather" or "chain"."""
        found = {"gather": self.gathered(state, transition), "chain": self.chained(state)}
        way = min(found, key=lambda name: found[name].cost)
        return way, found[way]


class Moved(NamedTuple):
    """Bytes of a token's inputs, which take as many exchanges as they have dtypes."""

    bytes: int
    exchanges: int = 1

    @classmethod
    def of(cls, sizes: Iterable[tuple[Hashable, int]]) -> Moved:
        """The sum of ``sizes``, which are ``(dtype, bytes)`` of each input."""
        known = list(sizes)
        return cls(sum(size for _, size in known), len({dtype for dtype, _ in known}))


@dataclass(frozen=True)
class LayerBytes:
    """``state`` and ``transition`` of a fragment; ``inputs`` of a token, and ``with_decay``, with a decay that the
    kernel does not take, which moves where states pass; ``part``, the inputs for one of the ranks by heads, None where
    heads do not divide; ``output`` of a token."""

    state: int
    transition: int
    inputs: Moved
    with_decay: Moved
    part: Moved | None
    output: int


@dataclass(frozen=True)
class WayCounts:
    """Rows and states that each way moves over a plan, whatever the layer, in a forward or a backward."""

    own: StateCounts
    shards: StateCounts  # of contiguous ones
    contiguous: tuple[tuple[int, int], tuple[int, int]]  # rows, there and back: of the rank that gets most, of all
    tokens: tuple[int, ...]  # of each rank, without pads
    is_backward: bool = False

    @classmethod
    def of(cls, plan: Plan, cu_seqlens: CuSeqlens | None = None, is_backward: bool = False) -> WayCounts:
        rows = []
        for wanted in (to_contiguous(plan), from_contiguous(plan)):
            moved = [int((of_rank.owner != rank).sum()) for rank, of_rank in enumerate(wanted)]
            rows.append((max(moved), sum(moved)))
        tokens = (int((plan.position_array(r) < plan.total_tokens).sum()) for r in range(plan.cp_size))
        own, shards = (
            StateCounts.of(Line.of(fragments, is_backward))
            for fragments in (plan.fragments(cu_seqlens), contiguous_fragments(plan, cu_seqlens))
        )
        there, back = reversed(rows) if is_backward else rows  # gradients come to where a tensor was
        return cls(own, shards, (there, back), tuple(tokens), is_backward)

    def traffic(self, layer: LayerBytes) -> dict[str, Traffic]:
        """What each way moves that the layer can go, "states" first."""
        found = {"states": self.own.cheaper(layer.state, layer.transition)[1]}
        (most, total), (most_back, total_back) = self.contiguous
        size, exchanges = layer.with_decay if self.shards.chain else layer.inputs
        inwards = Traffic(exchanges * bool(total), most * size, total * size)
        back = Traffic(int(bool(total)), most_back * layer.output, total_back * layer.output)
        found["contiguous"] = inwards + self.shards.cheaper(layer.state, layer.transition)[1] + back
        if layer.part is not None:
            found["heads"] = self._by_heads(layer.part, layer.output)
        return found

    def _by_heads(self, part: Moved, output: int) -> Traffic:
        world, tokens = len(self.tokens), np.array(self.tokens)
        if world == 1:
            return Traffic()
        there, back = tokens.sum() - tokens, tokens * (world - 1)
        if self.is_backward:
            there, back = back, there
        inwards, back = there * part.bytes, back * (output // world)
        most, total = int(inwards.max() + back.max()), int(inwards.sum() + back.sum())
        return Traffic(part.exchanges + 1, most, total)

    def cheapest(self, layer: LayerBytes) -> str:
        """One of ``WAYS``."""
        found = self.traffic(layer)
        return min(found, key=lambda way: found[way].cost)


def parts_of_heads(heads: int, all_heads: int, world: int) -> int | None:
    """How often each of an input's ``heads`` goes out, so that they divide by ranks as the ``all_heads`` of values do;
    None where they do not."""
    copied = int(np.lcm(heads, world)) if heads else 0
    fits = heads and all_heads % world == 0 and (all_heads % copied == 0 or copied % all_heads == 0)
    return copied // heads if fits else None


@dataclass(frozen=True)
class RecurrentShape:
    """A recurrent layer, to count bytes: ``heads`` states of ``key_dim`` x ``value_dim`` float32, inputs of
    ``element_bytes`` each. ``layer`` is "gated_delta", "kda", "rwkv7", "gla" or "mamba2". ``key_heads`` (those of
    queries and keys; groups of B and C) are as many as ``heads`` without them."""

    heads: int
    key_dim: int
    value_dim: int
    layer: str = "gated_delta"
    key_heads: int | None = None
    element_bytes: int = 2

    def __post_init__(self) -> None:
        if self.layer not in _LAYERS:
            raise ContractError(f"layer is {self.layer!r}; give one of {', '.join(_LAYERS)}.")
        sizes = (self.heads, self.key_dim, self.value_dim, self.element_bytes, self.key_heads)
        if any(size is not None and size < 1 for size in sizes):
            raise ContractError(f"{self} has a number below 1; give heads and dims of the layer.")

    def bytes(self, world: int) -> LayerBytes:
        """For ``world`` ranks, as ``run_recurrent`` counts tensors; log decays are float32."""
        kind = _LAYERS[self.layer]
        key_heads, size = self.key_heads or self.heads, self.element_bytes
        decay = self.key_dim if kind.has_key_decay else 1
        inputs = [Input(size, key_heads, kind.keys * self.key_dim * size),
                  Input(size, self.heads, self.value_dim * size)]  # fmt: skip
        if kind.has_number:
            inputs.append(Input(size, self.heads, size))
        with_decay = [*inputs, Input(4, self.heads, 4 * decay)]
        inputs = with_decay if kind.takes_decay else inputs
        return LayerBytes(
            4 * self.heads * self.key_dim * self.value_dim, 4 * self.heads * self.key_dim**kind.dims,
            Moved.of((x.dtype, x.heads * x.bytes) for x in inputs),
            Moved.of((x.dtype, x.heads * x.bytes) for x in with_decay), part_of(inputs, self.heads, world),
            self.heads * self.value_dim * size,
        )  # fmt: skip


class Input(NamedTuple):
    """An input's dtype, heads and bytes of a head."""

    dtype: Hashable
    heads: int
    bytes: int


def part_of(inputs: Sequence[Input], all_heads: int, world: int) -> Moved | None:
    """``LayerBytes.part`` beside values of ``all_heads``. What has no bytes does not move, but must divide."""
    copies = [parts_of_heads(x.heads, all_heads, world) for x in inputs]
    if None in copies:
        return None
    return Moved.of(
        (x.dtype, x.heads * (copy or 0) // world * x.bytes) for x, copy in zip(inputs, copies) if x.bytes
    )


def explain_ways(plan: Plan, shape: RecurrentShape) -> dict[str, object]:
    """Plain numbers: ``way``, the one that `run_recurrent` takes by itself; ``states``, ``contiguous`` and ``heads``
    (None where heads do not divide by ranks), of each what a forward moves: ``exchanges``, ``busiest_bytes`` (that come
    to the rank which gets most) and ``bytes`` of all ranks; and under ``backward`` what a backward moves. ``why``: a
    sentence about the choice."""
    counts, layer = WayCounts.of(plan), shape.bytes(plan.cp_size)
    found, back = counts.traffic(layer), WayCounts.of(plan, is_backward=True).traffic(layer)
    numbers: dict[str, object] = dict.fromkeys(WAYS)
    for way, traffic in found.items():
        numbers[way] = {**traffic.numbers(), "backward": back[way].numbers()}
    way = counts.cheapest(layer)
    return {"way": way, "why": _why(way, found), **numbers}


def _why(way: str, found: dict[str, Traffic]) -> str:
    """A sentence: what the way costs in a forward, and what the others do."""

    def cost(name: str) -> str:
        traffic = found[name]
        times = f"{traffic.exchanges} exchange{'s' * (traffic.exchanges != 1)}"
        return f"{traffic.busiest / 2**20:,.1f} MiB to the busiest rank in {times}"

    if not found[way].exchanges:
        return f'"{way}" moves nothing.'
    others = "".join(f'; "{name}": {cost(name)}' for name in found if name != way)
    latency = f"an exchange counts as {_EXCHANGE_BYTES / 2**20:.1f} MiB"
    return f'"{way}" costs least: {cost(way)}{others}; {latency}.'
