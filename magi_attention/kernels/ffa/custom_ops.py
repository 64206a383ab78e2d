# SPDX-License-Identifier: Apache-2.0
"""The attention call as torch custom ops, so that ``torch.compile(fullgraph=True)`` sees two opaque nodes.

``magi_attention::flex_fwd`` and ``magi_attention::flex_bwd`` take the mask as tensors, read it by value
and run the backend that the registry selects. ``out`` and ``lse`` have gradients, ``max_logits`` has none.
"""

from __future__ import annotations

from typing import Any

import torch

from magi_attention.common.disjoint import check_disjoint
from magi_attention.common.scalars import as_float
from magi_attention.common.slices import SliceTable
from magi_attention.kernels.eager import eager_call, opaque_op
from magi_attention.kernels.ffa.backend import FfaBackend
from magi_attention.kernels.ffa.launch_cache import PreparedCall
from magi_attention.kernels.reference.operands import delta_with_dlse
from magi_attention.kernels.registry import default_registry
from magi_attention.kernels.tables import table_from_tensors
from magi_attention.kernels.types import (
    Backend,
    BackwardOperands,
    Operands,
    Problem,
    RangeTensors,
    accumulation_dtype,
    as_scale,
    options_of,
)

_MASK = "Tensor q_ranges, Tensor k_ranges, Tensor? attn_type_map, Tensor? sink"
_OPTIONS = (
    "str sink_layout, float softmax_scale, float softcap, bool deterministic, int sm_margin, "
    "bool return_max_logits, str prefer, bool needs_backward"
)
Maybe = torch.Tensor | None
# What decides, besides the arguments, what a call comes to.
WATCHED = (
    "MAGI_ATTENTION_KERNEL_BACKEND",
    "MAGI_ATTENTION_SDPA_BACKEND",
    "MAGI_ATTENTION_FA4_BACKEND",
    "MAGI_ATTENTION_SANITY_CHECK",
    "MAGI_ATTENTION_FORCE_JIT_BUILD",
    "MAGI_ATTENTION_PROFILE_MODE",
)


def select_backend(problem: Problem, prefer: str = "") -> Backend:
    """The backend named ``prefer``, or with "" that of the environment; falls back unless it was explicit.

    Raises:
        NoBackendError: the user asked for a backend that cannot run the problem.
    """
    from magi_attention.env import general

    if prefer:
        return default_registry().select(problem, prefer, explicit=False)[0]
    name = general.kernel_backend().value
    return default_registry().select(problem, name, explicit=general.is_kernel_backend_explicit())[0]


def _kernels() -> FfaBackend | None:
    return next((b for b in default_registry().backends if isinstance(b, FfaBackend)), None)


def has_kernels() -> bool:
    """Is there a backend of CUDA kernels, and a torch that could launch them?"""
    backend = _kernels()
    return backend is not None and backend.has_runtime


def prepared_flex_fwd(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, q_ranges: torch.Tensor, k_ranges: torch.Tensor,
    attn_type_map: Maybe, sink: Maybe, softmax_scale: float | None, softcap: float, sink_layout: str,
    deterministic: bool, sm_margin: int, return_max_logits: bool, **_hints: Any,
) -> PreparedCall | None:  # fmt: skip
    """The launch that ``flex_fwd`` just made for these arguments of the public function; None if it made none."""
    from magi_attention.env import general

    backend = _kernels()
    if backend is None or general.kernel_backend().value != backend.name or general.is_sanity_check_enable():
        return None
    if general.is_profile_mode_enable():  # native code has no named intervals
        return None
    scale = q.shape[2] ** -0.5 if softmax_scale is None else as_scale(softmax_scale)
    options = options_of(scale, as_float(softcap, "softcap"), sink_layout, deterministic, sm_margin, return_max_logits)
    return backend.prepared(Operands(q, k, v, RangeTensors(q_ranges, k_ranges, attn_type_map), options, sink))


def _mask(k: torch.Tensor, q_ranges: torch.Tensor, k_ranges: torch.Tensor, types: Maybe) -> SliceTable | RangeTensors:
    """For the CUDA kernels: ranges on a GPU as they are, where nobody needs to look at them."""
    from magi_attention.env import general

    is_checked = general.is_sanity_check_enable()
    if q_ranges.device == k.device and not is_checked:
        return RangeTensors(q_ranges, k_ranges, types)
    return _slices(q_ranges, k_ranges, types)


def _slices(q_ranges: torch.Tensor, k_ranges: torch.Tensor, types: Maybe) -> SliceTable:
    from magi_attention.env import general

    slices = table_from_tensors(q_ranges, k_ranges, types, default_registry().tables)
    if general.is_sanity_check_enable():
        check_disjoint(slices)
    return slices


