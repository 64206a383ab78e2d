# SPDX-License-Identifier: Apache-2.0
"""The backward kernels on a Hopper GPU against exact gradients of dense attention.

All memory that the backward allocates, workspace included, holds NaN before, so a value that is not written shows.
"""

from __future__ import annotations

from dataclasses import replace
from itertools import product

import numpy as np
import pytest
import torch
from backward_oracle import assert_grads, assert_same, make_dout, options_of, seen, truth
from forward_oracle import Inputs, make_inputs
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from magi_attention.common.plan_cache import PlanCache
from magi_attention.common.slices import SliceTable, cut_k, trim
from magi_attention.functional.flex_flash_attn import flex_flash_attn_func
from magi_attention.kernels.ffa import backward as ffa_backward
from magi_attention.kernels.ffa import custom_ops
from magi_attention.kernels.ffa.backend import FfaBackend
from magi_attention.kernels.ffa.plans import Kept, PlanShape, RangePlans, table_plan
from magi_attention.kernels.types import BackwardOperands, Grads, Operands
from magi_attention.native.planner.schedule import BwdSchedule
from magi_attention.testing import masks

IS_HOPPER = torch.cuda.is_available() and torch.cuda.get_device_capability() == (9, 0)
pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not IS_HOPPER, reason="needs a GPU of compute capability 9.0 (H100, H200)"),
]

DEVICE = "cuda"
DTYPES = (torch.bfloat16, torch.float16)
SIZES = (1, 63, 64, 65, 127, 129, 300)
each_dtype = pytest.mark.parametrize("dtype", DTYPES, ids=("bf16", "fp16"))


def poisoned_like(like: torch.Tensor) -> torch.Tensor:
    """Fresh memory of ones in all bits, which is NaN in every floating dtype."""
    made = torch.empty_like(like)
    made.view(-1).view(torch.uint8).fill_(255)
    return made


@pytest.fixture(autouse=True)
def explicit_backend_in_poisoned_memory(monkeypatch):
    """An explicit wish, so that no other backend takes over."""
    for name in custom_ops.WATCHED:
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("MAGI_ATTENTION_KERNEL_BACKEND", "ffa")
    monkeypatch.setattr(ffa_backward, "_empty_like", poisoned_like)


def differentiate(x: Inputs, dout: torch.Tensor, **options) -> Grads:
    """By autograd through the public function; the gradients have the dtypes of the inputs."""
    leaves = [t.detach().requires_grad_() for t in (x.q, x.k, x.v, x.sink) if t is not None]
    with torch.enable_grad():
        out, _ = flex_flash_attn_func(
            *leaves[:3], *x.ranges, sink=leaves[3] if len(leaves) > 3 else None, sink_layout=x.sink_layout,
            softmax_scale=x.scale, softcap=x.softcap, **options,
        )  # fmt: skip
    got = torch.autograd.grad(out, leaves, dout)
    assert all(g.dtype == t.dtype for g, t in zip(got, leaves))
    return Grads(*got)


def forward(x: Inputs, ffa: FfaBackend) -> tuple[torch.Tensor, torch.Tensor]:
    """out in q's dtype and lse, by the kernels, as a training step keeps them."""
    out, lse, _ = ffa.forward_final(Operands(x.q, x.k, x.v, x.slices, options_of(x), x.sink))
    return out, lse


def check(seed, slices, tq, tk, *args, factor: float = 2.0, **kwargs) -> None:
    x = make_inputs(seed, slices, tq, tk, *args, **kwargs, device=DEVICE)
    dout = make_dout(x, seed)
    note = (seed, tq, tk, args, kwargs)
    assert_grads(x, differentiate(x, dout), truth(x, dout, factor), note)


@each_dtype
@pytest.mark.parametrize("ratio", [1, 2, 4, 5, 8, 16])
def test_families_and_gqa(dtype, ratio):
    for seed, slices in enumerate(masks.mask_families(333).values()):
        check(seed, slices, 333, 333, (2 * ratio, 2), dtype=dtype)


