# SPDX-License-Identifier: Apache-2.0
"""Backward of the CUDA kernels' backend, with a simulated library: parameters, layouts, stages, plans and autograd."""

from __future__ import annotations

import gc
import logging
import weakref

import numpy as np
import pytest
import torch
from ffa_case import NAMES, PLAIN, BackwardCase, compare
from ffa_simulator import backend, close, inputs, tensors
from hypothesis import given, settings
from hypothesis import strategies as st

from magi_attention.common.mask import Mask
from magi_attention.common.slices import SliceTable
from magi_attention.errors import ContractError, MagiError, UnsupportedError
from magi_attention.functional.flex_flash_attn import flex_flash_attn_func
from magi_attention.kernels import AttnOptions, Grads, SdpaBackend
from magi_attention.kernels.ffa import backward as ffa_backward
from magi_attention.kernels.ffa.plans import DEVICE_PLANS, KEPT_ORDERS
from magi_attention.kernels.types import BackwardOperands, Operands
from magi_attention.native import abi
from magi_attention.native.planner.schedule import BwdSchedule
from magi_attention.testing import masks
from magi_attention.testing.libraries import planner_or_skip


@pytest.fixture(scope="module", autouse=True)
def planner():
    planner_or_skip()


@settings(max_examples=80, deadline=None, print_blob=True)
@given(
    seed=st.integers(0, 2**32 - 1),
    sizes=st.tuples(st.integers(1, 60), st.integers(1, 60)),
    heads=st.sampled_from([(1, 1), (4, 1), (6, 2), (3, 3)]),
    dims=st.sampled_from([(8, 8), (16, 8), (8, 24)]),
    dtype=st.sampled_from([torch.bfloat16, torch.float16]),
    layout=st.sampled_from([None, "sh", "ssh"]),
    softcap=st.sampled_from([0.0, 2.0]),
    as_tensors=st.booleans(),
    with_delta=st.booleans(),
)
def test_random_masks(seed, sizes, heads, dims, dtype, layout, softcap, as_tensors, with_delta):
    """Rounded, in float32, and added to what is there."""
    ffa, simulator = backend()
    slices = SliceTable(masks.random_slices(np.random.default_rng(seed), *sizes, max_slices=12))
    shape = (sizes[0], 2, heads[0]) if layout == "ssh" else (2, heads[0])
    sink = None if layout is None else torch.randn(shape, generator=torch.Generator().manual_seed(1)).to(dtype)
    options = AttnOptions(0.3, softcap, layout or "sh")
    case = BackwardCase(slices, *sizes, options, sink, dtype, heads=heads, dims=dims)
    want, delta = case.want(), (case.out.float() * case.dout.float()).sum(-1) if with_delta else None
    got = ffa.backward_final(BackwardOperands(*case.tensors, tensors(slices) if as_tensors else slices, options, sink))
    assert got.dq.dtype == got.dk.dtype == got.dv.dtype == dtype
    compare(got, want, 3e-2)
    assert simulator.transposed == simulator.plans_made == int(as_tensors and len(slices) > 0)
    exact = ffa.backward(BackwardOperands(*case.tensors, slices, options, sink, delta))
    assert exact.dq.dtype == torch.float32 and all(getattr(exact, n).is_contiguous() for n in NAMES[:3])
    assert sink is None or (exact.dsink.shape == sink.shape and exact.dsink.dtype == torch.float32)
    compare(exact, want, 1e-4)
    into = Grads(*(torch.ones_like(getattr(exact, n)) for n in NAMES[:3]))
    for times in (1, 2):
        assert ffa.backward(BackwardOperands(*case.tensors, slices, options, sink, delta), into) is into
        close(into.dv, 1 + times * want.dv, 2e-4)
        assert sink is None or torch.allclose(into.dsink.double(), times * want.dsink, atol=2e-4)


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


