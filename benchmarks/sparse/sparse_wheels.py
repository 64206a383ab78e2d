# SPDX-License-Identifier: Apache-2.0
"""Sparse attention of public wheels, as peers of the sparse benchmark.

    cudnn_bsa    block_sparse_attention of nvidia-cudnn-frontend: blocks of 64 or 128; backward with as many kv heads as
                 query heads (--heads 16 16)
    cudnn_dsa    sparse_attention_backward of the same behind our forward: it has no forward for Hopper GPUs
    flash_mla    sparse prefill of FlashMLA, forward alone; built from https://github.com/deepseek-ai/FlashMLA
"""

from __future__ import annotations

from typing import Any

import torch
from peers import Make, Run, Unfit, _has
from sparse_cases import BlockCase, IndexCase

from magi_attention.api import index_attn_func


class _BlockSparse(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, lists: dict[str, Any]) -> torch.Tensor:
        from cudnn.block_sparse_attention import block_sparse_attention_forward

        got = block_sparse_attention_forward(q[None], k[None], v[None], **lists)
        ctx.save_for_backward(q, k, v, got["o_tensor"], got["lse_tensor"])
        ctx.lists = lists
        return got["o_tensor"][0]

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        from cudnn.block_sparse_attention import block_sparse_attention_backward

        q, k, v, out, lse = ctx.saved_tensors
        got = block_sparse_attention_backward(
            grads[0][None].contiguous(), q[None], k[None], v[None], out, lse, **ctx.lists
        )
        return *(got[name][0] for name in ("dq_tensor", "dk_tensor", "dv_tensor")), None


def _cudnn_bsa(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor | None, case: BlockCase | IndexCase) -> Run:
    if isinstance(case, IndexCase) or v is None:
        raise Unfit("block_sparse_attention takes blocks.")
    if case.block not in (64, 128):
        raise Unfit(f"block_sparse_attention has blocks of 64 and 128, not of {case.block}.")
    if q.requires_grad and q.shape[1] != k.shape[1]:
        raise Unfit("The backward of block_sparse_attention takes as many kv heads as query heads.")
    blocks = torch.from_numpy(case.blocks).to(q.device)
    order = (~blocks).to(torch.int8).argsort(dim=-1, stable=True).int()
    counts = blocks.sum(-1, dtype=torch.int32)
    shape = (1, q.shape[1], len(counts))
    lists = dict(
        q2k_block_index=order[:, : int(counts.max())].expand(*shape, -1).contiguous(),
        q2k_block_nums=counts.expand(shape).contiguous(),
        sparse_block_size=case.block,
        layout="bshd",
    )
    apply: Any = _BlockSparse.apply
    return lambda: apply(q, k, v, lists)


class _SparseBackward(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, q: torch.Tensor, k: torch.Tensor, case: IndexCase, lists: Any) -> torch.Tensor:
        out, meta = index_attn_func(q, k, None, lists, head_dim_v=case.head_dim_v)
        ctx.save_for_backward(q, k, out, meta.lse)
        ctx.indices = case.indices[:, 0].to(q.device)
        return out

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        from cudnn.deepseek_sparse_attention.sparse_attention_backward.api import sparse_attention_backward_wrapper

        q, k, out, lse = ctx.saved_tensors
        no_sink = torch.full(q.shape[1:2], float("-inf"), device=q.device)
        got = sparse_attention_backward_wrapper(q, k[:, 0], out, grads[0].contiguous(), lse, no_sink, ctx.indices)
        return got["dq"], got["dkv"][:, None], None, None


def _cudnn_dsa(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor | None, case: BlockCase | IndexCase) -> Run:
    if isinstance(case, BlockCase) or v is not None:
        raise Unfit("sparse_attention_backward takes lists of keys that hold their values.")
    if not q.requires_grad:
        raise Unfit("nvidia-cudnn-frontend has a sparse forward for SM100 GPUs alone.")
    lists = case.lists(q.device)
    apply: Any = _SparseBackward.apply
    return lambda: apply(q, k, case, lists)


def _flash_mla(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor | None, case: BlockCase | IndexCase) -> Run:
    from flash_mla import flash_mla_sparse_fwd

    if isinstance(case, BlockCase) or v is not None:
        raise Unfit("FlashMLA's sparse prefill takes lists of keys that hold their values.")
    if q.requires_grad:
        raise Unfit("FlashMLA's sparse prefill has no backward.")
    indices, scale = case.indices.to(q.device), q.shape[2] ** -0.5
    return lambda: flash_mla_sparse_fwd(q, k, indices, scale, case.head_dim_v)[0]


def of_wheels() -> dict[str, Make]:
    """Those that are installed."""
    known = {
        "cudnn_bsa": ("cudnn.block_sparse_attention", _cudnn_bsa),
        "cudnn_dsa": ("cudnn.deepseek_sparse_attention", _cudnn_dsa),
        "flash_mla": ("flash_mla", _flash_mla),
    }
    return {name: make for name, (module, make) in known.items() if _has(module)}
