# SPDX-License-Identifier: Apache-2.0
"""Backend ``"fa4"``: FlashAttention-4 of the wheel flash-attn-4, on 9.0, 10.0 and 10.3.

A mask becomes lists of blocks and the key intervals of each query, once per mask. Its kernels are compiled at the first
call of their shapes, which takes a minute. On 8.x they ignore lists of blocks and on 12.x they refuse them, so those
GPUs are refused here.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch

from magi_attention.common.plan_cache import Kind
from magi_attention.common.slices import SliceTable, trim
from magi_attention.kernels.fa4.blocks import BlockLists, BlockSize, mask_blocks
from magi_attention.kernels.fa4.wheel import HINT, Lists, is_installed, load_wheel
from magi_attention.kernels.types import AttnOptions, Problem
from magi_attention.kernels.wheel_backend import CAPABILITIES, QKV, WheelBackend

_ON_HOPPER = "multiples of 8 up to 192, and 256"
_ON_BLACKWELL = "multiples of 8 up to 128, (192, 128) or, without a backward, (256, 256)"


@dataclass(eq=False)
class _MaskOnGpu:
    """Tensors of ``MaskBlocks``; the lists of partial and full blocks by query and by key."""

    forward: tuple[Lists, Lists]
    backward: tuple[Lists, Lists]
    endpoints: torch.Tensor


_Key = tuple[int, int, BlockSize, torch.device]
_MASKS: Kind[_Key, _MaskOnGpu] = Kind(
    "blocks for flash-attn-4", lambda made: [made.endpoints, *made.forward, *made.backward]
)


@dataclass(frozen=True)
class Fa4Backend(WheelBackend):
    """The kernels of FlashAttention-4; blocks are kept with their masks."""

    name: str = "fa4"
    title, preference_on_blackwell = "FlashAttention-4", 1

    def why_not_own(self, p: Problem) -> str | None:
        """See ``WheelKernels.why_not_own``."""
        if p.options.return_max_logits:
            return "FlashAttention-4 does not give the greatest logits (return_max_logits)."
        reason = _why_not_dims(p) or (_why_no_backward(p) if p.needs_backward else None)
        if reason is None and not is_installed():
            return f"flash-attn-4 is not installed; {HINT}."
        return reason

    def attend(
        self, qkv: QKV, slices: SliceTable, options: AttnOptions
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
        """See ``WheelKernels.attend``."""
        wheel, (mask, size) = load_wheel(), _mask_of(slices, qkv)
        out, lse, *_ = wheel.forward(
            *qkv, softmax_scale=options.softmax_scale, softcap=options.softcap, pack_gqa=False, return_lse=True,
            **wheel.mask_of(mask.endpoints, mask.forward, size),
        )  # fmt: skip
        return out, lse, None

    def differentiate(
        self, qkv: QKV, out_BTHD: torch.Tensor, dout_BTHD: torch.Tensor, lse_BHT: torch.Tensor,
        slices: SliceTable, options: AttnOptions,
    ) -> QKV:  # fmt: skip
        """See ``WheelKernels.differentiate``."""
        wheel, (mask, size) = load_wheel(), _mask_of(slices, qkv)
        dq, dk, dv = wheel.backward(
            *qkv, out_BTHD, dout_BTHD, lse_BHT, softmax_scale=options.softmax_scale, softcap=options.softcap,
            **wheel.mask_of(mask.endpoints, mask.backward, size),
        )  # fmt: skip
        return dq, dk, dv


def _why_not_dims(p: Problem) -> str | None:
    dims = (p.head_dim, p.head_dim_v)
    are_small = all(dim % 8 == 0 and 8 <= dim <= 128 for dim in dims)
    if p.capability == (9, 0):
        if any(dim % 8 or not (8 <= dim <= 192 or dim == 256) for dim in dims):
            return f"FlashAttention-4 has no kernels for head dims {dims} on 9.0, only for {_ON_HOPPER}."
        return None
    if not are_small and dims not in ((192, 128), (256, 256)):
        return f"FlashAttention-4 has no kernels for head dims {dims} on 10.x, only for {_ON_BLACKWELL}."
    return None


def _why_no_backward(p: Problem) -> str | None:
    dims = (p.head_dim, p.head_dim_v)
    if p.options.deterministic:
        return "FlashAttention-4 has no deterministic backward of lists of blocks on 9.0; that on 10.x was not run."
    if any(dim % 32 for dim in dims):
        return f"The backward of FlashAttention-4 gave a wrong dq for head dims like {dims}; give multiples of 32."
    if p.capability == (9, 0) and dims[0] != dims[1] and (p.num_heads_q != p.num_heads_kv or dims[1] > dims[0]):
        return f"FlashAttention-4 has no backward on 9.0 for head dims {dims} with grouped heads or a larger one of v."
    if p.capability != (9, 0) and dims == (256, 256):
        return "FlashAttention-4 has no backward of lists of blocks for head dim 256 on 10.x."
    return None


def block_size(capability: tuple[int, int], head_dim: int) -> BlockSize:
    """The blocks that the kernels of both directions take. On 9.0 the keys are those of their tiles; on 10.x 192 has
    two CTAs in a cluster, which share a block."""
    if capability == (9, 0):
        return BlockSize(128, 128 if head_dim <= 128 else 96 if head_dim <= 192 else 64)
    return BlockSize(256, 256 if head_dim == 192 else 128)


def _mask_of(slices: SliceTable, qkv: QKV) -> tuple[_MaskOnGpu, BlockSize]:
    """The blocks of a mask, kept with it."""
    q_BTHD, k_BTHD, _ = qkv
    device, total_q, total_k = q_BTHD.device, q_BTHD.shape[1], k_BTHD.shape[1]
    size = block_size(torch.cuda.get_device_capability(device), q_BTHD.shape[3])

    def make() -> _MaskOnGpu:
        made = mask_blocks(trim(slices.array), total_q, total_k, size)
        lists = [_on_gpu(x, device) for x in made[:4]]
        endpoints = torch.from_numpy(made.endpoints).to(device)
        if endpoints.is_cuda:  # other streams may use the lists next, so they have to be there
            torch.cuda.current_stream(device).synchronize()
        return _MaskOnGpu((lists[0], lists[1]), (lists[2], lists[3]), endpoints)

    return slices.cache.get(_MASKS, (total_q, total_k, size, device), make), size


def _on_gpu(lists: BlockLists, device: torch.device) -> Lists:
    counts, indices = (torch.from_numpy(np.ascontiguousarray(x)).to(device) for x in lists)
    return Lists(counts[None, None], indices[None, None])


__all__ = ["CAPABILITIES", "Fa4Backend", "block_size"]
