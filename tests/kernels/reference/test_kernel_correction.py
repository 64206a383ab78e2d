# SPDX-License-Identifier: Apache-2.0
"""Merging of partial results, sinks and the safe building blocks, against plain formulas in float64."""

from __future__ import annotations

import inspect

import pytest
import torch

from magi_attention.errors import ContractError, UnsupportedError
from magi_attention.functional import utils
from magi_attention.functional.utils import (
    calc_lse_rescale_weight,
    calc_lse_sink,
    correct_attn_lse,
    correct_attn_lse_with_sink,
    correct_attn_out,
    correct_attn_out_lse,
    correct_attn_out_lse_with_sink,
    correct_attn_out_with_sink,
    safe_lse,
    safe_softmax,
    safe_subtract,
    sink_bwd,
    softmax_bwd,
)

NEG = float("-inf")
T, H, D = 7, 3, 5


def partials(count: int, seed: int = 0, dtype: torch.dtype = torch.float64):
    """Logits (T, H, n) with -inf holes and values, with (out, lse) of each of ``count`` parts and of all."""
    gen = torch.Generator().manual_seed(seed)
    s = torch.randn(T, H, 4 * count, generator=gen, dtype=torch.float64) * 40
    s[0] = NEG  # a row that sees nothing anywhere
    s[1, :, :4] = NEG  # nothing in the first part
    s[2, :, 4:] = NEG  # something in the first part only
    v = torch.randn(T, H, 4 * count, D, generator=gen, dtype=torch.float64)

    def attend(a: int, b: int):
        out = torch.einsum("thn,thnd->thd", safe_softmax(s[..., a:b]), v[:, :, a:b])
        return out.to(dtype), safe_lse(s[..., a:b]).to(torch.float32 if dtype != torch.float64 else dtype)

    return [attend(4 * i, 4 * i + 4) for i in range(count)], attend(0, 4 * count)


def close(a, b, tol=1e-12):
    assert a.shape == b.shape and not a.isnan().any()
    assert torch.allclose(a, b, atol=tol, rtol=tol)


@pytest.mark.parametrize("inplace", [False, True])
@pytest.mark.parametrize("order", [(0, 1, 2), (2, 1, 0), (1, 2, 0)])
def test_merging_parts_gives_the_whole(inplace, order):
    parts, (want_out, want_lse) = partials(3)
    out, lse = (x.clone() for x in parts[order[0]])
    for i in order[1:]:
        before = (out, lse)
        out, lse = correct_attn_out_lse(out, lse, *parts[i], inplace=inplace)
        assert (out is before[0] and lse is before[1]) == inplace
    close(out, want_out)
    close(lse, want_lse)


def test_separate_merges_agree_with_the_fused_one():
    ((out1, lse1), (out2, lse2)), (want_out, want_lse) = partials(2)
    lse = correct_attn_lse(lse1, lse2)
    close(lse, want_lse)
    close(correct_attn_out(out1, lse1, out2, lse2, lse), want_out)
    held = [x.clone() for x in (out1, lse1)]
    assert correct_attn_out(held[0], lse1, out2, lse2, lse, inplace=True) is held[0]
    assert correct_attn_lse(held[1], lse2, inplace=True) is held[1]
    close(held[0], want_out)
    close(held[1], want_lse)


@pytest.mark.parametrize("inplace", [False, True])
def test_16_bit_out_keeps_its_dtype(inplace):
    ((out1, lse1), (out2, lse2)), (want, _) = partials(2, dtype=torch.bfloat16)
    got, lse = correct_attn_out_lse(out1.clone(), lse1.clone(), out2, lse2, inplace=inplace)
    assert got.dtype == torch.bfloat16 and lse.dtype == torch.float32
    close(got.double(), want.double(), 0.02)


@pytest.mark.parametrize("inplace", [False, True])
@pytest.mark.parametrize("layout", ["sh", "ssh"])
@pytest.mark.parametrize("shift", [0.0, 200.0, -1000.0])
def test_sink_joins_the_denominator(layout, shift, inplace):
    _, (out, lse) = partials(2)
    sink = torch.randn((9, H) if layout == "sh" else (T, 9, H), dtype=torch.float64) + shift
    columns = (sink[None].expand(T, 9, H) if layout == "sh" else sink).transpose(1, 2)
    want_lse = torch.logsumexp(torch.cat([lse[..., None], columns], -1), -1)
    want_out = out * torch.exp(lse - want_lse)[..., None]
    close(calc_lse_sink(sink, T, layout), torch.logsumexp(columns, -1))
    close(correct_attn_lse_with_sink(lse.clone(), sink, layout, inplace), want_lse)
    close(correct_attn_out_with_sink(out.clone(), lse, sink, layout, inplace), want_out)
    held = out.clone(), lse.clone()
    got = correct_attn_out_lse_with_sink(*held, sink, layout, inplace)
    close(got[0], want_out)
    close(got[1], want_lse)
    assert (got[0] is held[0] and got[1] is held[1]) == inplace


