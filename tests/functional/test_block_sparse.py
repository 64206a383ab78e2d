# SPDX-License-Identifier: Apache-2.0
"""``block_sparse_attn_func`` against a masked softmax in float64, on the CPU."""

from __future__ import annotations

import pytest
import torch
from oracle import dense_attention

from magi_attention.api import block_sparse_attn_func, index_attn_func
from magi_attention.errors import ContractError
from magi_attention.kernels.index_attn import lists_of_blocks

# Tq, Tk, Hq, Hk, query block, key block, masks
CASES = [(40, 50, 4, 2, 8, 16, 2), (33, 33, 2, 2, 16, 16, 1), (7, 20, 6, 2, 3, 5, 2), (16, 8, 3, 1, 16, 1, 0)]


def draw(case: tuple[int, ...], seed: int):
    """Leaves q, k, v in float64, blocks with a row and a column of none, and what each pair is allowed (Hk, Tq, Tk)."""
    tq, tk, hq, hk, q_block, k_block, masks = case
    gen = torch.Generator().manual_seed(seed)
    shapes = (tq, hq, 8), (tk, hk, 8), (tk, hk, 4)
    leaves = [torch.randn(s, generator=gen, dtype=torch.float64).requires_grad_() for s in shapes]
    rows, columns = -(-tq // q_block), -(-tk // k_block)
    blocks = torch.rand((max(masks, 1), rows, columns), generator=gen) < 0.5
    if rows > 1:
        blocks[0, 1] = False
    blocks[:, :, 0] = False
    of_pairs = blocks.repeat_interleave(q_block, 1)[:, :tq].repeat_interleave(k_block, 2)[:, :, :tk]
    return leaves, blocks if masks else blocks[0], of_pairs.expand(hk, -1, -1)


@pytest.mark.parametrize("case", CASES, ids=str)
@pytest.mark.parametrize("sinks", [0, 2, 3])
def test_as_a_dense_softmax(case, sinks):
    seed = sum(case) + sinks
    print(f"seed {seed}")
    leaves, blocks, allowed = draw(case, seed)
    shape = (2, case[2]) if sinks == 2 else (case[0], 1, case[2])
    sink = torch.randn(shape, dtype=torch.float64).requires_grad_() if sinks else None
    want, lse, logits = dense_attention(*leaves, allowed, sink=sink)
    out, meta = block_sparse_attn_func(
        *leaves, blocks, case[4], case[5], sink=sink, sink_layout="ssh" if sinks == 3 else "sh", return_max_logits=True
    )
    torch.testing.assert_close(out, want)
    torch.testing.assert_close(meta.lse, lse.detach())
    torch.testing.assert_close(meta.max_logits, logits.detach().amax((1, 2)))
    inputs = [*leaves, *([] if sink is None else [sink])]
    dout = torch.randn(out.shape, dtype=torch.float64)
    for got, wanted in zip(*(torch.autograd.grad(x, inputs, dout) for x in (out, want))):
        torch.testing.assert_close(got, wanted)


@pytest.mark.parametrize("case", CASES, ids=str)
def test_lists_of_blocks_say_the_same(case):
    """What kernels of index attention get, run by their reference."""
    leaves, blocks, allowed = draw(case, 5)
    of_heads = blocks.reshape(-1, *blocks.shape[-2:]).expand(case[3], -1, -1)
    lists = lists_of_blocks(of_heads, case[4], case[5], case[1])
    assert lists.rows.dtype == torch.int32 and torch.equal(lists.counts.long(), of_heads.sum(-1).t())
    got, want = index_attn_func(*leaves, lists)[0], dense_attention(*leaves, allowed)[0]
    torch.testing.assert_close(got, want)
    for pair in zip(*(torch.autograd.grad(x.square().sum(), leaves) for x in (got, want))):
        torch.testing.assert_close(*pair)


def sizes_of(total: int, blocks: int, gen: torch.Generator) -> torch.Tensor:
    """So many sizes of 1 or more that add up to ``total``."""
    cuts = torch.randperm(total - 1, generator=gen)[: blocks - 1].sort().values + 1
    return torch.tensor([0, *cuts.tolist(), total]).diff()


@pytest.mark.parametrize("seed", range(6))
def test_blocks_of_different_sizes(seed):
    """One side or both; one mask or one for each kv head."""
    print(f"seed {seed}")
    gen = torch.Generator().manual_seed(seed)
    leaves, _, _ = draw((40, 50, 4, 2, 8, 16, 2), seed)
    q_sizes, k_sizes = sizes_of(40, 7, gen), sizes_of(50, 9, gen)
    given = (q_sizes, 6 if seed % 3 == 1 else k_sizes.int())
    of_keys = torch.tensor([6] * 8 + [2]) if seed % 3 == 1 else k_sizes
    blocks = torch.rand((2 if seed % 2 else 1, 7, 9), generator=gen) < 0.5
    blocks[:, 2], blocks[:, 3] = False, True
    allowed = blocks.repeat_interleave(q_sizes, 1).repeat_interleave(of_keys, 2).expand(2, -1, -1)
    want, lse, _ = dense_attention(*leaves, allowed)
    out, meta = block_sparse_attn_func(*leaves, blocks if seed % 2 else blocks[0], *given)
    torch.testing.assert_close(out, want)
    torch.testing.assert_close(meta.lse, lse.detach())
    for got, wanted in zip(*(torch.autograd.grad(x.square().sum(), leaves) for x in (out, want))):
        torch.testing.assert_close(got, wanted)


def test_bad_sizes_are_refused():
    (q, k, v), _, _ = draw(CASES[0], 0)
    blocks = torch.ones(3, 2, dtype=torch.bool)
    fine = torch.tensor([10, 20, 10]), torch.tensor([25, 25])
    for q_sizes, words in ((torch.tensor([10, 20, 11]), "add up to 41.*40 together"),
                           (torch.tensor([40, 0, 0]), "the least is 0"),
                           (torch.tensor([10.0, 20, 10]), "int32 or int64"),
                           (torch.tensor([20, 20]), r"give bool \(2, 2\)")):  # fmt: skip
        with pytest.raises(ContractError, match=words):
            block_sparse_attn_func(q, k, v, blocks, q_sizes, fine[1])
    assert block_sparse_attn_func(q, k, v, blocks, *fine)[0].shape == (40, 4, 4)


def test_bad_blocks_are_refused():
    (q, k, v), blocks, _ = draw(CASES[0], 0)
    for bad in (blocks.int(), blocks[:, :3], blocks[:, :, :2], blocks[[0, 1, 0]]):
        with pytest.raises(ContractError, match=r"give bool \(5, 4\), or with 2 kv heads in front"):
            block_sparse_attn_func(q, k, v, bad, 8, 16)
    with pytest.raises(ContractError, match="Block sizes are 8 and 0"):
        block_sparse_attn_func(q, k, v, blocks, 8, 0)
    with pytest.raises(ContractError, match="give bool"):
        lists_of_blocks(blocks[0], 8, 16, 50)


def test_equal_blocks_and_no_tokens():
    (q, k, v), _, _ = draw((9, 9, 2, 1, 4, 4, 0), 1)
    whole = torch.ones(3, 3, dtype=torch.bool)
    want = dense_attention(q, k, v, torch.ones(1, 9, 9, dtype=torch.bool))[0]
    torch.testing.assert_close(block_sparse_attn_func(q, k, v, whole, 4)[0], want)
    out, meta = block_sparse_attn_func(q[:0], k, v, whole[:0], 4)
    assert out.shape == (0, 2, 4) and meta.lse.shape == (0, 2)
    out, meta = block_sparse_attn_func(q, k, v, ~whole, 4)
    assert not out.any() and (meta.lse == float("-inf")).all()
