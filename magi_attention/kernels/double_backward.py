# SPDX-License-Identifier: Apache-2.0
"""Attention has no second derivative: to differentiate its gradients raises an error, as with torch's own kernels.

A gradient penalty that is left out in silence would train another model.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NoReturn

import torch

from magi_attention.errors import UnsupportedError


def refuse_double_backward(*_: object) -> NoReturn:
    """The backward of a backward."""
    raise UnsupportedError(
        "The derivative of attention's backward is not implemented, so its gradients cannot be differentiated again. "
        "For a gradient penalty compute that part with torch's scaled_dot_product_attention under "
        "torch.nn.attention.sdpa_kernel(SDPBackend.MATH)."
    )


class _OnceDifferentiable(torch.autograd.Function):
    """Gives its first ``count`` tensors on. The others are what these depend on: why the results need a gradient."""

    @staticmethod
    def forward(ctx: Any, count: int, *tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return tensors[:count]

    @staticmethod
    def backward(ctx: Any, *grads: object) -> NoReturn:
        refuse_double_backward()


_apply: Callable[..., tuple[torch.Tensor, ...]] = _OnceDifferentiable.apply


def once_differentiable(
    grads: Sequence[torch.Tensor | None], inputs: Sequence[torch.Tensor | None]
) -> tuple[torch.Tensor | None, ...]:
    """``grads`` as functions of ``inputs`` that have no derivative; None stays None.

    Why not torch's decorator of that name: it looks at the incoming gradient alone, which is a constant where the loss
    is linear in the output, and then the gradients pass for constants, too.
    """
    given = [x for x in grads if x is not None]
    results = iter(_apply(len(given), *given, *(x for x in inputs if x is not None)))
    return tuple(None if x is None else next(results) for x in grads)


__all__ = ["once_differentiable", "refuse_double_backward"]
