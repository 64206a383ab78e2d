# SPDX-License-Identifier: Apache-2.0
"""The backend ``cudnn_flex``, with a stand-in for the wheel that reads the endpoints alone, beside the dense one."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from magi_attention.common.slices import SliceTable, cut_k, trim
from magi_attention.kernels.cudnn_flex import backend as cudnn_flex
from magi_attention.kernels.cudnn_flex.backend import CudnnFlexBackend
from magi_attention.kernels.ffa.backend import FfaBackend
from magi_attention.kernels.reference.sdpa import SdpaBackend
from magi_attention.kernels.registry import Registry
from magi_attention.kernels.types import AttnOptions, Problem
from magi_attention.testing.masks import random_slices

GOOD = Problem("cuda", torch.bfloat16, 8, 2, 128, 128, AttnOptions(0.1), needs_backward=True, capability=(9, 0))
HEADS, DIM = (4, 2), 16


class Wheel:
    """``cudnn.flex_attention`` on the CPU: attention by the dense mask of the endpoints, in float32."""

    def __init__(self) -> None:
        self.plans: list[bool] = []

    def create_mask_plan(self, endpoints, q, k, v, *, build_backward):
        assert endpoints.dtype == torch.int32 and endpoints.shape[1] % 2 == 1 and q.dim() == 4
        self.plans.append(build_backward)
        seen = (endpoints[0].T[:, :, None] > torch.arange(k.shape[1])).sum(1) % 2 == 1
        return SimpleNamespace(seen=seen, has_backward=build_backward)

    def flex_attn_func(self, q, k, v, *, mask_plan, softmax_scale, return_lse, return_max_logit):
        s = scores(q, k, mask_plan, softmax_scale)
        lse = torch.logsumexp(s, -1)
        p = torch.where(lse[..., None] == -torch.inf, 0.0, torch.exp(s - lse[..., None]))
        out = torch.einsum("hqk,khd->qhd", p, grouped(v, q)).to(q.dtype)
        top = [s.amax((1, 2))] if return_max_logit else []
        return (out[None], lse[None], *top)

    def FlexAttentionBwd(self, *operands, deterministic):  # noqa: N802, the wheel's name
        def execute(q, k, v, out, dout, lse, dq, dk, dv, plan, *, workspace, softmax_scale):
            assert plan.has_backward and workspace.numel() == 0 and out.dtype == q.dtype == dout.dtype
            s, g = scores(q, k, plan, softmax_scale), dout[0].float()
            lse = lse[0][..., None]
            p = torch.where(lse == -torch.inf, 0.0, torch.exp(s - lse))
            delta = (out[0].float() * g).sum(-1).T[..., None]
            ds = p * (torch.einsum("qhd,khd->hqk", g, grouped(v, q)) - delta) * softmax_scale
            heads = k.shape[2]
            dq.copy_(torch.einsum("hqk,khd->qhd", ds, grouped(k, q)))
            sums = ((dk, ds, q[0].float()), (dv, p, g))
            for grad, x in ((grad, torch.einsum("hqk,qhd->khd", weights, rows)) for grad, weights, rows in sums):
                grad.copy_(x.unflatten(1, (heads, -1)).sum(2))

        return SimpleNamespace(check_support=bool, compile=bool, workspace_size=0, execute=execute)


def grouped(x, q):
    return x[0].float().repeat_interleave(q.shape[2] // x.shape[2], 1)


def scores(q, k, plan, scale):
    s = torch.einsum("qhd,khd->hqk", q[0].float(), grouped(k, q)) * scale
    return s.masked_fill(~plan.seen, -torch.inf)


@pytest.fixture
def wheel(monkeypatch) -> Wheel:
    stand_in = Wheel()
    monkeypatch.setattr(cudnn_flex, "_module", lambda: stand_in)
    return stand_in


def inputs(seed: int, total_q: int, total_k: int):
    generator = torch.Generator().manual_seed(seed)
    shapes = ((total_q, HEADS[0]), (total_k, HEADS[1]), (total_k, HEADS[1]), (total_q, HEADS[0]))
    return [torch.randn(*shape, DIM, generator=generator, dtype=torch.float32) for shape in shapes]


def near(got, want):
    return torch.allclose(got, want, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("seed", range(40))
def test_both_directions_are_those_of_the_dense_backend(wheel, seed):
    rng = np.random.default_rng(seed)
    total_q, total_k = (int(n) for n in rng.integers(1, 60, 2))
    slices = SliceTable(random_slices(rng, total_q, total_k, max_slices=int(rng.integers(1, 12))))
    print(f"seed {seed}: {total_q} x {total_k}, slices {slices.array.tolist()}")
    q, k, v, dout = inputs(seed, total_q, total_k)
    options = AttnOptions(0.3, return_max_logits=True)
    sink = torch.randn(2, HEADS[0]) if seed % 2 else None
    ours, dense = CudnnFlexBackend(), SdpaBackend()
    want, got = (b.forward(q, k, v, slices, options, sink) for b in (dense, ours))
    assert near(got.out, want.out) and near(got.lse, want.lse) and near(got.max_logits, want.max_logits)
    right, grads = (b.backward(dout, q, k, v, want.out, want.lse, slices, options, sink) for b in (dense, ours))
    for name in ("dq", "dk", "dv", *(["dsink"] if seed % 2 else [])):
        assert near(getattr(grads, name), getattr(right, name)), name


@pytest.mark.parametrize("seed", range(10))
def test_stages_are_merged(wheel, seed):
    rng = np.random.default_rng(seed)
    q, k, v, dout = inputs(seed, 40, 50)
    live = trim(random_slices(rng, 40, 50, max_slices=6))
    parts = [SliceTable(cut_k(live, start, end)[0]) for start, end in ((0, 20), (20, 50))]
    options, ours, dense = AttnOptions(0.3), CudnnFlexBackend(), SdpaBackend()
    want, got = dense.forward(q, k, v, SliceTable(live), options), None
    for part in parts:
        got = ours.forward(q, k, v, part, options, None, got)
    assert near(got.out, want.out) and near(got.lse, want.lse)
    right, grads = dense.backward(dout, q, k, v, want.out, want.lse, SliceTable(live), options), None
    for part in parts:
        grads = ours.backward(dout, q, k, v, want.out, want.lse, part, options, init=grads)
    assert all(near(getattr(grads, name), getattr(right, name)) for name in ("dq", "dk", "dv"))


def test_a_mask_is_planned_once_and_a_plan_of_the_backward_serves_both(wheel):
    q, k, v, dout = inputs(0, 20, 30)
    slices, options, ours = SliceTable([[0, 20, 0, 30, 1]]), AttnOptions(0.3), CudnnFlexBackend()
    for _ in range(3):
        got = ours.forward(q, k, v, slices, options)
    assert wheel.plans == [False]
    for _ in range(3):
        ours.backward(dout, q, k, v, got.out, got.lse, slices, options)
        ours.forward(q, k, v, slices, options)
    assert wheel.plans == [False, True]


def test_what_unseen_rows_hold_does_not_matter(wheel):
    q, k, v, dout = inputs(1, 20, 30)
    slices, options, ours = SliceTable([[2, 18, 5, 25, 0]]), AttnOptions(0.3), CudnnFlexBackend()
    want = ours.forward(q, k, v, slices, options)
    for x, rows in ((q, [0, 19]), (dout, [0, 19]), (k, [0, 29]), (v, [0, 29])):
        x[rows] = float("nan")
    got = ours.forward(q, k, v, slices, options)
    assert torch.equal(got.out, want.out) and torch.equal(got.lse, want.lse)
    grads = ours.backward(dout, q, k, v, got.out, got.lse, slices, options)
    assert not any(x.isnan().any() for x in (grads.dq, grads.dk, grads.dv))


def test_refusals_are_sentences(wheel):
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
        assert "pip install 'magi_attention[cudnn-flex]'" in CudnnFlexBackend().why_not(GOOD)
    finally:
        cudnn_flex._module.cache_clear()


def test_it_goes_first_on_blackwell_unless_ours_is_asked_for(wheel, monkeypatch):
    ffa = FfaBackend(portable=False)
    monkeypatch.setattr(type(ffa), "why_not", lambda self, problem: None)
    choice = Registry((ffa, CudnnFlexBackend(), SdpaBackend()))
    blackwell = replace(GOOD, capability=(10, 0))
    for problem, explicit, name in ((GOOD, False, "ffa"), (blackwell, False, "cudnn_flex"), (blackwell, True, "ffa")):
        chosen, why = choice.select(problem, "ffa", explicit=explicit)
        assert chosen.name == name and why.endswith(".")
    assert choice.select(blackwell, "sdpa")[0].name == "sdpa"
    assert choice.select(replace(blackwell, options=AttnOptions(0.1, softcap=2.0)), "ffa")[0].name == "ffa"
