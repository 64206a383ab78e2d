# SPDX-License-Identifier: Apache-2.0
"""Stage mode ``fused``: what attention in one launch has in common, whatever link its remote keys come by."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeVar

import torch

from magi_attention.common.plan_cache import Kind, PlanCache
from magi_attention.kernels import Grads
from magi_attention.kernels.ffa.arrival import Pace
from magi_attention.kernels.ffa.backend import FfaBackend
from magi_attention.kernels.types import BackwardOperands, Final, Operands
from magi_attention.meta.one_launch.fused_layout import RankLayout

_Operands = TypeVar("_Operands", Operands, BackwardOperands)

# Rough figures: when a put begins, and the speed of one multiprocessor, forward and backward.
_START_SECONDS, _FLOPS, _FLOPS_BACKWARD = 1e-5, 5e12, 4.3e12
_L2_GROUP_BYTES = 33 * 2**20  # keys and values of an L2 group of heads: kL2GroupBytes of common/fwd_scalars.h


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
    def forward(self, backend: FfaBackend, x: Operands) -> Final:
        """``(out in q's dtype, lse, max_logits)``. Here and below the mask of ``x`` is ``part.slices``."""

    @abstractmethod
    def backward(self, backend: FfaBackend, x: BackwardOperands) -> Grads:
        """dq, dk, dv in the inputs' dtype."""

    @abstractmethod
    def _made(self, shapes: Shapes, wire: torch.dtype, before: Any) -> Any:
        """Launches with ``cache`` and ``is_current()``; ``before``: those that are void now, or None."""

    def _of(self, x: _Operands) -> tuple[Any, _Operands]:
        """The launches, and ``x`` with k and v as bulk copies take them: as they are, if their layout is known."""
        q, k, v = x.q, x.k, x.v
        key = _layout(q, k, v)
        found = self.cache.find(LAUNCHES, key)
        if found is None or (k.data_ptr() | v.data_ptr()) & 15:
            k, v = _rows(k), _rows(v)
            x, key = x._replace(k=k, v=v), _layout(q, k, v)
            found = self.cache.find(LAUNCHES, key)
        if found is None or not found.is_current():
            strides = (k.stride(0), v.stride(0))
            shapes = Shapes(k.device, k.dtype, q.shape[1], k.shape[1], (k.shape[2], v.shape[2]), strides)
            made = self._made(shapes, k.dtype if self._wire is None else self._wire, found)
            self.cache.include(made.cache)
            self.cache.pop(LAUNCHES, key)
            found = self.cache.get(LAUNCHES, key, lambda: made)
        return found, x


class PreparedFused(NamedTuple):
    """``attention`` and the backend that runs it."""

    attention: OneLaunch
    backend: FfaBackend


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
