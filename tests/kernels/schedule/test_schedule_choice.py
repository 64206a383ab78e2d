# SPDX-License-Identifier: Apache-2.0
"""Schedules that the planner library chooses: there is a kernel for each, what is split ends sooner, and a mask is
asked about once."""

from __future__ import annotations

import ctypes
from pathlib import Path

import numpy as np
import pytest
from hopper_library import hopper_library
from schedule_oracle import NARROW, WIDE, end_of, plan_of, random_documents, random_mask, steps_of, visits_of

from magi_attention.common.mask import Mask
from magi_attention.common.slices import SliceTable
from magi_attention.kernels import AttnOptions
from magi_attention.kernels.ffa import schedule as schedule_module
from magi_attention.kernels.ffa.arrival import Pace
from magi_attention.kernels.ffa.peer_kv import TILE, RemoteKeys, RemoteMask
from magi_attention.kernels.ffa.schedule import select_schedule
from magi_attention.native import abi
from magi_attention.native.planner.schedule import NONE, BwdSchedule, ForwardSplits, forward_splits
from magi_attention.native.planner.tile_plan import TilePlan
from magi_attention.testing import masks

pytestmark = pytest.mark.usefixtures("planner")

SOURCE = Path(__file__).with_name("schedule_on_cpu.cpp")
NUM_SMS = 132


@pytest.fixture(scope="module")
def launcher(compile_folder) -> ctypes.CDLL:
    """The launcher's own answers."""
    found = hopper_library(compile_folder / "schedule", SOURCE)
    found.workspace_of.restype = ctypes.c_int64
    return found


def single_share(mask: Mask, block_m: int) -> float:
    """The share of m-blocks that one segment of one tile visits."""
    visits = visits_of(plan_of(mask.slices, mask.total_q, mask.total_k), mask.total_q, block_m)
    return float((visits == 1).mean())


def params_of(mask: Mask, found: BwdSchedule, heads, dim: int, options: AttnOptions, **fields) -> abi.FfaBwdParams:
    mode = abi.DQ_DETERMINISTIC if options.deterministic else abi.DQ_FIRST_WRITER
    given = dict(
        total_q=mask.total_q, total_k=mask.total_k, heads_q=heads[0], heads_kv=heads[1], head_dim=dim, head_dim_v=dim,
        dq_mode=mode, grad_dtype=abi.BF16, softcap=options.softcap, block_m=found.block_m,
        num_head_splits=found.num_head_splits, split_begin=found.split.begin, split_end=found.split.end,
        splits_per_split_tile=found.split.parts,
    )  # fmt: skip
    return abi.FfaBwdParams(**{**given, **fields})


def check_choice(launcher, mask: Mask, found: BwdSchedule, heads, dim: int, options: AttnOptions) -> None:
    group, is_counted = heads[0] // heads[1], options.deterministic or found.first_writer
    most = 128 if dim <= 64 and not is_counted else 80 if 64 < dim <= 128 else 64
    assert found.block_m in ({64, most} if options.is_plain else {64})
    if parts := found.num_head_splits:  # with atomic dq they may differ by a head
        assert 1 < parts <= group and not (is_counted and group % parts)
    assert not (options.deterministic and found.first_writer)
    if found.split != NONE:
        assert options.deterministic and (found.block_m, found.by_document, found.num_head_splits) == (80, False, 0)
        assert launcher.may_split(ctypes.byref(params_of(mask, found, heads, dim, options)), NUM_SMS)
    if found.direct_dq_store:
        assert is_counted and options.is_plain and single_share(mask, found.block_m) >= 0.1
        assert launcher.can_store_direct(ctypes.byref(params_of(mask, found, heads, dim, options)))
        for other in ({"grad_dtype": abi.FP32}, {"accumulate": 1}, {"softcap": 1.0}, {"dq_mode": abi.DQ_ATOMIC}):
            params = params_of(mask, found, heads, dim, options, **other)
            assert not launcher.can_store_direct(ctypes.byref(params)), other


