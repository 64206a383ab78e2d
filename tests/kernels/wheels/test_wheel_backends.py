# SPDX-License-Identifier: Apache-2.0
"""The backends ``cudnn_flex`` and ``fa4`` with stand-ins for their wheels, beside the dense backend."""

from __future__ import annotations

import sys
from dataclasses import replace
from types import ModuleType
from typing import NamedTuple

import numpy as np
import pytest
import torch
from stand_in_wheels import CudnnFlex, FlashAttention4

from magi_attention.comm.transport.fake import FakeWorld
from magi_attention.common.slices import SliceTable, cut_k, trim
from magi_attention.errors import UnsupportedError
from magi_attention.functional import AttnPolicy, AttnRuntime, TokenLayout, gather, shard
from magi_attention.functional.dist_attn import dist_attn
from magi_attention.kernels import registry as registry_module
from magi_attention.kernels.cudnn_flex import backend as cudnn_flex
from magi_attention.kernels.cudnn_flex.backend import CudnnFlexBackend
from magi_attention.kernels.fa4 import backend as fa4
from magi_attention.kernels.fa4 import wheel as fa4_wheel
from magi_attention.kernels.fa4.backend import Fa4Backend
from magi_attention.kernels.fa4.blocks import BlockSize
from magi_attention.kernels.ffa.backend import FfaBackend
from magi_attention.kernels.reference.sdpa import SdpaBackend
from magi_attention.kernels.registry import Registry
from magi_attention.kernels.types import AttnOptions, Backend, BackwardOperands, Operands, Problem
from magi_attention.meta.planner import build_plan
from magi_attention.testing.masks import random_slices

GOOD = Problem("cuda", torch.bfloat16, 8, 2, 128, 128, AttnOptions(0.1), needs_backward=True, capability=(9, 0))
HEADS, DIM = (4, 2), 16


class Case(NamedTuple):
    """A backend with a stand-in for its wheel."""

    backend: Backend
    wheel: CudnnFlex | FlashAttention4
    max_logits: bool


def make_case(name: str, monkeypatch) -> Case:
    if name == "cudnn_flex":
        wheel = CudnnFlex()
        monkeypatch.setattr(cudnn_flex, "_module", lambda: wheel)
        return Case(CudnnFlexBackend(), wheel, True)
    monkeypatch.setattr(fa4, "is_installed", lambda: True)
    monkeypatch.setattr(fa4, "load_wheel", FlashAttention4().as_wheel)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    monkeypatch.setattr(fa4, "block_size", lambda capability, head_dim: BlockSize(16, 8))
    return Case(Fa4Backend(), FlashAttention4(), False)


@pytest.fixture(params=("cudnn_flex", "fa4"))
def case(request, monkeypatch) -> Case:
    return make_case(request.param, monkeypatch)


@pytest.fixture
def wheel(monkeypatch) -> CudnnFlex:
    return make_case("cudnn_flex", monkeypatch).wheel


@pytest.fixture
def flash(monkeypatch) -> Fa4Backend:
    return make_case("fa4", monkeypatch).backend


def inputs(seed: int, total_q: int, total_k: int):
    generator = torch.Generator().manual_seed(seed)
    shapes = ((total_q, HEADS[0]), (total_k, HEADS[1]), (total_k, HEADS[1]), (total_q, HEADS[0]))
    return [torch.randn(*shape, DIM, generator=generator, dtype=torch.float32) for shape in shapes]


