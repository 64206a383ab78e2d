# SPDX-License-Identifier: Apache-2.0
"""Semaphore order of the deterministic backward, by its own kernels on the CPU: no CTA waits for ever, and sums have
one order, whichever are slow."""

from __future__ import annotations

import ctypes
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pytest
from hopper_library import hopper_library
from schedule_oracle import plan_of, random_mask, visits_of

from magi_attention.common.mask import Mask
from magi_attention.common.slices import SliceTable
from magi_attention.errors import ContractError
from magi_attention.native import abi
from magi_attention.native.planner.schedule import WorkTileShape, check_waits, with_schedule
from magi_attention.native.planner.tile_plan import TilePlan

pytestmark = pytest.mark.usefixtures("planner")

SOURCE = Path(__file__).with_name("schedule_on_cpu.cpp")
BY_HEAD, TIMED, IN_WAVES, ALL_DESCENDING, LATER_TARGETS, APART = (1 << n for n in range(6))


class Call(NamedTuple):
    """``split``: begin and end of the tiles that are split, in the order of the plan, and into how many parts."""

    mask: Mask
    heads: tuple[int, int]
    dim: int
    block_m: int
    sms: int
    margin: int = 0
    split: tuple[int, int, int] = (0, 0, 0)
    by_document: bool = False


class Waits(NamedTuple):
    steps: np.ndarray
    counters: np.ndarray
    targets: np.ndarray
    num_ctas: int
    flags: int


@pytest.fixture(scope="module")
def library(compile_folder):
    made = hopper_library(compile_folder / "schedule", SOURCE)
    made.workspace_bytes.restype, made.assign.restype = ctypes.c_int64, ctypes.c_char_p
    return made


