# SPDX-License-Identifier: Apache-2.0
"""``block_sparse_attn_func``: attention by blocks of queries and keys, on one device, with gradients."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from magi_attention.common.forward_meta import AttnForwardMeta
from magi_attention.common.mask import Mask
from magi_attention.common.scalars import as_int
from magi_attention.errors import ContractError
from magi_attention.functional.calls.autocast import cast_operands
from magi_attention.functional.calls.inputs import check_devices, check_qkv
from magi_attention.functional.flex_flash_attn import flex_flash_attn_func
from magi_attention.functional.sparse.index_attn import index_attn_func
from magi_attention.kernels.index_attn import PreparedIndices, has_kernel, lists_of_blocks
from magi_attention.kernels.types import as_scale, options_of


def block_sparse_attn_func(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    blocks: torch.Tensor,
    q_block_size: int | torch.Tensor,
    k_block_size: int | torch.Tensor | None = None,
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
    and nobody waits for them. Blocks of different sizes become ranges on their device, a pair for each block, and
    ``flex_flash_attn_func`` runs these: it plans on the device up to 64 MiB of plan (900 blocks with 8K tokens), and by
    way of the host above. Elsewhere the host reads the blocks, and that function runs them as slices.

    Args:
        q: (Tq, Hq, D). k: (Tk, Hk, D). v: (Tk, Hk, Dv). One floating dtype, Hq a multiple of Hk.
        blocks: bool (query blocks, key blocks), or with kv heads in front, on q's device: whether all queries of a
            block see all keys of another.
        q_block_size, k_block_size: tokens of a query block and, by default as many, of a key block. The last blocks
            may be shorter. Or the tokens of each, int32 or int64 (blocks,) on q's device: 1 or more that add up to the
            tokens. On a GPU nobody looks at them: tokens behind the last block take no part, and blocks end with the
            tokens.
        sink, sink_layout, softmax_scale, softcap, deterministic, sm_margin, return_max_logits: as of
            ``flex_flash_attn_func``.

    Returns:
        ``(out, meta)`` as ``flex_flash_attn_func``.

    Raises:
        ContractError: shapes, dtypes or devices that do not fit together.
    """
    q, k, v = cast_operands(q, k, v)  # type: ignore[assignment]
    check_qkv(q, k, v)
    q_block = _size(q_block_size, "q_block_size")
    k_block = q_block if k_block_size is None else _size(k_block_size, "k_block_size")
    check_devices(q, blocks=blocks, **dict(_tensors(q_block, k_block)))
    _check_blocks(q, k, blocks, q_block, k_block)
    options: dict[str, Any] = dict(
        sink=sink, sink_layout=sink_layout, softmax_scale=softmax_scale, softcap=softcap, deterministic=deterministic,
        sm_margin=sm_margin, return_max_logits=return_max_logits,
    )  # fmt: skip
    if not (isinstance(q_block, int) and isinstance(k_block, int)):
        edges = _edges(blocks, -2, q_block, q.shape[0]), _edges(blocks, -1, k_block, k.shape[0])
        return _by_heads(q, k, v, _of_heads(blocks), lambda mask: _ranges_on_device(mask, *edges), options)
    if q.is_cuda:
        lists = _lists(k, blocks, q_block, k_block)
        scale = q.shape[2] ** -0.5 if softmax_scale is None else as_scale(softmax_scale)
        asked = options_of(scale, float(softcap), sink_layout, bool(deterministic), sm_margin, return_max_logits)
        needs_backward = torch.is_grad_enabled() and any(x.requires_grad for x in (q, k, v))
        if has_kernel(q, k, v, asked, lists, sink, needs_backward):
            return index_attn_func(q, k, v, lists, **options)
    ranges_of = lambda mask: _ranges(mask, q.shape[0], k.shape[0], q_block, k_block)  # noqa: E731
    return _by_heads(q, k, v, _of_heads(blocks).cpu(), ranges_of, options)


BlockSize = int | torch.Tensor  # of all blocks, or (blocks,) of each
RangesOf = Callable[[torch.Tensor], tuple[torch.Tensor, torch.Tensor]]  # of the mask (query blocks, key blocks)


def _size(size: int | torch.Tensor, name: str) -> BlockSize:
    if not isinstance(size, torch.Tensor) or size.dim() == 0:
        return as_int(size, name)
    if size.dim() != 1 or size.dtype not in (torch.int32, torch.int64):
        raise ContractError(
            f"{name} is {tuple(size.shape)} {size.dtype}; give an integer, or int32 or int64 (blocks,)."
        )
    return size


