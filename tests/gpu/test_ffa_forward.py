# SPDX-License-Identifier: Apache-2.0
"""The forward kernels on a Hopper GPU through the public function, against dense attention in float64.

Outputs lie in memory that held NaN before, so a value that is not written shows.
"""

from __future__ import annotations

from dataclasses import replace
from itertools import product

import numpy as np
import pytest
import torch
from forward_oracle import (
    NEG_INF,
    Inputs,
    Result,
    allowed_error,
    allowed_error_of_huge_logits,
    assert_numbers,
    assert_right,
    dense,
    make_inputs,
)

from magi_attention.common.mask import Mask
from magi_attention.common.slices import SliceTable, cut_k, trim
from magi_attention.errors import NoBackendError
from magi_attention.functional.flex_flash_attn import flex_flash_attn_func
from magi_attention.kernels.ffa import custom_ops
from magi_attention.kernels.ffa.backend import FfaBackend
from magi_attention.kernels.types import AttnOptions, Operands, Partial
from magi_attention.testing import masks

IS_HOPPER = torch.cuda.is_available() and torch.cuda.get_device_capability() == (9, 0)
pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not IS_HOPPER, reason="needs a GPU of compute capability 9.0 (H100, H200)"),
]

DEVICE = "cuda"
DTYPES = (torch.bfloat16, torch.float16)
SIZES = (1, 63, 64, 65, 127, 129, 1000)
each_dtype = pytest.mark.parametrize("dtype", DTYPES, ids=("bf16", "fp16"))


@pytest.fixture(autouse=True)
def explicit_backend(monkeypatch):
    """An explicit wish, so that no other backend takes over."""
    for name in custom_ops.WATCHED:
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("MAGI_ATTENTION_KERNEL_BACKEND", "ffa")


def poison(x: Inputs) -> None:
    """Leaves NaN in the freed memory that out and lse get next."""
    rows = (*x.q.shape[:2], x.v.shape[2])
    held = [torch.full(rows, float("nan"), dtype=dtype, device=DEVICE) for dtype in (x.q.dtype, torch.float32)]
    held += [torch.full(rows[:2], float("nan"), device=DEVICE) for _ in range(3)]
    del held


def attend(x: Inputs, return_max_logits: bool = True, **options) -> Result:
    ranges = x.ranges
    poison(x)
    with torch.no_grad():
        out, meta = flex_flash_attn_func(
            x.q, x.k, x.v, *ranges, sink=x.sink, sink_layout=x.sink_layout, softmax_scale=x.scale,
            softcap=x.softcap, return_max_logits=return_max_logits, **options,
        )  # fmt: skip
    assert out.dtype == x.q.dtype and meta.lse.dtype == torch.float32
    return Result(out, meta.lse, meta.max_logits)


def check(*args, **kwargs) -> None:
    note = (args[2:], {name: value for name, value in kwargs.items() if name != "device"})
    x = make_inputs(*args, **kwargs, device=DEVICE)
    want = dense(x, torch.float64)
    tol = allowed_error(x, want)
    for with_max in (True, False):  # two ways through the kernel: exact and lagging running maximum
        assert_right(x, attend(x, with_max), tol, want, note=f"{note} max {with_max}")


def options_of(x: Inputs, return_max_logits: bool = True) -> AttnOptions:
    return AttnOptions(x.scale, x.softcap, x.sink_layout, return_max_logits=return_max_logits)


@each_dtype
@pytest.mark.parametrize("ratio", [1, 2, 3, 4, 5, 8, 16, 64])
def test_families_and_gqa(dtype, ratio):
    for seed, slices in enumerate(masks.mask_families(333).values()):
        check(seed, slices, 333, 333, (2 * ratio, 2), dtype=dtype)


