# SPDX-License-Identifier: Apache-2.0
"""The Hopper kernels of index attention, compiled for the CPU, against the reference in float64."""

from __future__ import annotations

import ctypes
from contextlib import nullcontext
from pathlib import Path

import pytest
import torch
from hopper_library import aligned, hopper_library

from magi_attention.kernels.index_attn import ffa
from magi_attention.kernels.index_attn.prepare import prepare_indices
from magi_attention.kernels.index_attn.reference import IndexReference
from magi_attention.kernels.index_attn.types import IndexProblem
from magi_attention.kernels.reference.operands import delta_with_dlse
from magi_attention.kernels.types import options_of
from magi_attention.native import abi
from magi_attention.native.index_abi import IndexBwdParams, IndexFwdParams, IndexSumParams

SCALE = 0.2
SOURCE = Path(__file__).with_name("index_on_cpu.cpp")
# dtype, tokens, keys, query heads, kv heads, head dims, entries, then block sizes and bounds
CASES = {
    "64 heads": (torch.bfloat16, 3, 150, 64, 1, 128, 128, 140),
    "8 heads on 2": (torch.bfloat16, 3, 90, 8, 2, 72, 56, 70),
    "128 heads": (torch.bfloat16, 3, 400, 128, 1, 128, 120, 300),
    "96 heads": (torch.bfloat16, 2, 300, 96, 1, 128, 128, 129),
    "64 heads, small": (torch.float16, 3, 200, 128, 2, 64, 64, 130),
    "128 heads, small": (torch.float16, 3, 300, 256, 2, 64, 40, 260),
    "blocks of 128": (torch.float16, 200, 300, 2, 2, 64, 64, 2, {"q_block_size": 128, "k_block_size": 128}),
    "blocks of 64": (torch.float16, 150, 250, 1, 1, 64, 48, 3, {"q_block_size": 64, "k_block_size": 64}),
    "4 heads, blocks of 8 and 24": (torch.float16, 21, 90, 8, 2, 64, 64, 3, {"q_block_size": 8, "k_block_size": 24}),
    "2 heads, blocks of 192": (torch.bfloat16, 200, 210, 2, 1, 64, 64, 2, {"q_block_size": 192, "k_block_size": 100}),
    "blocks within bounds": (torch.float16, 3, 200, 24, 2, 64, 64, 4, {"k_block_size": 16, "bounds": True}),
}


@pytest.fixture(scope="module")
def kernels(compile_folder) -> ctypes.CDLL:
    library = hopper_library(compile_folder / "index", SOURCE)
    for name in ("index_forward", "index_backward", "index_delta", "index_sum"):
        getattr(library, name).restype = ctypes.c_char_p
    return library