@pytest.mark.parametrize("parts", (2, 3, 5))
@pytest.mark.parametrize("queries", (64, 80))
def test_parts_that_differ_by_a_head(parts, queries, monkeypatch):
    """7 query heads of a kv head; three tiles of 44 are enough for two parts of each on 132 multiprocessors."""
    for seed, by_document in enumerate((False, True)):
        schedule = BwdSchedule(queries, parts, by_document=by_document)
        monkeypatch.setattr(ffa_backward, "select_schedule", lambda *_, found=schedule: found)
        monkeypatch.setattr(Inputs, "ranges", property(lambda self: self.slices.tensors()))
        check(parts + seed, masks.mask_families(380)["varlen_causal"], 380, 380, (7 * 44, 44), (128, 128))


@each_dtype
@pytest.mark.parametrize(
    "dims",
    [
        *((32, 32), (64, 64), (80, 80), (96, 96), (128, 128), (192, 192), (256, 256)),
        *((192, 128), (64, 128), (128, 64), (8, 256)),
    ],
    ids=str,
)
def test_head_dims(dtype, dims):
    families = masks.mask_families(400)
    for seed, name in enumerate(("full", "causal", "varlen_causal", "sliding_window", "holes", "empty")):
        check(seed, families[name], 400, 400, (4, 2), dims, dtype)


