# SPDX-License-Identifier: Apache-2.0
"""The backend of the CUDA kernels, with a simulated library: parameters, layouts, stages, plans, autograd, errors."""

from __future__ import annotations

import logging
from dataclasses import replace

import numpy as np
import pytest
import torch
from ffa_case import NAMES, PLAIN, BackwardCase, compare
from ffa_simulator import Simulator, backend, close, inputs, tensors, truth
from hypothesis import given, settings
from hypothesis import strategies as st

from magi_attention.common.mask import Mask
from magi_attention.common.slices import SliceTable
from magi_attention.errors import ContractError, MagiError, UnsupportedError
from magi_attention.functional.flex_flash_attn import flex_flash_attn_func
from magi_attention.kernels import AttnOptions, Backend, Grads, Partial, Problem, Registry, SdpaBackend
from magi_attention.kernels.ffa import backward as ffa_backward
from magi_attention.kernels.ffa.backend import FfaBackend
from magi_attention.kernels.ffa.operands import CudaRuntime
from magi_attention.kernels.types import BackwardOperands, Operands
from magi_attention.native import abi
from magi_attention.native.planner.schedule import BwdSchedule
from magi_attention.testing import masks

pytestmark = pytest.mark.usefixtures("planner")


@settings(max_examples=120, deadline=None, print_blob=True)
@given(
    seed=st.integers(0, 2**32 - 1),
    sizes=st.tuples(st.integers(1, 60), st.integers(1, 60)),
    heads=st.sampled_from([(1, 1), (4, 1), (6, 2), (3, 3)]),
    dims=st.sampled_from([(8, 8), (16, 8), (8, 24)]),
    dtype=st.sampled_from([torch.bfloat16, torch.float16]),
    layout=st.sampled_from([None, "sh", "ssh"]),
    softcap=st.sampled_from([0.0, 2.0]),
    way=st.sampled_from(["table", "tensors", "packed"]),
    with_delta=st.booleans(),
)
def test_random_masks(seed, sizes, heads, dims, dtype, layout, softcap, way, with_delta):
    """Rounded, in float32, and added to what is there; of a table or tensors, and of views of one projection, as models
    make them."""
    ffa, simulator = backend()
    sizes = (sizes[0], sizes[0]) if way == "packed" else sizes
    slices = SliceTable(masks.random_slices(np.random.default_rng(seed), *sizes, max_slices=12))
    mask = tensors(slices) if way == "tensors" else slices
    shape = (sizes[0], 3, heads[0]) if layout == "ssh" else (3, heads[0])
    sink = None if layout is None else torch.randn(shape, generator=torch.Generator().manual_seed(1)).to(dtype)
    options = AttnOptions(0.3, softcap, layout or "sh", return_max_logits=True)
    case = BackwardCase(slices, *sizes, options, sink, dtype, heads=heads, dims=dims, seed=seed % 2**31)
    dout, q, k, v, *saved = case.tensors
    if way == "packed" and dims[0] == dims[1]:
        q, k, v = torch.cat([q, k, v], dim=1).split([heads[0], heads[1], heads[1]], dim=1)

    want = truth(q, k, v, slices, options, sink)
    out, lse, top = ffa.forward_final(Operands(q, k, v, mask, options, sink))
    assert out.dtype == dtype and lse.dtype == top.dtype == torch.float32
    close(out, want.out, 1e-2)
    close(lse, want.lse, 1e-5)
    close(top, want.max_logits, 1e-5)
    if sink is None:
        partial = ffa.forward(Operands(q, k, v, slices, options))
        assert partial.out.dtype == torch.float32
        close(partial.out, want.out, 1e-5)

    want, delta = case.want(), (case.out.float() * dout.float()).sum(-1) if with_delta else None
    planned = simulator.plans_made
    got = ffa.backward_final(BackwardOperands(dout, q, k, v, *saved, mask, options, sink))
    assert got.dq.dtype == got.dk.dtype == got.dv.dtype == dtype
    compare(got, want, 3e-2)
    assert simulator.transposed == simulator.plans_made - planned == int(way == "tensors" and len(slices) > 0)
    x = BackwardOperands(dout, q, k, v, *saved, slices, options, sink, delta)
    exact = ffa.backward(x)
    assert exact.dq.dtype == torch.float32 and all(getattr(exact, n).is_contiguous() for n in NAMES[:3])
    assert sink is None or (exact.dsink.shape == sink.shape and exact.dsink.dtype == torch.float32)
    compare(exact, want, 1e-4)
    into = Grads(*(torch.ones_like(getattr(exact, n)) for n in NAMES[:3]))
    for times in (1, 2):
        assert ffa.backward(x, into) is into
        close(into.dv, 1 + times * want.dv, 2e-4)
        assert sink is None or torch.allclose(into.dsink.double(), times * want.dsink, atol=2e-4)


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


