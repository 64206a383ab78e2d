# SPDX-License-Identifier: Apache-2.0
"""Backward of the CUDA kernels' backend, with a simulated library: parameters, layouts, stages, plans and autograd."""

from __future__ import annotations

import gc
import logging
import weakref

import numpy as np
import pytest
import torch
from ffa_simulator import backend, close, inputs, tensors, truth
from hypothesis import given, settings
from hypothesis import strategies as st

from magi_attention.common.mask import Mask
from magi_attention.common.slices import SliceTable
from magi_attention.errors import ContractError, MagiError, UnsupportedError
from magi_attention.functional.flex_flash_attn import flex_flash_attn_func
from magi_attention.kernels import AttnOptions, Grads, SdpaBackend
from magi_attention.kernels.ffa import backward as ffa_backward
from magi_attention.kernels.ffa import schedule as schedule_module
from magi_attention.kernels.ffa.plans import DEVICE_PLANS, KEPT_ORDERS, RangeTensors
from magi_attention.kernels.types import BackwardOperands, Operands
from magi_attention.native import abi
from magi_attention.native.schedule import BwdSchedule
from magi_attention.testing import masks
from magi_attention.testing.libraries import planner_or_skip


@pytest.fixture(scope="module", autouse=True)
def planner():
    planner_or_skip()


MASKS = [
    Mask.causal(40).slices,
    Mask.varlen([0, 7, 7, 30, 40], causal=True).slices,
    Mask.sliding_window(40, (5, 3)).slices,
    SliceTable([[0, 10, 0, 40, 0], [12, 40, 3, 21, 2]]),  # rows 10, 11 and 30.. see nothing, 21.. are seen by few
    SliceTable([]),
]
NAMES = ("dq", "dk", "dv", "dsink")
PLAIN = AttnOptions(0.3)


class Case:
    """Inputs of a backward and the gradients in float64."""

    def __init__(self, slices, tq=40, tk=40, options=PLAIN, sink=None, dtype=torch.bfloat16, **kwargs):
        self.q, self.k, self.v = inputs(tq, tk, dtype=dtype, **kwargs)
        self.slices, self.options, self.sink = slices, options, sink
        forward = truth(self.q, self.k, self.v, slices, options, sink)
        self.out, self.lse = forward.out.to(dtype), forward.lse.float()
        g = torch.Generator().manual_seed(9)
        self.dout = torch.randn(self.out.shape, generator=g).to(dtype)
        self.tensors = (self.dout, self.q, self.k, self.v, self.out, self.lse)

    def want(self) -> Grads:
        double = (x.double() for x in self.tensors)
        sink = None if self.sink is None else self.sink.double()
        return SdpaBackend().backward(BackwardOperands(*double, self.slices, self.options, sink))


def compare(got: Grads, want: Grads, tol: float, scale: float = 1.0) -> None:
    for name in NAMES:
        a, b = getattr(got, name), getattr(want, name)
        assert (a is None) == (b is None), name
        if a is not None:
            close(a, b * scale, tol)


@pytest.mark.parametrize("slices", MASKS, ids=range(len(MASKS)))
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_gradients_in_both_dtypes(slices, dtype):
    ffa, simulator = backend()
    case = Case(slices, options=AttnOptions(0.3, softcap=2.0), dims=(16, 24), dtype=dtype)
    got = ffa.backward_final(BackwardOperands(*case.tensors, slices, case.options))
    assert got.dq.dtype == got.dk.dtype == got.dv.dtype == dtype and got.dsink is None
    compare(got, case.want(), 2e-2)
    exact = ffa.backward(BackwardOperands(*case.tensors, slices, case.options))
    assert exact.dq.dtype == torch.float32 and all(getattr(exact, n).is_contiguous() for n in NAMES[:3])
    compare(exact, case.want(), 1e-4)
    first, second = simulator.backward_calls
    assert (first.grad_dtype, second.grad_dtype) == (first.dtype, abi.FP32) and not second.accumulate
    assert first.delta is None, "nobody asks for delta without a sink"
    if not len(slices):
        assert not any(getattr(got, name).any() for name in NAMES[:3])


