# SPDX-License-Identifier: Apache-2.0
"""A kernel for packed documents, run over the tokens of all ranks: by states, contiguous shards, or heads."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import torch

from magi_attention.common.infer import CuSeqlens
from magi_attention.common.plan_cache import Kind, on_gpu
from magi_attention.errors import ContractError
from magi_attention.functional.recurrent.layouts import LayerLayout
from magi_attention.functional.recurrent.states import Held, Key, pass_states
from magi_attention.functional.tokens.layout import TokenLayout, table_tensor
from magi_attention.meta.fragments import Bools
from magi_attention.meta.recurrent.ways import WAYS, Input, LayerBytes, Moved, WayCounts, part_of

Kernel = Callable[..., tuple[torch.Tensor, torch.Tensor]]
_SEGMENTS: Kind[Key, tuple[torch.Tensor, ...]] = Kind("segments of fragments", on_gpu)
_LAST_ROWS: Kind[Key, tuple[torch.Tensor, ...]] = Kind("last segments of fragments", on_gpu)
_COUNTS: Kind[Key, WayCounts] = Kind("counts of ways", lambda _: [])


class Layer(NamedTuple):
    """Arguments of ``api.run_recurrent``."""

    kernel: Kernel
    value: torch.Tensor  # (T, H, V)
    key_dim: int
    inputs: tuple[torch.Tensor, ...] = ()  # (T, h, ...)
    parameters: tuple[torch.Tensor, ...] = ()  # (h, ...)
    log_decay: torch.Tensor | None = None  # (T, H) or (T, H, K)
    state_dtype: torch.dtype = torch.float32

    @property
    def has_decay(self) -> bool:
        """Is the decay one of the inputs? It moves once then."""
        return any(x is self.log_decay for x in self.inputs)

    def bytes(self, world: int) -> LayerBytes:
        """What ``meta.recurrent.ways`` counts by."""
        (_, heads, width), of_state, decay = self.value.shape, self.state_dtype.itemsize, self.log_decay
        moved = [_input(x) for x in (self.value, *self.inputs)]
        fixed = [Input(None, p.shape[0], 0) for p in self.parameters]
        transition = heads * self.key_dim**2 if decay is None else decay.shape[1:].numel()
        with_decay = moved if decay is None or self.has_decay else [*moved, _input(decay)]
        return LayerBytes(
            heads * self.key_dim * width * of_state, transition * of_state,
            Moved.of((x.dtype, x.heads * x.bytes) for x in moved),
            Moved.of((x.dtype, x.heads * x.bytes) for x in with_decay), part_of([*moved, *fixed], heads, world),
            heads * width * self.value.element_size(),
        )  # fmt: skip


def _input(x: torch.Tensor) -> Input:
    return Input(x.dtype, x.shape[1], x.shape[2:].numel() * x.element_size())


def segments(held: Held, device: torch.device) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """``Fragments.segments``, ``first_segments`` and ``last_segments`` of this rank as int64 tensors on ``device``."""

    def make() -> tuple[torch.Tensor, ...]:
        found, rank = held.fragments, held.rank
        arrays = found.segments(rank), found.first_segments(rank), found.last_segments(rank)
        return tuple(table_tensor(array, device) for array in arrays)

    bounds, first, last = held.layout.cache.get(_SEGMENTS, (*held.key, device), make)
    return bounds, first, last


def decay_of_fragments(log_decay: torch.Tensor, held: Held) -> torch.Tensor:
    """``(F, ...)``: the product of the decays in the last segment of each fragment; ``log_decay`` ``(T, ...)``."""
    bounds, _, last = segments(held, log_decay.device)
    sums = log_decay.double().cumsum(0)  # as differences of sums over all tokens are taken
    sums = torch.cat([torch.zeros_like(sums[:1]), sums])
    return (sums[bounds[last + 1]] - sums[bounds[last]]).exp().to(log_decay.dtype)


def choose_way(layer: Layer, layout: TokenLayout, cu_seqlens: CuSeqlens | None, way: str = "auto") -> str:
    """The one of ``WAYS`` that is asked for, or moves least. ``ContractError`` for arguments that do not fit."""
    try:
        _check(layer, layout, way)
    except Exception as exc:
        layout.transport.decline(exc, layer.value, "run_recurrent")
        raise
    if way != "auto":
        return way
    if not layer.inputs or layout.transport.size == 1:
        return "states"
    key = Held.of(layout, "states", cu_seqlens).key
    counts = layout.cache.get(_COUNTS, key, lambda: WayCounts.of(layout.plan, cu_seqlens))
    return counts.cheapest(layer.bytes(layout.transport.size))


def _check(layer: Layer, layout: TokenLayout, way: str) -> None:
    value, rows = layer.value, layout.num_local
    if value.dim() != 3 or value.shape[0] != rows:
        raise ContractError(f"value has shape {tuple(value.shape)}; give (T, H, V) with this rank's {rows} tokens.")
    for x in layer.inputs:
        if x.dim() < 2 or x.shape[0] != rows:
            raise ContractError(
                f"An input has shape {tuple(x.shape)}; give (T, heads, ...) with the {rows} tokens of this rank."
            )
    decay, heads = layer.log_decay, value.shape[1]
    if decay is not None and tuple(decay.shape) not in ((rows, heads), (rows, heads, layer.key_dim)):
        raise ContractError(
            f"log_decay has shape {tuple(decay.shape)}; give (T, H) or (T, H, K), that is {(rows, heads)} or "
            f"{(rows, heads, layer.key_dim)}."
        )
    if way not in ("auto", *WAYS):
        raise ContractError(f"way is {way!r}; give one of auto, {', '.join(WAYS)}.")
    if way in ("contiguous", "heads") and not layer.inputs:
        raise ContractError(f"way is {way!r}, and what the kernel holds does not move along; give it as inputs=.")
    if way == "heads" and layer.bytes(layout.transport.size).part is None:
        raise ContractError(
            f"The heads of values, {heads}, or of inputs do not divide by {layout.transport.size} ranks; give "
            'way="states" or "contiguous".'
        )


def run_recurrent(layer: Layer, layout: TokenLayout, cu_seqlens: CuSeqlens | None, way: str) -> torch.Tensor:
    """See ``api.recurrent.run_recurrent``."""
    way = choose_way(layer, layout, cu_seqlens, way)
    held = Held.of(layout, way, cu_seqlens)
    if way == "states":
        return _run(layer, held)
    place = LayerLayout(layout, way, layer.value.shape[1])
    decay = layer.log_decay if len(held.fragments.passes) else None  # by heads no state passes
    moves_alone = [] if decay is None or layer.has_decay else [decay]
    value, *inputs = place.inwards([layer.value, *layer.inputs, *moves_alone])
    if decay is not None:
        decay = inputs.pop() if moves_alone else next(y for x, y in zip(layer.inputs, inputs) if x is decay)
    parameters = tuple(map(place.own_heads, layer.parameters))
    moved = layer._replace(value=value, inputs=tuple(inputs), parameters=parameters, log_decay=decay)
    out = _run(moved, held)
    if out.dim() < 2 or tuple(out.shape[:2]) != tuple(value.shape[:2]):
        raise ContractError(
            f"The kernel's out has shape {tuple(out.shape)}; with way={way!r} it is (T, H, ...), here "
            f"{tuple(value.shape[:2])} and more."
        )
    return place.outwards(out)


def _run(layer: Layer, held: Held) -> torch.Tensor:
    """On the tokens that this rank holds, with states passed between ranks."""
    value, dtype = layer.value, layer.state_dtype
    bounds, first, last = segments(held, value.device)
    count, (_, heads, width) = len(bounds) - 1, value.shape
    zero = value.new_zeros((count, heads, layer.key_dim, width), dtype=dtype)
    rest = (*layer.inputs, *layer.parameters)
    if not len(held.fragments.passes):
        return layer.kernel(value, zero, bounds, *rest)[0]
    if layer.log_decay is not None:
        made = _checked(layer.kernel(value, zero, bounds, *rest)[1], layer, held)
        final = made.index_select(0, last)
        transition = decay_of_fragments(layer.log_decay.to(dtype), held)
    else:
        final = _states(layer, held, held.fragments.gives(held.rank), None)
        identity = torch.eye(layer.key_dim, dtype=dtype, device=value.device).expand(heads, -1, -1)
        transition = _states(layer, held, held.fragments.carries(held.rank), identity)
    wanting = (value, *rest, *(() if layer.log_decay is None else (layer.log_decay,)))
    came = pass_states(transition, _apply_join(final, *wanting), held)
    return layer.kernel(value, zero.index_copy(0, first, came), bounds, *rest)[0]


def _states(layer: Layer, held: Held, which: Bools, initial: torch.Tensor | None) -> torch.Tensor:
    """``(F, H, K, ...)``: what the last segment of each fragment of ``which`` leaves, zero for others: of a zero state,
    or of ``initial`` ``(H, K, K)`` with values of zero. The kernel runs on these tokens alone, where it has inputs."""
    device, dtype, heads = layer.value.device, layer.state_dtype, layer.value.shape[1]
    bounds, _, last = segments(held, device)
    numbers, rows, cut = _last_rows(held, device, which, "final" if initial is None else "transition")
    tensors, at = (layer.value, *layer.inputs), last[numbers]
    width = layer.value.shape[2] if initial is None else layer.key_dim
    whole = layer.value.new_zeros((len(last), heads, layer.key_dim, width), dtype=dtype)
    if layer.inputs:
        if not len(numbers):
            return whole
        tensors, bounds = tuple(x.index_select(0, rows) for x in tensors), cut
        at = torch.arange(len(numbers), device=device)
    value, *inputs = tensors
    begin = whole.new_zeros((len(bounds) - 1, *whole.shape[1:]))
    if initial is not None:
        value, begin = value.new_zeros((len(value), heads, layer.key_dim)), begin + initial
    final = _checked(layer.kernel(value, begin, bounds, *inputs, *layer.parameters)[1], layer, held)
    return whole.index_copy(0, numbers, final.index_select(0, at))


class _Join(torch.autograd.Function):
    """A tensor, which has a graph if any other one given has. The exchange of states is collective in the backward,
    too, and not on all ranks a state depends on what wants gradients."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, *others: torch.Tensor) -> torch.Tensor:
        ctx.others = len(others)
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        return grad, *[None] * ctx.others