@each_dtype
def test_odd_sizes(dtype):
    for seed, (tq, tk) in enumerate(product(SIZES, SIZES)):
        slices = np.array([[0, tq, 0, tk, seed % 4]])
        dims = ((64, 64), (128, 128), (80, 80))[seed % 3]
        check(seed, slices, tq, tk, ((4, 2), (5, 1), (3, 3))[seed // 4 % 3], dims, dtype)


@each_dtype
def test_random_masks(dtype):
    @settings(max_examples=200, deadline=None, print_blob=True, suppress_health_check=list(HealthCheck))
    @given(
        seed=st.integers(0, 2**32 - 1),
        sizes=st.tuples(st.integers(1, 400), st.integers(1, 400)),
        count=st.integers(1, 40),
        heads=st.sampled_from([(4, 4), (4, 2), (8, 1), (5, 1), (6, 2)]),
        dims=st.sampled_from([(64, 64), (128, 128), (80, 48), (192, 128), (256, 256)]),
    )
    def run(seed, sizes, count, heads, dims):
        slices = masks.random_slices(np.random.default_rng(seed), *sizes, max_slices=count)
        check(seed % 1000, slices, *sizes, heads, dims, dtype)

    run()


@pytest.mark.parametrize("softcap", [0.7, 5.0, 30.0])
def test_softcap(softcap):
    """The GPU's fast tanh has a relative error of 2^-11, as much as a rounding to fp16: so twice the factor there."""
    for dtype, dim in product(DTYPES, (64, 128, 256)):
        factor = 2.0 if dtype == torch.bfloat16 else 4.0
        check(1, masks.causal(300), 300, 300, (4, 2), (dim, dim), dtype, softcap=softcap, factor=factor)


@pytest.mark.parametrize("shape", [(1,), (4,), (300, 1), (300, 3)], ids=str)
def test_sinks(shape):
    families = masks.mask_families(300)
    for seed, (heads, name) in enumerate(product([4, 5], ["causal", "holes", "empty"])):
        for dtype, softcap in ((torch.bfloat16, 0.0), (torch.float16, 0.0), (torch.bfloat16, 3.0)):
            check(seed, families[name], 300, 300, (heads, 1), sink_shape=(*shape, heads), softcap=softcap, dtype=dtype)


@pytest.mark.parametrize("scale", [0.01, 1.0])
def test_softmax_scale(scale):
    x = replace(make_inputs(0, masks.causal(300), 300, 300, dims=(128, 128), device=DEVICE), scale=scale)
    dout = make_dout(x)
    assert_grads(x, differentiate(x, dout), truth(x, dout))


SPECIAL = {
    "unsorted": [[200, 300, 0, 50, 1], [0, 100, 100, 300, 0], [100, 200, 50, 250, 2]],
    "overlapping_q": [[0, 300, 0, 40, 0], [0, 300, 40, 90, 0], [50, 250, 100, 300, 1], [0, 50, 200, 290, 2]],
    "overlapping_rectangles": [[0, 100, 0, 200, 1], [0, 99, 101, 200, 2]],
    "empty_slices": [[5, 5, 0, 9, 0], [0, 300, 7, 7, 1], [10, 90, 0, 300, 0], [200, 290, 0, 10, 3]],
    "single_rows": [[r, r + 1, 37 * r % 290, 37 * r % 290 + 1 + r % 10, r % 2] for r in range(0, 300, 3)],
    "one_pair": [[299, 300, 0, 1, 0]],
    "long_band": [[0, 100, 0, 300, 3], [100, 300, 0, 290, 1]],
}


@pytest.mark.parametrize("name", SPECIAL)
def test_special_slices(name):
    for dtype, heads in product(DTYPES, [(4, 2), (16, 1)]):
        check(0, np.array(SPECIAL[name]), 300, 300, heads, (128, 128), dtype)


@pytest.mark.parametrize("tq, tk", [(1500, 1500), (64, 4000), (4000, 64)])
def test_ten_thousand_slices(tq, tk):
    slices = masks.random_slices(np.random.default_rng(0), tq, tk, max_slices=10_000, shrink=0.1)
    assert len(slices) > 5000
    check(0, slices, tq, tk, (2, 1), (64, 64))


@pytest.mark.parametrize("tq, tk", [(0, 64), (64, 0), (0, 0)])
def test_no_rows(tq, tk):
    x = make_inputs(0, SliceTable([]), tq, tk, sink_shape=(1, 4), device=DEVICE)
    got = differentiate(x, make_dout(x))
    for name, like in (("dq", x.q), ("dk", x.k), ("dv", x.v), ("dsink", x.sink)):
        assert getattr(got, name).shape == like.shape and not getattr(got, name).any()


def test_more_work_than_fits_at_once():
    """Some 20 tiles per multiprocessor and a long sequence, on few SMs."""
    x = make_inputs(0, masks.varlen(list(range(0, 20_001, 80)), 1), 20_000, 20_000, (16, 16), device=DEVICE)
    dout = make_dout(x)
    for options in ({"sm_margin": 100}, {}):
        got = differentiate(x, dout, **options)
        for first in (0, 9_920, 19_920):
            rows = slice(first, first + 80)
            part = replace(x, q=x.q[rows], k=x.k[rows], v=x.v[rows], slices=masks.causal(80))
            mine = Grads(got.dq[rows], got.dk[rows], got.dv[rows])
            assert_grads(part, mine, truth(part, dout[rows]), f"{options} {first}")
        assert not any(t.isnan().any() for t in (got.dq, got.dk, got.dv))


@each_dtype
@pytest.mark.parametrize("with_sink", [False, True])
def test_stages_add_up_in_float32(dtype, with_sink):
    """The same rows and other keys, into buffers that hold something; delta is given, as dist_attn does."""
    ffa, tq, tk = FfaBackend(), 300, 400
    for seed, dims in enumerate([(64, 64), (128, 128), (192, 128), (80, 80)]):
        heads = [(4, 2), (8, 1), (5, 1)][seed % 3]
        slices = trim(masks.random_slices(np.random.default_rng(seed), tq, tk, max_slices=20))
        x = make_inputs(
            seed, slices, tq, tk, heads, dims, dtype, DEVICE, sink_shape=(2, heads[0]) if with_sink else None
        )
        dout, (out, lse) = make_dout(x, seed), forward(x, ffa)
        want, delta = truth(x, dout), (out.float() * dout.float()).sum(-1)
        buffers = [torch.randn_like(t, dtype=torch.float32) for t in (x.q, x.k, x.v)]
        total, before = Grads(*(b.clone() for b in buffers)), Grads(*buffers)
        for n, (a, b) in enumerate(zip([0, 130, 131, 300], [130, 131, 300, tk])):
            part = SliceTable(cut_k(slices, a, b)[0] - np.array([0, 0, a, a, 0]))
            sink = x.sink if n == 1 else None  # exactly one stage applies it
            into = Grads(total.dq, total.dk[a:b], total.dv[a:b])
            of_part = BackwardOperands(dout, x.q, x.k[a:b], x.v[a:b], out, lse, part, options_of(x), sink, delta)
            assert ffa.backward(of_part, into) is into
            total.dsink = into.dsink if n == 1 else total.dsink
        assert_grads(x, total, want, (seed, dims), before=before)
        whole = ffa.backward(BackwardOperands(dout, x.q, x.k, x.v, out, lse, x.slices, options_of(x), x.sink))
        assert whole.dq.dtype == whole.dk.dtype == whole.dv.dtype == torch.float32
        assert_grads(x, whole, want, (seed, dims, "at once"))


def test_a_stage_without_pairs_changes_nothing():
    ffa, x = FfaBackend(), make_inputs(0, masks.causal(200), 200, 200, device=DEVICE)
    dout, (out, lse) = make_dout(x), forward(x, ffa)
    into = Grads(*(torch.randn_like(t, dtype=torch.float32) for t in (x.q, x.k, x.v)))
    before = [t.clone() for t in (into.dq, into.dk, into.dv)]
    ffa.backward(BackwardOperands(dout, x.q, x.k, x.v, out, lse, SliceTable([]), options_of(x)), into)
    assert all(torch.equal(a, b) for a, b in zip(before, (into.dq, into.dk, into.dv)))


def test_buffers_of_other_layouts_and_out_in_float32():
    ffa, x = FfaBackend(), make_inputs(0, masks.causal(200), 200, 200, device=DEVICE)
    dout, want = make_dout(x), None
    partial = ffa.forward(Operands(x.q, x.k, x.v, x.slices, options_of(x)))
    want = truth(x, dout)
    into = Grads(*(torch.zeros_like(t, dtype=torch.float32).mT.contiguous().mT for t in (x.q, x.k, x.v)))
    ffa.backward(BackwardOperands(dout, x.q, x.k, x.v, partial.out, partial.lse, x.slices, options_of(x)), into)
    assert_grads(x, into, want)


def test_two_runs():
    """dk and dv have one owner each, so they are bitwise equal; dq is summed in any order."""
    for seed, (heads, dim) in enumerate(product([(4, 4), (16, 1)], (64, 128, 256))):
        slices = masks.random_slices(np.random.default_rng(seed), 1000, 1000, max_slices=60)
        x = make_inputs(seed, slices, 1000, 1000, heads, (dim, dim), device=DEVICE)
        dout = make_dout(x)
        first = differentiate(x, dout)
        for _ in range(3):
            assert_same(differentiate(x, dout), first, x.q.dtype, (heads, dim))


def test_planning_on_host_and_device_gives_the_same():
    slices = masks.random_slices(np.random.default_rng(0), 900, 900, max_slices=60)
    x, ffa = make_inputs(0, slices, 900, 900, device=DEVICE), FfaBackend()
    dout, (out, lse) = make_dout(x), forward(x, ffa)
    by_table = ffa.backward_final(BackwardOperands(dout, x.q, x.k, x.v, out, lse, x.slices, options_of(x)))
    assert_same(differentiate(x, dout), by_table, x.q.dtype)


def test_strided_and_misaligned_inputs():
    x, ffa = make_inputs(0, masks.causal(300), 300, 300, (8, 2), device=DEVICE), FfaBackend()
    dout, (out, lse) = make_dout(x), forward(x, ffa)
    want = truth(x, dout)

    def run(dout, q, k, v, out, lse, note):
        got = ffa.backward_final(BackwardOperands(dout, q, k, v, out, lse, x.slices, options_of(x)))
        assert_grads(x, got, want, note)

    q, k, v = torch.cat([x.q, x.k, x.v], dim=1).split([8, 2, 2], dim=1)
    run(dout, q, k, v, out, lse, "one projection")
    by_head = [t.transpose(0, 1).contiguous().transpose(0, 1) for t in (dout, x.q, x.k, x.v, out, lse)]
    run(*by_head, "by heads")
    every_other = [
        torch.stack([t, torch.full_like(t, float("nan"))], 1).flatten(0, 1)[::2] for t in (dout, x.q, x.k, x.v, out)
    ]
    run(*every_other, lse, "every other row")
    shifted = [torch.empty(t.numel() + 1, dtype=t.dtype, device=DEVICE)[1:].view(t.shape).copy_(t)
               for t in (dout, x.q, x.k, x.v, out, lse)]  # fmt: skip
    run(*shifted, "misaligned")
    odd = [torch.empty(*t.shape[:2], 68, dtype=t.dtype, device=DEVICE)[..., :64].copy_(t) for t in (dout, x.q, out)]
    columns = [t.permute(2, 0, 1).contiguous().permute(1, 2, 0) for t in (x.k, x.v)]
    run(odd[0], odd[1], *columns, odd[2], lse, "odd strides")
    ones = torch.ones((), dtype=dout.dtype, device=DEVICE).expand(dout.shape)  # what out.sum().backward() gives
    assert_grads(x, differentiate(x, ones), truth(x, ones), "one number")


@each_dtype
@pytest.mark.parametrize("num_sinks", [0, 2])
@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_what_unseen_rows_hold_does_not_matter(dtype, value, num_sinks):
    """q and dout of queries that see nothing, k and v of keys that nobody sees. With sinks such queries have an lse."""
    slices = np.array([[0, 200, 10, 100, 0], [230, 480, 150, 330, 1]])
    for dims in ((64, 64), (128, 128), (192, 128), (256, 256)):
        sink_shape = (num_sinks, 4) if num_sinks else None
        x = make_inputs(0, slices, 500, 500, dims=dims, dtype=dtype, device=DEVICE, sink_shape=sink_shape)
        dout = make_dout(x)
        want = differentiate(x, dout)
        sees, is_seen = seen(x)
        assert 0 < sees.sum() < 500 and 0 < is_seen.sum() < 500
        for t, rows in ((x.q, ~sees), (dout, ~sees), (x.k, ~is_seen), (x.v, ~is_seen)):
            t[rows] = value
        got = differentiate(x, dout)
        assert_same(got, want, dtype, dims)
        assert not got.dq[~sees].any() and not got.dk[~is_seen].any() and not got.dv[~is_seen].any()
        ffa = FfaBackend()
        out, lse = forward(x, ffa)
        delta = (out.float() * dout.float()).sum(-1)  # NaN in those rows
        given = ffa.backward(BackwardOperands(dout, x.q, x.k, x.v, out, lse, x.slices, options_of(x), delta=delta))
        assert not any(t.isnan().any() for t in (given.dq, given.dk, given.dv))
        if num_sinks:
            assert got.dsink.isfinite().all()


@pytest.mark.parametrize("is_float", [False, True])
def test_a_plan_of_other_shapes_gives_nan(monkeypatch, is_float):
    x, ffa = make_inputs(0, masks.causal(200), 200, 200, device=DEVICE), FfaBackend()
    dout, (out, lse) = make_dout(x), forward(x, ffa)
    tile = ffa.library.backward_tile(64, 64)
    wrong = table_plan(masks.causal(328), PlanShape(328, 328, tile, is_transposed=True), x.q.device)
    monkeypatch.setattr(RangePlans, "plan", lambda *_: Kept(wrong, wrong.data_ptr(), PlanCache()))
    run = ffa.backward if is_float else ffa.backward_final
    got = run(BackwardOperands(dout, x.q, x.k, x.v, out, lse, x.slices, options_of(x)))
    for name in ("dq", "dk", "dv"):
        assert getattr(got, name).isnan().all(), name