@pytest.mark.parametrize("layout", ["sh", "ssh"])
def test_sink_gradient(layout):
    _, (out, lse) = partials(2)
    sink = torch.randn((4, H) if layout == "sh" else (T, 4, H), dtype=torch.float64).requires_grad_()
    dout = torch.randn(T, H, D, dtype=torch.float64)
    columns = (sink[None].expand(T, 4, H) if layout == "sh" else sink).transpose(1, 2)
    weight = torch.softmax(torch.cat([lse[..., None], columns], -1), -1)[..., :1]
    (want,) = torch.autograd.grad(weight * out, sink, dout)
    final_out, final_lse = correct_attn_out_lse_with_sink(out, lse, sink.detach(), layout)
    close(sink_bwd(sink.detach(), final_lse, final_out, dout, layout), want)
    held = torch.ones_like(want)
    assert sink_bwd(sink.detach(), final_lse, final_out, dout, layout, dsink=held) is held
    close(held, want)


def test_building_blocks_on_empty_rows():
    a = torch.tensor([NEG, NEG, 1.0])
    assert safe_subtract(a, torch.tensor([NEG, 2.0, 3.0])).tolist() == [NEG, NEG, -2.0]
    x = torch.tensor([[NEG, NEG], [0.0, NEG]])
    assert safe_softmax(x).tolist() == [[0.0, 0.0], [1.0, 0.0]]
    assert safe_lse(x).tolist() == [NEG, 0.0]
    assert safe_lse(x, keepdim=True).shape == (2, 1) and safe_lse(x[:, :0]).tolist() == [NEG, NEG]
    assert safe_softmax(x, lse=torch.tensor([NEG, torch.log(torch.tensor(2.0))]))[1].tolist() == [0.5, 0.0]
    assert safe_softmax(x.T, dim=0).tolist() == [[0.0, 1.0], [0.0, 0.0]]
    weight = calc_lse_rescale_weight(torch.tensor([[NEG, 0.0]]), torch.tensor([[NEG, 0.0]]))
    assert weight.tolist() == [[[0.0], [1.0]]]


def test_softmax_gradient():
    x = torch.randn(4, 6, dtype=torch.float64, requires_grad=True)
    dout = torch.randn(4, 6, dtype=torch.float64)
    p = torch.softmax(x, -1)
    close(softmax_bwd(dout, p.detach()), torch.autograd.grad(p, x, dout)[0])


def test_bad_sinks_are_refused():
    lse = torch.zeros(T, H)
    with pytest.raises(ContractError, match="sink has shape"):
        correct_attn_lse_with_sink(lse, torch.zeros(2, H + 1))
    with pytest.raises(ContractError, match="sink has shape"):
        correct_attn_lse_with_sink(lse, torch.zeros(T + 1, 2, H), "ssh")
    with pytest.raises(UnsupportedError, match="shd"):
        correct_attn_lse_with_sink(lse, torch.zeros(2, H, D), "shd")
    with pytest.raises(ContractError, match="Unknown sink layout"):
        correct_attn_lse_with_sink(lse, torch.zeros(2, H), "hs")


def test_published_parameter_names():
    want = {
        "correct_attn_lse": "lse1 lse2 inplace",
        "correct_attn_out": "out1 lse1 out2 lse2 lse inplace",
        "correct_attn_out_lse": "out1 lse1 out2 lse2 inplace",
        "correct_attn_lse_with_sink": "lse sink sink_layout inplace",
        "correct_attn_out_with_sink": "out lse sink sink_layout inplace",
        "correct_attn_out_lse_with_sink": "out lse sink sink_layout inplace",
        "safe_lse": "x dim keepdim",
        "safe_softmax": "x lse dim",
        "softmax_bwd": "dout out",
        "sink_bwd": "sink lse o do sink_layout dsink",
        "calc_lse_rescale_weight": "lse_to_rescale rescaled_lse",
        "calc_lse_sink": "sink seqlen_q sink_layout",
    }
    for name, parameters in want.items():
        assert list(inspect.signature(getattr(utils, name)).parameters) == parameters.split(), name
