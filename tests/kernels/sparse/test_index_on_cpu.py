# SPDX-License-Identifier: Apache-2.0
"""The Hopper kernels of index attention, compiled for the CPU, against the reference in float64; and those that make
its lists, against the torch operations."""

from __future__ import annotations

from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from hopper_library import aligned
from index_on_cpu import IndexCall, IndexLibraryOnCpu, run_on_the_cpu
from torch.utils._python_dispatch import TorchDispatchMode

from magi_attention.kernels.index_attn import launches, prepare_ffa
from magi_attention.kernels.index_attn.invert import key_counts, with_readers
from magi_attention.kernels.index_attn.prepare import blocks_op, prepare_indices, prepare_op
from magi_attention.native.index.abi import SUM_TAIL

SOURCE = Path(__file__).with_name("index_on_cpu.cpp")
ENTRIES = ("fwd", "bwd", "tiles", "has_variant", "sum", "prepare", "blocks")
BF16, FP16 = torch.bfloat16, torch.float16
# dtype, tokens, keys, query heads, kv heads, head dims, entries, then block sizes and bounds
CASES = {
    "64 heads": (BF16, 3, 150, 64, 1, 128, 128, 140, {}),
    "8 heads on 2": (BF16, 3, 90, 8, 2, 72, 56, 70, {}),
    "128 heads": (BF16, 3, 400, 128, 1, 128, 120, 300, {}),
    "96 heads": (BF16, 2, 300, 96, 1, 128, 128, 129, {}),
    "64 heads, small": (FP16, 3, 200, 128, 2, 64, 64, 130, {}),
    "128 heads, small": (FP16, 3, 300, 256, 2, 64, 40, 260, {}),
    "blocks of 128": (FP16, 200, 300, 2, 2, 64, 64, 2, {"q_block_size": 128, "k_block_size": 128}),
    "blocks of 64": (FP16, 150, 250, 1, 1, 64, 48, 3, {"q_block_size": 64, "k_block_size": 64}),
    "4 heads, blocks of 8 and 24": (FP16, 21, 90, 8, 2, 64, 64, 3, {"q_block_size": 8, "k_block_size": 24}),
    "2 heads, blocks of 192": (BF16, 200, 210, 2, 1, 64, 64, 2, {"q_block_size": 192, "k_block_size": 100}),
    "blocks within bounds": (FP16, 3, 200, 24, 2, 64, 64, 4, {"k_block_size": 16, "bounds": True}),
}


@pytest.fixture(scope="module")
def library(compile_folder) -> IndexLibraryOnCpu:
    return IndexLibraryOnCpu(compile_folder / "index", SOURCE, ENTRIES)


@pytest.fixture(autouse=True)
def on_the_cpu(monkeypatch, library) -> None:
    run_on_the_cpu(monkeypatch, library)
    monkeypatch.setenv("MAGI_ATTENTION_INDEX_FORWARD", "gather")
    monkeypatch.setenv("MAGI_ATTENTION_INDEX_BACKWARD", "queries")
    monkeypatch.setattr(torch.cuda, "device", lambda device: nullcontext())
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: SimpleNamespace(cuda_stream=0))