def waits_of(library, call: Call, seed: int) -> Waits:
    mask, (heads, heads_kv) = call.mask, call.heads
    plan = TilePlan.of_table(mask.slices, mask.total_q, mask.total_k, 128, 2, is_transposed=True)
    words = plan.words
    if call.by_document:
        words = with_schedule(words, WorkTileShape(heads_kv, heads // heads_kv, call.sms, call.sms, True))
    params = abi.FfaBwdParams(
        total_q=mask.total_q, total_k=mask.total_k, heads_q=heads, heads_kv=heads_kv, head_dim=call.dim,
        head_dim_v=call.dim, dq_mode=abi.DQ_DETERMINISTIC, block_m=call.block_m, sm_margin=call.margin,
        split_begin=call.split[0], split_end=call.split[1], splits_per_split_tile=call.split[2],
    )  # fmt: skip
    at = ctypes.byref(params)
    memory = np.empty(library.workspace_bytes(at, call.sms) + 128, dtype=np.uint8)
    params.plan, params.workspace = words.ctypes.data, memory.ctypes.data + -memory.ctypes.data % 128
    sizes = np.zeros(2, dtype=np.int64)
    error = library.assign(at, call.sms, ctypes.c_uint64(seed), ctypes.c_void_p(sizes.ctypes.data))
    assert error is None, error.decode()
    steps = np.zeros(sizes[0], dtype=np.int64)
    counters, targets = np.zeros((2, sizes[1]), dtype=np.int32)
    library.steps_of(*(ctypes.c_void_p(x.ctypes.data) for x in (steps, counters, targets)))
    return Waits(steps, counters, targets, max(call.sms - call.margin, 1), library.flags())


def check(library, call: Call, seed: int) -> Waits:
    print(f"{seed=} {call} {call.mask.slices.array.tolist()[:6]}")
    waits = waits_of(library, call, seed)
    check_waits(*waits[:4])
    mask, blocks = call.mask, -(-call.mask.total_q // call.block_m)
    visits = visits_of(plan_of(mask.slices, mask.total_q, mask.total_k), mask.total_q, call.block_m)
    found = np.bincount(waits.counters, minlength=blocks * call.heads[0])
    assert np.array_equal(found, np.tile(visits, call.heads[0]))
    return waits


def random_call(rng: np.random.Generator) -> Call:
    total = int(rng.integers(1, 2600))
    mask = random_mask(rng, total)
    total = mask.total_q
    heads_kv, dim = int(rng.choice((1, 2, 3, 8))), int(rng.choice((64, 128, 128)))
    block_m = 80 if dim == 128 and rng.random() < 0.5 else 64
    sms = int(rng.choice((1, 2, 5, 9, 24, 70, 132)))
    group, split = int(rng.choice((1, 2, 4, 5, 8))), (0, 0, 0)
    tiles = -(-total // 128)
    if block_m == 80 and group in (2, 4, 8) and tiles * heads_kv >= 19 * sms // 10 and rng.random() < 0.7:
        begin, end = sorted(rng.integers(0, tiles + 1, 2).tolist())
        split = (begin, end, int(rng.choice([n for n in (2, 4, 8) if n <= group]))) if begin < end else split
    by_document = split[2] == 0 and rng.random() < 0.2
    margin = int(rng.integers(0, sms)) if rng.random() < 0.3 else 0
    return Call(mask, (heads_kv * group, heads_kv), dim, block_m, sms, margin, split, by_document)


@pytest.mark.parametrize("seed", range(60))
def test_random_masks(library, seed):
    check(library, random_call(np.random.default_rng(seed)), seed)


DOCUMENTS = Mask.varlen([0, 700, 800, 1500, 2100], causal=True)
FAMILIES = {
    "timed": (Call(DOCUMENTS, (16, 4), 128, 64, 24), TIMED),
    "bands, head by head": (Call(Mask.sliding_window(2000, (300, 0)), (16, 2), 128, 64, 8), BY_HEAD | IN_WAVES),
    "all descend": (Call(Mask.causal(2100), (8, 8), 64, 64, 132), TIMED | ALL_DESCENDING | APART),
    "later groups": (Call(Mask.causal(2100), (64, 8), 128, 64, 10), TIMED | LATER_TARGETS),
    "by document": (Call(DOCUMENTS, (32, 4), 128, 64, 24, by_document=True), TIMED | ALL_DESCENDING),
}


@pytest.mark.parametrize("name", FAMILIES)
def test_every_order_is_met(library, name):
    call, flags = FAMILIES[name]
    assert check(library, call, 0).flags == flags


def test_tiles_are_ordered_by_number_where_one_contributes_twice(library):
    rng = np.random.default_rng(0)
    seen = rng.random((10, 10)) < 0.6
    rows = [[i * 24, i * 24 + 24, j * 12, j * 12 + 12, 0] for i, j in np.argwhere(seen)]
    waits = check(library, Call(Mask(SliceTable(np.array(rows)), 240, 120), (8, 2), 128, 64, 4), 0)
    assert not waits.flags & (TIMED | IN_WAVES)


def test_parts_may_have_other_targets(library):
    """Those of a tile that begin when others end, one after the other."""
    mask = Mask.varlen([0, 700, 800, 2000, 2500])
    whole, split = (
        check(library, Call(mask, (16, 2), 128, 80, 12, split=split), 0) for split in ((0, 0, 0), (4, 12, 2))
    )
    assert len(split.steps) == len(whole.steps) + 8 * 2
    assert sorted(split.counters.tolist()) == sorted(whole.counters.tolist())
    assert split.targets.tolist() != whole.targets.tolist()


@pytest.mark.parametrize("traversal", range(3), ids=("ascending", "wrap", "descending"))
def test_each_block_is_traversed_once(library, traversal):
    """And has the place in the traversal that semaphore targets count with; descending from any block on, and round."""
    for first, count in ((0, 1), (0, 7), (3, 1), (3, 2), (5, 40), (90, 33), (1000, 64)):
        blocks, places = np.full((2, count), -7, dtype=np.int32)
        for shift in (0, 1, 3, count - 1, count, 2 * count + 1, 700) if traversal == 2 else (0,):
            at = (ctypes.c_void_p(x.ctypes.data) for x in (blocks, places))
            assert library.traverse(first, first + count, traversal, shift, *at) == count, shift
            assert sorted(blocks.tolist()) == list(range(first, first + count)), shift
            assert places.tolist() == list(range(count)), shift


@pytest.mark.parametrize("sizes", ((7, 2, 40, 16, 2), (3, 1, 120, 44, 1), (1, 1, 1, 1, 4), (5, 8, 4, 4, 2)), ids=str)
def test_the_last_kernel_takes_up_all(library, sizes):
    """Each 64 columns of each head of each block once, one L2 group after the other, and in each by block; then
    nothing, also behind a last L2 group of fewer heads."""
    blocks, group, heads_kv, heads_per_l2_group, dims = sizes
    heads, count = group * heads_kv, blocks * group * heads_kv * dims
    words, found = np.array((blocks, heads, *sizes[2:]), dtype=np.int32), np.full((count + 5000, 3), -7, dtype=np.int32)
    library.items_of(ctypes.c_void_p(words.ctypes.data), len(found), ctypes.c_void_p(found.ctypes.data))
    assert (found[count:, 0] == -1).all() and len(np.unique(found[:count], axis=0)) == count
    assert (found[:count] >= 0).all() and (found[:count].max(0) < (blocks, heads, dims)).all()
    order = found[:count, 1] // (heads_per_l2_group * group) * blocks + found[:count, 0]
    assert (np.diff(order) >= 0).all()


# ---- the checker -----------------------------------------------------------------------------------------------------
FAULTS = {  # steps of each work tile, counters and targets of all steps, CTAs, what is said
    "two start with the other's first target": ([2, 2], [0, 1, 1, 0], [1, 0, 1, 0], 2, "waits for ever"),
    "the first waits for the third": ([1, 1, 1], [0, 0, 0], [2, 1, 0], 2, "with 2 of 3 work tiles taken"),
    "two may come first": ([1, 1, 1], [0, 0, 0], [0, 0, 1], 3, "and is number"),
    "nobody is second": ([1, 1, 1], [0, 0, 0], [0, 2, 2], 3, "and is number"),
}


@pytest.mark.parametrize("name", FAULTS)
def test_faults_of_waits_are_found(name):
    *arrays, num_ctas, sentence = FAULTS[name]
    with pytest.raises(ContractError, match=sentence):
        check_waits(*map(np.array, arrays), num_ctas)