@pytest.mark.parametrize("layout", ["sh", "ssh"])
@pytest.mark.parametrize("with_delta", [False, True])
def test_sinks(layout, with_delta):
    ffa, _ = backend()
    sink = torch.randn((3, 4) if layout == "sh" else (20, 3, 4)).to(torch.bfloat16).requires_grad_()
    options = AttnOptions(0.25, sink_layout=layout)
    case = Case(SliceTable([[0, 15, 0, 33, 1]]), 20, 33, options, sink.detach())
    delta = (case.out.float() * case.dout.float()).sum(-1) if with_delta else None
    got = ffa.backward(BackwardOperands(*case.tensors, case.slices, options, sink, delta))
    assert got.dsink.shape == sink.shape and got.dsink.dtype == torch.float32 and not got.dsink.requires_grad
    compare(got, case.want(), 1e-4)
    into = Grads(*(torch.ones_like(getattr(got, n)) for n in NAMES[:3]))
    for times in (1, 2):
        assert ffa.backward(BackwardOperands(*case.tensors, case.slices, options, sink, delta), into) is into
        close(into.dsink, times * case.want().dsink, 1e-4)
        close(into.dv, 1 + times * case.want().dv, 1e-4)


def test_stages_add_up_in_buffers_of_any_layout():
    ffa, simulator = backend()
    case = Case(SliceTable([[0, 32, 0, 16, 0], [8, 24, 16, 40, 2], [0, 8, 40, 48, 1]]), 32, 48)
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
    case = Case(MASKS[0])
    partial = ffa.forward(Operands(case.q, case.k, case.v, case.slices, case.options))
    x = BackwardOperands(*case.tensors, case.slices, case.options)
    got = ffa.backward(x._replace(dout=case.dout.float(), out=partial.out, lse=partial.lse.double()))
    assert simulator.backward_calls[-1].out is None and simulator.backward_calls[-1].delta
    compare(got, case.want(), 2e-2)


@settings(max_examples=40, deadline=None, print_blob=True)
@given(
    seed=st.integers(0, 2**32 - 1),
    sizes=st.tuples(st.integers(1, 60), st.integers(1, 60)),
    heads=st.sampled_from([(1, 1), (4, 1), (6, 2), (3, 3)]),
    dims=st.sampled_from([(8, 8), (16, 8), (8, 24)]),
    as_tensors=st.booleans(),
)
def test_random_masks(seed, sizes, heads, dims, as_tensors):
    ffa, simulator = backend()
    slices = SliceTable(masks.random_slices(np.random.default_rng(seed), *sizes, max_slices=12))
    case = Case(slices, *sizes, heads=heads, dims=dims)
    mask = tensors(slices) if as_tensors else slices
    compare(ffa.backward_final(BackwardOperands(*case.tensors, mask, case.options)), case.want(), 3e-2)
    compare(ffa.backward(BackwardOperands(*case.tensors, slices, case.options)), case.want(), 1e-4)
    assert simulator.transposed == simulator.plans_made == int(as_tensors and len(slices) > 0)


def test_layouts_that_need_a_copy_are_right_and_logged_once(caplog):
    ffa, simulator = backend()
    case = Case(Mask.causal(24).slices, 24, 24)
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
    case = Case(Mask.causal(8).slices, 8, 8)
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


def test_plans_are_kept_and_follow_every_edit():
    ffa, simulator = backend()
    case = Case(Mask.causal(32).slices, 32, 32)
    table = SliceTable(case.slices.array)
    for _ in range(2):
        ffa.backward(BackwardOperands(*case.tensors, table, case.options))
        ffa.forward(Operands(case.q, case.k, case.v, table, case.options))
    assert len({p.plan for p in simulator.backward_calls}) == len({p.plan for p in simulator.calls}) == 1
    assert len(table.cache.values(DEVICE_PLANS)) == 2 and simulator.transposed == 0
    mask = tensors(case.slices)
    for _ in range(3):
        ffa.backward_final(BackwardOperands(*case.tensors, mask, case.options))
        ffa.forward_final(Operands(case.q, case.k, case.v, mask, case.options))
    assert (simulator.transposed, simulator.plans_made) == (1, 2)
    mask.types.fill_(0)
    full = Case(SliceTable([[0, 32, 0, 32, 0]]), 32, 32)
    compare(ffa.backward_final(BackwardOperands(*full.tensors, mask, full.options)), full.want(), 2e-2)
    assert simulator.transposed == 2
    untyped = RangeTensors(mask.q_ranges, mask.k_ranges, None)
    compare(ffa.backward_final(BackwardOperands(*full.tensors, untyped, full.options)), full.want(), 2e-2)
    ffa.runtime.capturing = True
    for made in (4, 5):
        compare(ffa.backward_final(BackwardOperands(*full.tensors, mask, full.options)), full.want(), 2e-2)
        assert simulator.transposed == made
    many = RangeTensors(*(torch.zeros(300_000, 2, dtype=torch.int32) for _ in range(2)), None)
    with pytest.raises(UnsupportedError, match="CUDA graph"):
        ffa.backward_final(BackwardOperands(*full.tensors, many, full.options))
    entries = ffa._gpus.given.plans._entries
    assert entries
    died = weakref.ref(mask.q_ranges)
    del mask, untyped
    gc.collect()
    assert died() is None and not entries


