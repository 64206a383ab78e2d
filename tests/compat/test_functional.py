# SPDX-License-Identifier: Apache-2.0
"""Published functions and managers: called as programs written for that package call them."""

from __future__ import annotations

import pytest
import torch

from magi_attention import functional, init_dist_attn_runtime_mgr
from magi_attention.comm.transport.fake import FakeWorld
from magi_attention.common import AttnRanges
from magi_attention.common.forward_meta import AttnForwardMeta
from magi_attention.compat.functional import softmax
from magi_attention.config import DistAttnConfig
from magi_attention.dist_attn_runtime_mgr import DistAttnRuntimeMgr
from magi_attention.errors import ContractError, UnsupportedError
from magi_attention.functional import sdpa
from magi_attention.functional.dist_attn import DistAttnRuntime, dist_attn_func
from magi_attention.functional.fa4 import FA4AttnFunc, is_fa4_installed
from magi_attention.functional.flex_flash_attn import FlexFlashAttnFunc, flex_flash_attn_func, maybe_contiguous
from magi_attention.testing.ref_attn import ref_attn_func

TOTAL, HEADS = 32, (4, 2, 8)


def manager(group):
    ranges = AttnRanges.from_ranges([[0, 20], [20, 32]])
    return init_dist_attn_runtime_mgr(ranges, ranges, ["causal", "full"], TOTAL, TOTAL, *HEADS, 4, group)


def tensors(dtype=torch.float64):
    torch.manual_seed(3)
    q, k, v = (torch.randn(TOTAL, heads, 8, dtype=dtype) for heads in (4, 2, 2))
    return q, k, v


def slices():
    ranges = torch.tensor([[0, 20], [20, 32]], dtype=torch.int32)
    return ranges, ranges, torch.tensor([1, 0], dtype=torch.int32)


def test_a_manager_and_its_parts():
    """dispatch by keyword, attention by the runtime, undispatch: the result of one device."""
    q, k, v = tensors()
    want, want_meta = flex_flash_attn_func(q, k, v, *slices())

    def rank(group):
        mgr = manager(group)
        assert isinstance(mgr, DistAttnRuntimeMgr) and isinstance(mgr.dist_attn_runtime, DistAttnRuntime)
        local = mgr.dispatch_qo(q_or_o=q), mgr.dispatch_kv(k_or_v=k), mgr.dispatch_kv(k_or_v=v)
        out, meta = dist_attn_func(*local, dist_attn_runtime=mgr.dist_attn_runtime, return_max_logits=True)
        again, same = mgr.calc_attn(*local, return_max_logits=True)
        assert isinstance(meta, AttnForwardMeta) and isinstance(same, AttnForwardMeta)
        assert torch.equal(out, again) and torch.equal(meta.max_logits, same.max_logits)
        lse = functional.undispatch_func(meta.lse, mgr.dispatch_meta_q, group)
        assert torch.equal(lse, mgr.undispatch_qo(q_or_o=same.lse))
        return mgr.undispatch_kv(k_or_v=out, is_partial_grad=False), lse

    for out, lse in FakeWorld(2).run(rank):
        assert torch.allclose(out, want) and torch.allclose(lse, want_meta.lse)


def test_the_constructor_of_managers():
    q, k, v = tensors()

    def rank(group):
        made = manager(group)
        parts = dict(
            dispatch_meta_q=made.dispatch_meta_q, dispatch_meta_k=made.dispatch_meta_k,
            dist_attn_config=DistAttnConfig(), attn_solver=made.attn_solver, dist_attn_runtime=made.dist_attn_runtime,
            num_heads_q=4, num_heads_kv=2, head_dim=8, cp_group=group, ref_q_ranges=made.ref_q_ranges,
            ref_k_ranges=made.ref_k_ranges, is_same_source=True, is_q_permutable=True, is_k_permutable=True,
        )  # fmt: skip
        mgr = DistAttnRuntimeMgr(**parts)
        assert mgr == made and isinstance(mgr, DistAttnRuntimeMgr)
        local = [mgr.dispatch_qo(x) for x in (q, k, v)]
        assert torch.equal(mgr.calc_attn(*local)[0], made.calc_attn(*local)[0])
        for wrong in (
            {"num_heads_q": 8},
            {"ref_q_ranges": AttnRanges.from_ranges([[0, 32]])},
            {"head_dim": 4},
        ):
            with pytest.raises(ContractError):
                DistAttnRuntimeMgr(**{**parts, **wrong})
        with pytest.raises(UnsupportedError):
            DistAttnRuntimeMgr(**{**parts, "is_same_source": False})
        return True

    assert all(FakeWorld(2).run(rank))


def test_a_runtime_is_not_made_by_hand():
    with pytest.raises(UnsupportedError, match="init_dist_attn_runtime_mgr"):
        DistAttnRuntime(comm_meta=None, calc_meta=None)
    assert not isinstance(3, DistAttnRuntime) and not isinstance(3, DistAttnRuntimeMgr)