def test_stages_add_up_in_buffers_of_any_layout():
    ffa, simulator = backend()
    case = BackwardCase(SliceTable([[0, 32, 0, 16, 0], [8, 24, 16, 40, 2], [0, 8, 40, 48, 1]]), 32, 48)
    delta = (case.out.double() * case.dout.double()).sum(-1)  # of another dtype
    parts = [SliceTable(case.slices.array[i : i + 1]) for i in range(3)]
    zeros = lambda: [torch.zeros(x.shape) for x in (case.q, case.k, case.v)]  # noqa: E731
    odd = [x.mT.contiguous().mT for x in zeros()]
    shifted = [torch.zeros(x.numel() + 1)[1:].view(x.shape) for x in zeros()]
    for buffers in (zeros(), odd, shifted):
        into = Grads(*buffers)
        for part in parts:
            assert ffa.backward(BackwardOperands(*case.tensors, part, case.options, delta=delta), into) is into
        assert all(a is b for a, b in zip((into.dq, into.dk, into.dv), buffers))
        compare(into, case.want(), 1e-4)
        assert simulator.backward_calls[-1].accumulate == 1 and simulator.backward_calls[-1].out is None
    for bad in (Grads(into.dq.double(), into.dk, into.dv), Grads(into.dq, into.dk[1:], into.dv)):
        with pytest.raises(ContractError, match="accumulation buffer d"):
            ffa.backward(BackwardOperands(*case.tensors, parts[0], case.options), bad)


def test_out_in_float32_and_other_dtypes():
    """``forward`` gives out in float32: delta comes from it as it is, and the kernel is given delta."""
    ffa, simulator = backend()
    case = BackwardCase(Mask.causal(40).slices)
    partial = ffa.forward(Operands(case.q, case.k, case.v, case.slices, case.options))
    x = BackwardOperands(*case.tensors, case.slices, case.options)
    got = ffa.backward(x._replace(dout=case.dout.float(), out=partial.out, lse=partial.lse.double()))
    assert simulator.backward_calls[-1].out is None and simulator.backward_calls[-1].delta
    compare(got, case.want(), 2e-2)


def misplaced(x: torch.Tensor) -> torch.Tensor:
    """The same at an address that is no multiple of 16 bytes."""
    return torch.empty(x.numel() + 1, dtype=x.dtype)[1:].view(x.shape).copy_(x)


def by_columns(x: torch.Tensor) -> torch.Tensor:
    return x.transpose(0, 2).contiguous().transpose(0, 2)


def test_layouts_that_need_a_copy_are_right_and_logged_once(caplog):
    ffa, simulator = backend()
    case = BackwardCase(Mask.causal(24).slices, 24, 24)
    (dout, q, k, v, out, lse), mask = case.tensors, (case.slices, case.options)
    want = truth(q, k, v, *mask)
    odd_stride = torch.empty(24, 4, 20, dtype=q.dtype)[..., :16].copy_(q)
    operands = odd_stride, misplaced(k), by_columns(v)
    with caplog.at_level(logging.WARNING, logger="magi_attention.kernels"):
        for _ in range(2):
            close(ffa.forward_final(Operands(*operands, *mask))[0], want.out, 1e-2)
            saved = by_columns(dout), *operands, by_columns(out), lse.T.contiguous().T
            compare(ffa.backward(BackwardOperands(*saved, *mask)), case.want(), 1e-4)
    said = [r.getMessage() for r in caplog.records if "copies" in r.getMessage()]
    assert len(said) == 2 and sum("dout" in text for text in said) == 1, "once for each direction"
    expanded = v[:, :1].expand(-1, 2, -1)
    close(ffa.forward_final(Operands(q, k, expanded, *mask))[0], truth(q, k, expanded, *mask).out, 1e-2)
    # What loss.sum().backward() gives: one number in all places.
    ones = torch.ones((), dtype=q.dtype).expand(out.shape)
    dense = ffa.backward(BackwardOperands(ones.contiguous(), q, k, v, out, lse, *mask))
    compare(ffa.backward(BackwardOperands(ones, q, k, v, out, lse, *mask)), dense, 1e-6)
    # Honoured, not copied: a view with good strides keeps its address.
    views = [torch.zeros(24, 4, 32, dtype=q.dtype)[..., 16:].copy_(x) for x in (q, dout)]
    ffa.forward_final(Operands(views[0], k, v, *mask))
    assert simulator.calls[-1].q == views[0].data_ptr() and simulator.calls[-1].q_stride_head == 32
    compare(ffa.backward(BackwardOperands(views[1], q, k, v, out, lse, *mask)), case.want(), 1e-4)
    assert simulator.backward_calls[-1].dout == views[1].data_ptr()
    assert simulator.backward_calls[-1].dout_stride_head == 32


