# SPDX-License-Identifier: Apache-2.0
"""Every FlashAttention wrapper against a dense softmax in float64: out, lse, gradients of q, k, v and of the sink."""

from __future__ import annotations

import inspect
from dataclasses import dataclass, field

import numpy as np
import pytest
import torch
from dense import assert_equal_gradients, dense_attention

import magi_attn_extensions as extensions
from magi_attention.common.slices import SliceTable, to_dense
from magi_attention.errors import ContractError, UnsupportedError
from magi_attn_extensions.sink_attention import window_slices

FA2 = "dropout_p softmax_scale causal window_size softcap alibi_slopes deterministic return_attn_probs"
SCALES = "q_descale k_descale v_descale window_size attention_chunk softcap"
FA3 = f"qv {SCALES} num_splits pack_gqa deterministic sm_margin return_attn_probs"
FA4 = "softmax_scale causal softcap num_splits pack_gqa deterministic return_attn_probs"
BOUNDS = "cu_seqlens_q cu_seqlens_k max_seqlen_q max_seqlen_k"
# The published parameters, in their order.
PARAMETERS = {
    "fa2_func": f"q k v sink sink_layout {FA2}",
    "fa2_qkvpacked_func": f"qkv sink sink_layout {FA2}",
    "fa2_kvpacked_func": f"q kv sink sink_layout {FA2}",
    "fa2_varlen_func": f"q k v {BOUNDS} sink sink_layout {FA2} block_table",
    "fa2_varlen_qkvpacked_func": f"qkv cu_seqlens max_seqlen sink sink_layout {FA2}",
    "fa2_varlen_kvpacked_func": f"q kv {BOUNDS} sink sink_layout {FA2}",
    "fa3_func": f"q k v sink sink_layout softmax_scale causal {FA3}",
    "fa3_qkvpacked_func": f"qkv sink sink_layout softmax_scale causal {SCALES} deterministic num_heads_q sm_margin "
    "return_attn_probs",
    "fa3_varlen_func": f"q k v {BOUNDS} sink sink_layout seqused_q seqused_k softmax_scale causal {FA3}",
    "fa4_func": f"q k v sink sink_layout {FA4}",
    "fa4_varlen_func": f"q k v {BOUNDS} sink sink_layout {FA4}",
}
DEFAULTS = {
    "sink": None, "sink_layout": "sh", "dropout_p": 0.0, "softmax_scale": None, "causal": False,
    "window_size": (-1, -1), "softcap": 0.0, "alibi_slopes": None, "deterministic": False, "return_attn_probs": False,
    "block_table": None, "qv": None, "q_descale": None, "k_descale": None, "v_descale": None, "attention_chunk": 0,
    "num_splits": 1, "pack_gqa": None, "sm_margin": 0, "num_heads_q": None, "seqused_q": None, "seqused_k": None,
}  # fmt: skip
WRAPPERS = list(PARAMETERS)


def wrapper(name):
    return getattr(extensions, f"{name}_with_sink")


@pytest.mark.parametrize("name", WRAPPERS)
def test_parameters_are_the_published_ones(name):
    parameters = inspect.signature(wrapper(name)).parameters
    assert list(parameters) == PARAMETERS[name].split()
    defaults = {p.name: p.default for p in parameters.values() if p.default is not p.empty}
    assert defaults == {n: DEFAULTS[n] for n in parameters if n in DEFAULTS}


def visible(sq, sk, left, right):
    """FlashAttention's rule for one document."""
    row = torch.arange(sq)[:, None] + sk - sq
    key = torch.arange(sk)[None]
    allowed = torch.ones(sq, sk, dtype=torch.bool)
    if left >= 0:
        allowed &= key >= row - left
    if right >= 0:
        allowed &= key <= row + right
    return allowed


@pytest.mark.parametrize("left", (-1, 0, 1, 3, 20))
@pytest.mark.parametrize("right", (-1, 0, 1, 3, 20))
def test_slices_are_the_window_and_disjoint(left, right):
    sizes = torch.tensor([(sq, sk) for sq in range(9) for sk in range(9)])
    q_len, k_len = sizes.t()
    q_start, k_start = q_len.cumsum(0) - q_len, k_len.cumsum(0) - k_len
    q_ranges, k_ranges, types = window_slices(q_start, q_len, k_start, k_len, left, right)
    rows = torch.cat([q_ranges, k_ranges, types[:, None]], dim=1).numpy().astype(np.int64).reshape(-1, 3, 5)
    for (sq, sk), q0, k0, slices in zip(sizes.tolist(), q_start.tolist(), k_start.tolist(), rows):
        moved = slices - np.array([q0, q0, k0, k0, 0])
        counts = sum(to_dense(SliceTable(one[None]).array, sq, sk).astype(int) for one in moved)
        assert (torch.as_tensor(counts).reshape(sq, sk) == visible(sq, sk, left, right).int()).all(), (sq, sk, moved)