class Call:
    """One problem: operands, lists, and the parameters that both directions share."""

    def __init__(self, case: tuple, seed: int) -> None:
        dtype, tokens, keys, heads_q, heads_kv, dim, dim_v, width, *more = case
        blocks = dict(more[0]) if more else {}
        q_block, k_block, num_lists = blocks.get("q_block_size", 1), blocks.get("k_block_size", 1), tokens
        gen = torch.Generator().manual_seed(seed)
        shapes = ((tokens, heads_q, dim), (keys, heads_kv, dim), (keys, heads_kv, dim_v), (tokens, heads_q, dim_v))
        self.q, self.k, self.v, self.dout = (aligned(torch.randn(s, generator=gen).to(dtype)) for s in shapes)
        num_lists = -(-tokens // q_block)
        if blocks.pop("bounds", False):
            blocks["k_start"] = torch.randint(0, 50, (num_lists,), generator=gen)
            blocks["k_end"] = torch.randint(60, keys + 1, (num_lists,), generator=gen)
        most = -(-keys // k_block) - (4 if "k_start" in blocks else 0)
        indices = torch.randint(0, most, (num_lists, heads_kv, width), generator=gen, dtype=torch.int32)
        if num_lists > 2:
            indices[0, 0] = -1
            indices[1, -1, int(torch.randint(1, width, (1,), generator=gen)) :] = -1
        self.lists = prepare_indices(indices, keys, **blocks)
        options = options_of(SCALE, 0.0, "sh", False, 0)
        exact = [x.double() for x in (self.q, self.k, self.v)]
        problem = IndexProblem.of_lists(*exact, options, self.lists, needs_backward=True)
        self.out, self.lse = IndexReference().forward(problem, *exact, self.lists)
        self.grads = IndexReference().backward(problem, self.dout.double(), *exact, self.out, self.lse, self.lists)
        self.held = ffa._lists(self.lists)
        self.out16 = aligned(self.out.to(dtype))
        self.lse32 = aligned(self.lse.float())
        self.common = {
            "version": abi.ABI_VERSION, "dtype": abi.BF16 if dtype == torch.bfloat16 else abi.FP16, "total_q": tokens,
            "total_k": keys, "heads_q": heads_q, "heads_kv": heads_kv, "head_dim": dim, "head_dim_v": dim_v,
            "q_block": q_block, "k_block": k_block, "max_entries": width, "softmax_scale": SCALE,
            **{name: x.data_ptr() for name, x in self.held.items()},
            **fields(q=self.q, k=self.k, v=self.v, out=self.out16),
        }  # fmt: skip


def fields(**tensors: torch.Tensor) -> dict[str, int]:
    """Addresses and strides."""
    found = {name: x.data_ptr() for name, x in tensors.items()}
    for name, x in tensors.items():
        found[f"{name}_stride_token"], found[f"{name}_stride_head"] = x.stride(0), x.stride(1)
    return found


def right(error: bytes | None) -> None:
    assert error is None, error.decode()


def assert_near(name: str, got: torch.Tensor, want: torch.Tensor, size: float = 1.0) -> None:
    """Within what 16-bit weights and results explain; ``size`` times as much where many are added."""
    assert torch.equal(torch.isfinite(got), torch.isfinite(want)), name
    got, want = (torch.nan_to_num(x.double(), neginf=0.0) for x in (got, want))
    off, allowed = (got - want).abs().max(), 6e-3 * size * (1 + want.abs().max())
    assert off <= allowed, f"{name} is off by {off}, allowed {allowed}"


@pytest.mark.parametrize("name", CASES)
def test_forward(kernels, name):
    seed = 1
    print(f"seed {seed}")
    call = Call(CASES[name], seed)
    out, lse = aligned(torch.full_like(call.out16, 7.0)), aligned(torch.full_like(call.lse32, 7.0))
    params = IndexFwdParams(**{**call.common, **fields(out=out), "lse": lse.data_ptr()})
    right(kernels.index_forward(ctypes.byref(params), 2, seed))
    assert_near("out", out, call.out)
    assert_near("lse", lse, call.lse)


def test_forward_has_the_same_bits_whatever_lies_in_shared_memory(kernels):
    """The seed also draws what lies there. Few rows of a tile are used, and rows are rescaled together."""
    call, found = Call((torch.bfloat16, 3, 500, 8, 2, 72, 56, 400), 5), []
    for seed in range(6):
        print(f"seed {seed}")
        out, lse = aligned(torch.full_like(call.out16, 7.0)), aligned(torch.full_like(call.lse32, 7.0))
        params = IndexFwdParams(**{**call.common, **fields(out=out), "lse": lse.data_ptr()})
        right(kernels.index_forward(ctypes.byref(params), 2, seed))
        found.append((out, lse))
    assert all(torch.equal(a, b) for other in found[1:] for a, b in zip(found[0], other))


@pytest.mark.parametrize("name", CASES)
def test_backward(kernels, name):
    """Sums in any order; of the tokens in two calls."""
    seed = 3
    print(f"seed {seed}")
    call = Call(CASES[name], seed)
    dq, delta = aligned(torch.full_like(call.q, 7.0)), aligned(torch.full_like(call.lse32, 7.0))
    dk, dv = (aligned(torch.zeros(x.shape)) for x in (call.k, call.v))
    common = {
        **call.common, **fields(dout=call.dout), "lse": call.lse32.data_ptr(), "delta": delta.data_ptr(),
        "dq": dq.data_ptr(), "dk": dk.data_ptr(), "dv": dv.data_ptr(),
    }  # fmt: skip
    right(kernels.index_delta(ctypes.byref(IndexBwdParams(**common))))
    assert_near("delta", delta, (call.dout.double() * call.out16.double()).sum(-1), 4.0)
    for begin, end in ((0, 1), (1, call.lists.rows.shape[0])):
        params = IndexBwdParams(**common, list_begin=begin, list_end=end)
        right(kernels.index_backward(ctypes.byref(params), 2, seed))
    for label, x, want in zip(("dq", "dk", "dv"), (dq, dk * SCALE, dv), call.grads):
        assert_near(label, x, want, 3.0)


class EmulatedLibrary:
    """``IndexLibrary`` over the kernels for the CPU, on grids of 2 CTAs; every call takes another order of threads."""

    def __init__(self, kernels: ctypes.CDLL) -> None:
        self.kernels, self.seed, self.calls = kernels, 0, 0

    def forward(self, **fields: int | float) -> None:
        self._run(self.kernels.index_forward, IndexFwdParams(version=abi.ABI_VERSION, **fields), 2)

    def backward(self, **fields: int | float | None) -> None:
        params = IndexBwdParams(version=abi.ABI_VERSION, **fields)
        if params.out is not None:
            right(self.kernels.index_delta(ctypes.byref(params)))
        self._run(self.kernels.index_backward, params, 2)

    def sum_shares(self, **fields: int) -> None:
        right(self.kernels.index_sum(ctypes.byref(IndexSumParams(version=abi.ABI_VERSION, **fields))))

    def has(self, dtype: int, head_dim: int, head_dim_v: int, has_v: bool = True) -> bool:
        return has_v

    def tiles(self, heads_q: int, heads_kv: int, q_block: int, has_v: bool = True) -> int:
        return self.kernels.index_tiles(heads_q, heads_kv, q_block)

    def _run(self, kernel, params, grid: int) -> None:
        self.seed, self.calls = self.seed + 1, self.calls + 1
        right(kernel(ctypes.byref(params), grid, self.seed))


@pytest.mark.parametrize(
    "name", ["8 heads on 2", "4 heads, blocks of 8 and 24", "2 heads, blocks of 192", "blocks within bounds"]
)
def test_the_backend(kernels, name, monkeypatch):
    """Both directions as custom ops would call them; in order, with shares of one token at a time, the same bits."""
    library = EmulatedLibrary(kernels)
    monkeypatch.setattr(ffa.IndexFfa, "_library", staticmethod(lambda: library))
    monkeypatch.setattr(ffa, "_stream", lambda x: 0)
    monkeypatch.setattr(ffa, "SHARES_BYTES", 1)
    monkeypatch.setattr(torch.cuda, "device", lambda device: nullcontext())
    call = Call(CASES[name], seed=5)
    x = call.q, call.k, call.v
    grads = []
    for deterministic in (False, True, True):
        options = options_of(SCALE, 0.0, "sh", deterministic, 0)
        problem = IndexProblem.of_lists(*x, options, call.lists, needs_backward=True)
        out, lse = ffa.IndexFfa().forward(problem, *x, call.lists)
        assert_near("out", out, call.out)
        grads.append(ffa.IndexFfa().backward(problem, call.dout, *x, out, lse, call.lists))
        for label, got, want in zip(("dq", "dk", "dv"), grads[-1], call.grads):
            assert_near(label, got, want, 3.0)
    assert library.calls == 3 + 1 + 2 * call.lists.rows.shape[0]
    assert all(torch.equal(a, b) for a, b in zip(*grads[1:]))
    check_gradients_of_lse(call)


def check_gradients_of_lse(call: Call) -> None:
    """With delta the kernels do not read out, whatever is in it."""
    x, exact = (call.q, call.k, call.v), [x.double() for x in (call.q, call.k, call.v)]
    delta = delta_with_dlse(call.out, call.dout.double(), call.lse, call.lse.sin())
    for deterministic in (False, True):
        options = options_of(SCALE, 0.0, "sh", deterministic, 0)
        wanted = IndexProblem.of_lists(*exact, options, call.lists, needs_backward=True)
        wanted = IndexReference().backward(
            wanted, call.dout.double(), *exact, call.out, call.lse, call.lists, delta
        )
        assert (wanted[0] - call.grads[0]).abs().max() > 0.1
        problem = IndexProblem.of_lists(*x, options, call.lists, needs_backward=True)
        poison = torch.full_like(call.out16, float("nan"))
        grads = ffa.IndexFfa().backward(problem, call.dout, *x, poison, call.lse32, call.lists, delta.float())
        for label, got, want in zip(("dq", "dk", "dv"), grads, wanted):
            assert_near(label, got, want, 3.0)