def near(got, want):
    return torch.allclose(got, want, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("seed", range(40))
def test_both_directions_are_those_of_the_dense_backend(case, seed):
    rng = np.random.default_rng(seed)
    total_q, total_k = (int(n) for n in rng.integers(1, 60, 2))
    slices = SliceTable(random_slices(rng, total_q, total_k, max_slices=int(rng.integers(1, 12))))
    print(f"seed {seed}: {total_q} x {total_k}, slices {slices.array.tolist()}")
    q, k, v, dout = inputs(seed, total_q, total_k)
    options = AttnOptions(0.3, return_max_logits=case.max_logits)
    sink = torch.randn(2, HEADS[0]) if seed % 2 else None
    ours, dense = case.backend, SdpaBackend()
    want, got = (b.forward(Operands(q, k, v, slices, options, sink)) for b in (dense, ours))
    assert near(got.out, want.out) and near(got.lse, want.lse)
    assert near(got.max_logits, want.max_logits) if case.max_logits else got.max_logits is None
    right, grads = (
        b.backward(BackwardOperands(dout, q, k, v, want.out, want.lse, slices, options, sink)) for b in (dense, ours)
    )
    for name in ("dq", "dk", "dv", *(["dsink"] if seed % 2 else [])):
        assert near(getattr(grads, name), getattr(right, name)), name
    out, lse, top = ours.forward_final(Operands(q, k, v, slices, options, sink))
    assert torch.equal(out, got.out) and torch.equal(lse, got.lse) and (top is None) == (got.max_logits is None)
    final = ours.backward_final(BackwardOperands(dout, q, k, v, want.out, want.lse, slices, options, sink))
    assert all(torch.equal(getattr(final, name), getattr(grads, name)) for name in ("dq", "dk", "dv"))


@pytest.mark.parametrize("world", [1, 2])
def test_losses_of_lse_go_to_a_backend_that_takes_them(case, world, monkeypatch, caplog):
    """The kernels of a wheel work delta out themselves. Another backend takes such a backward, and says so."""
    monkeypatch.setattr(type(case.backend), "why_not", lambda self, problem: None)
    plan = build_plan(SliceTable(np.array([[0, 30, 0, 30, 1], [30, 64, 10, 64, 0]])), 64, world)
    tensors, found = inputs(3, 64, 64), []
    for registry in (Registry((case.backend, SdpaBackend())), Registry((SdpaBackend(),))):

        def rank(transport, registry=registry):
            layout = TokenLayout(plan, transport)
            policy = AttnPolicy(backend=registry.names[0], is_backend_explicit=True)
            runtime = AttnRuntime(plan, transport, registry, policy)
            q, k, v, dout = (shard(x, layout).detach().requires_grad_() for x in tensors)
            out, lse, _ = dist_attn(q, k, v, runtime)
            loss = (out * dout.detach()).sum() + lse.nan_to_num(neginf=0.0).square().sum()
            return [gather(x, layout) for x in torch.autograd.grad(loss, (q, k, v))]

        found.append(FakeWorld(world).run(rank)[0])
    assert all(near(a, b) for a, b in zip(*found))
    assert any(f"Backend '{case.backend.name}' takes no gradient of lse" in r.message for r in caplog.records)
    registry_module._warn_once.cache_clear()


@pytest.mark.parametrize("seed", range(10))
def test_stages_are_merged(case, seed):
    rng, sink = np.random.default_rng(seed), torch.randn(2, HEADS[0], generator=torch.Generator().manual_seed(seed))
    q, k, v, dout = inputs(seed, 40, 50)
    live = trim(random_slices(rng, 40, 50, max_slices=6))
    parts = [SliceTable(cut_k(live, start, end)[0]) for start, end in ((0, 20), (20, 50))]
    options, ours, dense = AttnOptions(0.3), case.backend, SdpaBackend()
    want, got = dense.forward(Operands(q, k, v, SliceTable(live), options, sink)), None
    for part, once in zip(parts, (None, sink)):
        got = ours.forward(Operands(q, k, v, part, options, once), got)
    assert near(got.out, want.out) and near(got.lse, want.lse)
    right, grads = (
        dense.backward(BackwardOperands(dout, q, k, v, want.out, want.lse, SliceTable(live), options, sink)),
        None,
    )
    for part, once in zip(parts, (None, sink)):
        grads = ours.backward(BackwardOperands(dout, q, k, v, want.out, want.lse, part, options, once), grads)
    assert all(near(getattr(grads, name), getattr(right, name)) for name in ("dq", "dk", "dv", "dsink"))


def test_a_mask_is_planned_once_and_a_plan_of_the_backward_serves_both(wheel):
    q, k, v, dout = inputs(0, 20, 30)
    slices, options, ours = SliceTable([[0, 20, 0, 30, 1]]), AttnOptions(0.3), CudnnFlexBackend()
    for _ in range(3):
        got = ours.forward(Operands(q, k, v, slices, options))
    assert wheel.plans == [False]
    for _ in range(3):
        ours.backward(BackwardOperands(dout, q, k, v, got.out, got.lse, slices, options))
        ours.forward(Operands(q, k, v, slices, options))
    assert wheel.plans == [False, True]


def test_what_unseen_rows_hold_does_not_matter(case):
    q, k, v, dout = inputs(1, 20, 30)
    slices, options, ours = SliceTable([[2, 18, 5, 25, 0]]), AttnOptions(0.3), case.backend
    sink = torch.zeros(1, HEADS[0])
    want = ours.forward(Operands(q, k, v, slices, options, sink))
    for x, rows in ((q, [0, 19]), (dout, [0, 19]), (k, [0, 29]), (v, [0, 29])):
        x[rows] = float("nan")
    got = ours.forward(Operands(q, k, v, slices, options, sink))
    assert torch.equal(got.out, want.out) and torch.equal(got.lse, want.lse)
    grads = ours.backward(BackwardOperands(dout, q, k, v, got.out, got.lse, slices, options, sink))
    assert not any(x.isnan().any() for x in (grads.dq, grads.dk, grads.dv, grads.dsink))


def test_refusals_of_cudnn_flex_are_sentences(wheel):
    ours = CudnnFlexBackend()
    assert ours.why_not(GOOD) is None
    for change, word in (
        ({"device_type": "cpu"}, "cpu"),
        ({"capability": (8, 0)}, "9.0, 10.0 and 10.3"),
        ({"dtype": torch.float32}, "float32"),
        ({"head_dim": 136, "head_dim_v": 136}, "(136, 136)"),
        ({"head_dim": 12}, "(12, 128)"),
        ({"num_heads_q": 7}, "7 query"),
        ({"head_dim_v": 64}, "no backward of grouped heads"),
        ({"head_dim": 64, "num_heads_kv": 8}, "the larger"),
        ({"options": AttnOptions(0.1, softcap=5.0)}, "softcap"),
        ({"options": AttnOptions(-1.0)}, "softmax_scale"),
        ({"options": AttnOptions(0.1, sm_margin=4)}, "sm_margin"),
        ({"head_dim": 256, "head_dim_v": 256, "options": AttnOptions(0.1, deterministic=True)}, "256"),
    ):
        reason = ours.why_not(replace(GOOD, **change))
        assert reason and word in reason and reason.endswith("."), change
    for fine in ({"head_dim_v": 64, "num_heads_kv": 8}, {"capability": (10, 3), "head_dim_v": 64}, {"has_sink": True}):
        assert ours.why_not(replace(GOOD, **fine)) is None


def test_without_the_wheel_it_says_what_to_install(monkeypatch):
    monkeypatch.setattr(cudnn_flex, "find_spec", lambda name: None)
    cudnn_flex._module.cache_clear()
    try:
        assert "pip install 'nvidia-cudnn-frontend[cutedsl]>=" in CudnnFlexBackend().why_not(GOOD)
    finally:
        cudnn_flex._module.cache_clear()


def test_wheels_that_are_not_in_question_are_not_loaded(monkeypatch):
    for module in (cudnn_flex, fa4_wheel):
        monkeypatch.setattr(module, "find_spec", lambda name: pytest.fail(f"{name} was looked for"))
    cudnn_flex._module.cache_clear()
    ffa = FfaBackend(portable=False)
    monkeypatch.setattr(type(ffa), "why_not", lambda self, problem: None)
    assert Registry((ffa, CudnnFlexBackend(), Fa4Backend())).select(GOOD, "ffa")[0].name == "ffa"


def test_refusals_of_fa4_are_sentences(flash):
    assert flash.why_not(GOOD) is None
    blackwell, wide = {"capability": (10, 0)}, {"head_dim": 256, "head_dim_v": 256}
    for change, word in (
        ({"device_type": "cpu"}, "cpu"),
        ({"capability": (8, 0)}, "9.0, 10.0 and 10.3"),
        ({"capability": (12, 0)}, "9.0, 10.0 and 10.3"),
        ({"dtype": torch.float32}, "float32"),
        ({"head_dim": 12, "head_dim_v": 12}, "(12, 12)"),
        ({"head_dim": 224, "head_dim_v": 224}, "(224, 224)"),
        ({"head_dim_v": 64}, "(128, 64)"),
        ({"head_dim": 64, "num_heads_kv": 8}, "(64, 128)"),
        ({"head_dim": 80, "head_dim_v": 80}, "multiples of 32"),
        ({**blackwell, "head_dim": 160, "head_dim_v": 160}, "(160, 160)"),
        ({**blackwell, **wide}, "256"),
        ({"num_heads_q": 7}, "7 query"),
        ({"options": AttnOptions(-1.0)}, "softmax_scale"),
        ({"options": AttnOptions(0.1, sm_margin=4)}, "sm_margin"),
        ({"options": AttnOptions(0.1, return_max_logits=True)}, "return_max_logits"),
        ({"options": AttnOptions(0.1, deterministic=True)}, "deterministic"),
        ({**blackwell, "options": AttnOptions(0.1, deterministic=True)}, "deterministic"),
    ):
        reason = flash.why_not(replace(GOOD, **change))
        assert reason and word in reason and reason.endswith("."), change
    forward = {"needs_backward": False}
    for fine in (
        {"options": AttnOptions(0.1, softcap=5.0)}, {"has_sink": True}, wide, {**blackwell, "head_dim_v": 64},
        {**forward, "options": AttnOptions(0.1, deterministic=True)}, {**forward, **blackwell, **wide},
        {"capability": (10, 3), "head_dim": 192},
    ):  # fmt: skip
        assert flash.why_not(replace(GOOD, **fine)) is None, fine


def test_another_flash_attn_4_is_refused(monkeypatch):
    package, interface, lists, mask_mod = (ModuleType(name) for name in ("p", "i", "b", "m"))
    package.interface = interface
    interface._flash_attn_fwd = interface._flash_attn_bwd = lambda q, k, v, softmax_scale: None
    lists.BlockSparseTensorsTorch, mask_mod.mask_mod_of = object, None
    names = ("flash_attn.cute", "flash_attn.cute.interface", "flash_attn.cute.block_sparsity")
    for name, module in zip((*names, "magi_attention.kernels.fa4.mask_mod"), (package, interface, lists, mask_mod)):
        monkeypatch.setitem(sys.modules, name, module)
    fa4_wheel.load_wheel.cache_clear()
    with pytest.raises(UnsupportedError, match=r"no aux_tensors, block_sparse_tensors.*pip install"):
        fa4_wheel.load_wheel()


def test_without_flash_attn_4_it_says_what_to_install(monkeypatch):
    monkeypatch.setattr(fa4_wheel, "find_spec", lambda name: None)
    fa4_wheel.is_installed.cache_clear()
    try:
        assert "pip install 'flash-attn-4[cu13]==" in Fa4Backend().why_not(GOOD)
    finally:
        fa4_wheel.is_installed.cache_clear()