@dataclass
class Case:
    """One call: rows of packed documents, the arguments in the wrapper's form, and what is seen."""

    leaves: list[torch.Tensor]  # q, k, v and the sink, as rows
    allowed: torch.Tensor
    arguments: dict = field(default_factory=dict)
    batch: int = 0  # 0 for packed documents


def draw_lengths(rng, name):
    """(batch or 0, lengths of queries, lengths of keys) that the form allows."""
    is_varlen, is_one = "varlen" in name, "qkvpacked" in name
    count = int(rng.integers(1, 4))
    if is_varlen:
        q_len = rng.integers(0, 14, count)
        q_len[rng.integers(count)] += 1
        return 0, q_len, q_len if is_one else rng.integers(0, 14, count) + (np.arange(count) == 0)
    sq = int(rng.integers(1, 12))
    return count, np.full(count, sq), np.full(count, sq if is_one else int(rng.integers(1, 12)))


def make_case(name, seed, dtype=torch.float64, device="cpu", dim=0) -> Case:
    rng = np.random.default_rng([seed, WRAPPERS.index(name)])
    batch, q_len, k_len = draw_lengths(rng, name)
    heads_kv = int(rng.integers(1, 3))
    heads = heads_kv * (1 if name.startswith("fa2") and "qkvpacked" in name else int(rng.integers(1, 4)))
    dim = dim or int(rng.integers(1, 9))
    layout, sinks = str(rng.choice(["sh", "ssh", "none"])), int(rng.integers(1, 4))
    tq, tk = int(q_len.sum()), int(k_len.sum())
    shapes = [(tq, heads, dim), (tk, heads_kv, dim), (tk, heads_kv, dim)]
    if layout != "none":
        shapes.append((sinks, heads) if layout == "sh" else (tq, sinks, heads))
    dtypes = [dtype, dtype, dtype, dtype if dtype == torch.float64 else torch.float32]
    leaves = [torch.from_numpy(rng.standard_normal(shape)).to(device, t) for shape, t in zip(shapes, dtypes)]
    options = {"softmax_scale": float(rng.uniform(0.5, 1.5)) * dim**-0.5 if rng.random() < 0.5 else None}
    options["causal"] = bool(rng.random() < 0.5)
    options["softcap"] = float(rng.uniform(1, 5)) if rng.random() < 0.3 else 0.0
    options["deterministic"] = bool(rng.random() < 0.3)
    left = right = -1
    if "window_size" in PARAMETERS[name].split():
        left, right = (int(rng.integers(-1, 8)) for _ in range(2))
        options["window_size"] = (left, right)
    used = [q_len, k_len]
    if name == "fa3_varlen_func" and rng.random() < 0.6:
        used = [rng.integers(0, x + 1) for x in (q_len, k_len)]
        options |= {n: torch.from_numpy(u).to(device, torch.int32) for n, u in zip(("seqused_q", "seqused_k"), used)}
    allowed = torch.zeros(tq, tk, dtype=torch.bool)
    q_start, k_start = q_len.cumsum() - q_len, k_len.cumsum() - k_len
    for q0, k0, sq, sk in zip(q_start, k_start, *used):
        allowed[q0 : q0 + sq, k0 : k0 + sk] = visible(int(sq), int(sk), left, 0 if options["causal"] else right)
    if "varlen" in name:
        cu = [torch.from_numpy(np.concatenate([[0], x.cumsum()])).to(device, torch.int32) for x in (q_len, k_len)]
        is_one = "qkvpacked" in name
        options |= {"cu_seqlens": cu[0]} if is_one else {"cu_seqlens_q": cu[0], "cu_seqlens_k": cu[1]}
        options |= {"max_seqlen": 0} if is_one else {"max_seqlen_q": 0, "max_seqlen_k": 0}
    if layout != "none":
        options["sink_layout"] = layout
    return Case([x.requires_grad_() for x in leaves], allowed.to(device), options, batch)


def call(name, case):
    """(out, lse) as rows, through the form of the wrapper."""
    q, k, v, *sink = (
        x.unflatten(0, (case.batch, -1)) if case.batch and not (i == 3 and x.dim() == 2) else x
        for i, x in enumerate(case.leaves)
    )
    arguments = {**case.arguments, "return_attn_probs": True}
    if sink:
        arguments["sink"] = sink[0]
    if "qkvpacked" in name:
        if q.shape[-2] == k.shape[-2]:
            arguments["qkv"] = torch.stack([q, k, v], dim=-3)
        else:
            arguments |= {"qkv": torch.cat([q, k, v], dim=-2), "num_heads_q": q.shape[-2]}
    elif "kvpacked" in name:
        arguments |= {"q": q, "kv": torch.stack([k, v], dim=-3)}
    else:
        arguments |= {"q": q, "k": k, "v": v}
    out, lse, *rest = wrapper(name)(**arguments)
    assert len(rest) == name.startswith("fa2") and all(x.numel() == 0 for x in rest)
    assert lse.is_contiguous()
    if case.batch:
        return out.flatten(0, 1), lse.transpose(1, 2).flatten(0, 1)
    return out, lse.t()


