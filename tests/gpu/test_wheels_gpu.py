# SPDX-License-Identifier: Apache-2.0
"""The backends ``cudnn_flex`` and ``fa4``, which call kernels of published wheels, through the public function and as
stages, against float64.

Most kernels are compiled here, once per shape: let the wheels keep them on disk, and give pytest several processes.
"""

from __future__ import annotations

from dataclasses import replace
from itertools import product
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from backward_oracle import assert_grads, make_dout, options_of, seen, truth
from forward_oracle import Inputs, Result, allowed_error_of_huge_logits, assert_right, dense, make_inputs
from test_ffa_backward import SPECIAL, differentiate

from magi_attention.common.slices import SliceTable, cut_k, trim
from magi_attention.errors import NoBackendError
from magi_attention.functional.fa4 import fa4_bwd, fa4_fwd, ffa_fa4_func
from magi_attention.functional.flex_flash_attn import flex_flash_attn_func
from magi_attention.kernels.fa4.backend import Fa4Backend
from magi_attention.kernels.ffa import custom_ops
from magi_attention.kernels.registry import default_registry
from magi_attention.kernels.types import AttnOptions, BackwardOperands, Grads, Operands, Problem
from magi_attention.testing import masks

DEVICE = "cuda"
DTYPES = (torch.bfloat16, torch.float16)
NAMES = ("cudnn_flex", "fa4")
BACKENDS = {b.name: b for b in default_registry().backends}
pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU")]


def why_not(name, heads=(4, 2), dims=(64, 64), dtype=torch.bfloat16, **options) -> str | None:
    capability = torch.cuda.get_device_capability()
    asked = AttnOptions(dims[0] ** -0.5, **options)
    return BACKENDS[name].why_not(Problem("cuda", dtype, *heads, *dims, asked, False, True, capability))


@pytest.fixture(params=NAMES)
def backend(request, monkeypatch) -> str:
    """An explicit wish, so that no other backend takes over."""
    reason = why_not(request.param)
    if reason is not None:
        pytest.skip(reason)
    for name in custom_ops.WATCHED:
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("MAGI_ATTENTION_KERNEL_BACKEND", request.param)
    return request.param


def attend(x: Inputs, **options) -> Result:
    with torch.no_grad():
        out, meta = flex_flash_attn_func(
            x.q, x.k, x.v, *x.ranges, sink=x.sink, sink_layout=x.sink_layout, softmax_scale=x.scale, softcap=x.softcap,
            **options,
        )  # fmt: skip
    return Result(out, meta.lse, meta.max_logits)


def check_case(x: Inputs, note: object, factor: float = 2.0, seed: int = 1) -> None:
    assert_right(x, attend(x), note=note)
    dout = make_dout(x, seed)
    assert_grads(x, differentiate(x, dout), truth(x, dout, factor), note)


def check(seed, slices, tq, tk, *args, factor: float = 2.0, **kwargs) -> None:
    check_case(make_inputs(seed, slices, tq, tk, *args, **kwargs, device=DEVICE), (seed, tq, tk, args), factor, seed)


@pytest.mark.parametrize("ratio", (1, 2, 4, 5, 8))
def test_families_and_gqa(backend, ratio):
    for seed, slices in enumerate(masks.mask_families(333).values()):
        check(seed, slices, 333, 333, (2 * ratio, 2))


HEAD_DIMS = (
    *((8, 8), (32, 32), (64, 64), (80, 80), (96, 96), (128, 128), (160, 160), (192, 192), (256, 256)),
    *((192, 128), (96, 80), (64, 128), (128, 64)),
)


@pytest.mark.parametrize("dims", HEAD_DIMS, ids=str)
def test_head_dims(backend, dims):
    fits = [heads for heads in ((4, 2), (3, 3)) if why_not(backend, heads, dims) is None]
    if not fits:
        pytest.skip(str(why_not(backend, (3, 3), dims)))
    families = masks.mask_families(400)
    for heads, (seed, name) in product(fits, enumerate(("full", "causal", "varlen_causal", "sliding_window", "empty"))):
        check(seed, families[name], 400, 400, heads, dims)


def test_fp16(backend):
    for seed, name in enumerate(("full", "causal", "varlen_causal", "sliding_window")):
        check(seed, masks.mask_families(400)[name], 400, 400, (4, 2), (128, 128), torch.float16)


