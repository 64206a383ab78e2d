# SPDX-License-Identifier: Apache-2.0
"""Results of torch's functional collectives, which are waited for at their first use by an op of torch.

Such a tensor (``AsyncCollectiveTensor``) says that its data are at address 0, and kernels that are launched by
addresses would read there. An all-to-all of heads before attention gives one for q, k and v, and its backward gives one
for dout.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

_PLAIN = (torch.Tensor, torch.nn.Parameter)


def waited(x: Any) -> Any:
    """The plain tensor behind ``x`` when it has arrived, differentiable; anything else as it is."""
    if type(x) in _PLAIN or not hasattr(x, "trigger_wait"):
        return x
    if torch.is_grad_enabled() and x.requires_grad:
        return _apply(x)
    return x.trigger_wait()


class _Wait(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Any) -> Any:
        return x.trigger_wait()

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
        return grad


_apply: Callable[..., Any] = _Wait.apply

__all__ = ["waited"]