def truth(case):
    q, k, v, *sink = (x.double() for x in case.leaves)
    scale = case.arguments["softmax_scale"]
    rows = sink[0] if sink and sink[0].dim() == 3 else sink[0][None] if sink else None
    scale = q.shape[2] ** -0.5 if scale is None else scale
    return dense_attention(q, k, v, case.allowed[None], scale, case.arguments["softcap"], rows)


@pytest.mark.parametrize("seed", range(8))
@pytest.mark.parametrize("name", WRAPPERS)
def test_a_wrapper_is_dense_attention(name, seed):
    case = make_case(name, seed)
    out, lse = call(name, case)
    want, want_lse = truth(case)
    torch.testing.assert_close(lse, want_lse.detach(), rtol=1e-10, atol=1e-10)
    dout = torch.randn(out.shape, dtype=out.dtype, generator=torch.Generator().manual_seed(seed))
    assert_equal_gradients(out, want, case.leaves, dout, ("q", "k", "v", "sink"))


@pytest.mark.parametrize("dtype", (torch.bfloat16, torch.float16, torch.float32), ids=str)
@pytest.mark.parametrize("name", ("fa2_func", "fa3_varlen_func"))
def test_other_dtypes_on_a_cpu(name, dtype):
    case = make_case(name, 3, dtype, dim=16)
    out, lse = call(name, case)
    want, want_lse = truth(case)
    tolerance = 32 * torch.finfo(dtype).eps
    assert out.dtype == dtype and lse.dtype == torch.float32
    torch.testing.assert_close(out.double(), want, rtol=tolerance, atol=tolerance)
    torch.testing.assert_close(lse.double(), want_lse.detach(), rtol=tolerance, atol=tolerance)


def test_out_alone_without_return_attn_probs():
    q = torch.randn(2, 5, 2, 4)
    for name in ("fa2_func", "fa3_func", "fa4_func"):
        assert wrapper(name)(q, q, q).shape == q.shape


@pytest.mark.parametrize(
    "name, argument, value",
    [
        ("fa2_func", "dropout_p", 0.1),
        ("fa2_kvpacked_func", "alibi_slopes", torch.ones(2)),
        ("fa2_varlen_func", "block_table", torch.zeros(1, 1, dtype=torch.int32)),
        ("fa3_func", "qv", torch.ones(1)),
        ("fa3_qkvpacked_func", "k_descale", torch.ones(1)),
        ("fa3_varlen_func", "attention_chunk", 64),
    ],
)
def test_what_is_not_supported_is_refused_with_a_remedy(name, argument, value):
    case = make_case(name, 0)
    case.arguments[argument] = value
    with pytest.raises(UnsupportedError, match=f"{argument} is not supported: (pass|give)"):
        call(name, case)


def test_arguments_that_do_not_fit_are_refused():
    q = torch.randn(2, 5, 2, 4)
    cu = torch.tensor([0, 5, 10], dtype=torch.int32)
    with pytest.raises(ContractError, match='layout "ssh" of a batch needs'):
        extensions.fa3_func_with_sink(q, q, q, torch.zeros(10, 1, 2), "ssh")
    with pytest.raises(ContractError, match='layout "sh" needs'):
        extensions.fa4_func_with_sink(q, q, q, torch.zeros(10, 1, 2))
    with pytest.raises(ContractError, match="one batch size"):
        extensions.fa2_func_with_sink(q, q[:1], q[:1])
    with pytest.raises(ContractError, match="give as many bounds"):
        extensions.fa4_varlen_func_with_sink(*[q.flatten(0, 1)] * 3, cu, cu[:2], 5, 5)
    with pytest.raises(ContractError, match="give num_heads_q heads of q"):
        extensions.fa3_qkvpacked_func_with_sink(q)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("dim", (64, 128))
@pytest.mark.parametrize("name", WRAPPERS)
def test_a_wrapper_on_a_gpu(name, dim):
    for seed in range(6):
        case = make_case(name, seed, torch.bfloat16, "cuda", dim)
        out, lse = call(name, case)
        want, want_lse = truth(case)
        torch.testing.assert_close(lse.double(), want_lse.detach(), rtol=1e-2, atol=1e-2)
        dout = torch.randn(out.shape, generator=torch.Generator().manual_seed(seed)).to(out)
        got = [out, *torch.autograd.grad(out, case.leaves, dout)]
        wanted = [want, *torch.autograd.grad(want, case.leaves, dout.double(), retain_graph=True)]
        # A gradient is a difference of two sums. The second has delta, whose terms are products with a rounded out.
        delta = (want.detach() * dout.double()).norm(dim=-1)
        second = torch.autograd.grad(want_lse, case.leaves, delta, allow_unused=True)
        for what, a, b, c in zip(("out", "dq", "dk", "dv", "dsink"), got, wanted, (None, *second)):
            distance = (a.double() - b.double()).norm()
            rounding = 0 if c is None else 4e-3 * c.double().norm()
            assert distance <= 2e-2 * b.double().norm() + rounding + 1e-3, (what, seed, distance)
