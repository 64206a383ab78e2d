# SPDX-License-Identifier: Apache-2.0
"""The attention call as torch custom ops, so that ``torch.compile(fullgraph=True)`` sees two opaque nodes.

``magi_attention::flex_fwd`` and ``magi_attention::flex_bwd`` take the mask as tensors, read it by value
and run the backend that the registry selects. ``out`` and ``lse`` have gradients, ``max_logits`` has none.

Eager calls pass the ops by (``call_flex_fwd``): a short kernel runs no longer than torch and the choice of a backend
take. What depends on shapes, options and environment alone is prepared once, in both directions.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch

from magi_attention.common.disjoint import check_disjoint
from magi_attention.common.scalars import as_float
from magi_attention.common.slices import SliceTable
from magi_attention.env import registry as env_registry
from magi_attention.errors import ContractError
from magi_attention.kernels.double_backward import refuse_double_backward
from magi_attention.kernels.eager import Onlookers, needs_gradient, opaque_op
from magi_attention.kernels.ffa.backend import FfaBackend
from magi_attention.kernels.ffa.launch_cache import PreparedCall
from magi_attention.kernels.ffa.operands import remember
from magi_attention.kernels.ffa.plans import RangeSnapshot, has_version
from magi_attention.kernels.instruments import untimed
from magi_attention.kernels.reference.operands import delta_with_dlse
from magi_attention.kernels.registry import default_registry
from magi_attention.kernels.tables import table_from_tensors
from magi_attention.kernels.types import (
    AttnOptions,
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
_environment = env_registry.watch(*WATCHED)
_ONLOOKERS = Onlookers()


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


class _Direction(NamedTuple):
    """By what calls that share a ``_Prepared`` run in one direction."""

    backend: Backend
    problem: Problem
    takes_ranges: bool  # by CUDA kernels, which take ranges on a GPU as they are where nobody needs to look at them
    is_timed: bool


class _Prepared(NamedTuple):
    """What eager calls of equal layouts and options in the same environment share."""

    arguments: tuple[Any, ...]  # options of ``flex_bwd``
    forward: _Direction
    backward: _Direction | None  # None without a gradient


def _direction(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, q_ranges: torch.Tensor, sink: Maybe, options: AttnOptions,
    prefer: str, needs_backward: bool,
) -> _Direction:  # fmt: skip
    from magi_attention.env import general

    problem = Problem.of(q, k, v, options, sink, needs_backward)
    backend, is_checked = select_backend(problem, prefer), general.is_sanity_check_enable()
    takes_ranges = isinstance(backend, FfaBackend) and q_ranges.device == k.device and not is_checked
    return _Direction(backend, problem, takes_ranges, general.is_profile_mode_enable())


def _slices(ranges: RangeTensors) -> SliceTable:
    from magi_attention.env import general

    slices = table_from_tensors(*ranges, default_registry().tables)
    if general.is_sanity_check_enable():
        check_disjoint(slices)
    return slices


class _MaskRead:
    """The mask as a forward read it, for its backward."""

    __slots__ = ("_slices", "_snapshot")

    def __init__(self, slices: SliceTable, ranges: RangeTensors) -> None:
        # Inference tensors have none: torch says that they cannot be saved, once the forward has ended.
        self._slices, self._snapshot = slices, RangeSnapshot(ranges) if has_version(ranges) else None

    def again(self, ranges: RangeTensors) -> SliceTable:
        """The mask, of the ranges that torch kept for the backward. ``ContractError`` if they are another one now."""
        # Torch tells of edits, but not below a checkpoint, which computes out and lse again, nor with hooks of saved
        # tensors. Either may also come with new ranges.
        is_same = self._snapshot is not None and self._snapshot.is_of(ranges)
        if not is_same and _slices(ranges) != self._slices:
            raise ContractError(
                "The ranges of an attention call were another mask in its forward than they are in its backward, below "
                "a checkpoint or hooks of saved tensors. Do not edit them in between; make new ones for the next call."
            )
        return self._slices


def _forward(
    by: _Direction, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, ranges: RangeTensors, sink: Maybe
) -> tuple[torch.Tensor, torch.Tensor, Maybe, SliceTable | None]:
    """out in q's dtype, lse, max_logits or None, and the mask if the host had to look at it."""
    backend, options = by.backend, by.problem.options
    step = default_registry().instruments.steps() if by.is_timed else untimed
    with step("fwd_prepare"):
        slices = None if by.takes_ranges else _slices(ranges)
        mask = ranges if slices is None else slices
        if slices is None and by.problem.needs_backward and isinstance(backend, FfaBackend):
            backend.slices_of(mask, q, k, options)  # starts to read the ranges, which the backward wants to know
    with step("fwd_run"):
        x = Operands(q, k, v, mask, options, sink)
        if isinstance(backend, FfaBackend):
            out, lse, max_logits = backend.forward_final(x)
        else:
            got = backend.forward(x)
            out, lse, max_logits = got.out, got.lse, got.max_logits
    with step("fwd_cast"):
        if out.dtype != q.dtype:
            out = out.to(q.dtype)
    return out, lse, max_logits, slices


