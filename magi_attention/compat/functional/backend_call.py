# SPDX-License-Identifier: Apache-2.0
"""Forward and backward calls of a given backend, without autograd: ``sdpa_*`` and ``fa4_*``."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

import torch

# First: threads that import this module and functional at once, each of which needs kernels, then do so in one order.
import magi_attention.functional  # noqa: F401, I001
from magi_attention.common.forward_meta import AttnForwardMeta
from magi_attention.common.scalars import as_float
from magi_attention.kernels.registry import default_registry
from magi_attention.kernels.tables import table_from_attn_arg
from magi_attention.kernels.types import AttnOptions, Backend, BackwardOperands, Operands, Problem, as_scale, options_of

Gradients = tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor | None]


class AttnArg(Protocol):
    """What is read of an attention argument; see ``table_from_attn_arg`` for the accepted types."""

    q_ranges: object
    k_ranges: object
    attn_type_map: object


def options_for(
    q: torch.Tensor, softmax_scale: float | None, softcap: float, sink_layout: str, **flags: Any
) -> AttnOptions:
    """Options of a call; the scale defaults to ``D ** -0.5``."""
    scale = q.shape[-1] ** -0.5 if softmax_scale is None else as_scale(softmax_scale)
    return options_of(scale, as_float(softcap, "softcap"), sink_layout, **flags)


class BackendCalls:
    """``fwd`` and ``bwd`` in the published form, by the backend that ``choose`` gives for a problem."""

    def __init__(self, choose: Callable[[Problem], Backend]) -> None:
        self._choose = choose

    def fwd(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        sink: torch.Tensor | None,
        attn_arg: AttnArg,
        softmax_scale: float | None = None,
        softcap: float = 0.0,
        sink_layout: str = "sh",
        return_max_logits: bool = False,
    ) -> tuple[torch.Tensor, AttnForwardMeta]:
        """``(out (Tq, Hq, Dv) in q's dtype, AttnForwardMeta)``. Scale defaults to ``D ** -0.5``."""
        options = options_for(q, softmax_scale, softcap, sink_layout, return_max_logits=return_max_logits)
        slices = table_from_attn_arg(attn_arg, default_registry().tables)
        backend = self._choose(Problem.of(q, k, v, options, sink))
        got = backend.forward(Operands(q, k, v, slices, options, sink))
        return got.out.to(q.dtype), AttnForwardMeta(got.lse, got.max_logits)

    def bwd(
        self,
        do: torch.Tensor,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        sink: torch.Tensor | None,
        o: torch.Tensor,
        lse: torch.Tensor,
        attn_arg: AttnArg,
        softmax_scale: float | None = None,
        softcap: float = 0.0,
        sink_layout: str = "sh",
        deterministic: bool = False,
    ) -> Gradients:
        """``(dq, dk, dv, dsink)`` in the dtypes of q, k, v, sink. ``o`` and ``lse`` are final, sinks included."""
        options = options_for(q, softmax_scale, softcap, sink_layout, deterministic=deterministic)
        slices = table_from_attn_arg(attn_arg, default_registry().tables)
        backend = self._choose(Problem.of(q, k, v, options, sink, needs_backward=True))
        got = backend.backward(BackwardOperands(do, q, k, v, o, lse, slices, options, sink))
        dsink = None if sink is None or got.dsink is None else got.dsink.to(sink.dtype)
        return got.dq.to(q.dtype), got.dk.to(k.dtype), got.dv.to(v.dtype), dsink
