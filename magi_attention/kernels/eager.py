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
    run, onlookers = op.run, Onlookers()
    differentiable = op if grad is None or save is None else _function(op, save, grad).apply

    @functools.wraps(run)
    def call(*args: Any) -> Any:
        if not onlookers.let_pass(args):
            return op(*args)
        return differentiable(*args) if needs_gradient(args) else run(*args)

    return call


def needs_gradient(args: tuple[Any, ...]) -> bool:
    """Does a result of plain tensors among ``args`` get a gradient?"""
    if torch.is_grad_enabled():
        for x in args:
            if type(x) in _PLAIN and x.requires_grad:
                return True
    return False


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


class Onlookers:
    """Who ought to see an op of torch. On a torch with other names somebody always might, so all calls are ops.

    Loops in place of generators, which cost every layer of a model several times as much.
    """

    def __init__(self) -> None:
        try:
            self._answers = *watching_modes(), (torch._C._functorch.peek_interpreter_stack, None)
            self._tangents = vars(forward_ad)
            self._is_known = "_current_level" in self._tangents
        except (AttributeError, UnsupportedError):
            self._is_known = False

    def let_pass(self, args: tuple[Any, ...]) -> bool:
        """May a call with these arguments pass torch's dispatcher by? Then all tensors among them are plain ones.

        ``UnsupportedError`` if one has a tangent, which the op would drop.
        """
        # A mode, a transform of functorch or a trace would see the op.
        if not self._is_known:
            return False
        if is_compiling():  # torch.compile knows the variable by its name alone
            if forward_ad._current_level >= 0:
                _refuse_tangents(args)
            return False
        if self._tangents["_current_level"] >= 0:
            _refuse_tangents(args)
            return False
        for ask, nobody in self._answers:
            if ask() != nobody:
                return False
        for x in args:
            if type(x) in _PLAIN:
                if x.is_meta:
                    return False
            elif x is not None and isinstance(x, torch.Tensor):
                return False
        return True


def _refuse_tangents(args: tuple[Any, ...]) -> None:
    for x in args:
        if isinstance(x, torch.Tensor) and forward_ad.unpack_dual(x).tangent is not None:
            raise UnsupportedError(
                "This kernel has no forward-mode derivative (torch.func.jvp, jacfwd, torch.autograd.forward_ad). "
                "Differentiate backward, or compute attention with torch's scaled_dot_product_attention under "
                "torch.nn.attention.sdpa_kernel(SDPBackend.MATH)."
            )


__all__ = ["Onlookers", "eager_call", "needs_gradient", "opaque_op", "watching_modes"]
