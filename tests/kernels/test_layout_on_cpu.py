# SPDX-License-Identifier: Apache-2.0
"""How the backward is divided into work tiles, by the library's own code compiled for the CPU: what is chosen can be
done, and what its workspace holds."""

from __future__ import annotations

import ctypes
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pytest
from schedule_oracle import NARROW, TILE, WIDE

from magi_attention.common.mask import Mask
from magi_attention.kernels import AttnOptions
from magi_attention.kernels.ffa.schedule import select_schedule
from magi_attention.native import abi
from magi_attention.native.schedule import NONE
from magi_attention.testing.libraries import compiled_or_skip, csrc_or_skip, planner_or_skip

SOURCE = Path(__file__).with_name("layout_on_cpu.cpp")
SMS = (132, 78, 8)


class Layout(NamedTuple):
    num_head_splits: int
    heads_per_l2_group: int
    target_tables: int
    workspace: int
    order: int


@pytest.fixture(scope="module")
def library(compile_folder):
    return compiled_or_skip(compile_folder / "layout", [SOURCE], [csrc_or_skip(), csrc_or_skip() / "include"], "-O1")


@pytest.fixture(scope="module")
def layout_of(library):
    def call(tokens: int, heads: tuple[int, int], dim: int, order: int, sms: int = 132, **fields) -> Layout:
        params = abi.FfaBwdParams(
            total_q=tokens, total_k=tokens, heads_q=heads[0], heads_kv=heads[1], head_dim=dim, head_dim_v=dim,
            dq_mode=order, **{"block_m": NARROW, **fields},
        )  # fmt: skip
        found = np.zeros(5, dtype=np.int64)
        library.layout_of(ctypes.byref(params), sms, ctypes.c_void_p(found.ctypes.data))
        return Layout(*found.tolist())

    return call


def calls(seed: int):
    """(tokens, heads, dim, sms)"""
    rng = np.random.default_rng(seed)
    for _ in range(400):
        tokens = int(np.exp(rng.uniform(np.log(100), np.log(400_000))))
        heads_kv, group = int(rng.choice((1, 2, 3, 8, 20, 32, 64, 100))), int(rng.choice((1, 2, 3, 4, 6, 8)))
        yield tokens, (heads_kv * group, heads_kv), int(rng.choice((64, 128, 256))), int(rng.choice(SMS))