def test_odd_sizes(backend):
    sizes = (1, 63, 64, 65, 127, 129, 300)
    for seed, (tq, tk) in enumerate(product(sizes, sizes)):
        dims = ((64, 64), (128, 128))[seed % 2]
        check(seed, np.array([[0, tq, 0, tk, seed % 4]]), tq, tk, (4, 2), dims)


@pytest.mark.parametrize("heads, dim", (((4, 2), 64), ((4, 4), 128), ((8, 1), 128)), ids=str)
def test_random_masks(backend, heads, dim):
    for seed in range(60):
        rng = np.random.default_rng(seed)
        tq, tk = (int(n) for n in rng.integers(1, 700, size=2))
        slices = masks.random_slices(rng, tq, tk, max_slices=int(rng.integers(1, 40)))
        check(seed, slices, tq, tk, heads, (dim, dim))


@pytest.mark.parametrize("softcap", (0.7, 5.0, 30.0))
def test_softcap(backend, softcap):
    if (reason := why_not(backend, softcap=softcap)) is not None:
        pytest.skip(reason)
    for dim in (64, 128):
        check(1, masks.causal(400), 400, 400, (4, 2), (dim, dim), softcap=softcap)


@pytest.mark.parametrize("shape", ((1,), (4,), (300, 1), (300, 3)), ids=str)
def test_sinks(backend, shape):
    for seed, name in enumerate(("causal", "holes", "empty")):
        check(seed, masks.mask_families(300)[name], 300, 300, (4, 2), sink_shape=(*shape, 4))


@pytest.mark.parametrize("scale", (0.01, 1.0))
def test_softmax_scale(backend, scale):
    x = make_inputs(0, masks.causal(300), 300, 300, dims=(128, 128), device=DEVICE)
    check_case(replace(x, scale=scale), scale)


def test_huge_logits(backend):
    x = make_inputs(0, masks.causal(500), 500, 500, dims=(128, 128), size=10.0, device=DEVICE)
    for order in (torch.arange(500, device=DEVICE), x.k[:, 0].float().sum(1).argsort()):
        case = replace(x, k=x.k[order].contiguous(), v=x.v[order].contiguous())
        want = dense(case, torch.float64)
        assert_right(case, attend(case), allowed_error_of_huge_logits(case, want), want)


@pytest.mark.parametrize("name", SPECIAL)
def test_special_slices(backend, name):
    check(0, np.array(SPECIAL[name]), 300, 300, (4, 2), (128, 128))


@pytest.mark.parametrize("tq, tk", ((1500, 1500), (64, 4000), (4000, 64)))
def test_thousands_of_slices(backend, tq, tk):
    slices = masks.random_slices(np.random.default_rng(0), tq, tk, max_slices=10_000, shrink=0.1)
    assert len(slices) > 5000
    if backend == "cudnn_flex" and tq < tk:
        pytest.skip("cudnn.flex_attention compiles its kernels for so many intervals of a row, which takes minutes")
    check(0, slices, tq, tk, (2, 1), (64, 64))


@pytest.mark.parametrize("tq, tk", ((0, 64), (64, 0), (0, 0)))
def test_no_rows(backend, tq, tk):
    x = make_inputs(0, SliceTable([]), tq, tk, sink_shape=(1, 4), device=DEVICE)
    got, grads = attend(x), differentiate(x, make_dout(x))
    assert not got.out.any() and torch.allclose(got.lse, x.sink.expand(tq, 4))
    assert not any(t.any() for t in (grads.dq, grads.dk, grads.dv, grads.dsink))


def test_a_long_sequence(backend):
    x = make_inputs(0, masks.varlen(list(range(0, 20_001, 80)), 1), 20_000, 20_000, (16, 16), device=DEVICE)
    dout = make_dout(x)
    got, grads = attend(x), differentiate(x, dout)
    for first in (0, 9_920, 19_920):
        rows = slice(first, first + 80)
        part = replace(x, q=x.q[rows], k=x.k[rows], v=x.v[rows], slices=masks.causal(80))
        assert_right(part, Result(got.out[rows], got.lse[rows], None))
        mine = Grads(grads.dq[rows], grads.dk[rows], grads.dv[rows])
        assert_grads(part, mine, truth(part, dout[rows]), first)


