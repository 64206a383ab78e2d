# SPDX-License-Identifier: Apache-2.0
"""The public function: autograd, compile, legacy call, errors, index lists; the FA4 and SDPA entries."""

from __future__ import annotations

import inspect
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from attn_oracle import assert_same, make_case, truth

from magi_attention.common.enum import AttnMaskType
from magi_attention.common.forward_meta import AttnForwardMeta
from magi_attention.errors import ContractError, NoBackendError, RangeError, UnsupportedError
from magi_attention.functional.fa4 import fa4_bwd, fa4_fwd, ffa_fa4_func
from magi_attention.functional.flex_flash_attn import flex_flash_attn_func
from magi_attention.functional.sdpa import sdpa_bwd, sdpa_fwd, sdpa_online_bwd, sdpa_online_fwd
from magi_attention.testing.masks import random_slices


@pytest.fixture(autouse=True)
def clean_environment(monkeypatch):
    for name in ("KERNEL_BACKEND", "SDPA_BACKEND", "FA4_BACKEND", "SANITY_CHECK"):
        monkeypatch.delenv(f"MAGI_ATTENTION_{name}", raising=False)


def leaves(case, dtype=torch.float64):
    return [x.to(dtype).requires_grad_() for x in (case.q, case.k, case.v)]


def grads_of(out, inputs, dout):
    return dict(zip(("dq", "dk", "dv", "dsink"), torch.autograd.grad(out, inputs, dout)))


@pytest.mark.parametrize("backend", [None, "sdpa", "sdpa_ol"])
@pytest.mark.parametrize("sink_shape", [None, (3, 4), (70, 2, 4)])
def test_against_dense_autograd(backend, sink_shape, monkeypatch):
    if backend:
        monkeypatch.setenv("MAGI_ATTENTION_KERNEL_BACKEND", backend)
    slices = random_slices(np.random.default_rng(5), 70, 90, max_slices=8)
    case = make_case(5, 70, 90, slices, dims=(16, 24), softcap=1.3, sink_shape=sink_shape)
    inputs = leaves(case)
    sink = None if case.sink is None else case.sink.clone().requires_grad_()
    out, meta = flex_flash_attn_func(
        *inputs, *case.slices.tensors(), sink=sink, sink_layout=case.sink_layout,
        softmax_scale=case.scale, softcap=case.softcap, return_max_logits=True,
    )  # fmt: skip
    assert isinstance(meta, AttnForwardMeta) and meta.lse.requires_grad
    got = {"out": out.detach(), "lse": meta.lse, "max_logits": meta.max_logits}
    got |= grads_of(out, inputs + ([] if sink is None else [sink]), case.dout)
    want = truth(case).tensors()
    assert got.keys() == want.keys()
    for name, x in got.items():
        assert_same(name, x, want[name], 1e-12)


def test_defaults_and_dtypes():
    case = make_case(1, 20, 20, np.array([[0, 20, 0, 20, 0]]))
    q, k, v = leaves(case, torch.bfloat16)
    ranges = torch.tensor([[0, 20]], dtype=torch.int32)
    out, meta = flex_flash_attn_func(q, k, v, ranges, ranges)
    assert out.dtype == torch.bfloat16 and meta.lse.dtype == torch.float32 and meta.max_logits is None
    assert out.shape == (20, 4, 16) and meta.lse.shape == (20, 4)
    case.scale = 16**-0.5
    assert_same("lse", meta.lse, truth(case).lse, 0.02)
    dq, dk, dv = torch.autograd.grad(out.float().sum(), (q, k, v))
    assert dq.dtype == dk.dtype == dv.dtype == torch.bfloat16


def test_gradcheck():
    case = make_case(2, 9, 11, np.array([[0, 6, 0, 8, 1], [2, 9, 8, 11, 0]]), dims=(4, 3))
    sink = torch.randn(2, 4, dtype=torch.float64, requires_grad=True)

    def attend(q, k, v, sink):
        return flex_flash_attn_func(q, k, v, *case.slices.tensors(), sink=sink, softcap=0.9)[0]

    assert torch.autograd.gradcheck(attend, (*leaves(case), sink))