def draw(case: tuple, seed: int) -> IndexCall:
    """With a list of no keys and one of few."""
    print(f"seed {seed}")
    dtype, tokens, keys, heads_q, heads_kv, dim, dim_v, width, blocks = case
    blocks = dict(blocks)
    q_block, k_block = blocks.get("q_block_size", 1), blocks.get("k_block_size", 1)
    gen, num_lists = torch.Generator().manual_seed(seed), -(-tokens // q_block)
    shapes = ((tokens, heads_q, dim), (keys, heads_kv, dim), (keys, heads_kv, dim_v), (tokens, heads_q, dim_v))
    operands = [torch.randn(s, generator=gen).to(dtype) for s in shapes]
    if blocks.pop("bounds", False):
        blocks["k_start"] = torch.randint(0, 50, (num_lists,), generator=gen)
        blocks["k_end"] = torch.randint(60, keys + 1, (num_lists,), generator=gen)
    most = -(-keys // k_block) - (4 if "k_start" in blocks else 0)
    indices = torch.randint(0, most, (num_lists, heads_kv, width), generator=gen, dtype=torch.int32)
    if num_lists > 2:
        indices[0, 0] = -1
        indices[1, -1, int(torch.randint(1, width, (1,), generator=gen)) :] = -1
    return IndexCall(*operands, prepare_indices(indices, keys, **blocks))


@pytest.mark.parametrize("name", CASES)
def test_both_directions(library, name):
    call = draw(CASES[name], 1)
    library.use(2, 1)
    call.check_forward()
    call.check_backward()


def test_forward_has_the_same_bits_whatever_lies_in_shared_memory(library):
    """The seed also draws what lies there. Few rows of a tile are used, and rows are rescaled together."""
    call, found = draw((BF16, 3, 500, 8, 2, 72, 56, 400, {}), 5), []
    for seed in range(6):
        library.use(2, seed)
        found.append(call.check_forward())
    assert all(torch.equal(a, b) for other in found[1:] for a, b in zip(found[0], other))


@pytest.mark.parametrize(
    "name", ["8 heads on 2", "4 heads, blocks of 8 and 24", "2 heads, blocks of 192", "blocks within bounds"]
)
def test_in_order_the_same_bits(library, name, monkeypatch):
    """Shares of one list at a time; each call takes another order of threads."""
    monkeypatch.setattr(launches, "SHARES_BYTES", 1)
    call, found = draw(CASES[name], 5), []
    for seed in range(2):
        library.use(2, seed)
        found.append(call.check_backward(deterministic=True))
    assert all(torch.equal(a, b) for a, b in zip(*found))
    for deterministic in (False, True):
        call.check_gradients_of_lse(deterministic)


class Sorts(TorchDispatchMode):
    """How often anything is sorted; what is inside an op of ours counts as that."""

    count = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.count += "sort" in str(func) or "index_readers" in str(func)
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("name", ["8 heads on 2", "4 heads, blocks of 8 and 24", "blocks within bounds"])
def test_lists_are_inverted_once(library, name, monkeypatch):
    """Those prepared for deterministic gradients are sorted by no backward, others by each; the bits are the same."""
    monkeypatch.setattr(launches, "SHARES_BYTES", 40_000)  # some lists at a time
    call, counts, found = draw(CASES[name], 3), [], []
    plain = call.lists
    assert plain.readers is None
    for call.lists in (plain, plain, with_readers(plain), with_readers(plain)):
        library.use(2, len(found))
        with Sorts() as sorts:
            found.append(call.check_backward(deterministic=True))
        counts.append(sorts.count)
    assert counts == [1, 1, 0, 0]
    assert all(torch.equal(*pair) for other in found[1:] for pair in zip(found[0], other))


@pytest.mark.parametrize("seed", range(6))
def test_sums_of_shares(library, seed):
    """Up to 90 lists read a key, and some lists are summed at a time. Float32 numbers are added one by one, in the
    order of first keys of blocks, lists and tiles. Shares of keys that a list does not see are NaN."""
    print(f"seed {seed}")
    gen = torch.Generator().manual_seed(seed)
    num_lists, heads, width, total_k, block, tiles = 90, 1 + seed % 2, 3, 7, (1, 3, 4)[seed % 3], 1 + seed % 3
    dim = (8, 132)[seed // 3]
    indices = torch.randint(-1, -(-total_k // block), (num_lists, heads, width), generator=gen)
    bounds = {"k_end": torch.randint(0, total_k + 1, (num_lists,), generator=gen)}
    if seed > 1:
        bounds["k_start"] = torch.randint(0, 3, (num_lists,), generator=gen)
        indices[indices * block + bounds["k_start"][:, None, None] >= total_k] = -1
    lists = prepare_indices(indices, total_k, k_block_size=block, **bounds, deterministic=True)
    counts = key_counts(lists)
    shares = torch.randn((num_lists, heads, tiles, width * block, dim), generator=gen)
    slots = torch.arange(width * block)
    is_seen = slots < counts[..., None]
    shares.masked_fill_(~is_seen[:, :, None, :, None], float("nan"))
    sums = torch.randn((total_k, heads, dim), generator=gen)
    want, starts = sums.clone(), bounds.get("k_start", torch.zeros(num_lists, dtype=torch.int64))
    reads = [
        (int(starts[number] + lists.rows[number, head, slot // block] * block), number, head, int(slot))
        for number, head, slot in is_seen.nonzero().tolist()
    ]
    split = int(torch.randint(0, num_lists, (1,), generator=gen))
    library.use(2, seed)
    for begin, end in ((0, split), (split, num_lists)):
        for first, number, head, slot in sorted(x for x in reads if begin <= x[1] < end):
            for tile in range(tiles):
                want[first + slot % block, head] += shares[number, head, tile, slot]
        prefix = library.sum_prefix(
            total_k=total_k, heads_kv=heads, k_block=block, max_entries=width, num_tiles=tiles, width=dim,
            has_starts=int("k_start" in bounds), list_begin=begin, list_end=end,
        )  # fmt: skip
        part = aligned(shares[begin:end])
        given = lists.readers, lists.reader_begins, counts, part, sums
        library.sum_raw(prefix + SUM_TAIL.pack(*(x.data_ptr() for x in given), 0))
        assert torch.equal(sums, want)


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64], ids=str)
@pytest.mark.parametrize(
    "shape", [(3, 2, 5, 9, 1), (2, 1, 300, 20_000, 1), (4, 1, 40, 33, 4), (1, 3, 1, 1, 1), (2, 2, 0, 5, 1)], ids=str
)
def test_prepared_lists(library, shape, dtype):
    lists, heads, width, total_k, block = shape
    seed = sum(shape)
    print(f"seed {seed}")
    gen = torch.Generator().manual_seed(seed)
    library.use(2, seed)
    most = -(-total_k // block)
    for start in (None, torch.randint(0, total_k, (lists,), generator=gen)):
        indices = torch.randint(-most // 3, most, (lists, heads, width), generator=gen).to(dtype)
        if start is not None:  # those that begin behind the last key are none on a GPU, and an error here
            first = indices.long() * block + start[:, None, None]
            indices[first >= total_k] = -1
        want = prepare_op(indices, total_k, block, start)
        got = prepare_ffa.prepare(library, indices, total_k, block, start)
        assert all(torch.equal(*pair) for pair in zip(got, want))
    beyond = torch.full((1, 1, 3), most, dtype=dtype)
    rows, counts = prepare_ffa.prepare(library, beyond, total_k, block, None)
    assert rows.tolist() == [[[-1, -1, -1]]] and counts.tolist() == [[0]]


@pytest.mark.parametrize("shape", [(5, 2, 70), (9, 1, 32), (1, 1, 1), (3, 2, 0)], ids=str)
def test_lists_of_blocks(library, shape):
    gen = torch.Generator().manual_seed(sum(shape))
    for share in (0.0, 0.3, 1.0):
        blocks = torch.rand(shape, generator=gen) < share
        assert all(torch.equal(*pair) for pair in zip(prepare_ffa.of_blocks(library, blocks), blocks_op(blocks)))
