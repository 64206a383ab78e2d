# SPDX-License-Identifier: Apache-2.0
"""Libraries' chunked kernels of recurrent layers over a plan: flash-linear-attention, attn_gym and mamba_ssm.

    from fla.ops.gated_delta_rule import chunk_gated_delta_rule

    kernel = fla_kernel(chunk_gated_delta_rule)
    out = run_recurrent(kernel, v, k.shape[-1], plan, inputs=(q, k, g, beta))

The caller gives the library's function, so nothing is imported here. Shapes have tokens and no batch.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F

from magi_attention.api import Plan, run_recurrent
from magi_attention.common.infer import CuSeqlens
from magi_attention.errors import ContractError
from magi_attention.functional.recurrent.layers import Kernel, Layer, choose_way
from magi_attention.functional.recurrent.states import Held

Function = Callable[..., Any]


def fla_kernel(function: Function, names: Sequence[str] = ("q", "k", "g", "beta"), **options: Any) -> Kernel:
    """A chunked function of ``fla.ops``, for ``run_recurrent`` with values ``(T, H, V)`` and inputs that the function
    calls ``names``: by default those of ``chunk_gated_delta_rule`` and ``chunk_kda``, ``inputs=(q, k, g, beta)``.

    q, k ``(T, Hk, K)``; g ``(T, H)`` or ``(T, H, K)``, logarithms of decays; beta ``(T, H)``. For ``chunk_rwkv7`` give
    ("r", "w", "k", "a", "b"), for ``chunk_gla`` ("q", "k", "g"). ``options`` are further arguments of the function, as
    ``scale`` and ``use_qk_l2norm_in_kernel``. ``ContractError`` for inputs that are not as many as names.
    """

    def kernel(
        value: torch.Tensor, initial_state: torch.Tensor, cu_seqlens: torch.Tensor, *inputs: torch.Tensor
    ) -> tuple[torch.Tensor, ...]:
        if len(inputs) != len(names):
            raise ContractError(f"{len(inputs)} inputs came for {', '.join(names)}; give inputs= in this order.")
        out, final = function(
            v=value[None], **{name: x[None] for name, x in zip(names, inputs)}, initial_state=initial_state,
            output_final_state=True, cu_seqlens=cu_seqlens, **options,
        )  # fmt: skip
        return out[0], final

    return kernel


def attn_gym_kernel(function: Function, **options: Any) -> Kernel:
    """``chunk_gdn`` or ``chunk_kda`` of ``attn_gym.linear``; inputs and options as of ``fla_kernel``.

    Its states are ``(V, K)``. Its own context parallelism takes our fragments as they are, if the plan pads nothing:
    ``ContextParallelPlan.from_fragments(fragments.cu_seqlens.tolist(), [r.tolist() for r in fragments.ranges], rank)``.
    """

    def kernel(
        value: torch.Tensor, initial_state: torch.Tensor, cu_seqlens: torch.Tensor, *inputs: torch.Tensor
    ) -> tuple[torch.Tensor, ...]:
        q, k, gate, beta = (x[None] for x in inputs)
        out, final = function(
            q, k, value[None], gate, beta, initial_state.mT.contiguous(), cu_seqlens=cu_seqlens.int(),
            output_final_state=True, **options,
        )  # fmt: skip
        return out[0], final.mT

    return kernel


def delta_rule_by_segments(function: Function, **options: Any) -> Kernel:
    """``fla_kernel`` for a function with the same arguments that takes one document a call, as torch's of transformers
    and Megatron-Core."""

    def kernel(
        value: torch.Tensor, initial_state: torch.Tensor, cu_seqlens: torch.Tensor, *inputs: torch.Tensor
    ) -> tuple[torch.Tensor, ...]:
        q, k, g, beta = (x[None] for x in inputs)

        def segment(at: slice, state: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
            parts = (x[:, at] for x in (q, k, value[None]))
            return function(
                *parts, g=g[:, at], beta=beta[:, at], initial_state=state, output_final_state=True, **options
            )

        return by_segments(segment, initial_state, cu_seqlens)

    return kernel


def by_segments(
    segment: Callable[[slice, torch.Tensor], tuple[torch.Tensor, torch.Tensor]], initial: torch.Tensor,
    cu_seqlens: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor]:  # fmt: skip
    """``segment(rows, state (1, H, K, V)) -> (out (1, T, ...), state)`` for one segment after another."""
    bounds = cu_seqlens.tolist()
    parts = [segment(slice(a, b), initial[i : i + 1]) for i, (a, b) in enumerate(zip(bounds[:-1], bounds[1:]))]
    return torch.cat([out[0] for out, _ in parts]), torch.cat([final for _, final in parts]).to(initial.dtype)


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
    way: str = "auto",
    **more: Any,
) -> torch.Tensor:
    """Mamba-2 by ``mamba_chunk_scan_combined`` of mamba_ssm: the output ``(T, H, P)`` of this rank's tokens.

    x ``(T, H, P)``, dt ``(T, H)``, A ``(H,)``, B and C ``(T, G, N)``, D ``(H,)`` or ``(H, P)``, dt_bias ``(H,)``. The
    function is called once for each fragment, whose documents ``seq_idx`` tells apart. ``way`` as of ``run_recurrent``;
    ``more`` are further arguments of the function, as ``state_dtype``.
    """
    options: dict[str, Any] = {"dt_softplus": dt_softplus, "dt_limit": dt_limit, **more}
    given = {name: x for name, x in (("D", D), ("dt_bias", dt_bias)) if x is not None}
    log_decay = A.float() * mamba2_step(dt, dt_bias, dt_softplus, dt_limit)
    layer = Layer(_no_kernel, x, B.shape[-1], (dt, B, C), (A, *given.values()), log_decay)
    layout = plan._layout(group)
    way = choose_way(layer, layout, cu_seqlens, way)
    packed = _Packed(Held.of(layout, way, cu_seqlens), x.device)

    def kernel(value: torch.Tensor, initial_state: torch.Tensor, _: torch.Tensor, *rest: torch.Tensor):
        dt, B, C, A, *parameters = rest
        named = {**options, **dict(zip(given, parameters))}

        def fragment(at: slice, state: torch.Tensor, seq_idx: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
            out, final = function(
                value[None, at], dt[None, at], A, B[None, at], C[None, at], chunk_size, initial_states=state,
                seq_idx=seq_idx, return_final_states=True, **named,
            )  # fmt: skip
            return out[0], final

        return packed.run(fragment, initial_state)

    return run_recurrent(
        kernel, x, B.shape[-1], plan, group, inputs=(dt, B, C), parameters=(A, *given.values()), log_decay=log_decay,
        cu_seqlens=cu_seqlens, way=way,
    )  # fmt: skip


def _no_kernel(*_: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    raise AssertionError("Only the bytes of this layer are asked for.")


class _Packed:
    """The segments of each fragment that a rank holds, for a function that takes the documents of one fragment."""

    def __init__(self, held: Held, device: torch.device) -> None:
        found, rank = held.fragments, held.rank
        self.bounds = found.segments(rank).tolist()
        self.runs = list(zip(found.first_segments(rank).tolist(), found.last_segments(rank).tolist()))
        # of a fragment the first one is 0, as the kernel gives its initial state to that number alone
        numbers = [number for first, last in self.runs for number in range(last + 1 - first)]
        of_token = np.repeat(np.array(numbers, dtype=np.int32), np.diff(self.bounds))
        self.seq_idx = torch.from_numpy(of_token).to(device)[None]

    def run(self, fragment: Function, initial: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """out ``(T, H, P)`` and final states ``(S, H, N, P)`` by ``fragment(rows, state (1, H, P, N), seq_idx)``."""
        outs, finals = [], []
        for first, last in self.runs:
            at = slice(self.bounds[first], self.bounds[last + 1])
            state = initial[first : first + 1].mT.contiguous()
            out, final = fragment(at, state, self.seq_idx[:, at].contiguous())
            outs.append(out)
            # only a fragment's last state passes on
            finals += [initial.new_zeros((last - first, *initial.shape[1:])), final.mT.to(initial)]
        return torch.cat(outs), torch.cat(finals)


def mamba2_step(
    dt: torch.Tensor, dt_bias: torch.Tensor | None, dt_softplus: bool, dt_limit: tuple[float, float]
) -> torch.Tensor:
    """``(T, H)`` float32: the step that Mamba-2 makes of dt ``(T, H)``."""
    step = (dt if dt_bias is None else dt + dt_bias.to(dt.dtype)).float()
    return (F.softplus(step) if dt_softplus else step).clamp(*dt_limit)


__all__ = ["attn_gym_kernel", "by_segments", "delta_rule_by_segments", "fla_kernel", "mamba2_step", "run_mamba2"]
