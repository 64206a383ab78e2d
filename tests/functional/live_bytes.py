# SPDX-License-Identifier: Apache-2.0
"""Bytes of tensors that live at a time, counted where operations make them, and a backend that computes nothing."""

from __future__ import annotations

import weakref
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from magi_attention.kernels.types import BackwardOperands, Final, Grads, Operands, Partial, Problem


class LiveBytes(TorchDispatchMode):
    """While active, counts the storages that operations return: ``now``, and ``peak``, the most at a time."""

    def __init__(self) -> None:
        super().__init__()
        self.now = self.peak = 0
        self._known: dict[int, Any] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        given = {x.untyped_storage()._cdata for x in tree_leaves((args, kwargs)) if isinstance(x, torch.Tensor)}
        result = func(*args, **(kwargs or {}))
        for x in tree_leaves(result):
            if isinstance(x, torch.Tensor) and x.untyped_storage()._cdata not in given:
                self._count(x.untyped_storage())
        return result

    def _count(self, storage: torch.UntypedStorage) -> None:
        key, size = storage._cdata, storage.nbytes()
        if key in self._known:
            return
        self.now += size
        self.peak = max(self.peak, self.now)

        def forget(_: Any) -> None:
            self.now -= size
            del self._known[key]

        self._known[key] = weakref.ref(storage, forget)


class EmptyBackend:
    """Results of the right shapes and dtypes, as a kernel allocates them, and nothing beside them."""

    name = "empty"

    def why_not(self, problem: Problem) -> str | None:
        return None

    def forward(self, x: Operands, init: Partial | None = None) -> Partial:
        if init is not None:
            return init
        rows, heads, width = x.q.shape[0], x.q.shape[1], x.v.shape[2]
        return Partial(
            x.q.new_zeros((rows, heads, width), dtype=torch.float32), x.q.new_zeros((rows, heads), dtype=torch.float32)
        )

    def backward(self, x: BackwardOperands, init: Grads | None = None) -> Grads:
        if init is not None:
            return init
        grads = Grads(*(torch.zeros(y.shape, dtype=torch.float32) for y in (x.q, x.k, x.v)))
        grads.delta = x.lse.new_zeros(x.lse.shape)
        return grads

    def forward_final(self, x: Operands) -> Final:
        out = x.q.new_empty((*x.q.shape[:2], x.v.shape[2])).zero_()
        return out, x.q.new_zeros(x.q.shape[:2], dtype=torch.float32), None

    def backward_final(self, x: BackwardOperands) -> Grads:
        sums = self.backward(x)
        return Grads(*(y.to(x.q.dtype) for y in (sums.dq, sums.dk, sums.dv)))