def test_there_is_a_kernel_for_what_is_chosen(launcher):
    """Masks and shapes are random, and each way is chosen somewhere."""
    met, draws = set(), np.random.default_rng(11)
    for _ in range(400):
        seed = int(draws.integers(1 << 30))
        rng = np.random.default_rng(seed)
        mask = random_mask(rng, int(rng.choice((100, 1000, 2500, 4096, 5120, 8192, 9000))))
        heads_kv = int(rng.choice((1, 4, 8, 16)))
        if rng.random() < 0.4:  # a work tile or two for each SM
            heads_kv = max(300 * 128 // mask.total_k, 1)
        heads = heads_kv * int(rng.choice((1, 2, 3, 4, 5, 7, 8))), heads_kv
        dim = int(rng.choice((40, 64, 128, 128, 256)))
        options = AttnOptions(0.3, deterministic=rng.random() < 0.5, softcap=float(rng.choice((0.0, 0.0, 0.0, 8.0))))
        shapes = (mask.total_q, heads[0], dim), (mask.total_k, heads[1], dim)
        found = select_schedule(*shapes, mask.slices, options, NUM_SMS)
        print(f"{seed=} {heads=} {dim=} {options.deterministic=} {options.softcap=} {found}")
        check_choice(launcher, mask, found, heads, dim, options)
        met |= {name for name, value in found._asdict().items() if value not in (0, NONE)} | {found.block_m}
        assert select_schedule(*shapes, SliceTable(mask.slices.array), options, NUM_SMS) == found, "no clock is read"
    assert met == {*BwdSchedule._fields, 64, 80, 128}


@pytest.mark.parametrize("softcap", (0.0, 1.0), ids=("tiles", "halves of all"))
def test_what_is_split_ends_sooner(softcap):
    """By another simulation. With softcap no kernel splits single tiles, so all are halved or none."""
    met = set()
    for seed in range(40):
        rng = np.random.default_rng(seed)
        heads_kv, group = int(rng.choice((2, 4, 8, 16))), int(rng.choice((4, 6, 8) if softcap else (2, 4, 8, 16)))
        total = 128 * int(rng.integers(19 * NUM_SMS // 10, 3 * NUM_SMS)) // heads_kv
        mask = random_documents(rng, total)
        options = AttnOptions(0.3, deterministic=True, softcap=softcap)
        found = select_schedule((total, heads_kv * group, 128), (total, heads_kv, 128), mask.slices, options, NUM_SMS)
        plan = plan_of(mask.slices, total, total)
        run = (0, len(plan.tiles), 2) if found.num_head_splits == 2 else found.split
        met.add(run != NONE)
        if run == NONE:
            continue
        block_m, start, gain = (NARROW, 3.0, 0.95) if softcap else (WIDE, 1.9, 0.98)
        steps, ends = steps_of(plan, block_m)[plan.order] * group, []
        for parts_of_run in (1, run[2]):
            parts = [parts_of_run if run[0] <= place < run[1] else 1 for place in range(len(steps))]
            work = [count / n + start for count, n in zip(steps, parts) for _ in range(n * heads_kv)]
            ends.append(end_of(work, NUM_SMS))
        assert ends[1] < gain * ends[0] + 1e-9, f"{seed=} {found}"
    assert met == {False, True}


def test_parts_that_may_differ_by_a_head_end_sooner():
    """By another simulation, than the fewest equal parts that make 1.9 work tiles for each SM; they fill no more memory
    than the sum of dq. Where work tiles are many, the order of L2 groups counts, too, which is not simulated here."""
    met, enough = set(), 19 * NUM_SMS // 10
    for seed in range(120):
        rng = np.random.default_rng(seed)
        heads_kv, group = int(rng.choice((1, 2, 4))), int(rng.choice((4, 5, 6, 7, 8)))
        total = 128 * int(rng.integers(NUM_SMS // 2, 4 * NUM_SMS)) // heads_kv
        mask = random_documents(rng, total)
        shapes = (total, heads_kv * group, 128), (total, heads_kv, 128)
        found = select_schedule(*shapes, mask.slices, AttnOptions(0.3), NUM_SMS)
        plan = plan_of(mask.slices, total, total)
        steps, parts = steps_of(plan, found.block_m)[plan.order], found.num_head_splits
        many = len(steps) * heads_kv >= enough
        met.add((many, group % parts != 0 if parts else None))
        if not parts:
            continue
        equal = [n for n in range(1, group + 1) if group % n == 0 and n * len(steps) * heads_kv >= enough] or [group]
        assert parts <= max(equal[0], group / 2), f"{seed=} {found}"
        ends = []
        for number in (equal[0], parts):
            heads = [len(some) for some in np.array_split(range(group), number)]
            work = [count * n + 3.0 for count in steps for _ in range(heads_kv) for n in heads]
            ends.append(end_of(work, NUM_SMS))
        # Fewer parts leave less in memory, for which they may end a little later.
        assert many or ends[1] < ends[0] * (1.1 if parts < equal[0] else 1), f"{seed=} {found}"
    assert met == {(many, differ) for many in (False, True) for differ in (None, False, True)}


def test_what_was_chosen_is_kept_with_the_mask(monkeypatch):
    """The choice, and the plan that it was made by, also when a launch has taken that."""
    mask, made, choose, plans, build = Mask.varlen([0, 3000, 7680]), [], schedule_module.choose, [], TilePlan.build
    monkeypatch.setattr(schedule_module, "choose", lambda *a: made.append(a) or choose(*a))
    monkeypatch.setattr(TilePlan, "build", lambda *a: plans.append(a) or build(*a))
    shapes = (7680, 64, 128), (7680, 8, 128)
    options = [AttnOptions(0.3), AttnOptions(0.3, deterministic=True), AttnOptions(0.3, softcap=1.0)]
    first = [select_schedule(*shapes, mask.slices, x, NUM_SMS) for x in options]
    TilePlan.of_table(mask.slices, 7680, 7680, 128, 2, is_transposed=True)
    again = [select_schedule(*shapes, mask.slices, x, NUM_SMS) for x in options]
    assert all(a is b for a, b in zip(first, again)) and len(made) == 3
    select_schedule(*shapes, mask.slices, options[0], 264)  # machines may have GPUs of two kinds
    assert len(made) == 4 and len(plans) == 1


@pytest.mark.parametrize("deterministic", (False, True))
@pytest.mark.parametrize("queries, keys", ((0, 8192), (8192, 0), (8192, 8192)))
def test_nothing_to_do(queries, keys, deterministic):
    options = AttnOptions(0.3, deterministic=deterministic)
    found = select_schedule((queries, 64, 128), (keys, 8, 128), SliceTable([]), options, NUM_SMS)
    assert found == BwdSchedule(64, 0)


def beside_remote(local: int, rows, remote: int, heads=(64, 8)) -> list[BwdSchedule]:
    """Schedules of a rank with so many keys of others behind its own, by default and in deterministic order."""
    arrivals, pace = np.zeros(remote // TILE, dtype=np.int32), Pace(np.array([1e-3]))
    mask = RemoteMask(SliceTable(np.array(rows)), local, local, arrivals, pace, 0)
    shapes = (local, heads[0], 128), (local, heads[1], 128)
    options = [AttnOptions(0.3, deterministic=is_deterministic) for is_deterministic in (False, True)]
    return [select_schedule(*shapes, RemoteKeys(mask, b""), x, NUM_SMS) for x in options]


def test_nothing_is_split_beside_keys_of_other_ranks():
    """There is no kernel for that; dq of a block with a single contribution waits there, too. Otherwise the choice is
    as if all keys were local: here halves of causal documents of 2,048, whose first half is another rank's."""
    for seed in range(20):
        rng = np.random.default_rng(seed)
        local, remote = 128 * int(rng.integers(1, 40)), 128 * int(rng.integers(1, 100))
        rows = masks.random_slices(rng, local, local + remote, max_slices=12, drop=0.0)
        heads_kv = int(rng.choice((1, 4, 8)))
        for found in beside_remote(local, rows, remote, (8 * heads_kv, heads_kv)):
            assert not found.num_head_splits and found.split == NONE and not found.direct_dq_store, seed
    starts = range(0, 8192, 1024)
    pairs = [[[q, q + 1024, 8192 + q, 9216 + q, 0], [q, q + 1024, q, q + 1024, 1]] for q in starts]
    rows, shapes = [row for pair in pairs for row in pair], ((8192, 64, 128), (16384, 8, 128))
    options = [AttnOptions(0.3, deterministic=is_deterministic) for is_deterministic in (False, True)]
    as_local = [select_schedule(*shapes, SliceTable(np.array(rows)), x, NUM_SMS) for x in options]
    assert beside_remote(8192, rows, 8192) == as_local and as_local[0].first_writer


def test_memory_of_a_backward(launcher):
    """dq_accum with the offsets and deltas of its rows; in deterministic mode 0.1% more, and what is split."""

    def bytes_of(tokens: int, mode: int, *split: int) -> int:
        fields = dict(zip(("split_begin", "split_end", "splits_per_split_tile"), split))
        call = Mask.full(tokens), BwdSchedule(WIDE, 0), (64, 8), 128, AttnOptions(0.3)
        return launcher.workspace_of(ctypes.byref(params_of(*call, dq_mode=mode, **fields)), NUM_SMS)

    wanted = 4 * (-(-32768 // WIDE) * WIDE) * 64 * (128 + 2)
    for mode, most in ((abi.DQ_FIRST_WRITER, 1.0005), (abi.DQ_DETERMINISTIC, 1.001)):
        assert wanted < bytes_of(32768, mode) < most * wanted
    # 4K: a quarter of the tiles in four parts, dk and dv of each in float32.
    for mode, parts in ((abi.DQ_FIRST_WRITER, 0), (abi.DQ_DETERMINISTIC, 4 * 8 * 8 * 128 * 2 * 128 * 4)):
        more = bytes_of(4096, mode, 16, 24, 4) - bytes_of(4096, mode)
        assert parts <= more <= 1.05 * parts


# ---- the forward -----------------------------------------------------------------------------------------------------
MOST_PARTS = 16  # of a work tile


def splits_of(blocks: np.ndarray, head_units: int, sms: int) -> ForwardSplits | None:
    """The splits of a plan whose tiles see so many blocks of 128 keys."""
    rows = [[128 * i, 128 * i + 128, 0, 128 * count, 0] for i, count in enumerate(blocks.tolist())]
    plan = TilePlan.build(SliceTable(rows), 128 * len(blocks), 128 * int(blocks.max(initial=1)), 128, 2)
    return forward_splits(plan, head_units, sms)


def test_the_last_work_tile_ends_sooner():
    draws, num_split = np.random.default_rng(5), 0
    for _ in range(100):
        seed = int(draws.integers(1 << 30))
        rng = np.random.default_rng(seed)
        tiles, head_units, sms = int(rng.integers(1, 200)), int(rng.integers(1, 9)), int(rng.integers(8, 133))
        blocks = rng.integers(1, 12, tiles)
        blocks[: rng.integers(0, 4)] = rng.integers(1, 2_000)
        blocks = np.sort(blocks)[::-1]
        splits = splits_of(blocks, head_units, sms)
        if splits is None:
            continue
        num_split += 1
        note = f"seed {seed}: {tiles} tiles, {head_units} head units, {sms} SMs, {splits}"
        assert 0 < splits.tiles <= tiles and 1 < splits.parts <= MOST_PARTS, note
        work: list[int] = []  # blocks of each work tile, in the order in which they are taken
        for place, count in enumerate(blocks.tolist()):
            parts = min(splits.parts, max(1, count // splits.blocks)) if place < splits.tiles else 1
            work += [count * (i + 1) // parts - count * i // parts for i in range(parts)]
        assert min(work) >= 1, note
        whole, end = (end_of(np.repeat(x, head_units), sms) for x in (blocks, work))
        share = blocks.sum() * head_units / sms
        # Nothing more is to be had where a tile has as many parts as there may be.
        assert end < whole and end <= max(2.1 * max(share, 8), blocks[0] / MOST_PARTS + share + 1), note
    assert num_split > 10


def test_even_tiles_stay_whole():
    for blocks in (np.full(128, 64), np.arange(128, 0, -1), np.zeros(0, dtype=np.int64), np.zeros(40, dtype=np.int64)):
        assert splits_of(blocks, 8, 132) is None
