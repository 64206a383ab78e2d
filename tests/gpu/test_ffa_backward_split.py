# SPDX-License-Identifier: Apache-2.0
"""Work tiles of short documents that are split by a work list (csrc/ffa/sm90/bwd/schedule/split.cuh).

Whether they are depends on lengths and on the number of multiprocessors; the list says.
"""

from __future__ import annotations

import numpy as np
import pytest
import torch
from backward_oracle import assert_grads, assert_same, make_dout, options_of, seen, truth
from forward_oracle import Inputs, make_inputs
from test_ffa_backward import (  # noqa: F401
    DEVICE,
    differentiate,
    each_dtype,
    explicit_backend_in_poisoned_memory,
    forward,
    poisoned_like,
    pytestmark,
)

from magi_attention.common.plan_cache import PlanCache
from magi_attention.kernels.ffa import backward as ffa_backward
from magi_attention.kernels.ffa.backend import FfaBackend
from magi_attention.kernels.ffa.plans import DEVICE_PLANS, Kept, PlanShape, RangePlans, RangeTensors, table_plan
from magi_attention.kernels.types import BackwardOperands, Grads
from magi_attention.native.planner import abi as schedule_abi
from magi_attention.native.planner.schedule import BwdSchedule
from magi_attention.testing import masks
from magi_attention.testing.uneven import SPLIT_CASES

TOTAL, HEADS = 700, (176, 44)  # 6 tiles x 44 heads: two work tiles for each of 132 multiprocessors


@pytest.fixture(autouse=True)
def ranges_on_the_host(monkeypatch):
    """So that every call has a schedule of the host, the first one, too."""
    monkeypatch.setattr(Inputs, "ranges", property(lambda self: self.slices.tensors()))


@pytest.fixture(autouse=True)
def m_blocks_of_64(monkeypatch):
    """m-blocks have 64 queries. The files of m-blocks of 80 take the tests from here, but not this."""
    monkeypatch.setattr(ffa_backward, "select_schedule", lambda *_: BwdSchedule(64, 0))


@pytest.fixture
def workspaces(monkeypatch) -> list[torch.Tensor]:
    """The workspace of the last backward, which held NaN before."""
    workspaces: list[torch.Tensor] = []

    def empty_like(like: torch.Tensor) -> torch.Tensor:
        made = poisoned_like(like)
        if made.dtype == torch.uint8:
            workspaces[:] = [made]
        return made

    monkeypatch.setattr(ffa_backward, "_empty_like", empty_like)
    return workspaces