def test_strided_inputs(backend):
    x = make_inputs(0, masks.causal(300), 300, 300, (8, 2), device=DEVICE)
    q, k, v = torch.cat([x.q, x.k, x.v], dim=1).split([8, 2, 2], dim=1)
    check_case(replace(x, q=q, k=k, v=v), "one projection")
    every_other = torch.stack([x.k, torch.full_like(x.k, float("nan"))], 1).flatten(0, 1)[::2]
    shifted = torch.empty(x.v.numel() + 1, dtype=x.v.dtype, device=DEVICE)[1:].view(x.v.shape).copy_(x.v)
    columns = x.q.permute(2, 0, 1).contiguous().permute(1, 2, 0)
    check_case(replace(x, q=columns, k=every_other, v=shifted), "odd strides")


@pytest.mark.parametrize("num_sinks", (0, 2))
@pytest.mark.parametrize("value", (float("nan"), float("inf")))
def test_what_unseen_rows_hold_does_not_matter(backend, value, num_sinks):
    slices = np.array([[0, 200, 10, 100, 0], [230, 480, 150, 330, 1]])
    x = make_inputs(3, slices, 500, 500, device=DEVICE, sink_shape=(num_sinks, 4) if num_sinks else None)
    dout = make_dout(x)
    want = attend(x), truth(x, dout)
    sees, is_seen = seen(x)
    for t, rows in ((x.q, ~sees), (dout, ~sees), (x.k, ~is_seen), (x.v, ~is_seen)):
        t[rows] = value
    got = attend(x)
    assert torch.equal(got.out, want[0].out) and torch.equal(got.lse, want[0].lse)
    assert_grads(x, differentiate(x, dout), want[1])


@pytest.mark.parametrize("with_sink", (False, True))
def test_stages(backend, with_sink):
    ours, tq, tk = BACKENDS[backend], 400, 500
    for seed in range(6):
        slices = trim(masks.random_slices(np.random.default_rng(seed), tq, tk, max_slices=20))
        x = make_inputs(seed, slices, tq, tk, dims=(128, 128), sink_shape=(2, 4) if with_sink else None, device=DEVICE)
        dout, options, part = make_dout(x, seed), options_of(x), None
        edges = ((0, 130), (130, 131), (131, 300), (300, tk))
        pieces = [SliceTable(cut_k(slices, a, b)[0] - np.array([0, 0, a, a, 0])) for a, b in edges]
        for n, ((a, b), piece) in enumerate(zip(edges, pieces)):
            sink, given = x.sink if n == 1 else None, part  # exactly one stage applies it
            part = ours.forward(Operands(x.q, x.k[a:b], x.v[a:b], piece, options, sink), part)
            assert given is None or part is given
        want = dense(x, torch.float64)
        assert (part.out - want.out).abs().max() < 4e-2 and torch.allclose(part.lse.double(), want.lse, atol=1e-3)
        out, lse = want.out.to(x.q.dtype), want.lse.float()
        total = Grads(*(torch.zeros_like(t, dtype=torch.float32) for t in (x.q, x.k, x.v)))
        for n, ((a, b), piece) in enumerate(zip(edges, pieces)):
            into = Grads(total.dq, total.dk[a:b], total.dv[a:b])
            sink = x.sink if n == 1 else None
            ours.backward(BackwardOperands(dout, x.q, x.k[a:b], x.v[a:b], out, lse, piece, options, sink), into)
            total.dsink = into.dsink if n == 1 else total.dsink
        assert_grads(x, total, truth(x, dout, 4.0), (seed, "each stage is rounded"))


def test_streams_do_not_disturb_one_another(backend):
    x = make_inputs(0, masks.varlen([0, 700, 1500], 1), 1500, 1500, (8, 2), (128, 128), device=DEVICE)
    want = attend(x)
    streams, results = [torch.cuda.Stream() for _ in range(4)], []
    for _ in range(5):
        for stream in streams:
            stream.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(stream):
                results.append(attend(x))
    torch.cuda.synchronize()
    assert all(torch.equal(got.out, want.out) and torch.equal(got.lse, want.lse) for got in results)


def test_the_deterministic_order_gives_the_same_bits(backend):
    x = make_inputs(4, masks.causal(2000), 2000, 2000, (8, 2), (128, 128), device=DEVICE)
    dout = make_dout(x)
    if why_not(backend, deterministic=True) is not None:
        with pytest.raises(NoBackendError, match="deterministic"):
            differentiate(x, dout, deterministic=True)
        return
    first = differentiate(x, dout, deterministic=True)
    assert_grads(x, first, truth(x, dout), "deterministic")
    for _ in range(10):
        again = differentiate(x, dout, deterministic=True)
        assert all(torch.equal(getattr(again, name), getattr(first, name)) for name in ("dq", "dk", "dv"))