@opaque_op(
    "magi_attention::flex_fwd",
    schema=f"(Tensor q, Tensor k, Tensor v, {_MASK}, {_OPTIONS}) -> (Tensor, Tensor, Tensor)",
)
def flex_fwd(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, q_ranges: torch.Tensor, k_ranges: torch.Tensor,
    attn_type_map: Maybe, sink: Maybe,
    sink_layout: str, softmax_scale: float, softcap: float, deterministic: bool, sm_margin: int,
    return_max_logits: bool, prefer: str, needs_backward: bool,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:  # fmt: skip
    """``(out (Tq, Hq, Dv) in q's dtype, lse (Tq, Hq), max_logits (Hq,) or empty)``."""
    step = default_registry().instruments.steps()
    with step("fwd_prepare"):
        options = options_of(softmax_scale, softcap, sink_layout, deterministic, sm_margin, return_max_logits)
        backend = select_backend(Problem.of(q, k, v, options, sink, needs_backward), prefer)
        is_ffa = isinstance(backend, FfaBackend)
        mask = _mask(k, q_ranges, k_ranges, attn_type_map) if is_ffa else _slices(q_ranges, k_ranges, attn_type_map)
        if isinstance(backend, FfaBackend) and needs_backward:
            backend.slices_of(mask, q, k, options)  # starts to read the ranges, which the backward wants to know
    with step("fwd_run"):
        x = Operands(q, k, v, mask, options, sink)
        if isinstance(backend, FfaBackend):
            out, lse, max_logits = backend.forward_final(x)
        else:
            got = backend.forward(x)
            out, lse, max_logits = got.out, got.lse, got.max_logits
    with step("fwd_cast"):
        out = out.to(q.dtype)
    return out, lse, lse.new_empty(0) if max_logits is None else max_logits


@flex_fwd.register_fake
def _(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *rest: Any) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    *_, return_max_logits, _prefer, _needs_backward = rest
    acc = accumulation_dtype(q.dtype)
    tokens, heads = q.shape[0], q.shape[1]
    return (
        q.new_empty((tokens, heads, v.shape[2])),
        q.new_empty((tokens, heads), dtype=acc),
        q.new_empty((heads if return_max_logits else 0,), dtype=acc),
    )


@opaque_op(
    "magi_attention::flex_bwd",
    schema=(
        f"(Tensor dout, Tensor q, Tensor k, Tensor v, Tensor out, Tensor lse, {_MASK}, str sink_layout, "
        "float softmax_scale, float softcap, bool deterministic, int sm_margin, str prefer, Tensor? dlse=None) "
        "-> (Tensor, Tensor, Tensor, Tensor)"
    ),
)
def flex_bwd(
    dout: torch.Tensor, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, out: torch.Tensor, lse: torch.Tensor,
    q_ranges: torch.Tensor, k_ranges: torch.Tensor, attn_type_map: Maybe, sink: Maybe, sink_layout: str,
    softmax_scale: float, softcap: float, deterministic: bool, sm_margin: int, prefer: str, dlse: Maybe = None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:  # fmt: skip
    """``(dq, dk, dv, dsink)`` in the dtypes of q, k, v and sink; ``dsink`` is empty without a sink. ``dlse``
    (Tq, Hq): the gradient of lse, or None."""
    step = default_registry().instruments.steps()
    with step("bwd_prepare"):
        options = options_of(softmax_scale, softcap, sink_layout, deterministic, sm_margin)
        problem, delta = Problem.of(q, k, v, options, sink, needs_backward=True), delta_with_dlse(out, dout, lse, dlse)
        backend = select_backend(problem, prefer)
        if delta is not None:
            backend = default_registry().taking_delta(backend, lambda: problem)
        is_ffa = isinstance(backend, FfaBackend)
        mask = _mask(k, q_ranges, k_ranges, attn_type_map) if is_ffa else _slices(q_ranges, k_ranges, attn_type_map)
        if isinstance(backend, FfaBackend):
            slices = backend.slices_of(mask, q, k, options)
            mask = mask if slices is None else slices
    with step("bwd_run"):
        x = BackwardOperands(dout, q, k, v, out, lse, mask, options, sink, delta)
        got = backend.backward_final(x) if isinstance(backend, FfaBackend) else backend.backward(x)
    with step("bwd_cast"):
        dsink = lse.new_empty(0) if sink is None else got.dsink.to(sink.dtype)  # type: ignore[union-attr]
        return got.dq.to(q.dtype), got.dk.to(k.dtype), got.dv.to(v.dtype), dsink


@flex_bwd.register_fake
def _(
    dout: torch.Tensor, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, out: torch.Tensor, lse: torch.Tensor,
    *rest: Any,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:  # fmt: skip
    sink = rest[3]  # behind the three tensors of the mask
    dsink = lse.new_empty((0,)) if sink is None else sink.new_empty(sink.shape)
    return q.new_empty(q.shape), k.new_empty(k.shape), v.new_empty(v.shape), dsink


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[torch.Tensor, ...]) -> None:
    q, k, v, q_ranges, k_ranges, types, sink, *options = inputs
    out, lse, max_logits = output
    ctx.save_for_backward(q, k, v, out, lse, q_ranges, k_ranges, types, sink)
    ctx.options = options
    ctx.mark_non_differentiable(max_logits)
    ctx.set_materialize_grads(False)  # that of lse would be made for every loss that does not use it


def _grad(ctx: Any, dout: Maybe, dlse: Maybe, _dmax_logits: object) -> tuple[torch.Tensor | None, ...]:
    layout, scale, softcap, deterministic, sm_margin, _, prefer, _ = ctx.options
    tensors = ctx.saved_tensors
    if dout is None:
        dout = torch.zeros_like(tensors[3])
    dq, dk, dv, dsink = call_flex_bwd(dout, *tensors, layout, scale, softcap, deterministic, sm_margin, prefer, dlse)
    sink = tensors[-1]
    return dq, dk, dv, None, None, None, None if sink is None else dsink, *[None] * 8


call_flex_fwd = eager_call(flex_fwd, _save, _grad)
call_flex_bwd = eager_call(flex_bwd)