@pytest.fixture
def list_counts(monkeypatch):
    """How many tiles of how many heads the last backward split, and how many work tiles its list had: a function."""
    plans, plan = [], RangePlans.plan

    def note(*arguments):
        plans[:] = [plan(*arguments)]
        return plans[0]

    def found() -> tuple[int, int]:
        (kept,) = plans
        if not kept.work_list:
            return 0, 0
        words = kept.plan[(kept.work_list - kept.address) // 4 :][:16].cpu().numpy()
        header = schedule_abi.WorkListHeader.from_buffer_copy(words.tobytes())
        return header.num_partials, header.num_work_tiles

    monkeypatch.setattr(RangePlans, "plan", note)
    return found


@pytest.fixture
def was_split(list_counts):
    """Whether the last backward split its tiles: a function."""
    return lambda: list_counts()[0] > 0


def documents(seed: int, count: int = 4, kind: int = 0, total: int = TOTAL) -> np.ndarray:
    return masks.varlen(masks.random_cu_seqlens(np.random.default_rng(seed), total, count), kind).array


def inputs(seed: int, slices: np.ndarray, dims=(128, 128), dtype=torch.bfloat16, total: int = TOTAL) -> Inputs:
    return make_inputs(seed, slices, total, total, HEADS, dims, dtype, DEVICE)


@each_dtype
@pytest.mark.parametrize("dims", ((128, 128), (96, 80)), ids=str)
def test_right_and_the_same_every_time(was_split, dims, dtype):
    splits = []
    for seed in (2, 3, 6):
        x = inputs(seed, documents(seed, kind=seed % 2), dims, dtype)
        dout = make_dout(x, seed)
        got = differentiate(x, dout)
        splits.append(was_split())
        assert_grads(x, got, truth(x, dout), (seed, dims))
        assert_same(differentiate(x, dout), got, dtype, seed)
    assert splits[0] and splits[2]


def has_132_multiprocessors() -> bool:
    return torch.cuda.get_device_properties(DEVICE).multi_processor_count == 132


@pytest.mark.parametrize("name", SPLIT_CASES)
def test_each_kind_of_split(list_counts, name):
    lengths, kind, heads, tiles, work_tiles = SPLIT_CASES[name]
    slices = masks.varlen([0, *np.cumsum(lengths).tolist()], kind).array
    x = make_inputs(1, slices, sum(lengths), sum(lengths), heads, (128, 128), torch.bfloat16, DEVICE)
    dout = make_dout(x, 1)
    got = differentiate(x, dout)
    if has_132_multiprocessors():
        assert list_counts() == (tiles * heads[1], work_tiles * heads[1])
    assert_grads(x, got, truth(x, dout), name)
    assert_same(differentiate(x, dout), got, torch.bfloat16, name)
    assert_grads(x, differentiate(x, dout, sm_margin=20), truth(x, dout), (name, "fewer multiprocessors"))


# With 132 multiprocessors: 29 tiles of 10 heads and 16 tiles of 20 heads, which are one L2 group.
@pytest.mark.parametrize("total, heads", ((3700, (40, 10)), (2048, (80, 20))), ids=("10 heads", "20 heads"))
def test_l2_groups_between_one_and_two(list_counts, total, heads):
    for kind in (0, 1):
        x = make_inputs(7, documents(7, 3, kind, total), total, total, heads, (128, 128), torch.bfloat16, DEVICE)
        dout = make_dout(x, 7)
        got = differentiate(x, dout)
        if has_132_multiprocessors():
            assert list_counts()[1] > 0
        assert_grads(x, got, truth(x, dout), kind)
        assert_same(differentiate(x, dout), got, torch.bfloat16, kind)


@pytest.mark.parametrize("name", SPLIT_CASES)
def test_the_last_kernel_waits_for_what_is_missing(name):
    """It begins before the main one has ended, here long before: that has few multiprocessors, and others are busy."""
    lengths, kind, heads, *_ = SPLIT_CASES[name]
    slices = masks.varlen([0, *np.cumsum(lengths).tolist()], kind).array
    x = make_inputs(3, slices, sum(lengths), sum(lengths), heads, (128, 128), torch.bfloat16, DEVICE)
    dout = make_dout(x, 3)
    other, beside = torch.randn(2048, 2048, device=DEVICE), torch.cuda.Stream()
    for margin in (0, 1, 60, 120):  # the order within a tile depends on it
        want = differentiate(x, dout, sm_margin=margin)
        assert_grads(x, want, truth(x, dout), (name, margin))
        for _ in range(10):
            with torch.cuda.stream(beside):
                torch.mm(other, other)
            assert_same(differentiate(x, dout, sm_margin=margin), want, torch.bfloat16, (name, margin))
    torch.cuda.synchronize()


@pytest.mark.parametrize("name", SPLIT_CASES)
def test_a_graph_and_another_stream_read_the_same_list(name):
    lengths, kind, heads, *_ = SPLIT_CASES[name]
    slices = masks.varlen([0, *np.cumsum(lengths).tolist()], kind).array
    x = make_inputs(5, slices, sum(lengths), sum(lengths), heads, (128, 128), torch.bfloat16, DEVICE)
    ffa, dout = FfaBackend(), make_dout(x, 5)
    out, lse = forward(x, ffa)

    def run() -> Grads:
        return ffa.backward_final(BackwardOperands(dout, x.q, x.k, x.v, out, lse, x.slices, options_of(x)))

    want = run()
    assert_grads(x, want, truth(x, dout), name)
    (kept,) = (kept for kept in x.slices.cache.values(DEVICE_PLANS) if kept.work_list)
    before = kept.plan.clone()
    for _ in range(20):
        assert_same(run(), want, torch.bfloat16, name)
    beside = torch.cuda.Stream()
    with torch.cuda.stream(beside):
        assert_same(run(), want, torch.bfloat16, name)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=beside):
        got = run()
    for _ in range(5):
        got.dq.fill_(float("nan"))
        graph.replay()
        assert_same(got, want, torch.bfloat16, (name, "graph"))
    assert torch.equal(kept.plan, before), "kernels only read it"


