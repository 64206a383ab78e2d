# SPDX-License-Identifier: Apache-2.0
"""Range tensors become known to the host from the second call of a mask on, with a simulated library."""

from __future__ import annotations

import gc

import numpy as np
import pytest
import torch
from ffa_simulator import backend, inputs, public_backend, tensors

from magi_attention.common.mask import Mask
from magi_attention.common.slices import SliceTable
from magi_attention.errors import ContractError
from magi_attention.functional.flex_flash_attn import flex_flash_attn_func
from magi_attention.kernels import AttnOptions
from magi_attention.kernels.ffa import schedule as schedule_module
from magi_attention.kernels.ffa.host_ranges import HostRanges
from magi_attention.kernels.ffa.plans import RangeTensors
from magi_attention.kernels.ffa.schedule import UNKNOWN, RecentSchedules
from magi_attention.kernels.tables import SliceTables, table_from_host_ranges
from magi_attention.native import abi
from magi_attention.native.planner.schedule import BwdSchedule
from magi_attention.testing import masks
from magi_attention.testing.ref_attn import ref_attn_func

pytestmark = pytest.mark.usefixtures("planner")


def test_ranges_are_known_once_the_copy_has_arrived():
    ffa, _ = backend()
    runtime, known = ffa.runtime, HostRanges(SliceTables())
    want = Mask.varlen([0, 10, 32], causal=True).slices
    mask = tensors(want)
    runtime.has_caught_up = False
    for _ in range(3):
        assert known.find(runtime, mask, 32, 32) is None
    assert runtime.copies == 3, "one for each tensor, started once"
    runtime.has_caught_up = True
    found = known.find(runtime, mask, 32, 32)
    assert found == want and known.find(runtime, mask, 32, 32) is found
    mask.q_ranges[0, 1] = 9
    assert known.find(runtime, mask, 32, 32) is None, "an edit"
    assert known.find(runtime, mask, 32, 32).array[0, 1] == 9
    assert len(known) == 1
    del mask
    gc.collect()
    assert len(known) == 0


def test_neither_graphs_nor_inference_tensors_are_remembered():
    ffa, _ = backend()
    runtime, known = ffa.runtime, HostRanges(SliceTables())
    mask = tensors(Mask.causal(32).slices)
    runtime.capturing = True
    for _ in range(2):
        assert known.find(runtime, mask, 32, 32) is None
    runtime.capturing = False
    with torch.inference_mode():
        other = tensors(Mask.causal(32).slices)
    for _ in range(2):
        assert known.find(runtime, other, 32, 32) is None
    assert runtime.copies == 0 and len(known) == 0


def test_slices_that_the_device_leaves_out_are_left_out():
    for seed in range(50):
        rng = np.random.default_rng(seed)
        rows = rng.integers(-2, 14, size=(rng.integers(1, 12), 5))
        rows[:, 4] = rng.integers(-1, 5, size=len(rows))
        want = [r for r in rows.tolist() if 0 <= r[0] <= r[1] <= 9 and 0 <= r[2] <= r[3] <= 11 and 0 <= r[4] <= 3]
        q, k, types = (torch.from_numpy(x) for x in (rows[:, :2], rows[:, 2:4], rows[:, 4]))
        assert table_from_host_ranges(q, k, types, 9, 11).array.tolist() == want, f"seed {seed}"


def check_gradients(seed: int) -> None:
    """The mask is one that no other test has, as schedules are kept with equal masks."""
    print(f"seed {seed}")
    slices = SliceTable(masks.random_slices(np.random.default_rng(7000 + seed), 48, 48, max_slices=6))
    q, k, v = (x.requires_grad_() for x in inputs(48, 48, seed=seed))
    out, _ = flex_flash_attn_func(q, k, v, *tensors(slices))
    dout = torch.randn(out.shape, generator=torch.Generator().manual_seed(seed)).to(out.dtype)
    got = torch.autograd.grad(out, (q, k, v), dout)
    exact = [x.detach().double().requires_grad_() for x in (q, k, v)]
    want_out, _ = ref_attn_func(*exact, torch.from_numpy(Mask(slices, 48, 48).to_dense()))
    for a, b in zip(got, torch.autograd.grad(want_out, exact, dout.double())):
        torch.testing.assert_close(a.double(), b, rtol=3e-2, atol=3e-2)


