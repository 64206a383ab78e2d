# SPDX-License-Identifier: Apache-2.0
"""Implementations that the sparse benchmark runs, as those of ``peers``: (q, k, v, case) -> a call that gives out.

Preparation (slices, block masks, prepared lists, compilation) happens before and is not timed.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from peers import Make, Run, Unfit, _cudnn_flex, _has, batched, tokens_first
from sparse_cases import BlockCase, IndexCase

from magi_attention.api import attend, block_sparse_attn_func, flex_flash_attn_func, index_attn_func, make_plan
from magi_attention.common.mask import Mask
from magi_attention.kernels import AttnOptions
from magi_attention.kernels.index_attn import IndexProblem
from magi_attention.kernels.index_attn.reference import IndexReference

# Gathering takes seconds beyond that, and says nothing new.
GATHER_TOKENS = 16384


def _ours(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, case) -> Run:
    """The public function: slices on the device, or prepared lists."""
    if isinstance(case, IndexCase):
        lists = case.lists(q.device)
        return lambda: index_attn_func(q, k, v, lists)[0]
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
        return *(g.to(x.dtype) for g, x in zip(grads, (q, k, v))), None, None


def _gather(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, case) -> Run:
    """Keys of each query gathered by PyTorch."""
    if isinstance(case, BlockCase):
        raise Unfit("Gathering is for single keys.")
    if case.seqlen > GATHER_TOKENS:
        raise Unfit(f"Gathering is left out above {GATHER_TOKENS:,} tokens, where it takes seconds.")
    lists = case.lists(q.device)
    problem = IndexProblem.of_lists(q, k, v, AttnOptions(q.shape[2] ** -0.5), lists)
    return lambda: _Gather.apply(q, k, v, problem, lists)


def _flex(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, case) -> Run:
    """FlexAttention, compiled per shape. Blocks are told to it as whole blocks, so no pair is asked about; single keys
    as a table of all pairs."""
    from torch.nn.attention.flex_attention import flex_attention

    # Lengths, block sizes and directions are compilations each; beyond the usual 8 it would run without one.
    torch._dynamo.config.recompile_limit = 64
    compiled = torch.compile(flex_attention, dynamic=False)
    block_mask = (_flex_blocks if isinstance(case, BlockCase) else _flex_keys)(case, q.device)
    inputs = [batched(x) for x in (q, k, v)]

    def run() -> torch.Tensor:
        return tokens_first(compiled(*inputs, block_mask=block_mask, enable_gqa=q.shape[1] != k.shape[1]))

    run()
    return run


def _flex_blocks(case: BlockCase, device: torch.device):
    from torch.nn.attention.flex_attention import BlockMask

    table, block = torch.from_numpy(case.blocks).to(device), case.block
    blocks = table[None, None]
    counts = blocks.sum(-1, dtype=torch.int32)
    order = (~blocks).to(torch.int8).argsort(dim=-1, stable=True).int()  # those that are kept, then the others
    none = torch.zeros_like(counts), torch.zeros_like(order)
    return BlockMask.from_kv_blocks(
        *none, counts, order, BLOCK_SIZE=block, mask_mod=lambda b, h, i, j: table[i // block, j // block],
        seq_lengths=(case.seqlen, case.seqlen),
    )  # fmt: skip


def _flex_keys(case: IndexCase, device: torch.device):
    from torch.nn.attention.flex_attention import create_block_mask

    table = torch.cat([case.seen(rows) for rows in torch.arange(case.seqlen, device=device).split(4096)])
    shape = (None, None, case.seqlen, case.seqlen)
    return torch.compile(create_block_mask)(lambda b, h, i, j: table[i, j], *shape, device=device.type)


def _cudnn(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, case) -> Run:
    if isinstance(case, IndexCase):
        raise Unfit("cudnn.flex_attention takes stretches of keys, and single keys are too many of these.")
    make: Callable[..., Run] = _cudnn_flex(is_thd=False)
    return make(q, k, v, case)


def dense(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, case) -> Run:
    """Ours on the full mask of as many tokens: no peer, but what the sparse rate is measured by."""
    ranges = Mask.full(case.seqlen).slices.tensors(q.device)
    return lambda: flex_flash_attn_func(q, k, v, *ranges)[0]


def available() -> dict[str, Make]:
    """Implementations by name, ours first."""
    found: dict[str, Make] = {"magi": _ours, "magi_blocks": _blocks, "magi_attend": _attend}
    found |= {"flex": _flex, "gather": _gather}
    return found | ({"cudnn_flex": _cudnn} if _has("cudnn.flex_attention") else {})