@pytest.mark.parametrize("seed", range(3))
def test_l2_groups_have_whole_heads(layout_of, seed):
    """Parts that divide the query heads, no more than are needed for nearly two work tiles for each SM, and groups that
    are no larger than there are heads; where there are several, those behind the first have targets of their own."""
    tables = set()
    for tokens, (heads, heads_kv), dim, sms in calls(seed):
        found = layout_of(tokens, (heads, heads_kv), dim, abi.DQ_DETERMINISTIC, sms)
        case = (tokens, heads, heads_kv, dim, sms, found)
        parts, work_tiles = found.num_head_splits, -(-tokens // TILE) * heads_kv * (2 if dim == 256 else 1)
        smaller = [n for n in range(1, parts) if heads // heads_kv % n == 0]
        assert heads // heads_kv % parts == 0 and all(work_tiles * n < 19 * sms // 10 for n in smaller), case
        assert 1 <= found.heads_per_l2_group <= heads_kv, case
        is_compared = -(-tokens // TILE) <= 1024
        assert found.target_tables == (2 if found.heads_per_l2_group < heads_kv and is_compared else 1), case
        tables.add(found.target_tables)
    assert tables == {1, 2}


def test_what_a_caller_asks_for(layout_of):
    """Two parts of the heads or more, and then all heads in one L2 group."""
    for order in (abi.DQ_DETERMINISTIC, abi.DQ_FIRST_WRITER):
        assert layout_of(4096, (64, 8), 128, order, num_head_splits=2)[:2] == (2, 8)
    assert layout_of(4096, (24, 8), 128, abi.DQ_DETERMINISTIC, num_head_splits=2)[:2] == (3, 8), (
        "two do not divide three"
    )


@pytest.mark.parametrize("seed", range(3))
def test_tiles_in_work_at_the_start(library, seed):
    """Those that have all their work tiles among the first, one for each CTA."""
    rng, met = np.random.default_rng(seed), set()
    for _ in range(500):
        num_ctas, work_tiles, parts = int(rng.choice(SMS)), int(rng.choice((1, 3, 8, 16))), int(rng.choice((2, 4, 8)))
        begin = int(rng.integers(0, 20))
        end = begin + int(rng.integers(0, 20))
        params = abi.FfaBwdParams(
            dq_mode=abi.DQ_DETERMINISTIC, split_begin=begin, split_end=end, splits_per_split_tile=parts * (end > begin)
        )
        found = library.tiles_at_once(ctypes.byref(params), num_ctas, work_tiles)
        taken = np.cumsum([work_tiles * (parts if begin <= i < end else 1) for i in range(num_ctas + end)])
        assert found == (taken <= num_ctas).sum(), (num_ctas, work_tiles, begin, end, parts)
        met.add((found > begin) + (found > end))
    assert met == {0, 1, 2}


@pytest.mark.parametrize("seed", range(4))
def test_what_is_chosen_may_be_split(library, seed):
    """By ``select_schedule``, of random documents."""
    planner_or_skip()
    rng, met = np.random.default_rng(seed), 0
    for _ in range(150):
        heads_kv, group = int(rng.choice((1, 2, 4, 8, 20, 32))), int(rng.choice((1, 2, 3, 4, 6, 8, 16, 32)))
        sms = int(rng.choice(SMS))
        tokens = int(rng.uniform(1.5, 3.2) * sms * TILE / heads_kv) + 1
        ends = np.unique(rng.integers(0, tokens + 1, int(rng.integers(1, 14))))
        mask = Mask.varlen([0, *ends[(ends > 0) & (ends < tokens)].tolist(), tokens])
        shapes = (tokens, heads_kv * group, 128), (tokens, heads_kv, 128)
        schedule = select_schedule(*shapes, mask.slices, AttnOptions(0.1, deterministic=True), sms)
        if schedule.split == NONE:
            continue
        met += 1
        params = abi.FfaBwdParams(
            total_q=tokens, total_k=tokens, heads_q=heads_kv * group, heads_kv=heads_kv, head_dim=128, head_dim_v=128,
            dq_mode=abi.DQ_DETERMINISTIC, block_m=schedule.block_m, num_head_splits=schedule.num_head_splits,
            split_begin=schedule.split.begin, split_end=schedule.split.end, splits_per_split_tile=schedule.split.parts,
        )  # fmt: skip
        assert library.may_split(ctypes.byref(params), sms), (seed, tokens, heads_kv, group, sms, schedule)
    assert met > 10


def test_what_may_not_be_split(library):
    def may(begin: int, end: int, parts: int, heads=(64, 8), tokens: int = 4096, order=abi.DQ_DETERMINISTIC) -> bool:
        params = abi.FfaBwdParams(
            total_q=tokens, total_k=tokens, heads_q=heads[0], heads_kv=heads[1], head_dim=128, head_dim_v=128,
            dq_mode=order, block_m=WIDE, split_begin=begin, split_end=end, splits_per_split_tile=parts,
        )  # fmt: skip
        return bool(library.may_split(ctypes.byref(params), 132))

    assert may(0, 32, 2) and may(31, 32, 8) and may(3, 5, 4, heads=(32, 8))
    for run in ((0, 33, 2), (5, 5, 2), (6, 5, 2), (-1, 5, 2), (0, 5, 1), (0, 5, 3), (0, 5, 16), (0, 5, 0)):
        assert not may(*run), run
    assert not may(0, 5, 8, heads=(32, 8)) and not may(0, 5, 2, heads=(48, 8)), "groups of four and of six"
    assert not may(0, 5, 2, order=abi.DQ_ATOMIC) and not may(0, 5, 2, order=abi.DQ_FIRST_WRITER)
    assert not may(0, 5, 2, tokens=2048), "heads are split anyway"
    assert not may(0, 5, 2, tokens=128 * 1025) and not may(0, 256, 2, tokens=32768), "too many tiles, too many parts"


def test_a_workspace_has_parts_of_split_tiles(layout_of):
    """In deterministic order, 4K, 64 heads on 8: a quarter of the tiles in four parts, and a semaphore target for each
    part of every tile."""
    whole = layout_of(4096, (64, 8), 128, abi.DQ_DETERMINISTIC, block_m=WIDE)
    split = dict(split_begin=16, split_end=24, splits_per_split_tile=4)
    found = layout_of(4096, (64, 8), 128, abi.DQ_DETERMINISTIC, block_m=WIDE, **split)
    assert found[:3] == whole[:3] == (1, 8, 1)
    parts, targets = 4 * 8 * 8 * 128 * 2 * 128 * 4, 3 * (32 * 8) * (-(-4096 // WIDE) + 1) * 4
    assert 0 <= found.workspace - whole.workspace - parts - targets < 512
    for order in (abi.DQ_ATOMIC, abi.DQ_FIRST_WRITER):
        wide = [layout_of(4096, (64, 8), 128, order, block_m=WIDE, **fields) for fields in ({}, split)]
        assert wide[0] == wide[1], "only in deterministic mode"


def test_a_workspace_has_no_gradients_of_keys(layout_of):
    """32K, 64 heads on 8: dq_accum and the offsets and deltas of its rows, in deterministic mode 0.1% more."""
    tokens, heads = 32768, 64
    for order, most in ((abi.DQ_FIRST_WRITER, 1.0005), (abi.DQ_DETERMINISTIC, 1.001)):
        found = layout_of(tokens, (heads, 8), 128, order, block_m=WIDE)
        rows = -(-tokens // WIDE) * WIDE
        wanted = 4 * rows * heads * (128 + 2)
        assert wanted < found.workspace < most * wanted, found.workspace / wanted


@pytest.mark.parametrize("seed", range(2))
def test_what_is_made_of_a_plan_is_kept_up_to_4_mib(layout_of, seed):
    """Starts and semaphore targets of each work tile of an L2 group, the latter at each block of queries: the order
    has room for them."""
    met = set()
    for tokens, (heads, heads_kv), dim, sms in calls(seed):
        found = {
            n: layout_of(tokens, (heads, heads_kv), dim, n, sms) for n in (abi.DQ_DETERMINISTIC, abi.DQ_FIRST_WRITER)
        }
        deterministic = found[abi.DQ_DETERMINISTIC]
        tiles, blocks = -(-tokens // TILE), -(-tokens // NARROW)
        kinds = deterministic.heads_per_l2_group * deterministic.num_head_splits * deterministic.target_tables
        wanted = 4 * tiles * (1 + kinds) + 4 * tiles * kinds * blocks + 4 * 4 * blocks
        case = (tokens, heads, heads_kv, dim, sms)
        if deterministic.order:
            assert wanted <= deterministic.order < wanted + 1024 and deterministic.order <= 4 * 2**20, case
            assert deterministic.order <= deterministic.workspace, case
        else:
            assert wanted > 4 * 2**20 - 1024, case
        met.add(bool(deterministic.order))
        assert found[abi.DQ_FIRST_WRITER].order > 0, "no semaphore targets"
    assert met == {False, True}


def test_a_workspace_of_few_tiles_has_parts_of_them(layout_of):
    """1K: four parts of dk and dv in float32, because tiles are too few for the SMs."""
    found = layout_of(1024, (64, 8), 128, abi.DQ_ATOMIC)
    assert found.num_head_splits == 4 and found.order == 0
    wanted = 4 * (1024 * 64 * (128 + 2) + 4 * 2 * 1024 * 8 * 128)
    assert wanted < found.workspace < 1.001 * wanted


def test_direct_stores_that_are_chosen_are_possible(library):
    """By ``select_schedule``, of random documents; what the caller adds to, or wants in float32, is not."""
    planner_or_skip()
    rng, met = np.random.default_rng(0), 0
    for _ in range(400):
        heads_kv, group = int(rng.choice((1, 4, 8, 32))), int(rng.choice((1, 2, 4, 8)))
        dim, tokens = int(rng.choice((64, 128, 256))), int(rng.choice((500, 2000, 8000)))
        ends = np.unique(rng.integers(0, tokens + 1, int(rng.integers(1, tokens // 100))))
        edges = [0, *ends[(ends > 0) & (ends < tokens)].tolist(), tokens]
        mask, is_deterministic = Mask.varlen(edges, causal=rng.random() < 0.5), rng.random() < 0.5
        options = AttnOptions(0.1, softcap=float(rng.choice((0.0, 20.0))), deterministic=is_deterministic)
        schedule = select_schedule((tokens, heads_kv * group, dim), (tokens, heads_kv, dim), mask.slices, options, 132)
        if not schedule.direct_dq_store:
            continue
        met += 1
        order = abi.DQ_DETERMINISTIC if is_deterministic else abi.DQ_FIRST_WRITER
        assert is_deterministic or schedule.first_writer
        fields = dict(
            dq_mode=order, grad_dtype=abi.BF16, softcap=options.softcap, split_begin=schedule.split.begin,
            split_end=schedule.split.end, splits_per_split_tile=schedule.split.parts,
        )  # fmt: skip
        assert library.can_store_direct(ctypes.byref(abi.FfaBwdParams(**fields))), (edges, schedule)
        for other in ({"grad_dtype": abi.FP32}, {"accumulate": 1}, {"softcap": 1.0}, {"dq_mode": abi.DQ_ATOMIC}):
            assert not library.can_store_direct(ctypes.byref(abi.FfaBwdParams(**{**fields, **other}))), other
    assert met > 50, f"only {met} calls had any"