def test_autograd_functions_by_position():
    q, k, v = (x.requires_grad_() for x in tensors())
    sink = torch.randn(2, 4)
    want, meta = flex_flash_attn_func(q, k, v, *slices(), sink=sink, softmax_scale=0.3, return_max_logits=True)
    got = FlexFlashAttnFunc.apply(
        q, k, v, sink, "sh", *slices(), 0.3, 0.0, False, 0, False, False, None, None, False, False, False, False,
        False, False, False, True, None, None,
    )  # fmt: skip
    for a, b in zip(got, (want, meta.lse, meta.max_logits), strict=True):
        assert torch.equal(a, b)
    plain, _ = flex_flash_attn_func(q, k, v, *slices(), softmax_scale=0.3)
    out, lse = FA4AttnFunc.apply(q, k, v, *slices(), 0.3, 0.0, True)
    assert is_fa4_installed and torch.allclose(out, plain) and lse.requires_grad
    weight = torch.randn_like(out)
    for a, b in zip(torch.autograd.grad(out, (q, k, v), weight), torch.autograd.grad(plain, (q, k, v), weight)):
        assert torch.allclose(a, b)
    with pytest.raises(UnsupportedError, match="index_attn_indices"):
        FlexFlashAttnFunc.apply(q, k, v, None, "sh", None, None, None, index_attn_indices_2d=torch.zeros(1, 1))


def test_partial_results_of_a_list():
    q, k, v = tensors()
    q_ranges, whole, _ = slices()
    full = [flex_flash_attn_func(q, k, v, torch.tensor([[0, 32]]), torch.tensor([[a, a + 8]])) for a in range(0, 32, 8)]
    want, meta = flex_flash_attn_func(q, k, v, torch.tensor([[0, 32]]), torch.tensor([[0, 32]]))
    outs, lses = [out for out, _ in full], [m.lse for _, m in full]
    out, lse = functional.correct_attn_fwd_result(out_list=outs, lse_list=lses, inplace=False)
    assert torch.allclose(out, want) and torch.allclose(lse, meta.lse) and not torch.allclose(outs[0], want)
    out, lse = functional.correct_attn_fwd_result(outs, lses, inplace=True)
    assert out is outs[0] and lse is lses[0] and torch.allclose(out, want)
    with pytest.raises(ContractError, match="one lse"):
        functional.correct_attn_fwd_result(outs, lses[:1])


@pytest.mark.parametrize("name", softmax._COMPILED)
def test_compiled_names_are_the_same_functions(name):
    """Not compiled here, which needs a C++ compiler and a minute; that they are traced is torch's business."""
    lse, sink = torch.randn(5, 3), torch.randn(2, 3)
    out = torch.randn(5, 3, 4)
    arguments = {
        "calc_lse_sink": (sink, 5),
        "correct_attn_lse": (lse, lse * 2),
        "correct_attn_out": (out, lse, out * 2, lse * 2, lse + 1),
        "correct_attn_out_lse_with_sink": (out, lse, sink),
        "sink_bwd": (sink, lse, out, out),
    }[name]
    compiled = getattr(softmax, f"{name}_compiled")
    assert compiled is getattr(softmax, f"{name}_compiled") is not getattr(softmax, name)
    with torch.compiler.set_stance("force_eager"):
        got, want = compiled(*arguments), getattr(softmax, name)(*arguments)
    for a, b in zip(got if isinstance(got, tuple) else (got,), want if isinstance(want, tuple) else (want,)):
        assert torch.equal(a, b)


@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize("with_delta", [False, True])
def test_steps_of_dense_attention(is_causal, with_delta):
    """Put together by hand, forward and backward, they are attention under autograd."""
    q, k, v = (x.requires_grad_() for x in tensors())
    mask = torch.rand(TOTAL, TOTAL) < 0.5
    mask[3] = False
    allowed = torch.ones(TOTAL, TOTAL, dtype=torch.bool).tril() if is_causal else mask
    want, meta = ref_attn_func(q, k, v, allowed, softmax_scale=0.3, backend="torch", return_lse=True)
    weight = torch.randn_like(want)
    with torch.no_grad():
        parts = sdpa.sdpa_fwd_qkv_rearrange(q, k, v)
        *ready, copies = sdpa.sdpa_fwd_preprocess(*parts, None if is_causal else mask, is_causal, softmax_scale=0.3)
        out, lse = sdpa.sdpa_fwd_out_lse_rearrange(*sdpa.sdpa_fwd_calc(*ready))
        assert torch.allclose(out, want) and torch.allclose(lse, meta.lse) and copies == 2
        *_, o, do, lse = sdpa.sdpa_bwd_qkvodo_lse_rearrange(q, k, v, out, weight, lse)
        q_, k_, v_, bias, scale = ready
        delta = sdpa.sdpa_bwd_preprocess(do, o) if with_delta else None
        weights = sdpa.sdpa_bwd_recalc_fwd(q_, k_, lse, bias, scale)
        dq, dk, dv = sdpa.sdpa_bwd_calc(do, q_, k_, v_, delta, weights, scale)
        got = sdpa.sdpa_bwd_dqdkdv_rearrange(dq, *sdpa.sdpa_bwd_postprocess(dk, dv, copies))
    for a, b in zip(got, torch.autograd.grad(want, (q, k, v), weight)):
        assert torch.allclose(a, b)
    with pytest.raises(ContractError, match="not both"):
        sdpa.sdpa_fwd_preprocess(*parts, mask, True)


def test_contiguous_where_the_last_dim_is_not():
    x = torch.arange(6.0).view(2, 3)
    assert maybe_contiguous(x) is x and maybe_contiguous(None) is None
    assert maybe_contiguous(x[:, ::2]).is_contiguous() and maybe_contiguous(x.T[:, :1]) is not x
