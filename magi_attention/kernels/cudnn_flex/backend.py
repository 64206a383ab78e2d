# SPDX-License-Identifier: Apache-2.0
"""Backend ``"cudnn_flex"``: ``cudnn.flex_attention`` of the wheel nvidia-cudnn-frontend, on 9.0, 10.0 and 10.3.

Its mask is the intervals of keys that each query sees, so every mask of slices is one. A plan is made of them on the
GPU once per mask, and its kernels are compiled at the first call of their shapes, which takes seconds to a minute.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from importlib.util import find_spec
from typing import Any

import torch

from magi_attention.common.plan_cache import Kind
from magi_attention.common.slices import SliceTable, trim
from magi_attention.kernels.cudnn_flex.endpoints import key_endpoints
from magi_attention.kernels.types import AttnOptions, Problem
from magi_attention.kernels.wheel_backend import CAPABILITIES, QKV, WheelBackend
from magi_attention.native import install

_WIDE = ((192, 128), (256, 256))  # head dims above 128
_HINT = f"run `{install.needs('cudnn-flex')}`"


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
class CudnnFlexBackend(WheelBackend):
    """The kernels of ``cudnn.flex_attention``; plans are kept with their masks."""

    name: str = "cudnn_flex"
    title, preference_on_blackwell = "cudnn.flex_attention", 2

    def why_not_own(self, p: Problem) -> str | None:
        """See ``WheelKernels.why_not_own``."""
        dims = (p.head_dim, p.head_dim_v)
        if dims not in _WIDE and any(dim % 8 or not 8 <= dim <= 128 for dim in dims):
            fine = "multiples of 8 up to 128, (192, 128) or (256, 256)"
            return f"cudnn.flex_attention has no kernels for head dims {dims}, only for {fine}."
        if p.capability == (9, 0) and p.needs_backward:
            if p.num_heads_q != p.num_heads_kv and p.head_dim != p.head_dim_v:
                return f"cudnn.flex_attention has no backward of grouped heads on 9.0 for unequal head dims {dims}."
            if p.head_dim_v > p.head_dim:
                return f"cudnn.flex_attention has no backward on 9.0 for head dims {dims}; that of v is the larger."
        if p.options.softcap:
            return "cudnn.flex_attention has no softcap."
        if p.options.deterministic and p.needs_backward and dims == (256, 256):
            return "cudnn.flex_attention has no deterministic backward for head dim 256."
        module = _module()
        return module if isinstance(module, str) else None

    def attend(
        self, qkv: QKV, slices: SliceTable, options: AttnOptions
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
        """See ``WheelKernels.attend``."""
        out, lse, *top = _module().flex_attn_func(
            *qkv, mask_plan=_plan_of(slices, qkv, is_backward=False).plan, softmax_scale=options.softmax_scale,
            return_lse=True, return_max_logit=options.return_max_logits,
        )  # fmt: skip
        return out, lse, top[0] if top else None

    def differentiate(
        self, qkv: QKV, out_BTHD: torch.Tensor, dout_BTHD: torch.Tensor, lse_BHT: torch.Tensor,
        slices: SliceTable, options: AttnOptions,
    ) -> QKV:  # fmt: skip
        """See ``WheelKernels.differentiate``."""
        made = _plan_of(slices, qkv, is_backward=True)
        q, k, v = qkv
        grads = torch.empty_like(q), torch.empty_like(k), torch.empty_like(v)
        operands = (*qkv, out_BTHD, dout_BTHD, lse_BHT, *grads, made.plan)
        run = made.backwards.get(options.deterministic)
        if run is None:
            run = _module().FlexAttentionBwd(*operands, deterministic=options.deterministic)
            run.check_support()
            run.compile()
            made.backwards[options.deterministic] = run
        workspace = torch.empty(run.workspace_size, dtype=torch.uint8, device=q.device)
        run.execute(*operands, workspace=workspace, softmax_scale=options.softmax_scale)
        return grads


def _plan_of(slices: SliceTable, qkv: QKV, is_backward: bool) -> _MaskPlan:
    """The plan for these shapes, kept with the mask. One for the backward serves the forward, too."""
    q_BTHD, k_BTHD, v_BTHD = qkv
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


__all__ = ["CAPABILITIES", "CudnnFlexBackend"]
