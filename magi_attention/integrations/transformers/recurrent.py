# SPDX-License-Identifier: Apache-2.0
"""Recurrent layers of transformers by the plans of a batch: gated delta rule, KDA, Mamba-2, short convolutions.

The layers call functions of their module, torch's or those of fla and mamba_ssm, whichever transformers found. Those of
the libraries take a rank's documents in one call, or one for each fragment. Torch's, and such as nothing is known of,
are called for one segment after another. The convolution is torch's.
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable
from functools import update_wrapper
from typing import Any

import torch
from transformers.activations import ACT2FN

from magi_attention.api import causal_conv1d, run_recurrent
from magi_attention.errors import ContractError
from magi_attention.functional.calls.attention_check import note_call
from magi_attention.integrations.packing import LayerPlans
from magi_attention.integrations.recurrent_kernels import (
    by_segments,
    delta_rule_by_segments,
    fla_kernel,
    mamba2_step,
    run_mamba2,
)
from magi_attention.integrations.shared.recurrent_layers import CONVOLUTION, FUSED, SCANS, is_marked, mark

Function = Callable[..., Any]


def use_recurrent_layers(model: torch.nn.Module) -> None:
    """From now on recurrent layers of ``model`` compute by the plans of a batch: no state crosses from one document
    into the next, and states pass between ranks. Without plans they do what they did.

    The functions of the modules that define the layers are replaced, for all models of these classes. Layers that call
    others stay as they are; ``validate`` names them.
    """
    for scope in {sys.modules[type(layer).__module__] for layer in model.modules()}:
        for name, by_plans in _BY_PLANS.items():
            original = vars(scope).get(name)
            if callable(original) and not is_marked(original):
                setattr(scope, name, _with_plans(original, by_plans))


def _with_plans(original: Function, by_plans: Function) -> Function:
    def function(*args: Any, magi_plans: LayerPlans | None = None, **options: Any) -> Any:
        if magi_plans is None:
            return original(*args, **options)
        first = next(x for x in (*args, *options.values()) if isinstance(x, torch.Tensor))
        if first.is_meta:  # shapes alone, of documents that need not be told apart
            if by_plans is not _convolution:
                note_call(magi_plans.full._mark)
            return original(*args, **{**options, "seq_idx": None, "cu_seqlens": None})
        if first.shape[0] != 1:
            raise ContractError(f"A batch has {first.shape[0]} rows; PackingCollator packs all of them into one.")
        states = (options.get(name) for name in ("initial_state", "initial_states"))
        if any(state is not None for state in states) or options.get("output_final_state"):
            raise ContractError("A recurrent layer has a cache and plans; give the model use_cache=False.")
        return by_plans(original, magi_plans, *args, **options)

    return mark(update_wrapper(function, original))


def _convolution(
    original: Function, plans: LayerPlans, hidden_states: torch.Tensor, weight: torch.Tensor,
    bias: torch.Tensor | None = None, activation: str | None = None, **_: Any,
) -> torch.Tensor:  # fmt: skip
    """``hidden_states`` (1, C, T), ``weight`` (C, W)."""
    x = hidden_states[0].T.to(weight.dtype)
    out = causal_conv1d(x, weight, plans.full, plans.group, bias=bias)
    if activation is not None:
        out = ACT2FN[activation](out)
    return out.T[None].to(hidden_states.dtype)


def _delta_rule(
    original: Function, plans: LayerPlans, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor,
    g: torch.Tensor, beta: torch.Tensor, use_qk_l2norm_in_kernel: bool = False, **_: Any,
) -> tuple[torch.Tensor, None]:  # fmt: skip
    """query, key (1, T, Hk, K), value (1, T, H, V), g (1, T, H) or (1, T, H, K), beta (1, T, H)."""
    adapter = fla_kernel if _is_of_library(original) else delta_rule_by_segments
    function = adapter(original, use_qk_l2norm_in_kernel=use_qk_l2norm_in_kernel)
    inputs = tuple(x[0] for x in (query, key, g, beta))
    return run_recurrent(function, value[0], key.shape[-1], plans.full, plans.group, inputs=inputs)[None], None


def _mamba2(
    original: Function, plans: LayerPlans, hidden_states: torch.Tensor, dt: torch.Tensor, A: torch.Tensor,
    B: torch.Tensor, C: torch.Tensor, chunk_size: int, D: torch.Tensor | None = None,
    dt_bias: torch.Tensor | None = None, dt_softplus: bool = False,
    dt_limit: tuple[float, float] = (0.0, float("inf")), **_: Any,
) -> torch.Tensor:  # fmt: skip
    """hidden_states (1, T, H, P), dt (1, T, H), A, D, dt_bias (H,), B, C (1, T, G, N). The state is (H, P, N) there."""
    if _is_of_library(original):
        parts = (hidden_states[0], dt[0], A, B[0], C[0])
        return run_mamba2(
            original, *parts, chunk_size, plans.full, plans.group, D=D, dt_bias=dt_bias, dt_softplus=dt_softplus,
            dt_limit=dt_limit,
        )[None]  # fmt: skip

    given = {name: x for name, x in (("D", D), ("dt_bias", dt_bias)) if x is not None}

    def kernel(
        value: torch.Tensor, initial: torch.Tensor, cu_seqlens: torch.Tensor, *rest: torch.Tensor
    ) -> tuple[torch.Tensor, ...]:
        dt, B, C, A, *parameters = rest

        def segment(at: slice, state: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
            out, final = original(
                *(x[None, at] for x in (value, dt)), A, *(x[None, at] for x in (B, C)), chunk_size=chunk_size,
                initial_states=state.mT, dt_softplus=dt_softplus, dt_limit=dt_limit, return_final_states=True,
                **dict(zip(given, parameters)),
            )  # fmt: skip
            return out, final.mT

        return by_segments(segment, initial, cu_seqlens)

    out = run_recurrent(
        kernel, hidden_states[0], B.shape[-1], plans.full, plans.group, inputs=(dt[0], B[0], C[0]),
        parameters=(A, *given.values()), log_decay=A.float() * mamba2_step(dt[0], dt_bias, dt_softplus, dt_limit),
    )  # fmt: skip
    return out[None]


def _is_of_library(function: Function) -> bool:
    """Did transformers find fla or mamba_ssm? Torch's functions in their place refuse packed documents."""
    if not inspect.isfunction(function):
        return False
    return bool(inspect.getclosurevars(function).nonlocals.get("is_new_implementation"))


def _nothing(*_: Any, **__: Any) -> None:
    """A fused function gives None where it cannot run, and the layer goes on in steps."""


_BY_PLANS: dict[str, Function] = {
    CONVOLUTION: _convolution,
    FUSED: _nothing,
    **dict(zip(SCANS, (_delta_rule, _delta_rule, _mamba2))),
}