def _backward(
    by: _Direction, dout: torch.Tensor, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, out: torch.Tensor,
    lse: torch.Tensor, ranges: RangeTensors, sink: Maybe, dlse: Maybe, slices: SliceTable | None = None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, Maybe]:  # fmt: skip
    """dq, dk, dv, dsink in the dtypes of q, k, v and sink. ``slices``: the mask, if the forward looked at it."""
    backend, options = by.backend, by.problem.options
    step = default_registry().instruments.steps() if by.is_timed else untimed
    with step("bwd_prepare"):
        delta = delta_with_dlse(out, dout, lse, dlse)
        if delta is not None:
            backend = default_registry().taking_delta(backend, lambda: by.problem)
        if slices is None and not by.takes_ranges:
            slices = _slices(ranges)
        elif slices is None and isinstance(backend, FfaBackend):
            slices = backend.slices_of(ranges, q, k, options)
        mask = ranges if slices is None else slices
    with step("bwd_run"):
        x = BackwardOperands(dout, q, k, v, out, lse, mask, options, sink, delta)
        got = backend.backward_final(x) if isinstance(backend, FfaBackend) else backend.backward(x)
    with step("bwd_cast"):
        dsink = None if sink is None else got.dsink.to(sink.dtype)  # type: ignore[union-attr]
        dq, dk, dv = got.dq, got.dk, got.dv
        if dq.dtype != q.dtype or dk.dtype != k.dtype or dv.dtype != v.dtype:
            dq, dk, dv = dq.to(q.dtype), dk.to(k.dtype), dv.to(v.dtype)
    return dq, dk, dv, dsink


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
    options = options_of(softmax_scale, softcap, sink_layout, deterministic, sm_margin, return_max_logits)
    by = _direction(q, k, v, q_ranges, sink, options, prefer, needs_backward)
    out, lse, max_logits, _ = _forward(by, q, k, v, RangeTensors(q_ranges, k_ranges, attn_type_map), sink)
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
    options = options_of(softmax_scale, softcap, sink_layout, deterministic, sm_margin)
    by = _direction(q, k, v, q_ranges, sink, options, prefer, needs_backward=True)
    ranges = RangeTensors(q_ranges, k_ranges, attn_type_map)
    dq, dk, dv, dsink = _backward(by, dout, q, k, v, out, lse, ranges, sink, dlse)
    return dq, dk, dv, lse.new_empty(0) if dsink is None else dsink


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
    layout, scale, softcap, deterministic, sm_margin, _, prefer, _ = options
    ctx.save_for_backward(q, k, v, out, lse, q_ranges, k_ranges, types, sink)
    ctx.arguments = layout, scale, softcap, deterministic, sm_margin, prefer
    ctx.mark_non_differentiable(max_logits)
    ctx.set_materialize_grads(False)  # that of lse would be made for every loss that does not use it


def _grad(ctx: Any, dout: Maybe, dlse: Maybe, _dmax_logits: object) -> tuple[torch.Tensor | None, ...]:
    tensors = ctx.saved_tensors
    if dout is None:
        dout = torch.zeros_like(tensors[3])
    dq, dk, dv, dsink = flex_bwd(dout, *tensors, *ctx.arguments, dlse)
    return dq, dk, dv, None, None, None, None if tensors[-1] is None else dsink, *[None] * 8


flex_fwd.register_autograd(_grad, setup_context=_save)
flex_bwd.register_autograd(refuse_double_backward)


