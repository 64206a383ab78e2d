# SPDX-License-Identifier: Apache-2.0
"""Group cast and reduce over buffers, their kernels compiled for the CPU, against all-to-all-v, bit for bit."""

from __future__ import annotations

import logging

import pytest
import torch
from comm_oracle import random_plan
from symm_library import CpuSymmGroup, Launches, compiled

from magi_attention.comm.collectives import group as group_collective
from magi_attention.comm.collectives.group import group_cast, group_reduce
from magi_attention.comm.collectives.layout import A2AVLayout
from magi_attention.comm.symm import collective as symm_collective
from magi_attention.comm.transport.fake import FakeWorld
from magi_attention.config import GrpCollConfig
from magi_attention.errors import PlanMismatchError
from magi_attention.native.comm import symm

DTYPES = (torch.bfloat16, torch.float16, torch.float32)
# short rows, several of a warp, and one beyond a stage
SHAPES = [[(8,), (264,)], [(520,), (1024,)], [(2056,), (16,)], [(16392,)]]


@pytest.fixture(scope="module")
def library(compile_folder):
    return compiled(compile_folder)


@pytest.fixture
def groups(library, monkeypatch):
    """Every group of ranks shares memory; the checks of the tensors stay, but for where they are. Gives the groups."""
    launches, shared, made = Launches(library), {}, {}
    monkeypatch.setattr(symm, "load", lambda name: launches)

    def symm_group_for(transport, tensors, dtypes, op="cast"):
        reason = symm_collective._why_not([x.to("meta") for x in tensors], dtypes, op)
        if transport.size == 1 or reason not in (None, "The tensors are on meta."):
            return None
        if id(transport) not in made:
            made[id(transport)] = CpuSymmGroup(transport, launches, shared)
        return made[id(transport)]

    monkeypatch.setattr(group_collective, "symm_group_for", symm_group_for)
    return made


def draw(seed: int, rows: int, shape: tuple[int, ...], dtype: torch.dtype, form: str) -> torch.Tensor:
    """(rows, *shape), by ``form`` contiguous, with rows further apart, or at an odd address."""
    gen = torch.Generator().manual_seed(seed)
    if form == "apart":
        return torch.randn(rows, 2, *shape, generator=gen).to(dtype)[:, 1]
    if form == "odd":
        count = rows * shape.numel() if isinstance(shape, torch.Size) else rows * int(torch.tensor(shape).prod())
        return torch.randn(count + 1, generator=gen).to(dtype)[1:].view(rows, *shape)
    return torch.randn(rows, *shape, generator=gen).to(dtype)


def case(t, plan, seed: int, native: bool):
    gen = torch.Generator().manual_seed(seed)

    def pick(options):
        return options[int(torch.randint(len(options), (1,), generator=gen))]

    dtype, out_dtype, wire = pick(DTYPES), pick(DTYPES), pick((None, *DTYPES))
    forms = [pick(("plain", "apart", "odd")) for _ in range(4)]
    op, acc, is_async, count = pick(("sum", "avg")), pick((True, False)), pick((True, False)), pick((1, 2, 3))
    shapes = pick(SHAPES) if seed % 2 else [(2, 8), (4,) if dtype == torch.float32 else (8,), (1, 24)][:count]
    spec = plan.specs[t.rank]
    inputs = [draw(seed + 10 * i + t.rank, spec.input_rows, s, dtype, forms[0]) for i, s in enumerate(shapes)]
    outputs = [draw(seed + 1, spec.output_rows, s, dtype, forms[1]) for s in shapes]
    layout = A2AVLayout.from_spec(spec) if pick((True, False)) else None
    options = dict(native=native, layout=layout, config=GrpCollConfig(num_sms=pick((2, 24))), async_op=is_async)
    group_cast(inputs, outputs, *plan.lists(t.rank), t, **options).wait_post_process()
    if wire is not None:  # rows that stay here are rounded like all others
        outputs = [y.to(wire).to(dtype) for y in outputs]
    shapes = [s for s in shapes if s != (4,)]
    parts = [draw(seed + 20 + i + t.rank, spec.output_rows, s, dtype, forms[2]) for i, s in enumerate(shapes)]
    if wire is not None:
        parts = [x.to(wire).to(dtype) if wire.itemsize <= dtype.itemsize else x for x in parts]
    back = [draw(seed + 30 + t.rank, spec.input_rows, s, out_dtype, forms[3]) for s in shapes]
    options |= dict(reduce_op=op, acc_reduce=acc, comm_dtype=wire)
    group_reduce(parts, back, *plan.reduce_lists(t.rank), t, **options).wait_post_process()
    return [x.clone() for x in outputs + back]


