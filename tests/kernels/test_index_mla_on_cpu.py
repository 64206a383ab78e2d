# SPDX-License-Identifier: Apache-2.0
"""Index attention in MLA's form, where values are columns of the keys, compiled for the CPU, against the reference in
float64."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from hopper_library import aligned, hopper_library
from index_library_on_cpu import IndexLibraryOnCpu, run_on_the_cpu

from magi_attention.kernels.index_attn import ffa
from magi_attention.kernels.index_attn.prepare import prepare_indices
from magi_attention.kernels.index_attn.reference import IndexReference
from magi_attention.kernels.index_attn.types import IndexProblem
from magi_attention.kernels.reference.operands import delta_with_dlse
from magi_attention.kernels.types import options_of
from magi_attention.native import abi

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
    kernels = hopper_library(compile_folder / "index_mla", SOURCE)
    return IndexLibraryOnCpu(kernels, tuple(f"magi_ffa_index_{name}" for name in ENTRIES), ())


@pytest.fixture(autouse=True)
def on_the_cpu(monkeypatch, library) -> None:
    run_on_the_cpu(monkeypatch)
    monkeypatch.setattr(ffa.IndexFfa, "_library", staticmethod(lambda: library))


class Call:
    """A problem with a list of no keys and one of few, NaN in keys that nobody lists, and its truth."""

    def __init__(self, case: tuple, seed: int) -> None:
        dtype, tokens, keys, heads_q, heads_kv, dim, self.dim_v, width, factor, blocks = case
        gen = torch.Generator().manual_seed(seed)
        q_block, k_block = blocks.get("q_block_size", 1), blocks.get("k_block_size", 1)
        indices = torch.randint(0, -(-keys // k_block), (-(-tokens // q_block), heads_kv, width), generator=gen)
        indices[0, 0] = -1
        indices[1, -1, 3:] = -1
        self.lists = prepare_indices(indices.int(), keys, **blocks)
        shapes = (tokens, heads_q, dim), (keys, heads_kv, dim), (tokens, heads_q, self.dim_v)
        q, k, dout = (torch.randn(s, generator=gen) for s in shapes)
        is_listed = torch.zeros((-(-keys // k_block), heads_kv), dtype=torch.bool)
        for head in range(heads_kv):
            listed = indices[:, head]
            is_listed[listed[listed >= 0], head] = True
        k[~is_listed.repeat_interleave(k_block, 0)[:keys]] = float("nan")
        self.q, self.k, self.dout = (aligned(x.to(dtype)) for x in (q * factor, k, dout))
        self.scale = dim**-0.5
        exact = self.q.double(), self.k.double()
        problem = self.problem(*exact)
        self.out, self.lse = IndexReference().forward(problem, *exact, None, self.lists)
        self.grads = IndexReference().backward(
            problem, self.dout.double(), *exact, None, self.out, self.lse, self.lists
        )

    def problem(self, q: torch.Tensor, k: torch.Tensor, deterministic: bool = False) -> IndexProblem:
        options = options_of(self.scale, 0.0, "sh", deterministic, 0)
        return IndexProblem.of_lists(q, k, None, options, self.lists, needs_backward=True, head_dim_v=self.dim_v)

    def run(self, deterministic: bool = False) -> list[torch.Tensor]:
        """out, lse, dq and dk by the kernels."""
        problem, x = self.problem(self.q, self.k, deterministic), (self.q, self.k, None)
        out, lse = ffa.IndexFfa().forward(problem, *x, self.lists)
        dq, dk, dv = ffa.IndexFfa().backward(
            problem, self.dout, *x, aligned(self.out.to(out.dtype)), aligned(self.lse.float()), self.lists
        )
        assert dv is None
        return [out, lse, dq, dk]


def assert_near(name: str, got: torch.Tensor, want: torch.Tensor, size: float) -> None:
    """Within what 16-bit weights and results explain, and infinite in the same places."""
    assert torch.equal(torch.isfinite(got), torch.isfinite(want)), name
    got, want = (torch.nan_to_num(x.double(), neginf=0.0) for x in (got, want))
    off, allowed = (got - want).abs().max(), 6e-3 * size * (1 + want.abs().max())
    assert off <= allowed, f"{name} is off by {off}, allowed {allowed}"


@pytest.mark.parametrize("name", CASES)
def test_both_directions(library, name):
    """By two CTAs, in three orders of their threads."""
    for seed in range(3):
        print(f"seed {seed}")
        call = Call(CASES[name], seed)
        library.use(2, seed)
        for label, got, want in zip(("out", "lse", "dq", "dk"), call.run(), (call.out, call.lse, *call.grads)):
            assert_near(label, got, want, 1.0 if label in ("out", "lse") else 2.0)


@pytest.mark.parametrize("name", ["128 heads", "8 heads on 2, narrow", "4 queries share a list"])
def test_in_order_the_same_bits(library, name, monkeypatch):
    """Shares of one list at a time; each call takes another order of threads."""
    monkeypatch.setattr(ffa, "SHARES_BYTES", 1)
    call, found = Call(CASES[name], 4), []
    for seed in range(2):
        print(f"seed {seed}")
        library.use(2 + seed, seed)
        found.append(call.run(deterministic=True))
    for label, got, want in zip(("out", "lse", "dq", "dk"), found[0], (call.out, call.lse, *call.grads)):
        assert_near(label, got, want, 2.0)
    assert all(torch.equal(a, b) for a, b in zip(*found))


@pytest.mark.parametrize("deterministic", [False, True])
def test_gradients_of_lse(library, deterministic):
    """With delta the kernels do not read out, whatever is in it."""
    call = Call(CASES["8 heads on 2, narrow"], 6)
    exact = call.q.double(), call.k.double(), None
    delta = delta_with_dlse(call.out, call.dout.double(), call.lse, call.lse.sin())
    rest = call.lists, delta
    wanted = IndexReference().backward(
        call.problem(*exact[:2]), call.dout.double(), *exact, call.out, call.lse, *rest
    )
    assert (wanted[0] - call.grads[0]).abs().max() > 0.1
    library.use(2, 6)
    poison, lse = torch.full_like(call.out, float("nan")).to(call.q.dtype), aligned(call.lse.float())
    problem = call.problem(call.q, call.k, deterministic)
    grads = ffa.IndexFfa().backward(problem, call.dout, call.q, call.k, None, aligned(poison), lse, *rest)
    for label, got, want in zip(("dq", "dk"), grads, wanted):
        assert_near(label, got, want, 2.0)


def test_which_head_dims(library):
    assert library.has(abi.BF16, 576, 512, False) and library.has(abi.BF16, 136, 136, False)
    assert not library.has(abi.BF16, 584, 512, False) and not library.has(abi.BF16, 576, 520, False)
    assert not library.has(abi.BF16, 576, 512), "there is no kernel of these head dims that takes values"


def test_more_values_than_columns(library):
    params = {"dtype": abi.BF16, "heads_q": 64, "heads_kv": 1, "q_block": 1, "k_block": 1, "softmax_scale": 1.0}
    with pytest.raises(AssertionError, match="columns of values in 320 of keys"):
        library.forward(**params, head_dim=320, head_dim_v=328)
