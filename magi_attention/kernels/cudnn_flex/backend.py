# SPDX-License-Identifier: Apache-2.0
"""Backend ``"cudnn_flex"``: ``cudnn.flex_attention`` of the wheel nvidia-cudnn-frontend, on 9.0, 10.0 and 10.3.

Its mask is the intervals of keys that each query sees, so every mask of slices is one. A plan is made of them on the
GPU once per mask, and its kernels are compiled at the first call of their shapes, which takes seconds to a minute.
Partial results are rounded to the dtype of q before they are merged. A sink joins by its share of the softmax, which is
exact.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from importlib.util import find_spec
from typing import Any

import numpy as np
import torch

from magi_attention.common.plan_cache import Kind
from magi_attention.common.slices import SliceTable, trim
from magi_attention.kernels.cudnn_flex.endpoints import key_endpoints
from magi_attention.kernels.reference.correction import sink_bwd_from_delta
from magi_attention.kernels.reference.operands import (
    check_operands,
    finish_backward,
    finish_forward,
    row_delta,
    unseen_rows,
)
from magi_attention.kernels.types import AttnOptions, Grads, Partial, Problem

CAPABILITIES = ((9, 0), (10, 0), (10, 3))
_DTYPES = (torch.bfloat16, torch.float16)
_WIDE = ((192, 128), (256, 256))  # head dims above 128
_HINT = "run `pip install 'magi_attention[cudnn-flex]'`"


@lru_cache(maxsize=1)
def _module() -> Any:
    """``cudnn.flex_attention``, or a sentence why it cannot be used."""
    try:
        if find_spec("cudnn") is None or find_spec("cudnn.flex_attention") is None:
            return f"cudnn.flex_attention is not installed; {_HINT}."
        import cudnn.flex_attention as module
    except (ImportError, OSError, RuntimeError) as error:
        return f"cudnn.flex_attention does not load ({error}); {_HINT}."
    return module


@dataclass(eq=False)
class _MaskPlan:
    """A plan, the endpoints that it was made from, and the backwards that were compiled for it."""

    plan: Any
    endpoints: torch.Tensor
    backwards: dict[bool, Any]


_Key = tuple[object, ...]
_PLANS: Kind[_Key, _MaskPlan] = Kind("plan of cudnn.flex_attention", lambda made: [made.endpoints])


@dataclass(frozen=True)
class CudnnFlexBackend:
    """The kernels of ``cudnn.flex_attention``; plans are kept with their masks."""

    name: str = "cudnn_flex"

    def preference(self, problem: Problem) -> int:
        """Ahead of our portable kernels on 10.x, which do without that GPU's own matrix instructions."""
        return 1 if problem.capability is not None and problem.capability[0] == 10 else 0

    def why_not(self, problem: Problem) -> str | None:
        p = problem
        if p.device_type != "cuda":
            return f"cudnn.flex_attention runs on NVIDIA GPUs, not on {p.device_type} tensors."
        if p.capability not in CAPABILITIES:
            return f"cudnn.flex_attention has kernels for 9.0, 10.0 and 10.3, not for {p.capability}."
        if p.dtype not in _DTYPES:
            return f"cudnn.flex_attention computes bfloat16 and float16, not {p.dtype}."
        dims = (p.head_dim, p.head_dim_v)
        if dims not in _WIDE and any(dim % 8 or not 8 <= dim <= 128 for dim in dims):
            fine = "multiples of 8 up to 128, (192, 128) or (256, 256)"
            return f"cudnn.flex_attention has no kernels for head dims {dims}, only for {fine}."
        if p.num_heads_kv == 0 or p.num_heads_q % p.num_heads_kv:
            return f"{p.num_heads_q} query heads are no multiple of {p.num_heads_kv} kv heads."
        is_uneven = p.num_heads_q != p.num_heads_kv and p.head_dim != p.head_dim_v
        if p.capability == (9, 0) and p.needs_backward and is_uneven:
            return f"cudnn.flex_attention has no backward of grouped heads on 9.0 for head dims {dims}, which differ."
        if p.options.softcap:
            return "cudnn.flex_attention has no softcap."
        if not p.options.softmax_scale > 0:
            return f"softmax_scale is {p.options.softmax_scale}; this backend needs a positive one."
        if p.options.deterministic and p.needs_backward and dims == (256, 256):
            return "cudnn.flex_attention has no deterministic backward for head dim 256."
        if p.options.sm_margin:
            return "cudnn.flex_attention leaves no SMs free (sm_margin)."
        module = _module()
        return module if isinstance(module, str) else None

    @torch.no_grad()
    def forward(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        slices: SliceTable,
        options: AttnOptions,
        sink: torch.Tensor | None = None,
        init: Partial | None = None,
    ) -> Partial:
        """See ``Backend.forward``. out is rounded to the dtype of q before anything is merged."""
        check_operands(q, k, v, slices)
        if _has_no_pairs(q, k, slices):
            return finish_forward(_nothing(q, v, options), options, sink, init)
        q_BTHD, k_BTHD, v_BTHD = _batched(q, k, v, slices)
        plan = _plan_of(slices, q_BTHD, k_BTHD, v_BTHD, is_backward=False)
        out, lse, *top = _module().flex_attn_func(
            q_BTHD, k_BTHD, v_BTHD, mask_plan=plan.plan, softmax_scale=options.softmax_scale, return_lse=True,
            return_max_logit=options.return_max_logits,
        )  # fmt: skip
        new = Partial(out[0].float(), lse[0].t().contiguous(), top[0] if top else None)
        return finish_forward(new, options, sink, init)

    @torch.no_grad()
    def backward(
        self,
        dout: torch.Tensor,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        out: torch.Tensor,
        lse: torch.Tensor,
        slices: SliceTable,
        options: AttnOptions,
        sink: torch.Tensor | None = None,
        delta: torch.Tensor | None = None,
        init: Grads | None = None,
    ) -> Grads:
        """See ``Backend.backward``. The kernel works delta out of ``out``; a given ``delta`` is used for sinks only."""
        check_operands(q, k, v, slices)
        if _has_no_pairs(q, k, slices):
            grads = Grads(*(torch.zeros_like(x, dtype=torch.float32) for x in (q, k, v)))
        else:
            grads = _gradients(dout, q, k, v, out, lse, slices, options)
        if sink is not None:
            delta = row_delta(out, dout, delta)
            grads.dsink = sink_bwd_from_delta(sink, lse.float(), delta, options.sink_layout)
        return finish_backward(grads, init)