# With the types that torch does not give to ``apply``.
_apply_join: Callable[..., torch.Tensor] = _Join.apply


def _checked(state: torch.Tensor, layer: Layer, held: Held) -> torch.Tensor:
    if state.dtype != layer.state_dtype:
        exc = ContractError(
            f"The kernel's final state is {state.dtype} and its initial state {layer.state_dtype}; give it in the same "
            "dtype, under torch.autocast as well, or say state_dtype=."
        )
        held.layout.transport.decline(exc, layer.value, "run_recurrent")
        raise exc
    return state


def _last_rows(held: Held, device: torch.device, which: Bools, name: str) -> tuple[torch.Tensor, ...]:
    """On ``device``: the numbers of the fragments of ``which``, the local rows of their last segments, and their
    cumulative lengths."""

    def make() -> tuple[torch.Tensor, ...]:
        bounds, last = held.fragments.segments(held.rank), held.fragments.last_segments(held.rank)[which]
        begin, end = bounds[last], bounds[last + 1]
        rows = np.concatenate([np.arange(0), *map(np.arange, begin, end)])
        arrays = np.flatnonzero(which), rows, np.concatenate([[0], np.cumsum(end - begin)])
        return tuple(table_tensor(array, device) for array in arrays)

    return held.layout.cache.get(_LAST_ROWS, (*held.key, device, name), make)