@pytest.mark.parametrize("tq, tk", [(0, 5), (5, 0), (0, 0)])
def test_no_rows(tq, tk):
    ffa, simulator = backend()
    q, k, v = inputs(tq, tk)
    sink = torch.zeros(1, 4)
    options = AttnOptions(0.25, return_max_logits=True)
    out, lse, top = ffa.forward_final(Operands(q, k, v, SliceTable([]), options, sink))
    assert out.shape == (tq, 4, 16) and not out.any() and (lse == 0).all() and torch.isneginf(top).all()
    partial = Partial(torch.ones(tq, 4, 16), torch.zeros(tq, 4))
    assert ffa.forward(Operands(q, k, v, SliceTable([]), AttnOptions(0.25)), partial) is partial
    assert (partial.out == 1).all() and (partial.lse == 0).all()
    out, lse = torch.zeros(tq, 4, 16).bfloat16(), torch.zeros(tq, 4)
    for grads in (
        ffa.backward(BackwardOperands(out, q, k, v, out, lse, SliceTable([]), AttnOptions(0.25), sink)),
        ffa.backward_final(BackwardOperands(out, q, k, v, out, lse, tensors(SliceTable([])), AttnOptions(0.25), sink)),
        ffa.backward(BackwardOperands(out, q, k, v, out, lse, SliceTable([]), AttnOptions(0.25), sink, lse)),
    ):
        for name, like in zip(NAMES, (q, k, v, sink)):
            assert getattr(grads, name).shape == like.shape and not getattr(grads, name).any()
    into = Grads(*(torch.ones(x.shape) for x in (q, k, v)))
    assert ffa.backward(BackwardOperands(out, q, k, v, out, lse, SliceTable([]), AttnOptions(0.25)), into) is into
    assert all((getattr(into, n) == 1).all() for n in NAMES[:3]) and not simulator.backward_calls


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
    case = BackwardCase(Mask.causal(8).slices, 8, 8)
    x = BackwardOperands(*case.tensors, case.slices, case.options)
    for simulator.status, kind in ((1, ContractError), (2, UnsupportedError), (3, MagiError), (4, MagiError)):
        with pytest.raises(kind, match="Attention forward: the simulator was told to fail"):
            ffa.forward_final(Operands(x.q, x.k, x.v, x.slices, x.options))
        with pytest.raises(kind, match="Attention backward: the simulator was told to fail"):
            ffa.backward(x)


def test_operands_that_do_not_fit_are_refused():
    ffa, _ = backend()
    case = BackwardCase(Mask.causal(8).slices, 8, 8)
    (dout, q, k, v, out, lse), mask = case.tensors, (case.slices, case.options)
    for bad in (
        (q.float(), k, v), (q[:, :3], k, v), (q[..., :12], k[..., :12], v), (q[0], k, v), (q, k[:7], v),
        (q.half(), k, v),
    ):  # fmt: skip
        with pytest.raises(ContractError):
            ffa.forward_final(Operands(*bad, Mask.causal(7).slices, case.options))
    for bad in (
        (dout[1:], q, k, v, out, lse), (dout, q, k, v, out[..., :8], lse), (dout, q, k, v, out, lse[:, :3]),
        (dout, q, k.half(), v, out, lse), (dout.int(), q, k, v, out, lse),
    ):  # fmt: skip
        with pytest.raises(ContractError):
            ffa.backward(BackwardOperands(*bad, *mask))
    with pytest.raises(ContractError, match="sink has shape"):
        ffa.backward(BackwardOperands(*case.tensors, *mask, torch.zeros(1, 5)))


def test_without_cuda_in_torch_nothing_is_prepared(monkeypatch):
    ffa = FfaBackend(Simulator())
    monkeypatch.setattr(CudaRuntime, "exists", staticmethod(lambda: False))
    q, k, v = inputs(8, 8)
    assert not ffa.has_runtime and backend()[0].has_runtime
    assert ffa.prepared(Operands(q, k, v, tensors(Mask.causal(8).slices), AttnOptions(0.25))) is None