class _Flex(torch.autograd.Function):
    """The same formula for eager calls, which know what to run. The mask comes as one argument, and so do all options,
    because torch looks at each."""

    @staticmethod
    def forward(
        ctx: Any, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, sink: Maybe, ranges: RangeTensors, call: _Prepared
    ) -> tuple[torch.Tensor, torch.Tensor, Maybe]:
        out, lse, max_logits, slices = _forward(call.forward, q, k, v, ranges, sink)
        ctx.save_for_backward(q, k, v, out, lse, *ranges, sink)  # ranges too: torch tells of edits before the backward
        ctx.call, ctx.mask = call, None if slices is None else _MaskRead(slices, ranges)
        if max_logits is not None:
            ctx.mark_non_differentiable(max_logits)
        ctx.set_materialize_grads(False)
        return out, lse, max_logits

    @staticmethod
    def backward(ctx: Any, dout: Maybe, dlse: Maybe, _dmax_logits: object) -> tuple[Maybe, ...]:
        call, tensors = ctx.call, ctx.saved_tensors
        q, k, v, out, lse, q_ranges, k_ranges, types, sink = tensors
        if dout is None:
            dout = torch.zeros_like(out)
        given = (dout, dlse, *tensors)
        if _ONLOOKERS.let_pass(given) and not needs_gradient(given):
            ranges = RangeTensors(q_ranges, k_ranges, types)
            slices = None if ctx.mask is None else ctx.mask.again(ranges)
            return *_backward(call.backward, dout, q, k, v, out, lse, ranges, sink, dlse, slices), None, None
        dq, dk, dv, dsink = flex_bwd(dout, *tensors, *call.arguments, dlse)
        return dq, dk, dv, None if sink is None else dsink, None, None


def call_flex_fwd(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, q_ranges: Maybe, k_ranges: Maybe, types: Maybe, sink: Maybe,
    sink_layout: str, softmax_scale: float | None, softcap: float, deterministic: bool, sm_margin: int,
    return_max_logits: bool, prefer: str, check: Callable[..., None],
) -> tuple[torch.Tensor, torch.Tensor, Maybe]:  # fmt: skip
    """``flex_fwd`` with its gradient: out, lse, and max_logits, which are None or empty if not asked for.

    ``softmax_scale`` None is ``D ** -0.5``. ``check(q, k, v, q_ranges, k_ranges, types, sink, sink_layout)`` raises
    what is wrong with a call by its layout; it is asked unless a call like this one has passed.
    """
    tensors = q, k, v, q_ranges, k_ranges, types, sink
    passes_by = _ONLOOKERS.let_pass(tensors)
    try:
        needs_backward = torch.is_grad_enabled() and (
            q.requires_grad or k.requires_grad or v.requires_grad or (sink is not None and sink.requires_grad)
        )
        options = softcap, deterministic, sm_margin, return_max_logits, prefer, needs_backward
        key = None if q_ranges is None or k_ranges is None or not passes_by else (
            q.shape, q.dtype, q.device, k.shape, k.dtype, k.device, v.shape, v.dtype, v.device,
            q_ranges.shape, q_ranges.dtype, q_ranges.device, k_ranges.shape, k_ranges.dtype, k_ranges.device,
            None if types is None else (types.shape, types.dtype, types.device),
            None if sink is None else (sink.shape, sink.dtype, sink.device),
            sink_layout, softmax_scale, options, _environment(),
        )  # fmt: skip
        call = None if key is None else default_registry().prepared.get(key)
    except (AttributeError, TypeError):  # of what is no tensor, or no string
        check(*tensors, sink_layout)
        raise
    if call is None:
        check(*tensors, sink_layout)
        scale = q.shape[2] ** -0.5 if softmax_scale is None else softmax_scale
        if key is None:
            got: tuple[torch.Tensor, torch.Tensor, torch.Tensor] = flex_fwd(*tensors, sink_layout, scale, *options)
            return got
        call = _prepare(tensors, sink_layout, scale, *options)
        remember(default_registry().prepared, key, call)
    ranges = RangeTensors(q_ranges, k_ranges, types)  # type: ignore[arg-type]
    if needs_backward:
        return _apply(q, k, v, sink, ranges, call)
    return _forward(call.forward, q, k, v, ranges, sink)[:3]


def _prepare(
    tensors: tuple[Any, ...], sink_layout: str, softmax_scale: float, softcap: float, deterministic: bool,
    sm_margin: int, return_max_logits: bool, prefer: str, needs_backward: bool,
) -> _Prepared:  # fmt: skip
    q, k, v, q_ranges, _, _, sink = tensors
    options = softmax_scale, softcap, sink_layout, deterministic, sm_margin
    forward = _direction(q, k, v, q_ranges, sink, options_of(*options, return_max_logits), prefer, needs_backward)
    # A choice of its own: a backend that has no max_logits may have the backward.
    backward = _direction(q, k, v, q_ranges, sink, options_of(*options), prefer, True) if needs_backward else None
    return _Prepared((sink_layout, softmax_scale, softcap, deterministic, sm_margin, prefer), forward, backward)


_apply: Callable[..., tuple[torch.Tensor, torch.Tensor, Maybe]] = _Flex.apply