def test_only_some_inputs_need_gradients():
    case = make_case(3, 12, 12, np.array([[0, 12, 0, 12, 1]]))
    q, k, v = case.q, case.k.clone().requires_grad_(), case.v
    out, _ = flex_flash_attn_func(q, k, v, *case.slices.tensors(), softmax_scale=case.scale)
    assert_same("dk", torch.autograd.grad(out, k, case.dout)[0], truth(case).dk, 1e-12)
    with torch.no_grad():
        assert not flex_flash_attn_func(q, k, v, *case.slices.tensors())[0].requires_grad


@pytest.mark.parametrize("compiler", ["eager", "aot_eager"])
def test_compiles_as_one_graph(compiler):
    case = make_case(6, 40, 50, np.array([[0, 40, 0, 50, 1]]), sink_shape=(2, 4))
    weight = torch.randn(16, 16, dtype=torch.float64, requires_grad=True)

    def model(x, k, v, weight, sink, q_ranges, k_ranges, types):
        out, meta = flex_flash_attn_func(x @ weight, k, v, q_ranges, k_ranges, types, sink=sink, return_max_logits=True)
        return out * 2 + meta.lse.nan_to_num(neginf=0.0)[..., None], meta.max_logits

    sink = case.sink.requires_grad_()
    inputs = [*leaves(case), weight, sink]
    args = (*inputs, *case.slices.tensors())
    torch._dynamo.reset()
    plain, fast = model(*args), torch.compile(model, fullgraph=True, backend=compiler)(*args)
    assert torch.equal(plain[0], fast[0]) and torch.equal(plain[1], fast[1])
    for a, b in zip(*(torch.autograd.grad(y[0], inputs, case.dout) for y in (plain, fast))):
        assert torch.allclose(a, b, atol=1e-13)


def test_custom_op_registration_is_sound():
    from magi_attention.kernels.ffa import custom_ops

    case = make_case(7, 12, 10, np.array([[0, 12, 0, 10, 0]]))
    q, k, v = leaves(case)
    mask = case.slices.tensors()
    for sink, top in ((None, False), (torch.randn(2, 4, dtype=torch.float64, requires_grad=True), True)):
        args = (q, k, v, *mask, sink, "sh", 0.3, 0.0, False, 0, top, "", True)
        torch.library.opcheck(custom_ops.flex_fwd, args)
        out, lse, _ = custom_ops.flex_fwd(*args)
        back = [x.detach() for x in (case.dout, q, k, v, out, lse)]
        dlse = torch.randn_like(back[-1]) if top else None
        plain_sink = None if sink is None else sink.detach()
        torch.library.opcheck(
            custom_ops.flex_bwd, (*back, *mask, plain_sink, "sh", 0.3, 0.0, False, 0, "", dlse),
            test_utils=("test_schema", "test_faketensor"),
        )  # fmt: skip


def test_signature_is_the_published_one():
    parameters = inspect.signature(flex_flash_attn_func).parameters
    positional = [n for n, p in parameters.items() if p.kind is p.POSITIONAL_OR_KEYWORD]
    assert positional == ["q", "k", "v", "q_ranges", "k_ranges", "attn_type_map"]
    want = (
        "index_attn_indices=None q_block_size=1 k_block_size=1 sink=None sink_layout='sh' softmax_scale=None "
        "softcap=0.0 deterministic=False sm_margin=0 disable_fwd_atomic_reduction=False "
        "disable_bwd_dkv_atomic_reduction=False ref_block_size=None max_seqlen_q=None auto_range_merge=False "
        "swap_ab=False pack_gqa=False cat_gqa=False sparse_load=False index_attn=False "
        "swap_bwd_qk_loop=False return_max_logits=False"
    )
    keyword = [f"{n}={p.default!r}" for n, p in parameters.items() if p.kind is p.KEYWORD_ONLY]
    assert keyword == want.split()


def test_legacy_calls():
    case = make_case(8, 16, 16, np.array([[0, 16, 0, 16, 1]]))
    q_ranges, k_ranges, types = case.slices.tensors()
    tensors = (case.q, case.k, case.v, q_ranges, k_ranges)
    want = flex_flash_attn_func(*tensors, types)[0]
    for args, kwargs in (
        ((16, 16, types), {}),
        ((16, 16), {"attn_type_map": types}),
        ((16,), {"max_seqlen_k": 16, "attn_type_map": types}),
        ((types,), {"max_seqlen_q": 16, "max_seqlen_k": 16, "disable_fwd_atomic_reduction": True}),
    ):
        with pytest.warns(DeprecationWarning, match="1.0.x"):
            out, second = flex_flash_attn_func(*tensors, *args, **kwargs)
        assert torch.equal(out, want) and second.lse.shape == (16, 4)
    with pytest.warns(DeprecationWarning), pytest.raises(ContractError, match="by keyword"):
        flex_flash_attn_func(*tensors, 16, 16, types, 0.5)