def test_orders_are_kept_with_the_plan():
    """One for each stream and each number of heads; none while a graph is captured or where there is none."""
    ffa, simulator = backend()
    case = Case(Mask.causal(32).slices, 32, 32)
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
        assert listed(mask, Case(case.slices, 32, 32, heads=(2, 2))) not in (None, first)
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


def test_many_slices_and_wrong_ones_are_planned_on_the_host():
    starts = torch.arange(2048, dtype=torch.int64)
    mask = RangeTensors(torch.stack([starts, starts + 1], 1), torch.stack([starts, starts + 1], 1), None)
    case = Case(SliceTable.from_ranges(mask.q_ranges.tolist(), mask.k_ranges.tolist(), 0), 2048, 2048,
                heads=(1, 1), dims=(8, 8))  # fmt: skip
    ffa, simulator = backend()
    simulator.tile_rows = 1
    compare(ffa.backward_final(BackwardOperands(*case.tensors, mask, case.options)), case.want(), 2e-2)
    assert simulator.transposed == 0
    checked, simulator = backend(host_planning=True)
    wrong = RangeTensors(mask.q_ranges[:1], torch.tensor([[0, 2049]]), None)
    with pytest.raises(ContractError, match=r"Slice 0 has k range \[0, 2049\)"):
        checked.backward_final(BackwardOperands(*case.tensors, wrong, case.options))


def test_prepared_calls_are_used_again():
    ffa, _ = backend()
    case = Case(Mask.causal(16).slices, 16, 16)
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
    slices = MASKS[3]
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
    case = Case(MASKS[0])
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
    case = Case(MASKS[0])
    for stream, is_capturing in ((7, False), (8, False), (8, True)):
        ffa.runtime.current_stream, ffa.runtime.capturing = stream, is_capturing
        ffa.backward(BackwardOperands(*case.tensors, case.slices, PLAIN))
    assert not ffa.runtime.said and [c.dq_mode for c in simulator.backward_calls] == 3 * [abi.DQ_FIRST_WRITER]


@pytest.mark.parametrize(
    "mask, dims, softcap, block",
    [
        (Mask.full(32), (128, 128), 0.0, 80),
        (Mask.causal(32), (96, 80), 0.0, 80),
        (Mask.full(32), (64, 64), 0.0, 64),
        (Mask.full(32), (128, 128), 1.0, 64),
        (Mask.varlen(list(range(0, 33, 2))), (128, 128), 0.0, 64),
        (Mask.sliding_window(32, (12, 0)), (128, 128), 0.0, 80),
    ],
    ids=("full", "causal", "narrow heads", "softcap", "short documents", "window"),
)
def test_long_masks_take_m_blocks_of_80(mask, dims, softcap, block, monkeypatch):
    """Where there are kernels for them and they gain; here they do from four queries a key on."""
    is_wide = lambda slices, *rest: rest[5] and rest[0][2] > 64 and slices.area >= 4 * 32  # noqa: E731
    monkeypatch.setattr(schedule_module, "_choose", lambda *a: BwdSchedule(80 if is_wide(*a) else 64, 0))
    ffa, simulator = backend()
    case = Case(mask.slices, 32, 32, AttnOptions(0.3, softcap=softcap), dims=dims)
    ranges = RangeTensors(*case.slices.tensors())  # these take the schedule of the last mask that the host knew
    for known in (ranges, case.slices, ranges):
        ffa.backward(BackwardOperands(*case.tensors, known, case.options))
    assert [c.block_m for c in simulator.backward_calls] == [64, block, block]
