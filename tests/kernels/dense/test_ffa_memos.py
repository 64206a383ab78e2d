# SPDX-License-Identifier: Apache-2.0
"""What the backend of the CUDA kernels remembers, with a simulated library: plans, orders, prepared launches; and
what was made before the call."""

from __future__ import annotations

import gc
import sys
import threading
import weakref
from pathlib import Path

import numpy as np
import pytest
import torch
from ffa_case import BackwardCase, compare
from ffa_simulator import CpuRuntime, Simulator, backend, close, inputs, tensors

from magi_attention.common.mask import Mask
from magi_attention.common.slices import SliceTable
from magi_attention.errors import ContractError, UnsupportedError
from magi_attention.kernels import AttnOptions
from magi_attention.kernels.ffa import schedule as schedule_module
from magi_attention.kernels.ffa.ahead import kept_tables, take_tables
from magi_attention.kernels.ffa.backend import FfaBackend
from magi_attention.kernels.ffa.plans import DEVICE_PLANS, KEPT_ORDERS, PlanShape, RangeTensors
from magi_attention.kernels.ffa.schedule import _OUTLINES
from magi_attention.kernels.tables import table_from_tensors
from magi_attention.kernels.types import BackwardOperands, Operands
from magi_attention.native.ffa import FfaTile
from magi_attention.native.planner.tile_plan import HOST_PLANS, TilePlan
from magi_attention.testing.masks import random_slices
from magi_attention.testing.waiting import DEADLINE_S

sys.path.insert(0, str(Path(__file__).parents[2] / "functional"))
from bytes_oracle import reached_bytes  # noqa: E402

pytestmark = pytest.mark.usefixtures("planner")


def test_plan_of_a_table_is_made_once_and_lives_with_it():
    ffa, simulator = backend()
    q, k, v = inputs(32, 32)
    slices, options = SliceTable(Mask.causal(32).slices.array), AttnOptions(0.25)
    for _ in range(3):
        ffa.forward_final(Operands(q, k, v, slices, options))
    ffa.forward(Operands(q, k, v, slices, options))
    assert len({p.plan for p in simulator.calls}) == 1
    (kept,) = slices.cache.values(DEVICE_PLANS)
    assert kept[1] == simulator.calls[0].plan, "held, so that its address is nobody else's"
    died = weakref.ref(kept[0])
    other = SliceTable(Mask.full(32).slices.array)
    ffa.forward_final(Operands(q, k, v, other, options))
    assert simulator.calls[-1].plan != simulator.calls[0].plan
    del kept, slices
    gc.collect()
    assert died() is None


@pytest.mark.parametrize("host_planning", [False, True])
def test_plans_of_tensors_follow_every_edit(host_planning):
    """In both directions; from the second call of a mask on, nothing is planned."""
    ffa, simulator = backend(host_planning=host_planning)
    options = AttnOptions(0.25)
    mask = tensors(Mask.varlen([0, 10, 32], causal=True).slices)

    def run_and_check(m) -> int:
        """Plans that were made on the device."""
        before = simulator.plans_made
        case = BackwardCase(table_from_tensors(*m), 32, 32, options)
        out, *_ = ffa.forward_final(Operands(case.q, case.k, case.v, m, options))
        close(out, case.out, 1e-2)
        compare(ffa.backward_final(BackwardOperands(*case.tensors, m, options)), case.want(), 2e-2)
        return simulator.plans_made - before

    new = 0 if host_planning else 2
    assert run_and_check(mask) == new
    plan = simulator.calls[-1].plan
    assert run_and_check(mask) == 0 and simulator.calls[-1].plan == plan
    mask.q_ranges[0, 1] = 9
    assert run_and_check(mask) == new
    mask.types.zero_()
    run_and_check(mask)
    mask.k_ranges.copy_(torch.tensor([[3, 8], [12, 20]]))
    run_and_check(mask)
    run_and_check(RangeTensors(mask.q_ranges, mask.k_ranges, None))
    swapped = RangeTensors(mask.q_ranges, mask.k_ranges.flip(0), mask.types)
    assert run_and_check(swapped) == new and run_and_check(swapped) == 0
    entries = ffa._gpus.given.plans._entries
    died = weakref.ref(mask.q_ranges)
    assert entries
    del mask, swapped
    gc.collect()
    assert died() is None and not entries
    for seed in range(20):  # memory and ids are reused; no plan is
        run_and_check(tensors(Mask.varlen([0, 1 + seed, 32]).slices))


