# SPDX-License-Identifier: Apache-2.0
"""The backend of the CUDA kernels, with a simulated library: parameters, layouts, results and errors."""

from __future__ import annotations

import logging
from dataclasses import replace

import numpy as np
import pytest
import torch
from ffa_simulator import Simulator, backend, close, inputs, tensors, truth
from hypothesis import given, settings
from hypothesis import strategies as st

from magi_attention.common.mask import Mask
from magi_attention.common.slices import SliceTable
from magi_attention.errors import ContractError, MagiError, UnsupportedError
from magi_attention.kernels import AttnOptions, Backend, Partial, Problem, Registry, SdpaBackend
from magi_attention.kernels.ffa.backend import FfaBackend
from magi_attention.kernels.ffa.operands import CudaRuntime
from magi_attention.kernels.types import Operands
from magi_attention.testing import masks
from magi_attention.testing.libraries import planner_or_skip


@pytest.fixture(scope="module", autouse=True)
def planner():
    planner_or_skip()


@settings(max_examples=80, deadline=None, print_blob=True)
@given(
    seed=st.integers(0, 2**32 - 1),
    sizes=st.tuples(st.integers(1, 48), st.integers(1, 48)),
    heads=st.sampled_from([(1, 1), (4, 1), (6, 2), (3, 3)]),
    dims=st.sampled_from([(8, 8), (16, 8), (8, 24)]),
    dtype=st.sampled_from([torch.bfloat16, torch.float16]),
    layout=st.sampled_from([None, "sh", "ssh"]),
    softcap=st.sampled_from([0.0, 2.0]),
    way=st.sampled_from(["table", "tensors", "packed"]),
)
def test_random_masks(seed, sizes, heads, dims, dtype, layout, softcap, way):
    """Rounded and in float32; of a table or tensors, and of views of one projection, as models make them."""
    ffa, _ = backend()
    sizes = (sizes[0], sizes[0]) if way == "packed" else sizes
    slices = SliceTable(masks.random_slices(np.random.default_rng(seed), *sizes, max_slices=8))
    q, k, v = inputs(*sizes, heads, dims, dtype, seed % 2**31)
    if way == "packed" and dims[0] == dims[1]:
        q, k, v = torch.cat([q, k, v], dim=1).split([heads[0], heads[1], heads[1]], dim=1)
    shape = (sizes[0], 3, heads[0]) if layout == "ssh" else (3, heads[0])
    sink = None if layout is None else torch.randn(shape, generator=torch.Generator().manual_seed(1)).to(dtype)
    options = AttnOptions(0.3, softcap, layout or "sh", return_max_logits=True)
    want = truth(q, k, v, slices, options, sink)
    out, lse, top = ffa.forward_final(Operands(q, k, v, tensors(slices) if way == "tensors" else slices, options, sink))
    assert out.dtype == dtype and lse.dtype == top.dtype == torch.float32
    close(out, want.out, 1e-2)
    close(lse, want.lse, 1e-5)
    close(top, want.max_logits, 1e-5)
    if sink is None:
        got = ffa.forward(Operands(q, k, v, slices, options))
        assert got.out.dtype == torch.float32
        close(got.out, want.out, 1e-5)


def test_stages_merge_into_buffers_of_any_layout():
    ffa, simulator = backend()
    q, k, v = inputs(32, 48)
    parts = [SliceTable([[0, 32, 0, 16, 0]]), SliceTable([[8, 24, 16, 40, 2]]), SliceTable([[0, 8, 40, 48, 1]])]
    options = AttnOptions(0.25, return_max_logits=True)
    whole = SliceTable(np.concatenate([p.array for p in parts]))
    want = truth(q, k, v, whole, options)
    for scattered in (False, True):
        partial = ffa.forward(Operands(q, k, v, parts[0], options))
        if scattered:
            partial = Partial(partial.out.mT.contiguous().mT, partial.lse.T.contiguous().T, partial.max_logits)
        for part in parts[1:]:
            assert ffa.forward(Operands(q, k, v, part, options), partial) is partial
        close(partial.out, want.out, 1e-5)
        close(partial.lse, want.lse, 1e-5)
        close(partial.max_logits, want.max_logits, 1e-5)
    assert simulator.calls[-1].accumulate == 1
    plain = Partial(partial.out, partial.lse)
    ffa.forward(Operands(q, k, v, parts[0], options), plain)
    assert plain.max_logits is not None
    for bad in (Partial(partial.out.bfloat16(), partial.lse), Partial(partial.out, partial.lse[:-1])):
        with pytest.raises(ContractError, match="accumulation buffer"):
            ffa.forward(Operands(q, k, v, parts[0], options), bad)


