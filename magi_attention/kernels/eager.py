# SPDX-License-Identifier: Apache-2.0
"""Custom ops whose eager calls do not go through torch's dispatcher.

``torch.compile`` needs a custom op, which it sees as one node. An eager call needs none, and with a gradient torch
takes 0.2 ms of the host for its forward and 0.7 ms for its backward (torch 2.11): longer than many kernels. So an eager
call runs the op's function in a ``torch.autograd.Function``, with the same formula, where nobody else looks on.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch._library.custom_ops import CustomOpDef
from torch.autograd import forward_ad
from torch.compiler import is_compiling

from magi_attention.errors import UnsupportedError
from magi_attention.kernels.double_backward import refuse_double_backward

_PLAIN = (torch.Tensor, torch.nn.Parameter)


def opaque_op(name: str, schema: str) -> Callable[[Callable[..., Any]], CustomOpDef]:
    """``torch.library.custom_op`` of a function that edits none of its arguments. ``run`` of the op is the function."""

    def decorate(run: Callable[..., Any]) -> CustomOpDef:
        op = torch.library.custom_op(name, run, mutates_args=(), schema=schema)
        op.run = run  # type: ignore[attr-defined]
        return op

    return decorate


def eager_call(op: Any, save: Callable[..., None] | None = None, grad: Callable[..., Any] | None = None) -> Any:
    """How to call an ``opaque_op``, by position, and what its derivative is: ``grad`` of what ``save`` keeps, both as
    ``register_autograd`` of torch takes them; ``UnsupportedError`` without them."""
    op.register_autograd(grad or refuse_double_backward, setup_context=save)
    run, onlookers = op.run, _Onlookers()
    differentiable = op if grad is None or save is None else _function(op, save, grad).apply

    @functools.wraps(run)
    def call(*args: Any) -> Any:
        if is_compiling() or onlookers.are_there():
            return op(*args)
        tensors = [x for x in args if isinstance(x, torch.Tensor)]
        if any(type(x) not in _PLAIN or x.is_meta for x in tensors):
            return op(*args)
        if torch.is_grad_enabled() and any(x.requires_grad for x in tensors):
            return differentiable(*args)
        return run(*args)

    return call


def _function(op: Any, save: Callable[..., None], grad: Callable[..., Any]) -> Any:
    def forward(ctx: Any, *args: Any) -> Any:
        results = op.run(*args)
        save(ctx, args, results)
        return results

    members = {"forward": staticmethod(forward), "backward": staticmethod(grad), "__doc__": op.run.__doc__}
    return type(op._name, (torch.autograd.Function,), members)


def watching_modes() -> tuple[tuple[Callable[[], object], object], ...]:
    """Functions of torch, and what each gives where no mode and no trace is active.

    ``UnsupportedError`` if this torch has other names for them.
    """
    try:
        modes = torch._C._len_torch_dispatch_stack, torch._C._len_torch_function_stack
        return *((mode, 0) for mode in modes), (torch._C._is_tracing, False)
    except AttributeError as error:
        raise UnsupportedError(f"torch {torch.__version__} is unknown to this package: {error}.") from None


class _Onlookers:
    """Who ought to see an op of torch. On a torch with other names somebody always might, so all calls are ops."""

    def __init__(self) -> None:
        try:
            self._answers = *watching_modes(), (torch._C._functorch.peek_interpreter_stack, None)
            self._tangents = vars(forward_ad)
            self._is_known = "_current_level" in self._tangents
        except (AttributeError, UnsupportedError):
            self._is_known = False

    def are_there(self) -> bool:
        """Is there a mode, a transform of functorch, a trace or a tangent?"""
        if not self._is_known or self._tangents["_current_level"] >= 0:
            return True
        return any(ask() != nobody for ask, nobody in self._answers)


__all__ = ["eager_call", "opaque_op", "watching_modes"]
