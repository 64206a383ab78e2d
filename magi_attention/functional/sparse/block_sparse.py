# SPDX-License-Identifier: Apache-2.0
"""``block_sparse_attn_func``: attention by blocks of queries and keys, on one device, with gradients."""

from __future__ import annotations

from typing import Any

import torch

from magi_attention.common.forward_meta import AttnForwardMeta
from magi_attention.common.mask import Mask
from magi_attention.common.scalars import as_int
from magi_attention.errors import ContractError
from magi_attention.functional.flex_flash_attn import flex_flash_attn_func
from magi_attention.functional.inputs import check_devices, check_qkv
from magi_attention.functional.sparse.index_attn import index_attn_func
from magi_attention.kernels.index_attn import PreparedIndices, has_kernel, lists_of_blocks
from magi_attention.kernels.types import as_scale, options_of


def block_sparse_attn_func(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    blocks: torch.Tensor,
    q_block_size: int,
    k_block_size: int | None = None,
    *,
    sink: torch.Tensor | None = None,
    sink_layout: str = "sh",
    softmax_scale: float | None = None,
    softcap: float = 0.0,
    deterministic: bool = False,
    sm_margin: int = 0,
    return_max_logits: bool = False,
) -> tuple[torch.Tensor, AttnForwardMeta]:
    """Attention whose mask is a matrix of blocks, one for all heads or one for each kv head.

    Where the kernels of index attention run the problem (``index_attn_func``), the blocks become lists on their device
    and nobody waits for them. Elsewhere the host reads the blocks and ``flex_flash_attn_func`` runs them as slices.

    Args:
        q: (Tq, Hq, D). k: (Tk, Hk, D). v: (Tk, Hk, Dv). One floating dtype, Hq a multiple of Hk.
        blocks: bool (query blocks, key blocks), or with kv heads in front, on q's device: whether all queries of a
            block see all keys of another.
        q_block_size, k_block_size: tokens of a query block and, by default as many, of a key block. The last blocks
            may be shorter.
        sink, sink_layout, softmax_scale, softcap, deterministic, sm_margin, return_max_logits: as of
            ``flex_flash_attn_func``.

    Returns:
        ``(out, meta)`` as ``flex_flash_attn_func``.

    Raises:
        ContractError: shapes, dtypes or devices that do not fit together.
    """
    check_qkv(q, k, v)
    q_block = as_int(q_block_size, "q_block_size")
    k_block = q_block if k_block_size is None else as_int(k_block_size, "k_block_size")
    _check_blocks(q, k, blocks, q_block, k_block)
    check_devices(q, blocks=blocks)
    options: dict[str, Any] = dict(
        sink=sink, sink_layout=sink_layout, softmax_scale=softmax_scale, softcap=softcap, deterministic=deterministic,
        sm_margin=sm_margin, return_max_logits=return_max_logits,
    )  # fmt: skip
    if q.is_cuda:
        lists = _lists(k, blocks, q_block, k_block)
        scale = q.shape[2] ** -0.5 if softmax_scale is None else as_scale(softmax_scale)
        asked = options_of(scale, float(softcap), sink_layout, bool(deterministic), sm_margin, return_max_logits)
        needs_backward = torch.is_grad_enabled() and any(x.requires_grad for x in (q, k, v))
        if has_kernel(q, k, v, asked, lists, sink, needs_backward):
            return index_attn_func(q, k, v, lists, **options)
    return _by_slices(q, k, v, blocks, q_block, k_block, options)


def _check_blocks(q: torch.Tensor, k: torch.Tensor, blocks: torch.Tensor, q_block: int, k_block: int) -> None:
    if q_block < 1 or k_block < 1:
        raise ContractError(f"Block sizes are {q_block} and {k_block}; give 1 or more tokens.")
    wanted = (-(-q.shape[0] // q_block), -(-k.shape[0] // k_block))
    heads = blocks.shape[:-2]
    if blocks.dtype != torch.bool or tuple(blocks.shape[-2:]) != wanted or heads not in ((), (1,), (k.shape[1],)):
        raise ContractError(
            f"blocks are {tuple(blocks.shape)} {blocks.dtype} with {q.shape[0]} queries in blocks of {q_block} and "
            f"{k.shape[0]} keys in blocks of {k_block}; give bool {wanted}, or with {k.shape[1]} kv heads in front."
        )


def _lists(k: torch.Tensor, blocks: torch.Tensor, q_block: int, k_block: int) -> PreparedIndices:
    return lists_of_blocks(_of_heads(blocks).expand(k.shape[1], -1, -1), q_block, k_block, k.shape[0])


def _of_heads(blocks: torch.Tensor) -> torch.Tensor:
    return blocks if blocks.dim() == 3 else blocks[None]


def _by_slices(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, blocks: torch.Tensor, q_block: int, k_block: int,
    options: dict[str, Any],
) -> tuple[torch.Tensor, AttnForwardMeta]:  # fmt: skip
    """All heads at once where they have one mask, else one kv head after the other."""
    masks = _of_heads(blocks).cpu()
    group, size = q.shape[1] // k.shape[1], k.shape[1] if len(masks) == 1 else 1
    outs, metas = [], []
    for number, mask in enumerate(masks):
        heads = slice(number * size * group, (number + 1) * size * group)
        kv = slice(number * size, (number + 1) * size)
        given = {**options, "sink": None if options["sink"] is None else options["sink"][..., heads]}
        ranges = _ranges(mask, q.shape[0], k.shape[0], q_block, k_block)
        out, meta = flex_flash_attn_func(q[:, heads], k[:, kv], v[:, kv], *ranges, **given)
        outs.append(out)
        metas.append(meta)
    largest = None if metas[0].max_logits is None else torch.cat([m.max_logits for m in metas])
    return torch.cat(outs, 1), AttnForwardMeta(torch.cat([m.lse for m in metas], 1), largest)


def _ranges(
    blocks: torch.Tensor, total_q: int, total_k: int, q_block: int, k_block: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """``(q_ranges, k_ranges)`` of one mask on the host."""
    sizes = [
        torch.full((n,), block).clamp(max=total - block * torch.arange(n)).tolist()
        for n, block, total in zip(blocks.shape, (q_block, k_block), (total_q, total_k))
    ]
    if not blocks.numel():
        return torch.zeros((0, 2), dtype=torch.int32), torch.zeros((0, 2), dtype=torch.int32)
    q_ranges, k_ranges, _ = Mask.block_sparse(blocks, *sizes).slices.tensors()
    return q_ranges, k_ranges


__all__ = ["block_sparse_attn_func"]
