# SPDX-License-Identifier: Apache-2.0
"""Backward calls of the implementations in ``peers``: gradients alone, or forward and gradients of one training step.

Each takes (q, k, v, dout (T, Hq, Dv), case) and gives a function of no arguments whose result is (dq, dk, dv), shaped
(T, H, D) as q, k and v are. For gradients alone the forward runs before, once, and is not timed.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch
from masks import Case
from peers import OUR_WHEELS, Make, our_backend, our_wheel

from magi_attention.kernels import AttnOptions
from magi_attention.kernels.types import BackwardOperands, FinalBackend, Operands

Grads = tuple[torch.Tensor, torch.Tensor, torch.Tensor]
MakeGrads = Callable[[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, Case], Callable[[], Grads]]


class OurGradients:
    """``backward_final`` of ``backend``, by default ours; with ``is_both`` after its ``forward_final``, in one call."""

    def __init__(
        self, q, k, v, dout, case: Case, is_both: bool, deterministic: bool = False, backend: FinalBackend | None = None
    ) -> None:
        self._backend = backend or our_backend()
        self._tensors, self._dout, self._slices = (q, k, v), dout, case.mask.slices
        self._options = AttnOptions(q.shape[2] ** -0.5, deterministic=deterministic)
        self._final = None if is_both else self._forward()

    def _forward(self) -> tuple[torch.Tensor, torch.Tensor]:
        return self._backend.forward_final(Operands(*self._tensors, self._slices, self._options))[:2]

    def __call__(self) -> Grads:
        out, lse = self._final or self._forward()
        grads = self._backend.backward_final(
            BackwardOperands(self._dout, *self._tensors, out, lse, self._slices, self._options)
        )
        return grads.dq, grads.dk, grads.dv

    @property
    def workspace_bytes(self) -> int | None:
        """For the prepared backward call, so there must have been one; None if it cannot be told."""
        # The options were made for this object, so they tell its calls from all others.
        calls = getattr(self._backend, "_backward", None)
        prepared = calls._prepared.values() if calls else ()
        return max((c.workspace_like.numel() for c in prepared if c.options is self._options), default=None)


def ours(is_both: bool, deterministic: bool = False, wheel: str | None = None) -> MakeGrads:
    """``wheel``: one of ``OUR_WHEELS``."""

    def make_grads(q, k, v, dout, case: Case) -> Callable[[], Grads]:
        backend = None if wheel is None else our_wheel(wheel, q, k, v)
        return OurGradients(q, k, v, dout, case, is_both, deterministic, backend)

    return make_grads


def by_autograd(make: Make, is_both: bool) -> MakeGrads:
    """Gradients of a forward of ``peers``, by autograd; without v (dq, dk)."""

    def make_grads(q, k, v, dout, case: Case) -> Callable[[], Grads]:
        given = [None if x is None else x.detach().requires_grad_() for x in (q, k, v)]
        leaves = tuple(x for x in given if x is not None)
        if is_both:
            forward = make(*given, case)
            return lambda: torch.autograd.grad(forward(), leaves, dout)
        # Compiled functions may otherwise reuse what they saved, and refuse a second backward of one forward. The check
        # is made at every call, so the setting stays for the life of the process.
        import torch._functorch.config as functorch

        functorch.donated_buffer = False
        out = make(*given, case)()
        return lambda: torch.autograd.grad(out, leaves, dout, retain_graph=True)

    return make_grads


def gradient_makers(makers: Mapping[str, Make], is_both: bool) -> dict[str, MakeGrads]:
    """The gradients of each forward in ``makers``. ``"magi"`` is the public function; ``"magi_host"`` the kernels with
    the mask known on the host, and ``"magi_det"`` these with ``deterministic``."""
    grads: dict[str, MakeGrads] = {}
    for name, make in makers.items():
        if name == "magi_host":
            grads |= {name: ours(is_both), "magi_det": ours(is_both, deterministic=True)}
        elif name in OUR_WHEELS:
            grads[name] = ours(is_both, wheel=name)
        else:
            grads[name] = by_autograd(make, is_both)
    return grads