def _tensors(*sizes: BlockSize) -> list[tuple[str, torch.Tensor]]:
    return [(n, x) for n, x in zip(("q_block_size", "k_block_size"), sizes) if isinstance(x, torch.Tensor)]


def _check_blocks(
    q: torch.Tensor, k: torch.Tensor, blocks: torch.Tensor, q_block: BlockSize, k_block: BlockSize
) -> None:
    sides = (("queries", q.shape[0], q_block), ("keys", k.shape[0], k_block))
    if any(isinstance(size, int) and size < 1 for _, _, size in sides):
        raise ContractError(f"Block sizes are {q_block} and {k_block}; give 1 or more tokens.")
    wanted = tuple(-(-total // size) if isinstance(size, int) else len(size) for _, total, size in sides)
    heads = blocks.shape[:-2]
    if blocks.dtype != torch.bool or tuple(blocks.shape[-2:]) != wanted or heads not in ((), (1,), (k.shape[1],)):
        said = [f"{n} {w} in blocks of {s if isinstance(s, int) else 'their own sizes'}" for w, n, s in sides]
        raise ContractError(
            f"blocks are {tuple(blocks.shape)} {blocks.dtype} with {said[0]} and {said[1]}; give bool {wanted}, or "
            f"with {k.shape[1]} kv heads in front."
        )
    for what, total, size in sides:
        if isinstance(size, torch.Tensor) and not size.is_cuda and (int(size.sum()) != total or bool((size < 1).any())):
            raise ContractError(
                f"The sizes of the blocks of {what} add up to {int(size.sum())}, the least is "
                f"{int(size.min()) if len(size) else 0}; give 1 or more tokens each, {total} together."
            )


def _lists(k: torch.Tensor, blocks: torch.Tensor, q_block: int, k_block: int) -> PreparedIndices:
    return lists_of_blocks(_of_heads(blocks).expand(k.shape[1], -1, -1), q_block, k_block, k.shape[0])


def _of_heads(blocks: torch.Tensor) -> torch.Tensor:
    return blocks if blocks.dim() == 3 else blocks[None]


def _edges(blocks: torch.Tensor, side: int, size: BlockSize, total: int) -> torch.Tensor:
    """(blocks + 1,) where each begins, and where the last ends."""
    if isinstance(size, int):
        return (torch.arange(blocks.shape[side] + 1, device=blocks.device) * size).clamp(max=total)
    return torch.nn.functional.pad(size.long().cumsum(0), (1, 0)).clamp(max=total)


def _ranges_on_device(
    blocks: torch.Tensor, q_edges: torch.Tensor, k_edges: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """``(q_ranges, k_ranges)``, int32 (query blocks * key blocks, 2): for the first block of each run in a row, the
    tokens of the row and of the run; for all others nothing. Their number is that of the blocks, so nobody waits."""
    rows, columns = blocks.shape
    begins = blocks & ~torch.nn.functional.pad(blocks, (1, 0))[:, :-1]
    places = torch.arange(columns, device=blocks.device)
    ends = torch.where(blocks, columns, places).flip(1).cummin(1).values.flip(1) if columns else places.expand(rows, 0)
    q_ranges = torch.stack([q_edges[:-1], q_edges[1:]], 1)[:, None].expand(rows, columns, 2)
    k_ranges = torch.stack([k_edges[:-1].expand(rows, columns), k_edges[ends]], 2)
    return tuple((x * begins[..., None]).reshape(-1, 2).int() for x in (q_ranges, k_ranges))  # type: ignore[return-value]


def _by_heads(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, masks: torch.Tensor, ranges_of: RangesOf, options: dict[str, Any]
) -> tuple[torch.Tensor, AttnForwardMeta]:  # fmt: skip
    """All heads at once where they have one mask, else one kv head after the other."""
    group, size = q.shape[1] // k.shape[1], k.shape[1] if len(masks) == 1 else 1
    outs, metas = [], []
    for number, mask in enumerate(masks):
        heads = slice(number * size * group, (number + 1) * size * group)
        kv = slice(number * size, (number + 1) * size)
        given = {**options, "sink": None if options["sink"] is None else options["sink"][..., heads]}
        out, meta = flex_flash_attn_func(q[:, heads], k[:, kv], v[:, kv], *ranges_of(mask), **given)
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