def test_what_is_not_remembered():
    ffa, simulator = backend()
    q, k, v = inputs(32, 32)
    options = AttnOptions(0.25)
    mask = tensors(Mask.causal(32).slices)
    ffa.forward_final(Operands(q, k, v, mask, options))
    work = simulator.calls[-1].workspace
    ffa.runtime.capturing = True
    case = BackwardCase(Mask.causal(32).slices, 32, 32, options)
    for made in (2, 4):
        ffa.forward_final(Operands(q, k, v, mask, options))
        assert simulator.plans_made == made and simulator.calls[-1].workspace != work
        compare(ffa.backward_final(BackwardOperands(*case.tensors, mask, options)), case.want(), 2e-2)
    assert ffa.prepared(Operands(q, k, v, mask, options)) is None
    many = RangeTensors(*(torch.zeros(300_000, 2, dtype=torch.int32) for _ in range(2)), None)
    with pytest.raises(UnsupportedError, match="CUDA graph"):
        ffa.forward_final(Operands(q, k, v, many, options))
    with pytest.raises(UnsupportedError, match="CUDA graph"):
        ffa.backward_final(BackwardOperands(*case.tensors, many, options))
    ffa.runtime.capturing = False
    with torch.inference_mode():
        inference = tensors(Mask.full(32).slices)
        for _ in range(2):
            before = simulator.plans_made
            ffa.forward_final(Operands(q, k, v, inference, options))
            assert simulator.plans_made == before + 1
    assert len(ffa._gpus.given.plans._entries) == 1


def test_many_slices_and_wrong_ones_are_planned_on_the_host():
    starts = torch.arange(2048, dtype=torch.int64)
    mask = RangeTensors(torch.stack([starts, starts + 1], 1), torch.stack([starts, starts + 1], 1), None)
    table = table_from_tensors(*mask)
    ffa, simulator = backend()
    simulator.tile_rows = 1
    case = BackwardCase(table, 2048, 2048, AttnOptions(1.0), heads=(1, 1), dims=(8, 8))
    out, *_ = ffa.forward_final(Operands(case.q, case.k, case.v, mask, case.options))
    assert torch.equal(out[:, 0], case.v[starts, 0])
    compare(ffa.backward_final(BackwardOperands(*case.tensors, mask, case.options)), case.want(), 2e-2)
    assert simulator.plans_made == simulator.transposed == 0
    checked, _ = backend(host_planning=True)
    beyond = mask.k_ranges.clone()
    beyond[0] = torch.tensor([0, 2049])
    wrong = RangeTensors(mask.q_ranges[:1], beyond[:1], None)
    with pytest.raises(ContractError, match=r"Slice 0 has k range \[0, 2049\)"):
        ffa.forward_final(Operands(case.q, case.k, case.v, RangeTensors(mask.q_ranges, beyond, None), case.options))
    with pytest.raises(ContractError, match=r"Slice 0 has k range \[0, 2049\)"):
        checked.backward_final(BackwardOperands(*case.tensors, wrong, case.options))


def test_only_what_ran_is_prepared():
    ffa, simulator = backend()
    q, k, v = inputs(32, 32)
    options, mask = AttnOptions(0.25), tensors(Mask.causal(32).slices)
    assert ffa.prepared(Operands(q, k, v, mask, options)) is None
    ffa.forward_final(Operands(q, k, v, mask, options))
    call = ffa.prepared(Operands(q, k, v, mask, options))
    assert (call.plan_address, call.workspace_address) == (simulator.calls[0].plan, simulator.calls[0].workspace)
    for change in (
        {"q": q[:31]}, {"k": k.half()}, {"v": v[:, :1]}, {"options": AttnOptions(0.25)}, {"sink": torch.zeros(1, 4)},
        {"mask": tensors(Mask.causal(32).slices)},
    ):  # fmt: skip
        kept = {"q": q, "k": k, "v": v, "mask": mask, "options": options, "sink": None, **change}
        assert ffa.prepared(Operands(**kept)) is None, change
    mask.types.fill_(0)
    assert ffa.prepared(Operands(q, k, v, mask, options)) is None