def _gradients(
    dout: torch.Tensor, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, out: torch.Tensor, lse: torch.Tensor,
    slices: SliceTable, options: AttnOptions,
) -> Grads:  # fmt: skip
    """dq, dk and dv in float32, rounded to the dtype of q by the kernel."""
    q_BTHD, k_BTHD, v_BTHD = _batched(q, k, v, slices)
    rows = unseen_rows(slices, q.shape[0], k.shape[0])[0]
    out_BTHD, dout_BTHD = (_blank(x.to(q.dtype), rows)[None] for x in (out, dout))
    lse_BHT = lse.float().t().contiguous()[None]
    made = _plan_of(slices, q_BTHD, k_BTHD, v_BTHD, is_backward=True)
    grads = tuple(torch.empty_like(x) for x in (q_BTHD, k_BTHD, v_BTHD))
    operands = (q_BTHD, k_BTHD, v_BTHD, out_BTHD, dout_BTHD, lse_BHT, *grads, made.plan)
    run = made.backwards.get(options.deterministic)
    if run is None:
        run = _module().FlexAttentionBwd(*operands, deterministic=options.deterministic)
        run.check_support()
        run.compile()
        made.backwards[options.deterministic] = run
    workspace = torch.empty(run.workspace_size, dtype=torch.uint8, device=q.device)
    run.execute(*operands, workspace=workspace, softmax_scale=options.softmax_scale)
    return Grads(*(x[0].float() for x in grads))


def _plan_of(
    slices: SliceTable, q_BTHD: torch.Tensor, k_BTHD: torch.Tensor, v_BTHD: torch.Tensor, is_backward: bool
) -> _MaskPlan:
    """The plan for these shapes, kept with the mask. One for the backward serves the forward, too."""
    key = (q_BTHD.shape, k_BTHD.shape, v_BTHD.shape, q_BTHD.dtype, q_BTHD.device)
    found = slices.cache.find(_PLANS, (*key, True))
    if found is not None:
        return found

    def make() -> _MaskPlan:
        endpoints = torch.from_numpy(key_endpoints(trim(slices.array), q_BTHD.shape[1])).to(q_BTHD.device)
        plan = _module().create_mask_plan(endpoints, q_BTHD, k_BTHD, v_BTHD, build_backward=is_backward)
        if endpoints.is_cuda:  # other streams may use the plan next, so it has to be there
            torch.cuda.current_stream(endpoints.device).synchronize()
        return _MaskPlan(plan, endpoints, {})

    return slices.cache.get(_PLANS, (*key, is_backward), make)


def _batched(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, slices: SliceTable
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """(1, T, H, D) contiguous; rows that take part in nothing are 0, because a weight of 0 leaves a NaN a NaN."""
    q_unseen, k_unseen = unseen_rows(slices, q.shape[0], k.shape[0])
    return _blank(q, q_unseen)[None], _blank(k, k_unseen)[None], _blank(v, k_unseen)[None]


def _blank(x: torch.Tensor, rows: np.ndarray | None) -> torch.Tensor:
    """``x``, contiguous and at a multiple of 128 bytes, with these rows 0."""
    if rows is None:
        return x.contiguous() if not x.data_ptr() % 128 else x.clone(memory_format=torch.contiguous_format)
    blanked = x.clone(memory_format=torch.contiguous_format)
    blanked[torch.from_numpy(rows).to(x.device)] = 0
    return blanked


def _has_no_pairs(q: torch.Tensor, k: torch.Tensor, slices: SliceTable) -> bool:
    return not q.shape[0] or not k.shape[0] or not len(trim(slices.array))


def _nothing(q: torch.Tensor, v: torch.Tensor, options: AttnOptions) -> Partial:
    """What queries get that see no key."""
    rows, heads = q.shape[:2]
    lse = torch.full((rows, heads), float("-inf"), dtype=torch.float32, device=q.device)
    top = torch.full((heads,), float("-inf"), dtype=torch.float32, device=q.device)
    out = torch.zeros((rows, heads, v.shape[2]), dtype=torch.float32, device=q.device)
    return Partial(out, lse, top if options.return_max_logits else None)


__all__ = ["CAPABILITIES", "CudnnFlexBackend"]
