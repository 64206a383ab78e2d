# SPDX-License-Identifier: Apache-2.0
"""Implementations that the sparse benchmark runs, as those of ``peers``: (q, k, v, case) -> a call that gives out.

v is None where values are the first ``case.head_dim_v`` columns of k. Preparation (slices, block masks, prepared lists,
compilation) happens before and is not timed.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch
from peers import Make, Run, Unfit, _cudnn_flex, _has, batched, tokens_first
from sparse_cases import BlockCase, IndexCase
from sparse_wheels import of_wheels

from magi_attention.api import attend, block_sparse_attn_func, flex_flash_attn_func, index_attn_func, make_plan
from magi_attention.common.mask import Mask
from magi_attention.kernels import AttnOptions
from magi_attention.kernels.index_attn import IndexProblem
from magi_attention.kernels.index_attn.reference import IndexReference

# Gathering takes seconds beyond that, and says nothing new.
GATHER_TOKENS = 16384
CUDNN_STRETCHES = 16
FLEX_KEY_TOKENS = 4096  # beyond them a block mask of single keys takes minutes to make


def _ours(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor | None, case) -> Run:
    """The public function: slices on the device, or prepared lists."""
    if isinstance(case, IndexCase):
        lists = case.lists(q.device)
        return lambda: index_attn_func(q, k, v, lists, head_dim_v=case.head_dim_v)[0]
    ranges = case.mask.slices.tensors(q.device)
    return lambda: flex_flash_attn_func(q, k, v, *ranges)[0]


def _attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, case) -> Run:
    """The public function that takes a plan, here of one rank."""
    if isinstance(case, IndexCase):
        raise Unfit("attend takes masks that are known before the step.")
    plan = make_plan(case.mask, 1)
    return lambda: attend(q, k, v, plan)[0]


def _blocks(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, case) -> Run:
    """The public function that takes the matrix of blocks, on the device, and makes their lists in every call."""
    if isinstance(case, IndexCase):
        raise Unfit("block_sparse_attn_func takes blocks.")
    blocks = torch.from_numpy(case.blocks).to(q.device)
    return lambda: block_sparse_attn_func(q, k, v, blocks, case.block)[0]


class _Gather(torch.autograd.Function):
    """The reference, whatever kernels there are."""

    @staticmethod
    def forward(ctx, q, k, v, problem, lists):
        out, lse = IndexReference().forward(problem, q, k, v, lists)
        ctx.save_for_backward(q, k, v, out, lse)
        ctx.problem, ctx.lists = problem, lists
        return out

    @staticmethod
    def backward(ctx, dout):
        q, k, v, out, lse = ctx.saved_tensors
        grads = IndexReference().backward(ctx.problem, dout, q, k, v, out, lse, ctx.lists)
        return *(None if g is None else g.to(q.dtype) for g in grads), None, None


def _gather(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor | None, case) -> Run:
    """Keys of each query gathered by PyTorch."""
    if isinstance(case, BlockCase):
        raise Unfit("Gathering is for single keys.")
    if case.seqlen > GATHER_TOKENS:
        raise Unfit(f"Gathering is left out above {GATHER_TOKENS:,} tokens, where it takes seconds.")
    lists = case.lists(q.device)
    problem = IndexProblem.of_lists(q, k, v, AttnOptions(q.shape[2] ** -0.5), lists, head_dim_v=case.head_dim_v)
    return lambda: _Gather.apply(q, k, v, problem, lists)


FLEX_BLOCK = 128  # of its backward on H100, which has no kernel for smaller ones unless it searches for minutes


def _flex(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor | None, case) -> Run:
    """FlexAttention, compiled per shape. Blocks are told to it as whole blocks where it has kernels for their size, so
    no pair is asked about; single keys, and blocks that are too small, as a table."""
    from torch.nn.attention.flex_attention import flex_attention

    if v is None:
        raise Unfit("FlexAttention takes values as a tensor of their own, not as columns of the keys.")
    # Lengths, block sizes and directions are compilations each; beyond the usual 8 it would run without one.
    torch._dynamo.config.recompile_limit = 64
    compiled, options = torch.compile(flex_attention, dynamic=False), None
    if isinstance(case, IndexCase):
        if case.seqlen > FLEX_KEY_TOKENS:
            raise Unfit(f"Single keys are left out above {FLEX_KEY_TOKENS:,} tokens: their block mask takes minutes.")
        block_mask = _flex_keys(case, q.device)
    else:
        is_small = case.block < FLEX_BLOCK
        block_mask = _flex_blocks(case, q.device, FLEX_BLOCK if is_small and q.requires_grad else case.block)
        if is_small and q.is_cuda and not q.requires_grad:  # the usual tiles are larger than the blocks
            options = {"BLOCK_M": case.block, "BLOCK_N": case.block}
    inputs, has_groups = [batched(x) for x in (q, k, v)], q.shape[1] != k.shape[1]

    def run() -> torch.Tensor:
        out = compiled(*inputs, block_mask=block_mask, enable_gqa=has_groups, kernel_options=options)
        return tokens_first(out)

    run()
    return run


def _flex_blocks(case: BlockCase, device: torch.device, size: int):
    """``size``: tokens of its blocks, as many as those of the case or several of these."""
    from torch.nn.attention.flex_attention import BlockMask

    table, block, each = torch.from_numpy(case.blocks).to(device), case.block, size // case.block
    tiles = table.unflatten(1, (-1, each)).unflatten(0, (-1, each))
    whole = tiles.all(3).all(1)
    parts = tiles.any(3).any(1) & ~whole
    return BlockMask.from_kv_blocks(
        *_listed(parts), *_listed(whole), BLOCK_SIZE=size,
        mask_mod=lambda b, h, i, j: table[i // block, j // block], seq_lengths=(case.seqlen, case.seqlen),
    )  # fmt: skip


def _listed(blocks: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """How many blocks each row keeps, and the columns of these before those of the others."""
    order = (~blocks).to(torch.int8).argsort(dim=-1, stable=True)
    return blocks.sum(-1, dtype=torch.int32)[None, None], order.int()[None, None]


def _flex_keys(case: IndexCase, device: torch.device):
    from torch.nn.attention.flex_attention import create_block_mask

    table = torch.cat([case.seen(rows) for rows in torch.arange(case.seqlen, device=device).split(4096)])
    shape = (None, None, case.seqlen, case.seqlen)
    return torch.compile(create_block_mask)(lambda b, h, i, j: table[i, j], *shape, device=device.type)


def _cudnn(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, case) -> Run:
    if isinstance(case, IndexCase):
        raise Unfit("cudnn.flex_attention takes stretches of keys, and single keys are too many of these.")
    most = int(np.diff(np.pad(case.blocks, ((0, 0), (1, 0))).astype(np.int8), axis=1).clip(0).sum(1).max())
    if most > CUDNN_STRETCHES:
        raise Unfit(f"{most} stretches of keys in a row are left out; cudnn.flex_attention compiles for their number.")
    make: Callable[..., Run] = _cudnn_flex(is_thd=False)
    return make(q, k, v, case)


def dense(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor | None, case) -> Run:
    """Ours on the full mask of as many tokens: no peer, but what the sparse rate is measured by."""
    if v is None:
        raise Unfit("There are no dense kernels for values that are columns of the keys.")
    ranges = Mask.full(case.seqlen).slices.tensors(q.device)
    return lambda: flex_flash_attn_func(q, k, v, *ranges)[0]


def available() -> dict[str, Make]:
    """Implementations by name, ours first."""
    found: dict[str, Make] = {"magi": _ours, "magi_blocks": _blocks, "magi_attend": _attend}
    found |= {"flex": _flex, "gather": _gather} | of_wheels()
    return found | ({"cudnn_flex": _cudnn} if _has("cudnn.flex_attention") else {})