def test_bytes_of_a_table_are_those_of_its_plans_and_lists():
    ffa, simulator = backend()
    simulator.list_bytes = 64
    q, k, v = inputs(32, 32)
    slices, options = SliceTable(Mask.varlen([0, 10, 32], causal=True).slices.array), AttnOptions(0.25)
    out, lse, _ = ffa.forward_final(Operands(q, k, v, slices, options))

    def run() -> None:
        ffa.forward_final(Operands(q, k, v, slices, options))
        for deterministic in (False, True):
            in_order = AttnOptions(0.25, deterministic=deterministic)
            ffa.backward_final(BackwardOperands(torch.ones_like(out), q, k, v, out, lse, slices, in_order))

    run()
    plans = slices.cache.values(DEVICE_PLANS)
    lists = [kept for plan in plans if plan.orders is not None for kept in plan.orders.values(KEPT_ORDERS)]
    assert len(plans) == 2 and lists
    assert slices.cache.nbytes == reached_bytes(slices) == full_bytes(slices, plans, lists)
    full, died = slices.cache.nbytes, [weakref.ref(x) for x in (plans[0].plan, lists[0].words)]
    del plans, lists
    slices.cache.clear()
    gc.collect()
    assert not any(ref() for ref in died) and slices.cache.nbytes == slices.array.nbytes
    run()
    assert slices.cache.nbytes == full == reached_bytes(slices)


def full_bytes(slices, plans, lists) -> int:
    """Bytes of what kernels read, and of the little that the host keeps of a mask."""
    on_host = reached_bytes(slices.cache.values(_OUTLINES), slices.cache.values(HOST_PLANS))
    return slices.array.nbytes + sum(p.plan.nbytes for p in plans) + sum(x.words.nbytes for x in lists) + on_host


def test_threads_share_the_plan_that_came_in_first():
    ffa, _ = backend()
    slices, shape = SliceTable(Mask.causal(64).slices.array), PlanShape(64, 64, FfaTile(16, 1, 1))
    barrier, found = threading.Barrier(4, timeout=DEADLINE_S), []

    def work() -> None:
        barrier.wait()
        found.append(ffa._gpus.given.plans.plan(slices, shape, torch.device("cpu"), 0, False))

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(DEADLINE_S)
    assert len(found) == 4 and len({kept.address for kept in found}) == 1
    assert slices.cache.nbytes == slices.array.nbytes + found[0].plan.nbytes


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


def refuse(*args, **kwargs):
    raise AssertionError("made anew, though it was made ahead")


@pytest.mark.parametrize("deterministic", [False, True])
@pytest.mark.parametrize("seed", range(3))
def test_a_call_makes_nothing_that_was_made_ahead(seed, deterministic, monkeypatch):
    rng = np.random.default_rng(seed)
    rows = random_slices(rng, 70, 90, drop=0.0)
    options = AttnOptions(0.25, deterministic=deterministic)
    ffa = FfaBackend(Simulator(), CpuRuntime())
    q, k, v = (torch.randn(n, h, 16, dtype=torch.bfloat16) for n, h in ((70, 4), (90, 2), (90, 2)))
    want = ffa.forward_final(Operands(q, k, v, SliceTable(rows), options))

    other_process, slices = SliceTable(rows), SliceTable(rows)
    kernels = ffa.tiles(-1, q.dtype, (4, 2), (16, 16), options)
    kernels.make(other_process, 70, 90, 90)
    take_tables([(slices, *rest) for _, *rest in kept_tables(other_process)])
    for owner, name in ((TilePlan, "build"), (schedule_module, "_choose")):
        monkeypatch.setattr(owner, name, refuse)
    out, lse, _ = ffa.forward_final(Operands(q, k, v, slices, options))
    assert torch.equal(out, want[0]) and torch.equal(lse, want[1])
    ffa.backward_final(BackwardOperands(torch.ones_like(out), q, k, v, out, lse, slices, options))
    with pytest.raises(AssertionError, match="made anew"):
        ffa.forward_final(Operands(q, k, v, SliceTable(rows), options))