def test_hints_do_not_change_the_result():
    case = make_case(8, 64, 64, np.array([[0, 64, 0, 64, 0]]))
    args = (case.q, case.k, case.v, *case.slices.tensors())
    want = flex_flash_attn_func(*args)[0]
    for hints in (
        dict(auto_range_merge=True, sparse_load=True, swap_ab=True, ref_block_size=(16, 64)),
        dict(pack_gqa=True, ref_block_size=(128, 128), max_seqlen_q=64, sm_margin=4, deterministic=True),
        dict(cat_gqa=True, disable_fwd_atomic_reduction=True, disable_bwd_dkv_atomic_reduction=True),
        dict(swap_bwd_qk_loop=True),
    ):
        assert torch.equal(flex_flash_attn_func(*args, **hints)[0], want)


def test_bad_calls():
    q, k = torch.zeros(8, 4, 16), torch.zeros(8, 2, 16)
    r = torch.tensor([[0, 8]], dtype=torch.int32)
    two = torch.tensor([[0, 8], [0, 4]], dtype=torch.int32)
    t = torch.tensor([0], dtype=torch.int32)
    ids = torch.zeros(8, 1, 4, dtype=torch.int32)
    for args, kwargs, text in (
        ((q, k, k), {}, "exactly one"),
        ((q, k, k, r, r), {"index_attn_indices": ids}, "exactly one"),
        ((q, k, k, r), {}, "k_ranges is missing"),
        ((q, k, k, r, two), {}, "one k range per q range"),
        ((q, k, k, r, r, torch.tensor([0, 1])), {}, "entries for 1 slices"),
        ((q, k, k, r, r, torch.tensor([4])), {}, "attn_type_map\\[0\\] is 4"),
        ((q, k, k, r, r, t.float()), {}, "attn_type_map is"),
        ((q, k, k, r.float(), r), {}, "q_ranges is"),
        ((q, k, k, r, r[:, :1]), {}, "k_ranges is"),
        ((q, k, k, r, r + 1), {}, "k row 9, but there are only 8"),
        ((q[0], k, k, r, r), {}, "tokens, heads, head dim"),
        ((q, k, k[:4], r, r), {}, "same tokens and heads"),
        ((q[..., :8], k, k, r, r), {}, "same head dim"),
        ((q[:, :3], k, k, r, r), {}, "multiple"),
        ((q.half(), k, k, r, r), {}, "cast all three"),
        ((q.to("meta"), k, k, r, r), {}, "move k to meta"),
        ((q, k, k, r, r), {"sink": torch.zeros(2, 3)}, "sink has shape"),
        ((q, k, k, r, r), {"sink_layout": "xy"}, "Unknown sink layout"),
        ((q, k, k, r, r), {"sm_margin": -1}, "sm_margin"),
        ((q, k, k, r, r), {"swap_bwd_qk_loop": True, "deterministic": True}, "exclude each other"),
        ((q, k, k, r, r), {"cat_gqa": True, "pack_gqa": True}, "cat_gqa excludes"),
        ((q, k, k, r, r), {"ref_block_size": (8, 64)}, "is no tile"),
        ((q, k, k, r, r), {"index_attn": True}, "index_attn needs"),
        ((q, k, k), {"index_attn_indices": ids}, "with one head"),
        ((q, k[:, :1], k[:, :1]), {"index_attn_indices": ids + 8}, "index is 8, but k has only 8"),
    ):
        with pytest.raises(AssertionError, match=text) as caught:
            flex_flash_attn_func(*args, **kwargs)
        assert isinstance(caught.value, ContractError), text
    with pytest.raises(RangeError, match="half-open"):
        flex_flash_attn_func(q, k, k, r.flip(1), r)
    for kwargs in (
        {"sparse_load": True},
        {"disable_bwd_dkv_atomic_reduction": True, "swap_bwd_qk_loop": True},
        {"q_block_size": 2},
        {"sink": torch.zeros(1, 4), "sink_layout": "shd"},
    ):
        with pytest.raises(RuntimeError) as caught:
            flex_flash_attn_func(q, k, k, r, r, **kwargs)
        assert isinstance(caught.value, UnsupportedError)