def test_max_logits(backend):
    x = make_inputs(4, masks.causal(300), 300, 300, device=DEVICE)
    if why_not(backend, return_max_logits=True) is not None:
        with pytest.raises(NoBackendError, match="return_max_logits"):
            attend(x, return_max_logits=True)
        return
    assert_right(x, attend(x, return_max_logits=True))


@pytest.mark.parametrize("entry", ("fa4_fwd", "ffa_fa4_func", "MAGI_ATTENTION_FA4_BACKEND"))
def test_published_entries_of_fa4_run_fa4(entry, monkeypatch):
    """They fall back to other backends, so calls are counted, too."""
    if (reason := why_not("fa4", dims=(128, 128))) is not None:
        pytest.skip(reason)
    calls = []
    for name in ("attend", "differentiate"):
        run = getattr(Fa4Backend, name)
        monkeypatch.setattr(Fa4Backend, name, lambda *a, run=run, name=name: (calls.append(name), run(*a))[1])
    for name in custom_ops.WATCHED:
        monkeypatch.delenv(name, raising=False)
    x = make_inputs(6, masks.causal(700), 700, 700, (8, 2), (128, 128), device=DEVICE)
    dout = make_dout(x)
    if entry == "fa4_fwd":
        arg = SimpleNamespace(**dict(zip(("q_ranges", "k_ranges", "attn_type_map"), x.ranges)))
        out, lse = fa4_fwd(x.q, x.k, x.v, None, arg, x.scale)
        grads = Grads(*fa4_bwd(dout, x.q, x.k, x.v, None, out, lse, arg, x.scale)[:3])
    else:
        if entry == "MAGI_ATTENTION_FA4_BACKEND":
            monkeypatch.setenv(entry, "1")
            call = lambda *qkv: flex_flash_attn_func(*qkv, *x.ranges, softmax_scale=x.scale)  # noqa: E731
        else:
            call = lambda *qkv: ffa_fa4_func(*qkv, *x.ranges, softmax_scale=x.scale)  # noqa: E731
        leaves = [t.clone().requires_grad_() for t in (x.q, x.k, x.v)]
        out, second = call(*leaves)
        out, lse = out.detach(), getattr(second, "lse", second)
        grads = Grads(*torch.autograd.grad(call(*leaves)[0], leaves, dout))
    assert set(calls) == {"attend", "differentiate"}
    assert_right(x, Result(out, lse, None))
    assert_grads(x, grads, truth(x, dout), entry)


def test_kernels_of_fa4_that_were_compiled_ahead_are_used(tmp_path, monkeypatch):
    reason = why_not("fa4")
    if reason is not None:
        pytest.skip(reason)
    from flash_attn.cute import interface

    from magi_attention.kernels.fa4 import objects
    from magi_attention.kernels.fa4.compile_jobs import compile_all
    from magi_attention.kernels.fa4.precompile import Shape
    from magi_attention.kernels.fa4.wheel import load_wheel

    load_wheel()
    device = torch.cuda.get_device_properties(0)
    shapes, folder = [Shape(128, 128, 4, 1), Shape(128, 128, 4, 2)], tmp_path / "ahead"
    assert sum(d.compiled for d in compile_all(shapes, (device.major, device.minor), device.multi_processor_count,
                                               folder, 2)) > 4  # fmt: skip
    for name in objects.KINDS.values():
        monkeypatch.setattr(getattr(interface, name), "compile_cache", None)  # put back afterwards
    monkeypatch.setenv("MAGI_ATTENTION_FFA_FA4_CACHE_DIR", str(folder))
    monkeypatch.setenv("MAGI_ATTENTION_KERNEL_BACKEND", "fa4")
    objects.install(interface)
    prefix = [[0, 700, 0, 100, 0], [100, 400, 100, 400, 1], [400, 700, 400, 700, 1]]
    for slices in (masks.causal(700), np.array(prefix)):
        check(0, slices, 700, 700, (8, 2), (128, 128))
    assert sum(getattr(interface, name).compile_cache.compiled for name in objects.KINDS.values()) == 0
