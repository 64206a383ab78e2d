# SPDX-License-Identifier: Apache-2.0
"""Index attention in MLA's form, where values are columns of the keys, compiled for the CPU, against the reference in
float64."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from index_on_cpu import IndexCall, IndexLibraryOnCpu, run_on_the_cpu

from magi_attention.kernels.index_attn import launches
from magi_attention.kernels.index_attn.prepare import prepare_indices
from magi_attention.native import abi
from magi_attention.native.index.abi import IndexFwdParams

SOURCE = Path(__file__).with_name("index_mla_on_cpu.cpp")
ENTRIES = ("fwd", "bwd", "tiles", "has_variant", "sum")
# dtype, tokens, keys, query heads, kv heads, head dims, entries, factor of q, and options of the lists
CASES = {
    "128 heads": (torch.bfloat16, 3, 200, 128, 1, 576, 512, 130, 1.0, {}),
    "128 heads, large scores": (torch.bfloat16, 3, 400, 128, 1, 576, 512, 270, 30.0, {}),
    "64 heads": (torch.float16, 3, 300, 64, 1, 576, 512, 300, 1.0, {}),
    "100 heads": (torch.bfloat16, 3, 150, 100, 1, 576, 512, 65, 1.0, {}),
    "8 heads on 2, narrow": (torch.bfloat16, 4, 100, 16, 2, 320, 256, 70, 1.0, {}),
    "all columns are values": (torch.float16, 3, 90, 32, 1, 200, 200, 64, 3.0, {}),
    "4 queries share a list": (torch.bfloat16, 10, 120, 16, 1, 264, 136, 90, 1.0, {"q_block_size": 4}),
    "blocks of keys": (torch.float16, 3, 210, 64, 1, 576, 512, 5, 1.0, {"k_block_size": 48}),
}


@pytest.fixture(scope="module")
def library(compile_folder) -> IndexLibraryOnCpu:
    return IndexLibraryOnCpu(compile_folder / "index_mla", SOURCE, ENTRIES)


@pytest.fixture(autouse=True)
def on_the_cpu(monkeypatch, library) -> None:
    run_on_the_cpu(monkeypatch, library)


def draw(case: tuple, seed: int) -> IndexCall:
    """With a list of no keys and one of few, and NaN in keys that nobody lists."""
    print(f"seed {seed}")
    dtype, tokens, keys, heads_q, heads_kv, dim, dim_v, width, factor, blocks = case
    gen = torch.Generator().manual_seed(seed)
    q_block, k_block = blocks.get("q_block_size", 1), blocks.get("k_block_size", 1)
    indices = torch.randint(0, -(-keys // k_block), (-(-tokens // q_block), heads_kv, width), generator=gen)
    indices[0, 0] = -1
    indices[1, -1, 3:] = -1
    shapes = (tokens, heads_q, dim), (keys, heads_kv, dim), (tokens, heads_q, dim_v)
    q, k, dout = (torch.randn(s, generator=gen) for s in shapes)
    is_listed = torch.zeros((-(-keys // k_block), heads_kv), dtype=torch.bool)
    for head in range(heads_kv):
        listed = indices[:, head]
        is_listed[listed[listed >= 0], head] = True
    k[~is_listed.repeat_interleave(k_block, 0)[:keys]] = float("nan")
    operands = (q * factor).to(dtype), k.to(dtype), None, dout.to(dtype)
    return IndexCall(*operands, prepare_indices(indices.int(), keys, **blocks), dim**-0.5)


@pytest.mark.parametrize("name", CASES)
def test_both_directions(library, name):
    """By two CTAs, in three orders of their threads."""
    for seed in range(3):
        call = draw(CASES[name], seed)
        library.use(2, seed)
        call.check_forward()
        call.check_backward(size=2.0)


@pytest.mark.parametrize("name", ["128 heads", "8 heads on 2, narrow", "4 queries share a list"])
def test_in_order_the_same_bits(library, name, monkeypatch):
    """Shares of one list at a time; each call takes another order of threads."""
    monkeypatch.setattr(launches, "SHARES_BYTES", 1)
    call, found = draw(CASES[name], 4), []
    for seed in range(2):
        library.use(2 + seed, seed)
        found.append((*call.check_forward(), *call.check_backward(True, 2.0)))
    assert all(torch.equal(a, b) for a, b in zip(*found))


@pytest.mark.parametrize("deterministic", [False, True])
def test_gradients_of_lse(library, deterministic):
    call = draw(CASES["8 heads on 2, narrow"], 6)
    library.use(2, 6)
    call.check_gradients_of_lse(deterministic, 2.0)


def test_which_head_dims(library):
    assert library.has(abi.BF16, 576, 512, False) and library.has(abi.BF16, 136, 136, False)
    assert not library.has(abi.BF16, 584, 512, False) and not library.has(abi.BF16, 576, 520, False)
    assert not library.has(abi.BF16, 576, 512), "there is no kernel of these head dims that takes values"


def test_more_values_than_columns(library):
    params = {"dtype": abi.BF16, "heads_q": 64, "heads_kv": 1, "q_block": 1, "k_block": 1, "softmax_scale": 1.0}
    with pytest.raises(AssertionError, match="columns of values in 320 of keys"):
        library.forward_raw(bytes(IndexFwdParams(abi.ABI_VERSION, **params, head_dim=320, head_dim_v=328)))