@each_dtype
@pytest.mark.parametrize(
    "dims",
    [
        *((8, 8), (40, 40), (64, 64), (80, 80), (128, 128), (160, 160), (192, 192), (256, 256)),
        *((192, 128), (64, 128), (128, 64), (256, 8)),
    ],
    ids=str,
)
def test_head_dims(dtype, dims):
    families = masks.mask_families(500)
    for seed, name in enumerate(("full", "causal", "varlen_causal", "sliding_window", "holes", "empty")):
        check(seed, families[name], 500, 500, (8, 2), dims, dtype)


@each_dtype
def test_odd_sizes(dtype):
    for seed, (tq, tk) in enumerate(product(SIZES, SIZES)):
        slices = [[0, tq, 0, tk, seed % 4]]
        dims = ((64, 64), (128, 128))[seed % 2]
        check(seed, np.array(slices), tq, tk, ((4, 2), (5, 1), (3, 3))[seed // 4 % 3], dims, dtype)


@each_dtype
def test_random_masks(dtype):
    for seed in range(200):
        rng = np.random.default_rng(seed)
        tq, tk = (int(n) for n in rng.integers(1, 700, size=2))
        slices = masks.random_slices(rng, tq, tk, max_slices=int(rng.integers(1, 40)))
        heads = [(4, 4), (4, 2), (8, 1), (5, 1), (16, 1), (6, 2)][seed % 6]
        dims = [(64, 64), (128, 128), (80, 48), (192, 128), (256, 256)][seed % 5]
        check(seed, slices, tq, tk, heads, dims, dtype)


@each_dtype
@pytest.mark.parametrize("dim", [64, 96, 128, 192, 256])
def test_scattered_blocks(dtype, dim):
    """Masks for which key blocks are small; each CTA has several tiles, some of which see nothing."""
    for seed, (rows, keys) in enumerate(((64, 64), (128, 128), (48, 32), (100, 50))):
        blocks = np.random.default_rng(seed).random((1500 // rows, 1500 // keys)) < 0.15
        mask = Mask.block_sparse(blocks, rows, keys)
        options = {"softcap": 5.0} if seed == 3 else {}
        check(seed, mask.slices, mask.total_q, mask.total_k, (8, 1 + seed % 2), (dim, dim), dtype, **options)


@pytest.mark.parametrize("softcap", [0.7, 5.0, 30.0])
def test_softcap(softcap):
    for dtype, dim in product(DTYPES, (64, 128)):
        check(1, masks.causal(400), 400, 400, (4, 2), (dim, dim), dtype, softcap=softcap, size=2.0)


@pytest.mark.parametrize("shape", [(1,), (4,), (400, 1), (400, 3)], ids=str)
def test_sinks(shape):
    families = masks.mask_families(400)
    for seed, (heads, name) in enumerate(product([4, 5, 8], ["causal", "holes", "empty"])):
        for softcap in (0.0, 3.0):
            check(seed, families[name], 400, 400, (heads, 1), sink_shape=(*shape, heads), softcap=softcap)


@pytest.mark.parametrize("shift", [200.0, -200.0])
def test_extreme_sinks(shift):
    x = make_inputs(0, np.array([[0, 90, 0, 70, 1]]), 100, 70, sink_shape=(100, 2, 4), device=DEVICE)
    x.sink += shift
    assert_right(x, attend(x))


@pytest.mark.parametrize("scale", [1e-3, 0.02, 1.0])
def test_softmax_scale(scale):
    x = replace(make_inputs(0, masks.causal(300), 300, 300, dims=(128, 128), device=DEVICE), scale=scale)
    assert_right(x, attend(x))


@each_dtype
@pytest.mark.parametrize("size", [10.0, 40.0])
def test_huge_logits(dtype, size):
    """Logits up to some 10^4, in ascending and falling order, so that the running maximum moves often and far."""
    for dim in (64, 128, 256):
        x = make_inputs(0, masks.causal(500), 500, 500, dims=(dim, dim), dtype=dtype, size=size, device=DEVICE)
        for order in (torch.arange(500, device=DEVICE), x.k[:, 0].float().sum(1).argsort()):
            case = replace(x, k=x.k[order].contiguous(), v=x.v[order].contiguous())
            for with_max in (True, False):
                got = attend(case, with_max)
                want = dense(case, torch.float64)
                assert want.max_logits.max() > 10 * size
                assert_right(case, got, allowed_error_of_huge_logits(case, want), want)


def test_logits_that_grow_and_fall_along_the_keys():
    for sign in (1.0, -1.0):
        x = make_inputs(0, masks.full(700), 700, 700, dims=(128, 128), device=DEVICE)
        x.q[:] = 1.0
        x.k[:] = (sign * torch.linspace(-5, 5, 700, device=DEVICE))[:, None, None]
        for with_max in (True, False):
            assert_right(x, attend(x, with_max))


@each_dtype
@pytest.mark.parametrize("with_sink", [False, True])
def test_stages_equal_one_shot(dtype, with_sink):
    ffa = FfaBackend()
    tq, tk = 400, 500
    for seed in range(6):
        heads = [(4, 2), (8, 1), (5, 1)][seed % 3]
        slices = trim(masks.random_slices(np.random.default_rng(seed), tq, tk, max_slices=20))
        shape = (2, heads[0]) if with_sink else None
        x = make_inputs(seed, slices, tq, tk, heads, (128, 128), dtype, DEVICE, sink_shape=shape)
        options, edges = options_of(x), [0, 130, 131, 300, tk]
        part: Partial | None = None
        for n, (a, b) in enumerate(zip(edges[:-1], edges[1:])):
            piece = SliceTable(cut_k(slices, a, b)[0] - np.array([0, 0, a, a, 0]))
            sink = x.sink if n == 1 else None  # exactly one stage applies it
            given = part
            part = ffa.forward(Operands(x.q, x.k[a:b], x.v[a:b], piece, options, sink), part)
            assert given is None or part is given
        poison(x)
        whole = ffa.forward(Operands(x.q, x.k, x.v, x.slices, options, x.sink))
        assert part.out.dtype == whole.out.dtype == torch.float32
        want = assert_right(x, Result(whole.out, whole.lse, whole.max_logits))
        assert_right(x, Result(part.out, part.lse, part.max_logits))
        assert ((part.out - whole.out).abs().flatten(1).amax(1) <= allowed_error(x, want)).all()
        assert_numbers("lse", part.lse, whole.lse.double(), 1e-5)
        assert torch.equal(part.max_logits, whole.max_logits)


def test_a_stage_without_pairs_changes_nothing():
    ffa = FfaBackend()
    x = make_inputs(0, masks.causal(200), 200, 200, device=DEVICE)
    part = ffa.forward(Operands(x.q, x.k, x.v, x.slices, options_of(x)))
    before = Result(part.out.clone(), part.lse.clone(), part.max_logits.clone())
    ffa.forward(Operands(x.q, x.k, x.v, SliceTable([]), options_of(x)), part)
    for name in ("out", "lse", "max_logits"):
        assert torch.equal(getattr(part, name), getattr(before, name)), name
    fresh = Partial(torch.zeros_like(part.out), torch.full_like(part.lse, NEG_INF))
    ffa.forward(Operands(x.q, x.k, x.v, x.slices, options_of(x)), fresh)
    assert_right(x, Result(fresh.out, fresh.lse, fresh.max_logits))


def test_two_runs_are_bitwise_equal():
    for seed, (heads, dim) in enumerate(product([(4, 4), (16, 1)], (64, 128, 256))):
        slices = masks.random_slices(np.random.default_rng(seed), 1500, 1500, max_slices=60)
        x = make_inputs(seed, slices, 1500, 1500, heads, (dim, dim), device=DEVICE)
        first = attend(x)
        for _ in range(3):
            again = attend(x)
            assert all(torch.equal(getattr(first, n), getattr(again, n)) for n in ("out", "lse", "max_logits"))


def test_planning_on_host_and_device_gives_equal_bits():
    x = make_inputs(0, masks.random_slices(np.random.default_rng(0), 900, 900, max_slices=60), 900, 900, device=DEVICE)
    by_table, *_ = FfaBackend().forward_final(Operands(x.q, x.k, x.v, x.slices, options_of(x)))
    assert torch.equal(by_table, attend(x).out)


def test_strided_inputs():
    x = make_inputs(0, masks.causal(300), 300, 300, (8, 2), device=DEVICE)
    packed = torch.cat([x.q, x.k, x.v], dim=1)
    q, k, v = packed.split([8, 2, 2], dim=1)
    assert_right(case := replace(x, q=q, k=k, v=v), attend(case))
    by_head = [t.transpose(0, 1).contiguous().transpose(0, 1) for t in (x.q, x.k, x.v)]
    assert_right(case := replace(x, q=by_head[0], k=by_head[1], v=by_head[2]), attend(case))
    every_other = torch.stack([x.k, torch.full_like(x.k, float("nan"))], 1).flatten(0, 1)[::2]
    assert every_other.stride(0) == 2 * 2 * 64
    assert_right(case := replace(x, k=every_other), attend(case))
    shifted = torch.empty(x.v.numel() + 1, dtype=x.v.dtype, device=DEVICE)[1:].view(x.v.shape).copy_(x.v)
    odd = torch.empty(300, 8, 68, dtype=x.q.dtype, device=DEVICE)[..., :64].copy_(x.q)
    columns = x.k.permute(2, 0, 1).contiguous().permute(1, 2, 0)
    assert_right(case := replace(x, q=odd, k=columns, v=shifted), attend(case))
    shared = x.v[:, :1].expand(-1, 2, -1)
    assert_right(case := replace(x, v=shared), attend(case))


SPECIAL = {
    "unsorted": [[200, 300, 0, 50, 1], [0, 100, 100, 300, 0], [100, 200, 50, 250, 2]],
    "overlapping_q": [[0, 300, 0, 40, 0], [0, 300, 40, 90, 0], [50, 250, 100, 300, 1], [0, 50, 200, 290, 2]],
    "overlapping_rectangles": [[0, 100, 0, 200, 1], [0, 99, 101, 200, 2]],
    "empty_slices": [[5, 5, 0, 9, 0], [0, 300, 7, 7, 1], [10, 90, 0, 300, 0], [200, 290, 0, 10, 3]],
    "single_rows": [[r, r + 1, 37 * r % 290, 37 * r % 290 + 1 + r % 10, r % 2] for r in range(0, 300, 3)],
    "one_pair": [[299, 300, 0, 1, 0]],
}


@pytest.mark.parametrize("name", SPECIAL)
def test_special_slices(name):
    for dtype, heads in product(DTYPES, [(4, 2), (16, 1)]):
        check(0, np.array(SPECIAL[name]), 300, 300, heads, (128, 128), dtype)


@pytest.mark.parametrize("tq, tk", [(2000, 2000), (64, 8000)])
def test_ten_thousand_slices(tq, tk):
    slices = masks.random_slices(np.random.default_rng(0), tq, tk, max_slices=10_000, shrink=0.1)
    assert len(slices) > 5000
    check(0, slices, tq, tk, (2, 1), (64, 64))


@pytest.mark.parametrize("tq, tk", [(0, 64), (64, 0), (0, 0)])
def test_no_rows(tq, tk):
    x = make_inputs(0, SliceTable([]), tq, tk, sink_shape=(1, 4), device=DEVICE)
    got = attend(x)
    assert not got.out.any() and (got.max_logits == NEG_INF).all()
    assert_numbers("lse", got.lse, x.sink.double().expand(tq, 4), 1e-6)


def test_more_work_than_fits_at_once():
    """Some 80 tiles per multiprocessor, a long sequence and few SMs: the scheduler has to make many waves."""
    x = make_inputs(0, masks.varlen(list(range(0, 20_001, 80)), 1), 20_000, 20_000, (16, 16), device=DEVICE)
    got = attend(x, sm_margin=100)
    for first in (0, 9_920, 19_920):
        rows = slice(first, first + 80)
        part = replace(x, q=x.q[rows], k=x.k[rows], v=x.v[rows], slices=masks.causal(80))
        assert_right(part, Result(got.out[rows], got.lse[rows], None))
    assert torch.equal(got.out, attend(x).out) and not got.lse.isinf().any()


def test_compiled_whole():
    x = make_inputs(0, masks.causal(300), 300, 300, (8, 2), (128, 128), device=DEVICE)

    def model(q, k, v, *ranges):
        out, meta = flex_flash_attn_func(q, k, v, *ranges, return_max_logits=True)
        return out * 2, meta.lse, meta.max_logits

    torch._dynamo.reset()
    with torch.no_grad():
        out, lse, top = torch.compile(model, fullgraph=True, backend="aot_eager")(x.q, x.k, x.v, *x.ranges)
    assert_right(x, Result(out / 2, lse, top))


def test_cuda_graph_follows_values_and_ranges():
    x = make_inputs(0, masks.varlen([0, 100, 300], 1), 300, 300, (8, 2), (128, 128), device=DEVICE)
    ranges = x.ranges

    def call():
        with torch.no_grad():
            out, meta = flex_flash_attn_func(x.q, x.k, x.v, *ranges, return_max_logits=True)
        return Result(out, meta.lse, meta.max_logits)

    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        call()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        got = call()
    for seed, cu in enumerate(([0, 100, 300], [0, 1, 300], [0, 299, 300])):
        new = make_inputs(seed, masks.varlen(cu, 1), 300, 300, (8, 2), (128, 128), device=DEVICE)
        for old, fresh in zip((x.q, x.k, x.v, *ranges), (new.q, new.k, new.v, *new.ranges)):
            old.copy_(fresh)
        got.out.fill_(float("nan"))
        graph.replay()
        assert_right(new, got, note=cu)


def test_streams_do_not_disturb_one_another():
    cases = [make_inputs(n, masks.causal(600), 600, 600, (8, 2), (128, 128), device=DEVICE) for n in range(3)]
    streams = [torch.cuda.Stream() for _ in cases]
    ffa = FfaBackend()
    torch.cuda.synchronize()
    got = []
    for _ in range(5):
        for x, stream in zip(cases, streams):
            with torch.cuda.stream(stream), torch.no_grad():
                got.append((x, ffa.forward_final(Operands(x.q, x.k, x.v, x.slices, options_of(x)))))
    torch.cuda.synchronize()
    for x, result in got:
        assert_right(x, Result(*result))


def test_nan_in_unseen_rows_stays_there():
    total = 500
    seen = np.array([[0, 200, 10, 100, 0], [200, 500, 150, 330, 1]])
    shapes = [(64, 64), (128, 128), (192, 128), (192, 192), (256, 256)]
    for dtype, with_max, dims in product(DTYPES, (True, False), shapes):
        x = make_inputs(0, seen, total, total, dims=dims, dtype=dtype, device=DEVICE)
        want = attend(x, with_max)
        unseen = torch.ones(total, dtype=torch.bool, device=DEVICE)
        unseen[10:100] = unseen[150:330] = False
        for value in (float("nan"), float("inf")):
            x.k[unseen] = value
            x.v[unseen] = value
            got = attend(x, with_max)
            assert torch.equal(got.out, want.out) and torch.equal(got.lse, want.lse)


def test_what_the_kernels_refuse_is_said():
    x = make_inputs(0, masks.causal(64), 64, 64, device=DEVICE)
    with pytest.raises(NoBackendError, match="float32"):
        flex_flash_attn_func(x.q.float(), x.k.float(), x.v.float(), *x.ranges)
