# SPDX-License-Identifier: Apache-2.0
"""Libraries' chunked kernels of recurrent layers over a plan: flash-linear-attention, attn_gym and mamba_ssm.

    from fla.ops.gated_delta_rule import chunk_gated_delta_rule

    kernel = fla_kernel(chunk_gated_delta_rule, q, k, g, beta)
    out = run_recurrent(kernel, v, k.shape[-1], plan)

The caller gives the library's function, so nothing is imported here. Shapes have this rank's T tokens and no batch.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F

from magi_attention.api import Plan, decay_of_fragments, run_recurrent
from magi_attention.common.infer import CuSeqlens
from magi_attention.functional.recurrent.layers import Kernel

Function = Callable[..., Any]


def fla_kernel(
    function: Function, q: torch.Tensor, k: torch.Tensor, g: torch.Tensor, beta: torch.Tensor, **options: Any
) -> Kernel:
    """``chunk_gated_delta_rule`` or ``chunk_kda`` of ``fla.ops``, for ``run_recurrent`` with values ``(T, H, V)``.

    q, k ``(T, Hk, K)``; g ``(T, H)`` or ``(T, H, K)``, logarithms of decays; beta ``(T, H)``. ``options`` are further
    arguments of the function, as ``scale`` and ``use_qk_l2norm_in_kernel``.
    """

    def kernel(value: torch.Tensor, initial_state: torch.Tensor, cu_seqlens: torch.Tensor) -> tuple[torch.Tensor, ...]:
        out, final = function(
            q[None], k[None], value[None], g[None], beta[None], initial_state=initial_state, output_final_state=True,
            cu_seqlens=cu_seqlens, **options,
        )  # fmt: skip
        return out[0], final

    return kernel


def attn_gym_kernel(
    function: Function, q: torch.Tensor, k: torch.Tensor, gate: torch.Tensor, beta: torch.Tensor, **options: Any
) -> Kernel:
    """``chunk_gdn`` or ``chunk_kda`` of ``attn_gym.linear``; arguments as of ``fla_kernel``.

    Its states are ``(V, K)``. Its own context parallelism takes our fragments as they are, if the plan pads nothing:
    ``ContextParallelPlan.from_fragments(fragments.cu_seqlens.tolist(), [r.tolist() for r in fragments.ranges], rank)``.
    """

    def kernel(value: torch.Tensor, initial_state: torch.Tensor, cu_seqlens: torch.Tensor) -> tuple[torch.Tensor, ...]:
        out, final = function(
            q[None], k[None], value[None], gate[None], beta[None], initial_state.mT.contiguous(),
            cu_seqlens=cu_seqlens.int(), output_final_state=True, **options,
        )  # fmt: skip
        return out[0], final.mT

    return kernel


def run_mamba2(
    function: Function,
    x: torch.Tensor,
    dt: torch.Tensor,
    A: torch.Tensor,
    B: torch.Tensor,
    C: torch.Tensor,
    chunk_size: int,
    plan: Plan,
    group: Any = None,
    *,
    D: torch.Tensor | None = None,
    dt_bias: torch.Tensor | None = None,
    dt_softplus: bool = False,
    dt_limit: tuple[float, float] = (0.0, float("inf")),
    cu_seqlens: CuSeqlens | None = None,
) -> torch.Tensor:
    """Mamba-2 by ``mamba_chunk_scan_combined`` of mamba_ssm: the output ``(T, H, P)`` of this rank's tokens.

    x ``(T, H, P)``, dt ``(T, H)``, A ``(H,)``, B and C ``(T, G, N)``, D ``(H,)`` or ``(H, P)``, dt_bias ``(H,)``. The
    function is called once for each fragment, whose documents ``seq_idx`` tells apart.
    """
    fragments = plan.fragments(cu_seqlens)
    rank = plan._layout(group).rank
    bounds = fragments.segments(rank).tolist()
    runs = list(zip(fragments.first_segments(rank).tolist(), fragments.last_segments(rank).tolist()))
    # of a fragment the first one is 0, as the kernel gives its initial state to that number alone
    numbers = [number for first, last in runs for number in range(last + 1 - first)]
    of_token = np.repeat(np.array(numbers, dtype=np.int32), np.diff(bounds))
    seq_idx = torch.from_numpy(of_token).to(x.device)[None]

    def kernel(value: torch.Tensor, initial_state: torch.Tensor, _: torch.Tensor) -> tuple[torch.Tensor, ...]:
        outs, finals = [], []
        for first, last in runs:
            at = slice(bounds[first], bounds[last + 1])
            out, final = function(
                value[None, at], dt[None, at], A, B[None, at], C[None, at], chunk_size, D=D, dt_bias=dt_bias,
                initial_states=initial_state[first : first + 1].mT.contiguous(), seq_idx=seq_idx[:, at].contiguous(),
                dt_softplus=dt_softplus, dt_limit=dt_limit, return_final_states=True,
            )  # fmt: skip
            outs.append(out[0])
            # only a fragment's last state passes on
            finals += [initial_state.new_zeros((last - first, *initial_state.shape[1:])), final.mT.to(initial_state)]
        return torch.cat(outs), torch.cat(finals)

    transition = decay_of_fragments(A.float() * mamba2_step(dt, dt_bias, dt_softplus, dt_limit), plan, group,
                                    cu_seqlens=cu_seqlens)  # fmt: skip
    return run_recurrent(kernel, x, B.shape[-1], plan, group, transition=transition, cu_seqlens=cu_seqlens)


def mamba2_step(
    dt: torch.Tensor, dt_bias: torch.Tensor | None, dt_softplus: bool, dt_limit: tuple[float, float]
) -> torch.Tensor:
    """``(T, H)`` float32: the step that Mamba-2 makes of dt ``(T, H)``."""
    step = (dt if dt_bias is None else dt + dt_bias.to(dt.dtype)).float()
    return (F.softplus(step) if dt_softplus else step).clamp(*dt_limit)


__all__ = ["attn_gym_kernel", "fla_kernel", "mamba2_step", "run_mamba2"]
