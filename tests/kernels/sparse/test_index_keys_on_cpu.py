# SPDX-License-Identifier: Apache-2.0
"""The key-stationary backward of index attention, compiled for the CPU, against the reference in float64."""

from __future__ import annotations

import ctypes
from pathlib import Path

import pytest
import torch
from hopper_library import aligned
from index_on_cpu import IndexCall, IndexLibraryOnCpu, run_on_the_cpu

from magi_attention.kernels.index_attn import launches
from magi_attention.kernels.index_attn.backward_choice import is_key_stationary
from magi_attention.kernels.index_attn.prepare import lists_of_blocks
from magi_attention.kernels.index_attn.types import IndexProblem, PreparedIndices
from magi_attention.kernels.types import options_of
from magi_attention.native import abi
from magi_attention.native.index.abi import IndexBwdKeysParams
from magi_attention.testing.block_lists import poison_unseen

SOURCE = Path(__file__).with_name("index_keys_on_cpu.cpp")
BF16, FP16 = torch.bfloat16, torch.float16
# dtype, tokens, keys, query heads, kv heads, head dims, block sizes, share of blocks, CTAs, parts of the heads
CASES = {
    "blocks of 64": (BF16, 200, 300, 4, 2, 128, 128, 64, 64, 0.5, 2, 2),
    "blocks of 128": (FP16, 300, 260, 6, 2, 64, 48, 128, 128, 0.4, 3, 2),
    "key blocks of 16": (FP16, 120, 333, 3, 1, 64, 64, 64, 16, 0.4, 1, 2),
    "key blocks of 48, one head": (FP16, 140, 333, 2, 2, 56, 64, 64, 48, 0.4, 2, 2),
    "blocks of 192 and 256": (BF16, 330, 520, 2, 1, 72, 128, 192, 256, 0.6, 2, 1),
    "a long tile": (FP16, 400, 700, 8, 1, 64, 64, 64, 128, 0.15, 4, 1),
}


class Library(IndexLibraryOnCpu):
    def lists(self, params: IndexBwdKeysParams) -> list[int]:
        at = (ctypes.c_int64 * 4)()
        self.ask("make_lists", ctypes.byref(params), at)
        return list(at)


@pytest.fixture(scope="module")
def library(compile_folder) -> Library:
    return Library(compile_folder / "index_keys", SOURCE, ("bwd_keys", "bwd_keys_workspace"), ("make_lists",))


@pytest.fixture(autouse=True)
def on_the_cpu(monkeypatch, library) -> None:
    run_on_the_cpu(monkeypatch, library)


