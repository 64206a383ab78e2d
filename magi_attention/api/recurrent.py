# SPDX-License-Identifier: Apache-2.0
"""Recurrent layers (gated delta rule, KDA, Mamba-2, short convolutions) over the dispatch of a plan.

A plan's ranks hold fragments of the sequence (``plan.fragments()``). Within them a library's kernel for packed
documents runs, and states pass from fragment to fragment here. All are collective over the group and differentiable.
``magi_attention.integrations.recurrent_kernels`` has adapters for the kernels of libraries. Under ``torch.compile``
these calls break the graph.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from magi_attention.api.compiled.graph_breaks import breaks_graph
from magi_attention.api.plan import Plan, check_plan
from magi_attention.common.infer import CuSeqlens
from magi_attention.functional.calls.attention_check import note_call
from magi_attention.functional.recurrent import conv, layers, states
from magi_attention.functional.recurrent.states import Held

_eager = breaks_graph("rows and states pass by tables of the plan")


@_eager
def pass_states(
    transition: torch.Tensor,
    state: torch.Tensor,
    plan: Plan,
    group: Any = None,
    *,
    cu_seqlens: CuSeqlens | None = None,
    way: str = "auto",
) -> torch.Tensor:
    """The state that comes to each of this rank's fragments, ``(F, H, K, V)``, zero where a document begins.

    ``state`` ``(F, H, K, V)`` is what the last segment of each fragment (``plan.fragments().last_segments(rank)``)
    makes of a zero state. ``transition`` is the product of the transitions of that segment's tokens, so that a state S
    becomes ``transition S + state``: a number of each head ``(F, H)`` (Mamba-2), a diagonal ``(F, H, K)`` (gated linear
    attention) or a matrix ``(F, H, K, K)`` (gated delta rule, KDA). Both have one floating-point dtype, as float32.

    Documents are those of the plan's mask, or of ``cu_seqlens`` as of ``plan.labels``. ``way``: "gather" sends the
    summaries of a document's earlier fragments to the ranks that hold later ones, by one all-to-all-v; "chain" sends
    one state from fragment to fragment, in as many steps as the longest chain has; "auto" takes what moves less, a step
    counted as what a link moves in the latency of a collective. The order of additions is that of the document, so
    results have the same bits in every run. Gradients take the same way back; they may be differentiated again.
    ``ContractError`` for shapes and dtypes that do not fit.
    """
    check_plan(plan)
    return states.pass_states(transition, state, Held.of(plan._layout(group), "states", cu_seqlens), way)


@_eager
def decay_of_fragments(
    log_decay: torch.Tensor, plan: Plan, group: Any = None, *, cu_seqlens: CuSeqlens | None = None
) -> torch.Tensor:
    """The ``transition`` of ``pass_states`` for layers whose tokens decay the state and do nothing else to it.

    ``log_decay`` ``(T, H)`` or ``(T, H, K)`` are logarithms of each local token's decay. Returns ``(F, H)`` or
    ``(F, H, K)``, of the same dtype; no communication.
    """
    check_plan(plan)
    layout = plan._layout(group)
    layout.check_rows(log_decay, 0, layout.num_local, "decay_of_fragments")
    return layers.decay_of_fragments(log_decay, Held.of(layout, "states", cu_seqlens))


@_eager
def run_recurrent(
    kernel: layers.Kernel,
    value: torch.Tensor,
    key_dim: int,
    plan: Plan,
    group: Any = None,
    *,
    inputs: Sequence[torch.Tensor] = (),
    parameters: Sequence[torch.Tensor] = (),
    log_decay: torch.Tensor | None = None,
    state_dtype: torch.dtype = torch.float32,
    cu_seqlens: CuSeqlens | None = None,
    way: str = "auto",
) -> torch.Tensor:
    """A recurrent layer's output for this rank's tokens, as one device computes it for each document alone.

    ``kernel(value, initial_state, cu_seqlens, *inputs, *parameters) -> (out, final_state)`` runs packed documents:
    ``value`` ``(T, H, V)``, ``initial_state`` and ``final_state`` ``(S, H, K, V)`` of ``state_dtype``, ``cu_seqlens``
    ``(S + 1,)`` int64 on the device of ``value``; S segments, each of which begins with its initial state. It must be
    linear in (value, initial_state), and differentiable. ``value`` and ``inputs`` ``(T, h, ...)`` are this rank's
    tokens; ``parameters`` ``(h, ...)`` are the same on all ranks. ``key_dim`` is K.

    ``way`` says what moves, forward and backward:

    * "states": states between fragments. The kernel is called for the states that segments leave, if states pass at
      all, and with the states that came. The first call has only the segments whose state passes, as ``cu_seqlens``
      says, where there are ``inputs`` and no ``log_decay``.
    * "contiguous": value and inputs to consecutive shards, out back, and states between the shards.
    * "heads": value and inputs to all tokens of ``H / cp_size`` heads, out back. H must divide by the ranks. Inputs
      and parameters of fewer heads are copied until theirs do. The kernel is called once.
    * "auto" takes the one that moves the fewest bytes, as ``plan.explain(recurrent=...)`` counts them. A kernel that
      holds its other inputs itself, so that there are no ``inputs``, runs by states.

    Without ``log_decay`` the kernel is called once more where states go through a whole fragment, for the product of
    transitions, with values of zero ``(T, H, K)`` and the identity as initial state. For layers that only decay their
    state (Mamba-2, gated linear attention) ``log_decay`` ``(T, H)`` or ``(T, H, K)``, logarithms of each token's decay,
    save this call. Returns ``out``, of any shape by states, else ``(T, H, ...)``. ``ContractError`` for shapes that do
    not fit.
    """
    check_plan(plan)
    note_call(plan._mark)
    layer = layers.Layer(kernel, value, key_dim, tuple(inputs), tuple(parameters), log_decay, state_dtype)
    return layers.run_recurrent(layer, plan._layout(group), cu_seqlens, way)


@_eager
def conv_history(
    x: torch.Tensor, width: int, plan: Plan, group: Any = None, *, cu_seqlens: CuSeqlens | None = None
) -> torch.Tensor:
    """The ``width - 1`` tokens before each of this rank's fragments, ``(F, width - 1, ...)`` in their order, zero where
    they would be of another document: the initial states of a causal convolution's kernel.

    ``x`` ``(T, ...)`` are this rank's tokens, of any dtype. They may come from several fragments and ranks.
    """
    check_plan(plan)
    return conv.history(x, plan._layout(group), width, cu_seqlens)


@_eager
def causal_conv1d(
    x: torch.Tensor,
    weight: torch.Tensor,
    plan: Plan,
    group: Any = None,
    *,
    bias: torch.Tensor | None = None,
    cu_seqlens: CuSeqlens | None = None,
) -> torch.Tensor:
    """Causal depthwise convolution, each document alone: over the tokens of t's document
    ``out[t, c] = bias[c] + sum_w weight[c, w] x[t - W + 1 + w, c]``.

    ``x`` ``(T, C)`` are this rank's tokens, ``weight`` ``(C, W)``, ``bias`` ``(C,)``, of one dtype. Returns ``(T, C)``.
    Torch's own convolution; gradients of ``weight`` and ``bias`` are those of this rank's tokens, as all parameters'.
    """
    check_plan(plan)
    return conv.causal_conv1d(x, weight, bias, plan._layout(group), cu_seqlens)