@pytest.mark.parametrize("name", SPLIT_CASES)
def test_range_tensors_give_the_same_without_a_list(name):
    """The first call of a mask that only the device knows: its tiles stay whole."""
    lengths, kind, heads, *_ = SPLIT_CASES[name]
    slices = masks.varlen([0, *np.cumsum(lengths).tolist()], kind).array
    x = make_inputs(5, slices, sum(lengths), sum(lengths), heads, (128, 128), torch.bfloat16, DEVICE)
    ffa, dout = FfaBackend(), make_dout(x, 5)
    out, lse = forward(x, ffa)
    columns = torch.tensor(slices, dtype=torch.int32, device=DEVICE)
    ranges = RangeTensors(columns[:, :2].contiguous(), columns[:, 2:4].contiguous(), columns[:, 4].contiguous())
    got = ffa.backward_final(BackwardOperands(dout, x.q, x.k, x.v, out, lse, ranges, options_of(x)))
    assert_grads(x, got, truth(x, dout), name)


def test_a_plan_of_other_shapes_gives_nan(monkeypatch):
    x, ffa = inputs(2, documents(2)), FfaBackend()
    dout, (out, lse) = make_dout(x), forward(x, ffa)
    shape = PlanShape(328, 328, ffa.library.backward_tile(128, 128), is_transposed=True)
    wrong = table_plan(masks.causal(328), shape, x.q.device)
    kept = Kept(wrong, wrong.data_ptr(), PlanCache())
    monkeypatch.setattr(RangePlans, "plan", lambda *_: kept)
    for _ in range(2):
        got = ffa.backward_final(BackwardOperands(dout, x.q, x.k, x.v, out, lse, x.slices, options_of(x)))
        for name in ("dq", "dk", "dv"):
            assert getattr(got, name).isnan().all(), name


def test_rows_with_delta_given_and_without_out():
    """What a call of the runtime gives: delta in place of out, and gradients in float32."""
    lengths, kind, heads, *_ = SPLIT_CASES["a tile by queries"]
    slices = masks.varlen([0, *np.cumsum(lengths).tolist()], kind).array
    x = make_inputs(6, slices, sum(lengths), sum(lengths), heads, (128, 128), torch.bfloat16, DEVICE)
    ffa, dout = FfaBackend(), make_dout(x, 6)
    out, lse = forward(x, ffa)
    delta = (out.float() * dout.float()).sum(-1)
    for _ in range(3):
        got = ffa.backward(BackwardOperands(dout, x.q, x.k, x.v, out, lse, x.slices, options_of(x), delta=delta))
        assert_grads(x, got, truth(x, dout))


def test_a_tile_split_by_queries_beside_unseen_rows(list_counts):
    lengths, kind, heads, tiles, _ = SPLIT_CASES["two tiles by queries, and the two shortest by heads"]
    slices = masks.varlen([0, *np.cumsum(lengths).tolist()], kind).array[1:]
    x = make_inputs(2, slices, sum(lengths), sum(lengths), heads, (128, 128), torch.bfloat16, DEVICE)
    dout = make_dout(x, 2)
    want = differentiate(x, dout)
    assert_grads(x, want, truth(x, dout))
    if has_132_multiprocessors():
        assert list_counts()[0] == tiles * heads[1]
    sees, is_seen = seen(x)
    for t, rows in ((x.q, ~sees), (dout, ~sees), (x.k, ~is_seen), (x.v, ~is_seen)):
        t[rows] = float("nan")
    assert_same(differentiate(x, dout), want, x.q.dtype)


def test_even_tiles_stay_whole(was_split):
    x = inputs(0, masks.full(TOTAL).array)
    dout = make_dout(x)
    differentiate(x, dout)
    assert not was_split()


def test_float32_buffers_are_added_to(was_split):
    ffa, x = FfaBackend(), inputs(2, documents(2))
    dout, (out, lse) = make_dout(x), forward(x, ffa)
    before = Grads(*(torch.randn_like(t, dtype=torch.float32) for t in (x.q, x.k, x.v)))
    into = Grads(*(t.clone() for t in (before.dq, before.dk, before.dv)))
    ffa.backward(BackwardOperands(dout, x.q, x.k, x.v, out, lse, x.slices, options_of(x)), into)
    assert was_split()
    assert_grads(x, into, truth(x, dout), before=before)


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_what_unseen_rows_hold_does_not_matter(was_split, value):
    x = inputs(6, np.delete(documents(6), 2, axis=0))
    dout = make_dout(x)
    want = differentiate(x, dout)
    assert was_split()
    sees, is_seen = seen(x)
    assert not sees.all() and not is_seen.all()
    for t, rows in ((x.q, ~sees), (dout, ~sees), (x.k, ~is_seen), (x.v, ~is_seen)):
        t[rows] = value
    assert_same(differentiate(x, dout), want, x.q.dtype)