def test_environment_decides_about_checks_and_backend(monkeypatch):
    case = make_case(1, 8, 8, np.array([[0, 8, 0, 8, 0], [4, 8, 0, 8, 1]]))
    args = (case.q, case.k, case.v, *case.slices.tensors())
    flex_flash_attn_func(*args)
    monkeypatch.setenv("MAGI_ATTENTION_SANITY_CHECK", "1")
    with pytest.raises(ContractError, match="Slices 0 and 1 overlap"):
        flex_flash_attn_func(*args)
    monkeypatch.setenv("MAGI_ATTENTION_SANITY_CHECK", "0")
    monkeypatch.setenv("MAGI_ATTENTION_KERNEL_BACKEND", "fa4")
    with pytest.raises(NoBackendError, match="fa4"):
        flex_flash_attn_func(*args)


def test_ranges_may_change_between_calls_but_not_before_backward():
    case = make_case(9, 8, 8, np.array([[0, 8, 0, 8, 0]]))
    q_ranges, k_ranges, types = (x.clone() for x in case.slices.tensors())
    inputs = leaves(case)
    out, _ = flex_flash_attn_func(*inputs, q_ranges, k_ranges, types)
    types.fill_(1)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        torch.autograd.grad(out, inputs, case.dout)


def attn_args(case):
    """The same mask as tensors, pairs, range objects and mask types."""
    q_ranges, k_ranges, types = case.slices.tensors()
    objects = [[SimpleNamespace(start=a, end=b) for a, b in r.tolist()] for r in (q_ranges, k_ranges)]
    yield SimpleNamespace(q_ranges=q_ranges, k_ranges=k_ranges, attn_type_map=types)
    yield SimpleNamespace(q_ranges=q_ranges.tolist(), k_ranges=k_ranges.tolist(), attn_type_map=types.tolist())
    enums = [AttnMaskType.from_int_type(t) for t in types.tolist()]
    yield SimpleNamespace(q_ranges=objects[0], k_ranges=objects[1], attn_type_map=enums, total_area=-1)


@pytest.mark.parametrize(
    "forward, backward", [(fa4_fwd, fa4_bwd), (sdpa_fwd, sdpa_bwd), (sdpa_online_fwd, sdpa_online_bwd)]
)
@pytest.mark.parametrize("with_sink", [False, True])
def test_plain_entries(forward, backward, with_sink):
    slices = random_slices(np.random.default_rng(2), 40, 50, max_slices=6)
    case = make_case(2, 40, 50, slices, softcap=2.0, sink_shape=(2, 4) if with_sink else None)
    want = truth(case)
    for arg in attn_args(case):
        out, second = forward(case.q, case.k, case.v, case.sink, arg, case.scale, case.softcap, "sh")
        lse = second.lse if isinstance(second, AttnForwardMeta) else second
        grads = backward(
            case.dout, case.q, case.k, case.v, case.sink, out, lse, arg, case.scale, case.softcap, "sh", True
        )
        got = dict(zip(("out", "lse", "dq", "dk", "dv", "dsink"), (out, lse, *grads)))
        assert (got["dsink"] is None) != with_sink
        for name, x in got.items():
            if x is not None:
                assert_same(name, x, getattr(want, name), 1e-12)
    if forward is not fa4_fwd:
        meta = forward(case.q, case.k, case.v, None, arg, case.scale, case.softcap, return_max_logits=True)[1]
        assert_same("max_logits", meta.max_logits, want.max_logits, 1e-12)


def test_fa4_autograd_form_never_reuses_another_mask():
    case = make_case(4, 30, 30, np.array([[0, 30, 0, 30, 1]]))
    other = make_case(4, 30, 30, np.array([[0, 30, 0, 30, 2]]))
    for c in (case, other):
        inputs = leaves(c)
        out, lse = ffa_fa4_func(*inputs, *c.slices.tensors(), softmax_scale=c.scale, reuse_attn_arg=True)
        want = truth(c)
        assert_same("out", out.detach(), want.out, 1e-12)
        assert_same("lse", lse, want.lse, 1e-12)
        for name, x in grads_of(out, inputs, c.dout).items():
            assert_same(name, x, getattr(want, name), 1e-12)