@pytest.mark.parametrize("where", ["late", "at once"])
def test_backward_of_the_public_function_follows_what_the_host_knows(monkeypatch, where):
    """Right with either schedule; whether the device planned the mask of the backward tells which one ran."""
    ffa, simulator = public_backend(monkeypatch)
    ffa.runtime.has_caught_up = where == "at once"
    for seed in range(6):
        before = simulator.transposed
        check_gradients(seed)
        assert simulator.transposed - before == (0 if where == "at once" else 1)


def test_deterministic_backwards_do_not_depend_on_what_the_host_knows(monkeypatch):
    ffa, simulator = public_backend(monkeypatch)
    mask = tensors(Mask.causal(48).slices)
    q, k, v = (x.requires_grad_() for x in inputs(48, 48))
    for has_caught_up in (False, True, True):
        ffa.runtime.has_caught_up = has_caught_up
        out, _ = flex_flash_attn_func(q, k, v, *mask, deterministic=True)
        torch.autograd.grad(out, (q, k, v), torch.ones_like(out))
    assert ffa.runtime.copies == 0
    assert len({(p.block_m, p.num_head_splits, p.dq_mode) for p in simulator.backward_calls}) == 1


def test_one_mask_has_one_place():
    q = torch.zeros(4, 2, 8, device="meta")
    on_host = torch.tensor([[0, 4]], dtype=torch.int32)
    with pytest.raises(ContractError, match="move the mask to meta or leave all of it on the CPU"):
        flex_flash_attn_func(q, q, q, on_host, on_host.to("meta"))
    ffa, _ = backend()
    assert ffa.slices_of(SliceTable(Mask.causal(4).slices.array), q, q, AttnOptions(1.0)) is not None
    assert isinstance(tensors(Mask.causal(4).slices), RangeTensors)


def test_a_mask_that_the_host_does_not_know_takes_the_schedule_of_the_last_one_of_its_shape():
    """Where each training step has a mask of its own, all layers may be launched before its ranges have arrived."""
    recent, options = RecentSchedules(), AttnOptions(0.3)
    shapes = (64, 8, 128), (64, 2, 128)
    by_document = BwdSchedule(80, 0, first_writer=True, by_document=True, direct_dq_store=True)
    assert recent.best(UNKNOWN, *shapes, options) is UNKNOWN, "no mask was known yet"
    assert recent.best(by_document, *shapes, options) is by_document
    assert recent.best(UNKNOWN, *shapes, options) == by_document._replace(by_document=False), "that needs the mask"
    assert recent.best(UNKNOWN, (65, 8, 128), shapes[1], options) is UNKNOWN, "another shape"
    assert recent.best(UNKNOWN, *shapes, AttnOptions(0.3, softcap=5.0)) is UNKNOWN
    assert recent.best(UNKNOWN, *shapes, AttnOptions(0.3, deterministic=True)) is UNKNOWN, "the same bits in every call"
    recent.best(BwdSchedule(80, 0), *shapes, options)
    assert recent.best(UNKNOWN, *shapes, options) == BwdSchedule(80, 0)


def test_backwards_are_right_with_the_schedule_of_another_mask(monkeypatch):
    """The ranges of every other mask are late."""
    monkeypatch.setattr(schedule_module, "_choose", lambda *_: BwdSchedule(64, 0, first_writer=True))
    ffa, simulator = public_backend(monkeypatch)
    for seed in range(8):
        ffa.runtime.has_caught_up = seed % 2 == 0
        check_gradients(100 + seed)
    assert [call.dq_mode for call in simulator.backward_calls] == [abi.DQ_FIRST_WRITER] * 8
