# SPDX-License-Identifier: Apache-2.0
"""A backward on the simulated library, and what it should give."""

from __future__ import annotations

import torch
from ffa_simulator import close, inputs, truth

from magi_attention.kernels import AttnOptions, Grads, SdpaBackend
from magi_attention.kernels.types import BackwardOperands

NAMES = ("dq", "dk", "dv", "dsink")
PLAIN = AttnOptions(0.3)


class BackwardCase:
    """Inputs of a backward and the gradients in float64."""

    def __init__(self, slices, tq=40, tk=40, options=PLAIN, sink=None, dtype=torch.bfloat16, **kwargs):
        self.q, self.k, self.v = inputs(tq, tk, dtype=dtype, **kwargs)
        self.slices, self.options, self.sink = slices, options, sink
        forward = truth(self.q, self.k, self.v, slices, options, sink)
        self.out, self.lse = forward.out.to(dtype), forward.lse.float()
        g = torch.Generator().manual_seed(9)
        self.dout = torch.randn(self.out.shape, generator=g).to(dtype)
        self.tensors = (self.dout, self.q, self.k, self.v, self.out, self.lse)

    def want(self) -> Grads:
        double = (x.double() for x in self.tensors)
        sink = None if self.sink is None else self.sink.double()
        return SdpaBackend().backward(BackwardOperands(*double, self.slices, self.options, sink))


def compare(got: Grads, want: Grads, tol: float) -> None:
    for name in NAMES:
        a, b = getattr(got, name), getattr(want, name)
        assert (a is None) == (b is None), name
        if a is not None:
            close(a, b, tol)
