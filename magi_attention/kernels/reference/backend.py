# SPDX-License-Identifier: Apache-2.0
"""What the two reference backends share: checks before, sinks and sums behind the attention that each computes."""

from __future__ import annotations

from abc import ABC, abstractmethod

import torch

from magi_attention.kernels.reference import operands
from magi_attention.kernels.reference.correction import sink_bwd_from_delta
from magi_attention.kernels.reference.numerics import LoadedOperands, load_operands
from magi_attention.kernels.types import BackwardOperands, Grads, Operands, Partial, Problem, check_dropout


class ReferenceBackend(ABC):
    """A ``Backend`` of torch operations; a subclass computes attention and its gradients without a sink."""

    def why_not(self, problem: Problem) -> str | None:
        """See ``Backend.why_not``."""
        return operands.reference_why_not(problem)

    @operands.as_kernel
    def forward(self, x: Operands, init: Partial | None = None) -> Partial:
        """See ``Backend.forward``."""
        operands.check_operands(x)
        check_dropout(x)
        return operands.finish_forward(self._attend(x, load_operands(x)), x, init)

    @operands.as_kernel
    def backward(self, x: BackwardOperands, init: Grads | None = None) -> Grads:
        """See ``Backend.backward``."""
        operands.check_operands(x)
        check_dropout(x)
        delta = operands.row_delta(x.out, x.dout, x.delta)
        grads = Grads(*(grad.to(delta.dtype) for grad in self._differentiate(x, load_operands(x, delta))))
        grads.delta = delta
        if x.sink is not None:
            grads.dsink = sink_bwd_from_delta(x.sink, x.lse.to(delta.dtype), delta, x.options.sink_layout)
        return operands.finish_backward(grads, init)

    @abstractmethod
    def _attend(self, x: Operands, loaded: LoadedOperands) -> Partial:
        """out (Tq, Hq, Dv), lse (Tq, Hq) and, where options ask for it, max_logits (Hq,), in the accumulation dtype."""

    @abstractmethod
    def _differentiate(
        self, x: BackwardOperands, loaded: LoadedOperands
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """dq, dk, dv in the shapes of q, k, v, contiguous."""