def test_prepared_calls_are_used_again():
    ffa, _ = backend()
    case = BackwardCase(Mask.causal(16).slices, 16, 16)
    made = ffa._backward._prepared
    for _ in range(3):
        ffa.backward(BackwardOperands(*case.tensors, case.slices, case.options))
    assert len(made) == 1
    ffa.backward(BackwardOperands(*case.tensors, case.slices, AttnOptions(0.5)))
    ffa.backward_final(BackwardOperands(*case.tensors, case.slices, case.options))
    assert len(made) == 3


@pytest.mark.parametrize("layout", [None, "sh", "ssh"])
@pytest.mark.parametrize("softcap", [0.0, 3.0])
def test_autograd_of_the_public_function(public, layout, softcap):
    ffa, simulator = public
    slices = SliceTable([[0, 10, 0, 40, 0], [12, 40, 3, 21, 2]])  # rows 10, 11 and 30.. see nothing
    q, k, v = (x.requires_grad_() for x in inputs(40, 40))
    sink = None if layout is None else torch.randn((2, 4) if layout == "sh" else (40, 2, 4)).requires_grad_()
    ranges = slices.tensors()
    out, meta = flex_flash_attn_func(
        q, k, v, *ranges, sink=sink, sink_layout=layout or "sh", softcap=softcap, softmax_scale=0.3
    )
    dout = torch.randn(out.shape).bfloat16()
    leaves = [x for x in (q, k, v, sink) if x is not None]
    got = torch.autograd.grad(out, leaves, dout)
    assert len(simulator.calls) == len(simulator.backward_calls) == 1
    assert simulator.backward_calls[0].grad_dtype == abi.BF16
    options = AttnOptions(0.3, softcap=softcap, sink_layout=layout or "sh")
    tensors64 = (x.detach().double() for x in (dout, q, k, v, out, meta.lse))
    sink64 = None if sink is None else sink.detach().double()
    want = SdpaBackend().backward(BackwardOperands(*tensors64, slices, options, sink64))
    for leaf, grad, name in zip(leaves, got, NAMES):
        assert grad.dtype == leaf.dtype and grad.shape == leaf.shape
        close(grad, getattr(want, name), 2e-2)
    # A second layer with the same mask tensors plans nothing.
    plans = simulator.plans_made
    out, _ = flex_flash_attn_func(q, k, v, *ranges, softmax_scale=0.3)
    out.sum().backward()
    assert simulator.plans_made == plans and q.grad is not None


@pytest.mark.parametrize("wish", (False, True))
def test_the_wish_for_deterministic_gradients_reaches_the_kernels(public, wish):
    _, simulator = public
    q, k, v = (x.requires_grad_() for x in inputs(16, 16))
    out, _ = flex_flash_attn_func(q, k, v, *Mask.causal(16).slices.tensors(), deterministic=wish)
    out.sum().backward()
    assert [c.dq_mode for c in simulator.backward_calls] == [int(wish)] and q.grad is not None


def test_deterministic_kernels_follow_one_another_over_streams():
    """Side by side each could hold multiprocessors that the other waits for."""
    ffa, _ = backend()
    case = BackwardCase(Mask.causal(40).slices)
    ordered = AttnOptions(0.3, deterministic=True)
    for stream, options in ((7, ordered), (7, ordered), (8, PLAIN), (8, ordered), (8, ordered), (7, ordered)):
        ffa.runtime.current_stream = stream
        ffa.backward(BackwardOperands(*case.tensors, case.slices, options))
    a, b = ("record", 7), ("record", 8)
    assert ffa.runtime.said == [a, a, ("wait", 8), b, b, ("wait", 7), a]
    ffa.runtime.capturing, ffa.runtime.current_stream = True, 9
    ffa.backward(BackwardOperands(*case.tensors, case.slices, ordered))
    assert len(ffa.runtime.said) == 7  # a capture has nothing to do with what ran before


def test_kernels_in_which_the_first_writer_stores_wait_for_no_other(monkeypatch):
    """In a capture, too."""
    monkeypatch.setattr(ffa_backward, "select_schedule", lambda *_: BwdSchedule(64, 0, first_writer=True))
    ffa, simulator = backend()
    case = BackwardCase(Mask.causal(40).slices)
    for stream, is_capturing in ((7, False), (8, False), (8, True)):
        ffa.runtime.current_stream, ffa.runtime.capturing = stream, is_capturing
        ffa.backward(BackwardOperands(*case.tensors, case.slices, PLAIN))
    assert not ffa.runtime.said and [c.dq_mode for c in simulator.backward_calls] == 3 * [abi.DQ_FIRST_WRITER]