def test_layouts_that_need_a_copy_are_right_and_logged_once(caplog):
    ffa, simulator = backend()
    case = BackwardCase(Mask.causal(24).slices, 24, 24)
    dout, q, k, v, out, lse = case.tensors
    misaligned = torch.empty(k.numel() + 1, dtype=k.dtype)[1:].view(k.shape).copy_(k)
    odd_stride = torch.empty(24, 4, 20, dtype=q.dtype)[..., :16].copy_(q)
    columns = [x.transpose(0, 2).contiguous().transpose(0, 2) for x in (dout, v, out)]
    by_head = lse.T.contiguous().T
    with caplog.at_level(logging.WARNING, logger="magi_attention.kernels"):
        for _ in range(2):
            strided = columns[0], odd_stride, misaligned, columns[1], columns[2], by_head
            got = ffa.backward(BackwardOperands(*strided, case.slices, case.options))
            compare(got, case.want(), 1e-4)
    assert len([r for r in caplog.records if "dout" in r.getMessage() and "copies" in r.getMessage()]) == 1
    # What loss.sum().backward() gives: one number in all places.
    ones = torch.ones((), dtype=q.dtype).expand(out.shape)
    dense = ffa.backward(BackwardOperands(ones.contiguous(), q, k, v, out, lse, case.slices, case.options))
    compare(ffa.backward(BackwardOperands(ones, q, k, v, out, lse, case.slices, case.options)), dense, 1e-6)
    # Honoured, not copied: a view with good strides keeps its address.
    view = torch.zeros(24, 4, 32, dtype=q.dtype)[..., 16:].copy_(dout)
    compare(ffa.backward(BackwardOperands(view, q, k, v, out, lse, case.slices, case.options)), case.want(), 1e-4)
    assert simulator.backward_calls[-1].dout == view.data_ptr()
    assert simulator.backward_calls[-1].dout_stride_head == 32


@pytest.mark.parametrize("tq, tk", [(0, 5), (5, 0), (0, 0)])
def test_no_rows(tq, tk):
    ffa, simulator = backend()
    q, k, v = inputs(tq, tk)
    out, lse, sink = torch.zeros(tq, 4, 16).bfloat16(), torch.zeros(tq, 4), torch.zeros(1, 4)
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


def test_errors():
    ffa, simulator = backend()
    case = BackwardCase(Mask.causal(8).slices, 8, 8)
    for simulator.status, kind in ((1, ContractError), (2, UnsupportedError), (3, MagiError), (4, MagiError)):
        with pytest.raises(kind, match="Attention backward: the simulator was told to fail"):
            ffa.backward(BackwardOperands(*case.tensors, case.slices, case.options))
    simulator.status = 0
    dout, q, k, v, out, lse = case.tensors
    bad = [
        (dout[1:], q, k, v, out, lse), (dout, q, k, v, out[..., :8], lse), (dout, q, k, v, out, lse[:, :3]),
        (dout, q, k.half(), v, out, lse), (dout.int(), q, k, v, out, lse),
    ]  # fmt: skip
    for given_tensors in bad:
        with pytest.raises(ContractError):
            ffa.backward(BackwardOperands(*given_tensors, case.slices, case.options))
    with pytest.raises(ContractError, match="sink has shape"):
        ffa.backward(BackwardOperands(*case.tensors, case.slices, case.options, torch.zeros(1, 5)))


def test_orders_are_kept_with_the_plan():
    """One for each stream and each number of heads; none while a graph is captured or where there is none."""
    ffa, simulator = backend()
    case = BackwardCase(Mask.causal(32).slices, 32, 32)
    table, ranges = SliceTable(case.slices.array), tensors(case.slices)

    def listed(mask, given=case, **options) -> int | None:
        ffa.backward_final(BackwardOperands(*given.tensors, mask, AttnOptions(given.options.softmax_scale, **options)))
        return simulator.backward_calls[-1].order

    is_made = lambda: bool(simulator.backward_calls[-1].order_is_made)  # noqa: E731
    for mask in (table, ranges):
        first = listed(mask)
        assert first and not is_made()
        assert listed(mask) == first and is_made()
        assert listed(mask, sm_margin=3) not in (None, first) and not is_made()
        assert listed(mask, deterministic=True) not in (None, first) and not is_made(), "another order"
        assert listed(mask, BackwardCase(case.slices, 32, 32, heads=(2, 2))) not in (None, first)
        ffa.runtime.capturing = True
        assert listed(mask) == (first if mask is table else None), "the planner is part of the graph"
        assert is_made() == (mask is table)
        assert listed(mask, sm_margin=4) is None
        ffa.runtime.capturing = False
        assert listed(mask, sm_margin=4) and not is_made(), "captured calls have not run"
    assert listed(table) != listed(ranges)
    (kept,) = (kept for kept in table.cache.values(DEVICE_PLANS) if kept.orders)
    died = [weakref.ref(order) for order in kept.orders.values(KEPT_ORDERS)]
    del kept, table
    gc.collect()
    assert len(died) == 5 and not any(ref() for ref in died)
    other, other_simulator = backend()
    other_simulator.order_bytes = 0
    other.backward_final(BackwardOperands(*case.tensors, ranges, case.options))
    assert other_simulator.backward_calls[-1].order is None


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