@pytest.mark.parametrize("seed", [*range(9), *(pytest.param(n, marks=pytest.mark.nightly) for n in range(9, 18))])
def test_against_all_to_all_v(groups, seed: int) -> None:
    """Every third plan has more rows than a signal of a sender is for."""
    plan = random_plan(seed, 2 + seed % 4, max_size=(3, 40, 100)[seed % 3])
    world = FakeWorld(len(plan.specs))
    wanted, got = (world.run(case, plan, seed, native) for native in (False, True))
    assert {stage for group in groups.values() for stage in group.stages} == {"group_cast", "group_reduce"}
    for mine, theirs in zip(got, wanted):
        for i, (a, b) in enumerate(zip(mine, theirs)):
            assert torch.equal(a, b), (seed, i)


def test_no_more_multiprocessors_than_asked_for():
    for op in ("cast", "reduce"):
        for transfers in (1, 16, 17, 5000):
            whole = sum(symm_collective.ctas_of(op, transfers, None))
            for num_sms in range(2, 80, 2):
                found = symm_collective.ctas_of(op, transfers, num_sms)
                assert min(found) >= 1 and sum(found) == min(num_sms, whole), (op, transfers, num_sms)
    assert symm_collective.ctas_of("cast", 100, 24) == (12, 12) and symm_collective.ctas_of("reduce", 100, 24) == (
        7,
        17,
    )


def test_a_layout_is_compared_once_and_boxes_grow(groups) -> None:
    small, large = random_plan(3, 3), random_plan(4, 3, max_splits=8, max_size=40)

    def main(t):
        layouts = [A2AVLayout.from_spec(plan.specs[t.rank]) for plan in (small, large)]
        gathers = []
        original = t.all_gather_object
        t.all_gather_object = lambda x: gathers.append(1) or original(x)
        for layout in (*layouts, *layouts):
            x, y = torch.ones(layout.input_rows, 8), torch.zeros(layout.output_rows, 8)
            group_cast(x, y, [], [], [], [], t, layout=layout, native=True).wait_post_process()
            assert (y == 1).all()
        return len(gathers)

    assert FakeWorld(3).run(main) == [2, 2, 2]


def test_counts_that_do_not_fit_are_told(groups) -> None:
    def main(t):
        rows = 3 if t.rank else 2
        lists = ([rows], [2], [[1 - t.rank]], [1 - t.rank])
        with pytest.raises(PlanMismatchError, match="Rank 1 sends 3 rows to rank 0, which expects 2"):
            group_cast(torch.ones(rows, 8), torch.ones(2, 8), *lists, t, native=True)
        return True

    assert FakeWorld(2).run(main) == [True, True]


def test_what_cannot_use_boxes_goes_over_all_to_all_v_and_says_why(caplog, monkeypatch) -> None:
    monkeypatch.setenv("MAGI_ATTENTION_NATIVE_GRPCOLL", "1")
    symm_collective._say_once.cache_clear()

    def main(t):
        y = torch.zeros(1, 8)
        lists = ([1], [1], [[1 - t.rank]], [1 - t.rank])
        for _ in range(3):
            group_cast(torch.full((1, 8), 1.0 + t.rank), y, *lists, t).wait_post_process()
        return float(y[0, 0])

    with caplog.at_level(logging.WARNING, "magi_attention.comm"):
        assert FakeWorld(2).run(main) == [2.0, 1.0]
    lines = [r.getMessage() for r in caplog.records if "over NVLink" in r.getMessage()]
    assert 1 <= len(lines) <= 2 and "The tensors are on cpu." in lines[0]  # two threads may say it at once


def test_reasons() -> None:
    def why(shape, dtypes, op="cast", count=1):
        x = [torch.empty(2, *shape, device="meta")] * count
        return symm_collective._why_not([_OnGpu(v) for v in x], dtypes, op)

    f32, bf16, f64 = torch.float32, torch.bfloat16, torch.float64
    assert why((8,), [[bf16]]) is None and why((4,), [[f32]]) is None
    assert "16 bytes" in why((4,), [[bf16]]) and "8 values" in why((4,), [[f32], [f32]], "sum")
    assert "float64" in why((8,), [[f64]]) and "lse" in why((8,), [[f32], [f32]], "lse")
    assert "several dtypes" in why((8,), [[bf16, f32], [f32, f32]], "sum", 2)
    assert "4 tensors" in why((8,), [[f32] * 4], count=4)


class _OnGpu:
    def __init__(self, x: torch.Tensor) -> None:
        self.shape, self.device = x.shape, torch.device("cuda")
