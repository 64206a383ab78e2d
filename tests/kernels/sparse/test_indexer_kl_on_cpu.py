# SPDX-License-Identifier: Apache-2.0
"""The divergence of the indexer over lists and its gradients, the Hopper kernels compiled for the CPU, against plain
torch in float64."""

from __future__ import annotations

import random
from pathlib import Path

import pytest
import torch
from hopper_library import aligned, memory_like
from index_on_cpu import IndexLibraryOnCpu

from magi_attention.kernels.index_attn import prepare_indices
from magi_attention.kernels.indexer import kl_hopper
from magi_attention.native.index.abi import FUNCTIONS
from magi_attention.testing.indexer_kl import KlProblem, random_kl

SOURCE = Path(__file__).with_name("indexer_kl_on_cpu.cpp")
BF16, FP16 = torch.bfloat16, torch.float16
# dtype, queries, keys, index heads, index columns, query heads, kv heads, columns, entries
CASES = {
    "64 heads of MLA": (BF16, 5, 300, 64, 128, 64, 1, 576, 200),
    "128 heads of MLA": (FP16, 4, 200, 64, 128, 128, 1, 576, 130),
    "columns of 64": (BF16, 7, 90, 64, 64, 32, 1, 128, 64),
    "3 heads, 24 columns": (FP16, 6, 150, 3, 24, 7, 1, 40, 65),
    "40 heads, 72 columns": (BF16, 5, 140, 40, 72, 100, 1, 200, 100),
    "12 heads on 12": (BF16, 6, 120, 8, 64, 12, 12, 192, 90),
    "96 heads on 8": (FP16, 4, 130, 16, 32, 96, 8, 128, 70),
    "60 heads on 3": (BF16, 4, 110, 16, 40, 60, 3, 64, 67),
}


@pytest.fixture(scope="module")
def library(compile_folder) -> IndexLibraryOnCpu:
    class Library(IndexLibraryOnCpu):
        def _bind(self) -> None:
            for name in ("magi_ffa_indexer_kl_fwd", "magi_ffa_indexer_kl_bwd", "magi_ffa_index_sum"):
                self._library[name].restype, self._library[name].argtypes = FUNCTIONS[name]
            self.sum_raw = self._entry("magi_ffa_index_sum")

    return Library(compile_folder / "indexer_kl", SOURCE, ())


@pytest.fixture(autouse=True)
def memory_that_is_not_clean(monkeypatch) -> None:
    monkeypatch.setattr(kl_hopper, "_empty", lambda shape, **of: memory_like(torch.empty(shape, **of)))


def run(library, of: KlProblem, in_order: bool = False) -> tuple[torch.Tensor, ...]:
    """Divergences and gradients."""
    indexer = [aligned(x) for x in (of.q_index, of.k_index, of.weights)]
    lists = prepare_indices(of.lists[:, None], len(of.k), deterministic=in_order)  # as attention's backward has them
    *saved, targets = kl_hopper.forward(library, *indexer, aligned(of.q), aligned(of.k), of.lse, lists, of.scale, 0)
    grads = kl_hopper.backward(library, of.grad, *saved[1:], targets, *indexer, lists, in_order, 0)
    return saved[0], *grads


@pytest.mark.parametrize("name", CASES)
def test_divergences_and_gradients(library, name):
    """By some CTAs, in several orders of their threads."""
    for seed in range(3):
        print(f"seed {seed}")
        of = random_kl(torch.Generator().manual_seed(seed), *CASES[name])
        library.use(1 + seed, seed)
        of.check(*run(library, of))


@pytest.mark.parametrize("name", ["64 heads of MLA", "3 heads, 24 columns"])
def test_in_order_the_same_bits(library, name, monkeypatch):
    """Shares of two queries at a time; each call takes another order of threads."""
    of = random_kl(torch.Generator().manual_seed(4), *CASES[name])
    monkeypatch.setattr(kl_hopper, "SHARES_BYTES", 2 * 4 * CASES[name][8] * CASES[name][4])
    found = []
    for seed in range(3):
        library.use(1 + seed, seed)
        found.append(run(library, of, in_order=True))
        of.check(*found[-1])
    assert all(torch.equal(a, b) for other in found[1:] for a, b in zip(found[0], other))


def test_small_gradients_of_small_weights(library):
    """A mean over very many queries, and weights far below 1: float16 would lose both in the products."""
    of = random_kl(torch.Generator().manual_seed(5), *CASES["3 heads, 24 columns"])
    of.weights *= 2.0**-12
    of.grad *= 2.0**-10
    large = of.scaled(grad=2.0**20)
    library.use(2, 5)
    found, wanted = run(library, of), run(library, large)
    assert torch.equal(found[0], wanted[0]) and float(found[3].abs().max()) > 0
    torch.testing.assert_close(found[3] * 2.0**20, wanted[3], rtol=1e-5, atol=0)
    large.check(*wanted)


def test_it_takes_what_python_says(library):
    """Shapes of attention that the library takes are those that ``has_tile`` lets through."""
    rng = random.Random(7)
    for _ in range(60):
        heads_kv = rng.choice((1, 1, 2, 3, 8, 9, 10, 36, 37))
        heads, dim = heads_kv * rng.choice((1, 3, 16, 17, 64, 65, 128)), rng.choice((40, 64, 128, 192, 576, 584))
        of = random_kl(torch.Generator().manual_seed(1), BF16, 3, 4, 1, 8, heads, heads_kv, dim, 1)
        of.lists[:] = -1  # nothing to compute
        if kl_hopper.has_tile(heads, heads_kv, dim):
            run(library, of)
        else:
            with pytest.raises(AssertionError, match="heads of"):
                run(library, of)


def test_what_it_does_not_take(library):
    of = random_kl(torch.Generator().manual_seed(6), BF16, 3, 20, 65, 64, 4, 1, 64, 9)
    with pytest.raises(AssertionError, match="give 1 to 64 heads"):
        run(library, of)
    of = random_kl(torch.Generator().manual_seed(6), BF16, 3, 20, 4, 64, 129, 1, 64, 9)
    with pytest.raises(AssertionError, match="give 1 to 128 heads"):
        run(library, of)
    of = random_kl(torch.Generator().manual_seed(6), BF16, 3, 20, 4, 64, 72, 3, 256, 9)
    with pytest.raises(AssertionError, match="up to 9 of up to 576 columns in all"):
        run(library, of)
    assert kl_hopper.library_for(of.q_index, of.k_index, of.q, of.k, of.lists, 0.0) is None, "on the CPU"
