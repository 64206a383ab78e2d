# SPDX-License-Identifier: Apache-2.0
"""The forward of index attention that copies blocks, compiled for the CPU, against the reference in float64."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from hopper_library import at
from index_on_cpu import IndexCall, IndexLibraryOnCpu, assert_near, run_on_the_cpu

from magi_attention.kernels.index_attn.forward_choice import copies_blocks, why_not_by_blocks
from magi_attention.kernels.index_attn.prepare import lists_of_blocks
from magi_attention.kernels.index_attn.types import IndexProblem
from magi_attention.kernels.types import options_of
from magi_attention.native import abi
from magi_attention.native.index.abi import IndexFwdBlocksParams
from magi_attention.testing.block_lists import poison_unseen

SOURCE = Path(__file__).with_name("index_blocks_on_cpu.cpp")
BF16, FP16 = torch.bfloat16, torch.float16
# dtype, tokens, keys, query heads, kv heads, head dims, block sizes, share of blocks, CTAs
CASES = {
    "blocks of 128, 8 heads on 2": (BF16, 200, 300, 8, 2, 128, 128, 128, 128, 0.6, 2),
    "blocks of 64, an odd number": (FP16, 130, 444, 4, 2, 64, 48, 64, 64, 0.5, 3),
    "as many kv heads, lists of 64": (BF16, 200, 330, 2, 2, 128, 128, 64, 64, 0.5, 3),
    "one token of 64 heads, key blocks of 80": (FP16, 7, 500, 64, 1, 56, 64, 1, 80, 0.5, 2),
    "lists of 192 rows": (FP16, 200, 300, 8, 2, 64, 64, 48, 32, 0.5, 2),
    "one head": (FP16, 300, 500, 2, 2, 64, 64, 128, 64, 0.4, 2),
    "64 heads, key blocks of 192": (FP16, 5, 500, 64, 1, 56, 64, 2, 192, 0.6, 3),
    "key blocks of 16, tails": (FP16, 100, 333, 8, 1, 64, 64, 16, 16, 0.4, 2),
    "key blocks of 48": (BF16, 130, 400, 16, 2, 72, 120, 64, 48, 0.5, 1),
    "fewer keys than a block": (FP16, 128, 40, 4, 2, 64, 64, 64, 128, 0.5, 2),
}


class Library(IndexLibraryOnCpu):
    def order(self, counts: torch.Tensor) -> torch.Tensor:
        """The lists of each kv head in the order in which they are taken (L, Hk), by their counts (L, Hk)."""
        work = torch.full((1 + counts.numel(),), 9, dtype=torch.int32)
        self.ask("order_lists", at(counts), *counts.shape, at(work))
        assert work[0] == 0
        return work[1:].view(counts.shape[1], counts.shape[0])


@pytest.fixture(scope="module")
def library(compile_folder) -> Library:
    return Library(compile_folder / "index_blocks", SOURCE, ("fwd_blocks",), ("order_lists",))


@pytest.fixture(autouse=True)
def on_the_cpu(monkeypatch, library) -> None:
    run_on_the_cpu(monkeypatch, library)
    monkeypatch.setenv("MAGI_ATTENTION_INDEX_FORWARD", "blocks")


def draw(case: tuple, seed: int, blocks: torch.Tensor | None = None) -> IndexCall:
    """With one list without keys, some with the last block, and NaN in all rows that take part in nothing; or of blocks
    that are given, all rows being finite."""
    print(f"seed {seed}")
    dtype, tokens, keys, heads_q, heads_kv, dim, dim_v, q_block, k_block, share, _ = case
    gen = torch.Generator().manual_seed(seed)
    shapes = ((tokens, heads_q, dim), (keys, heads_kv, dim), (keys, heads_kv, dim_v), (tokens, heads_q, dim_v))
    q, k, v, dout = (torch.randn(s, generator=gen).to(dtype) for s in shapes)
    if blocks is None:
        blocks = torch.rand((heads_kv, -(-tokens // q_block), -(-keys // k_block)), generator=gen) < share
        blocks[-1, -1], blocks[0, 1], blocks[:, 0, -1] = True, False, True
        poison_unseen(blocks, q_block, k_block, (q,), (k, v))
    return IndexCall(q, k, v, dout, lists_of_blocks(blocks, q_block, k_block, keys))


@pytest.mark.parametrize("name", CASES)
def test_forward(library, name):
    """Queries that see nothing get zeros and -inf; keys that nobody sees may hold NaN."""
    case = CASES[name]
    seed = sum(case[1:9])
    call = draw(case, seed)
    assert call.lse.isneginf().any() and copies_blocks(call.problem(), call.lists)
    for order in range(2):
        library.use(case[10], seed + order)
        call.check_forward()


def test_keys_of_another_list_stay_out(library):
    """A CTA has held NaN in its stages when a list comes that does not fill a step, and behind its end others stand."""
    blocks = torch.tensor([[[1, 0, 0, 0, 0], [0, 1, 0, 1, 1], [1, 1, 1, 1, 1]]], dtype=torch.bool)
    call = draw((FP16, 96, 320, 4, 1, 64, 64, 32, 64, 0.0, 1), 11, blocks)
    call.k[128:192], call.v[128:192] = float("nan"), float("nan")  # the last list alone sees them, and comes first
    call.lists.rows[call.lists.rows < 0] = 2
    library.use(1, 11)
    out, lse = call.forward()
    assert out[64:].isnan().all() and not out[:64].isnan().any()
    assert_near("out", out[:64], call.out[:64])
    assert_near("lse", lse[:64], call.lse[:64])


@pytest.mark.parametrize("seed", range(3))
def test_order(library, seed):
    """The longest lists of each kv head first; of equal ones those of later queries."""
    print(f"seed {seed}")
    gen = torch.Generator().manual_seed(seed)
    heads, num_lists = 1 + seed, int(torch.randint(1, 600, (1,), generator=gen))
    counts = torch.randint(0, 1 + 20 * seed, (num_lists, heads), generator=gen, dtype=torch.int32)
    library.use(2, seed)
    for order, of_head in zip(library.order(counts).tolist(), counts.t().tolist()):
        assert order == sorted(range(num_lists), key=lambda i: (-of_head[i], -i))


def test_which_forward_runs(monkeypatch):
    """Where it can, as the environment says; of itself where key blocks are 64 or more."""

    def choice(q_block: int, k_block: int, heads_q: int = 8, keys: int = 256) -> bool:
        q, k = torch.zeros(256, heads_q, 64, dtype=FP16), torch.zeros(keys, 1, 64, dtype=FP16)
        blocks = torch.ones((1, -(-256 // q_block), -(-keys // k_block)), dtype=torch.bool)
        lists = lists_of_blocks(blocks, q_block, k_block, keys)
        problem = IndexProblem.of_lists(q, k, k, options_of(0.2, 0.0, "sh", False, 0), lists)
        bounded = lists._replace(k_start=torch.zeros(len(lists.rows), dtype=torch.int64))
        assert why_not_by_blocks(problem, bounded) is not None and not copies_blocks(problem, bounded)
        return copies_blocks(problem, lists)

    for asked, large, small in (("auto", True, False), ("blocks", True, True), ("gather", False, False)):
        monkeypatch.setenv("MAGI_ATTENTION_INDEX_FORWARD", asked)
        assert choice(128, 128) is choice(64, 64) is choice(8, 64) is choice(64, 64, 1) is large
        assert choice(128, 16) is choice(128, 48) is small
        assert not choice(32, 64, 1) and not choice(4, 64) and not choice(128, 100) and not choice(128, 128, 8, 0)


@pytest.mark.parametrize("changed", [{"q_block": 4}, {"k_block": 24}, {"heads_q": 24}, {"total_k": 0}], ids=str)
def test_refusals(library, changed):
    fields = {
        "dtype": abi.FP16, "total_q": 64, "total_k": 64, "heads_q": 8, "heads_kv": 1, "head_dim": 64, "head_dim_v": 64,
        "q_block": 16, "k_block": 64, "softmax_scale": 1.0,
    }  # fmt: skip
    params = IndexFwdBlocksParams(version=abi.ABI_VERSION, **{**fields, **changed})
    assert library._library.magi_ffa_index_fwd_blocks(bytes(params)) in (abi.UNSUPPORTED, abi.INVALID_ARGUMENT)
    assert library._library.last_error()