def draw_blocks(case: tuple, gen: torch.Generator) -> torch.Tensor:
    """With a row and a column of none for the first head, and a column of all for the last."""
    tokens, keys, heads, q_block, k_block, share = case[1], case[2], case[4], case[7], case[8], case[9]
    blocks = torch.rand((heads, -(-tokens // q_block), -(-keys // k_block)), generator=gen) < share
    blocks[-1, :, -1] = True
    blocks[0, 1], blocks[0, :, 1] = False, False
    return blocks


def draw(case: tuple, seed: int) -> IndexCall:
    """With NaN in all rows that take part in nothing."""
    print(f"seed {seed}")
    dtype, tokens, keys, heads_q, heads_kv, dim, dim_v, q_block, k_block, *_ = case
    gen = torch.Generator().manual_seed(seed)
    blocks = draw_blocks(case, gen)
    shapes = ((tokens, heads_q, dim), (keys, heads_kv, dim), (keys, heads_kv, dim_v), (tokens, heads_q, dim_v))
    q, k, v, dout = (torch.randn(s, generator=gen).to(dtype) for s in shapes)
    poison_unseen(blocks, q_block, k_block, (q, dout), (k, v))
    call = IndexCall(q, k, v, dout, lists_of_blocks(blocks, q_block, k_block, keys))
    assert is_key_stationary(call.problem(), call.lists)
    return call


@pytest.mark.parametrize("name", CASES)
def test_gradients(library, name, monkeypatch):
    """Rows that see or are seen by nothing get zeros, whatever is in them."""
    monkeypatch.setenv("MAGI_ATTENTION_INDEX_BACKWARD", "keys")
    case = CASES[name]
    monkeypatch.setattr(launches, "HEAD_SPLITS", case[11])
    seed = sum(case[1:9])
    call = draw(case, seed)
    library.use(case[10], seed)
    call.check_backward()
    if name == "key blocks of 16":
        call.check_gradients_of_lse()


@pytest.mark.parametrize("seed", range(6))
def test_lists_and_order(library, seed):
    """Every list has the query blocks of its tile; every head of every tile is in one work tile, heads in order."""
    print(f"seed {seed}")
    gen = torch.Generator().manual_seed(seed)

    def pick(*of: int) -> int:
        return of[int(torch.randint(len(of), (1,), generator=gen))]

    heads, group, q_block, k_block = pick(1, 3), pick(1, 5, 8), pick(64, 192), pick(16, 48, 64, 128, 384)
    tokens, keys, parts, sms = pick(1, 5000, 30_000), pick(7, 2000, 5000), pick(1, 2, 3), pick(1, 5, 60)
    blocks = torch.rand((heads, -(-tokens // q_block), -(-keys // k_block)), generator=gen) < pick(1, 5, 9) / 10
    blocks[-1, :, 0] = True
    lists = lists_of_blocks(blocks, q_block, k_block, keys)
    params = IndexBwdKeysParams(
        version=abi.ABI_VERSION, dtype=abi.FP16, total_q=tokens, total_k=keys, heads_q=heads * group, heads_kv=heads,
        head_dim=8, head_dim_v=8, q_block=q_block, k_block=k_block, max_entries=lists.rows.shape[2], softmax_scale=1.0,
        num_head_splits=parts, lists=lists.rows.data_ptr(), counts=lists.counts.data_ptr(),
    )  # fmt: skip
    library.use(sms, seed)
    memory = aligned(torch.zeros(_workspace(library, params), dtype=torch.uint8))
    params.workspace = memory.data_ptr()
    entries_at, tiles_at, work_tiles_at, count_at = library.lists(params)
    tiles, num_lists = -(-keys // 128), blocks.shape[1]

    def words(begin: int, count: int) -> torch.Tensor:
        return memory[begin : begin + 4 * count].view(torch.int32)

    entries = words(entries_at, heads * tiles * num_lists).view(heads, tiles, num_lists)
    counts = words(tiles_at, 2 * heads * tiles).view(heads, tiles, 2)
    granules = blocks.repeat_interleave(k_block // 16, 2)
    padded = torch.zeros((heads, num_lists, 8 * (tiles + 3)), dtype=torch.bool)
    padded[..., : min(granules.shape[2], padded.shape[2])] = granules[..., : padded.shape[2]]
    bits = (padded[..., : 8 * tiles].unflatten(2, (tiles, 8)) * 2 ** torch.arange(8)).sum(-1)
    for head in range(heads):
        for tile in range(tiles):
            seen = bits[head, :, tile]
            want = (torch.arange(num_lists) << 8 | seen)[seen > 0]
            assert counts[head, tile, 0] == len(want)
            assert torch.equal(entries[head, tile, : len(want)].long(), want)
            assert counts[head, tile, 1] == int(seen.max() if len(want) == 1 else _any_bits(seen))
    work_tiles = words(work_tiles_at, 2 * int(words(count_at, 1))).view(-1, 2).tolist()
    done: dict[int, int] = {}
    for number, word in work_tiles:
        first, count = word & 255, word >> 8 & 255
        assert count > 0 and done.get(number, 0) == first, "the parts of a tile follow one another"
        assert word >> 16 == counts.flatten(0, 1)[number, 1]
        done[number] = first + count
    assert done == {number: group for number in range(heads * tiles)}


def _any_bits(words: torch.Tensor) -> int:
    found = 0
    for word in words.tolist():
        found |= word
    return found


def _workspace(library: Library, params: IndexBwdKeysParams) -> int:
    need = ctypes.c_int64()
    library.check(library._library.magi_ffa_index_bwd_keys_workspace(bytes(params), ctypes.byref(need)), "")
    return need.value


def test_which_backward_runs(monkeypatch):
    lists = lists_of_blocks(torch.ones((2, 20, 50), dtype=torch.bool), 128, 128, 50 * 128)
    q, k = torch.empty((20 * 128, 8, 64), device="meta"), torch.empty((50 * 128, 2, 64), device="meta")

    def choice(lists: PreparedIndices = lists, is_deterministic: bool = False) -> bool:
        options = options_of(0.2, 0.0, "sh", is_deterministic, 0)
        return is_key_stationary(IndexProblem.of_lists(q, k, k, options, lists, needs_backward=True), lists)

    assert choice() and not choice(is_deterministic=True)
    assert not choice(lists._replace(k_block_size=32)) and not choice(lists._replace(q_block_size=32))
    assert not choice(lists._replace(k_end=torch.ones(20, dtype=torch.int64)))
    assert not choice(lists._replace(total_k=10 * 128)), "too few tiles"
    monkeypatch.setenv("MAGI_ATTENTION_INDEX_BACKWARD", "queries")
    assert not choice()
    monkeypatch.setenv("MAGI_ATTENTION_INDEX_BACKWARD", "keys")
    assert choice(lists._replace(k_block_size=32)) and not choice(is_deterministic=True)