def test_layouts_that_need_a_copy_are_right_and_logged_once(caplog):
    ffa, simulator = backend()
    q, k, v = inputs(24, 24)
    slices, options = Mask.causal(24).slices, AttnOptions(0.25)
    want = truth(q, k, v, slices, options)
    misaligned = torch.empty(k.numel() + 1, dtype=k.dtype)[1:].view(k.shape).copy_(k)
    odd_stride = torch.empty(24, 4, 20, dtype=q.dtype)[..., :16].copy_(q)
    transposed = v.transpose(0, 2).contiguous().transpose(0, 2)
    expanded = v[:, :1].expand(-1, 2, -1)
    with caplog.at_level(logging.WARNING, logger="magi_attention.kernels"):
        for _ in range(2):
            out, *_ = ffa.forward_final(Operands(odd_stride, misaligned, transposed, slices, options))
            close(out, want.out, 1e-2)
    assert len([r for r in caplog.records if "copies" in r.getMessage()]) == 1
    out, *_ = ffa.forward_final(Operands(q, k, expanded, slices, options))
    close(out, truth(q, k, expanded, slices, options).out, 1e-2)
    # Honoured, not copied: a view with good strides keeps its address.
    wide = torch.zeros(24, 4, 32, dtype=q.dtype)
    view = wide[..., 16:].copy_(q)
    ffa.forward_final(Operands(view, k, v, slices, options))
    assert simulator.calls[-1].q == view.data_ptr() and simulator.calls[-1].q_stride_head == 32


@pytest.mark.parametrize("tq, tk", [(0, 5), (5, 0), (0, 0)])
def test_no_rows(tq, tk):
    ffa, _ = backend()
    q, k, v = inputs(tq, tk)
    sink = torch.zeros(1, 4)
    options = AttnOptions(0.25, return_max_logits=True)
    out, lse, top = ffa.forward_final(Operands(q, k, v, SliceTable([]), options, sink))
    assert out.shape == (tq, 4, 16) and not out.any() and (lse == 0).all() and torch.isneginf(top).all()
    partial = Partial(torch.ones(tq, 4, 16), torch.zeros(tq, 4))
    assert ffa.forward(Operands(q, k, v, SliceTable([]), AttnOptions(0.25)), partial) is partial
    assert (partial.out == 1).all() and (partial.lse == 0).all()


def test_refusals_are_sentences():
    ffa, _ = backend()
    good = Problem("cuda", torch.bfloat16, 8, 2, 128, 128, AttnOptions(0.1), capability=(9, 0))
    assert ffa.why_not(good) is None and ffa.why_not(replace(good, head_dim=40, head_dim_v=8)) is None
    for change, word in (
        ({"device_type": "cpu"}, "cpu"),
        ({"capability": (10, 0)}, "9.0"),
        ({"capability": (8, 0)}, "9.0"),
        ({"dtype": torch.float32}, "float32"),
        ({"head_dim": 60}, "60"),
        ({"head_dim_v": 264}, "264"),
        ({"num_heads_q": 7}, "7 query"),
        ({"options": AttnOptions(-1.0)}, "softmax_scale"),
    ):
        reason = ffa.why_not(replace(good, **change))
        assert reason and word in reason and reason.endswith("."), change
    for fine in ({"needs_backward": True}, {"needs_backward": True, "options": AttnOptions(0.1, deterministic=True)}):
        assert ffa.why_not(replace(good, **fine)) is None
    assert isinstance(ffa, Backend)
    registry = Registry((ffa, SdpaBackend()))
    assert registry.select(good, "ffa", explicit=True)[0] is ffa


def test_errors_of_the_library_become_exceptions():
    ffa, simulator = backend()
    q, k, v = inputs(8, 8)
    for simulator.status, kind in ((1, ContractError), (2, UnsupportedError), (3, MagiError), (4, MagiError)):
        with pytest.raises(kind, match="Attention forward: the simulator was told to fail"):
            ffa.forward_final(Operands(q, k, v, Mask.causal(8).slices, AttnOptions(0.25)))
    bad = [
        (q.float(), k, v), (q[:, :3], k, v), (q[..., :12], k[..., :12], v), (q[0], k, v), (q, k[:7], v),
        (q.half(), k, v),
    ]  # fmt: skip
    for q_bad, k_bad, v_bad in bad:
        with pytest.raises(ContractError):
            ffa.forward_final(Operands(q_bad, k_bad, v_bad, Mask.causal(7).slices, AttnOptions(0.25)))


def test_without_cuda_in_torch_nothing_is_prepared(monkeypatch):
    ffa = FfaBackend(Simulator())
    monkeypatch.setattr(CudaRuntime, "exists", staticmethod(lambda: False))
    q, k, v = inputs(8, 8)
    assert not ffa.has_runtime and backend()[0].has_runtime
    assert ffa.prepared(Operands(q, k, v, tensors(Mask.causal(8).slices), AttnOptions(0.25))) is None
