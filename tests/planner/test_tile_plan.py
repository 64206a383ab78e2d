# SPDX-License-Identifier: Apache-2.0
"""The native tile planner: plans equal dense masks, are small, and bad input is refused."""

from __future__ import annotations

import ctypes
import sys
from pathlib import Path

import numpy as np
import pytest

from magi_attention.common.mask import Mask
from magi_attention.common.slices import BICAUSAL, CAUSAL, FULL, INVCAUSAL, SliceTable, to_dense
from magi_attention.errors import ContractError, MagiError
from magi_attention.native.planner.tile_plan import TilePlan, plan_words
from magi_attention.testing import masks

sys.path.insert(0, str(Path(__file__).parent))
import tile_lib as lib  # noqa: E402


def plan_and_check(slices, total_q, total_k, tile_tokens, groups) -> np.ndarray:
    plan = lib.make_plan(slices, total_q, total_k, tile_tokens, groups)
    status, sentence = lib.check_plan(slices, plan)
    assert status == lib.OK, sentence
    assert not (plan == lib.GARBAGE).any(), "words were left unwritten"
    return plan


def segments_per_tile(table, total: int, tile_tokens: int, groups: int) -> np.ndarray:
    return lib.View(plan_and_check(table, total, total, tile_tokens, groups)).tiles["num_segments"]


# ---- the producer ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("tile_tokens", "groups"), lib.SHAPES)
def test_walker_accepts_plans_of_random_masks(tile_tokens, groups):
    for seed in range(150):
        _, slices, total_q, total_k = lib.random_case(seed)
        plan = lib.make_plan(slices, total_q, total_k, tile_tokens, groups)
        status, sentence = lib.check_plan(slices, plan)
        assert status == lib.OK, f"seed {seed}: {sentence}"


def dense_segments(view: lib.View, total_q: int, total_k: int) -> np.ndarray:
    """How often every pair is visited, int ``(total_q, total_k)``."""
    count = np.zeros((total_q, total_k), dtype=np.int64)
    for tile in view.tiles:
        for record in range(tile["segment_begin"], tile["segment_begin"] + tile["num_segments"]):
            for r, (lo, hi) in enumerate(view.pairs(record)[: tile["num_tokens"]]):
                count[tile["token0"] + r, lo:hi] += 1
    return count


def expected_group(pairs: np.ndarray, rows: range) -> tuple[int, int, int, int]:
    """Tightest ranges of a group, by counting who sees each key."""
    seen = [set(range(*pairs[r])) for r in rows]
    some, every = (set.union(*seen), set.intersection(*seen)) if seen else (set(), set())
    visit = (min(some), max(some) + 1) if some else (0, 0)
    full = (min(every), max(every) + 1) if every else (0, 0)
    assert len(every) == full[1] - full[0]
    return (*visit, *full)


@pytest.mark.parametrize(
    ("tile_tokens", "groups"), [(1, 1), (5, 2), (8, 1), (16, 1), (24, 3), (64, 2), (128, 2), (192, 3)]
)
def test_plan_equals_the_dense_mask(tile_tokens, groups):
    """And ranges of groups are the tightest; the walker, which looks at the rest, takes wider ones."""
    for seed in range(1000, 1012):
        _, slices, total_q, total_k = lib.random_case(seed, most_tokens=300, most_slices=12)
        view = lib.View(plan_and_check(slices, total_q, total_k, tile_tokens, groups))
        mask = to_dense(slices, total_q, total_k)
        np.testing.assert_array_equal(dense_segments(view, total_q, total_k), mask, err_msg=f"seed {seed}")
        seen_K = mask.any(axis=0)
        assert bool(view.header[0]["has_unseen"]) == (not seen_K.all()), f"seed {seed}"
        for tile in view.tiles:
            rows = [view.group_rows(g, tile["num_tokens"]) for g in range(groups)]
            for record in range(tile["segment_begin"], tile["segment_begin"] + tile["num_segments"]):
                found = [tuple(map(int, group)) for group in view.segment(record)[0]["group"][:groups]]
                assert found == [expected_group(view.pairs(record), r) for r in rows], f"seed {seed}"
        costs = view.tiles["cost"].tolist()
        assert view.order.tolist() == sorted(range(len(costs)), key=lambda t: (-costs[t], t)), f"seed {seed}"


@pytest.mark.parametrize("gap", [0, 256, 1024])
def test_halves_of_a_tile_are_joined_unless_far_apart(gap):
    """The first and second half of a tile see keys that abut or not: one segment only if it walks no block in vain."""
    slices = np.array([[0, 64, 0, 256, FULL], [64, 128, 256 + gap, 512 + gap, FULL]])
    view = lib.View(plan_and_check(slices, 128, 2048, 128, 2))
    assert view.tiles["num_segments"].tolist() == [1 if gap == 0 else 2]
    assert view.tiles["num_blocks"].tolist() == [4]


def test_order_of_many_distinct_costs():
    """Costs that need more than one digit of the radix sort."""
    rng = np.random.default_rng(3)
    lengths = rng.integers(1, 900_000, size=700)
    q = [(i, i + 1) for i in range(700)]
    table = SliceTable.from_ranges(q, [(0, int(n)) for n in lengths], FULL)
    view = lib.View(plan_and_check(table, 700, 900_000, 1, 1))
    cost = view.tiles["cost"].tolist()
    assert max(cost) > 1 << 16 and len(set(cost)) > 500
    assert view.order.tolist() == sorted(range(700), key=lambda t: (-cost[t], t))


def test_plans_do_not_depend_on_the_order_of_slices():
    for seed in range(60):
        rng, slices, total_q, total_k = lib.random_case(seed)
        first = lib.make_plan(slices, total_q, total_k, 16, 1)
        second = lib.make_plan(slices[rng.permutation(len(slices))], total_q, total_k, 16, 1)
        np.testing.assert_array_equal(first, second, err_msg=f"seed {seed}")


@pytest.mark.parametrize(("tile_tokens", "groups"), [(8, 1), (24, 3), (64, 2)])
def test_many_segments_in_a_tile(tile_tokens, groups):
    """Short intervals with gaps, different for every few rows: more segments than a slice may choose from."""
    rng = np.random.default_rng(21)
    slices = []
    for q0 in range(0, 60, 3):
        edges = np.sort(rng.choice(40_000, size=2 * int(rng.integers(1, 40)), replace=False)).reshape(-1, 2)
        slices += [[q0, q0 + 3, lo, hi, FULL] for lo, hi in edges]
    view = lib.View(plan_and_check(np.array(slices), 64, 40_000, tile_tokens, groups))
    assert view.tiles["num_segments"].max() > 20


@pytest.mark.parametrize("tile_tokens", [1, 16, 128])
@pytest.mark.parametrize("name", sorted(masks.mask_families(64)))
def test_mask_families(name, tile_tokens):
    for total in (64, 333, 1024):
        for groups in (1, 2, 3):
            plan_and_check(masks.mask_families(total)[name], total, total, tile_tokens, groups)


@pytest.mark.parametrize("kind", [CAUSAL, INVCAUSAL, BICAUSAL])
def test_more_rows_than_keys(kind):
    """Rows of a non-FULL slice that see nothing; BICAUSAL slices without any pair."""
    slices = np.array([[0, 40, 3, 20, kind], [45, 46, 0, 1, kind]])
    for tile_tokens, groups in lib.SHAPES:
        view = lib.View(plan_and_check(slices, 50, 30, tile_tokens, groups))
        np.testing.assert_array_equal(dense_segments(view, 50, 30), to_dense(slices, 50, 30))


def test_empty_inputs():
    for total_q, total_k in ((0, 0), (0, 9), (9, 0), (9, 9)):
        view = lib.View(plan_and_check(np.zeros((0, 5)), total_q, total_k, 4, 2))
        assert view.header[0]["has_unseen"] == (total_k > 0)
        assert view.tiles["num_segments"].sum() == 0 and (view.tiles["cost"] == 12).all()
    view = lib.View(plan_and_check(np.array([[2, 2, 0, 9, FULL], [0, 9, 4, 4, CAUSAL]]), 9, 9, 4, 1))
    assert view.header[0]["num_segments"] == 0


def test_ranges_near_the_int32_limit():
    top = 2**31 - 1
    slices = np.array([[0, 20, top - 1000, top, CAUSAL], [20, 40, 0, top, FULL], [40, 50, 5, top, BICAUSAL]])
    for groups in (1, 2, 3):
        view = lib.View(plan_and_check(slices, 50, top, 16, groups))
        assert view.tiles["cost"].max() > 2**28


def test_costs_that_exceed_int32_saturate():
    """Row r sees r single keys, then all the rest; the gaps keep that out of r segments, so segment r is wide."""
    top = 2**31 - 1
    slices = [[r, r + 1, 3 * i, 3 * i + 1, FULL] for r in range(8) for i in range(r)]
    slices += [[r, r + 1, 3 * r, top, FULL] for r in range(8)]
    tile = lib.View(plan_and_check(np.array(slices), 8, top, 8, 1)).tiles[0]
    assert tile["cost"] == top and tile["num_segments"] == 8 and tile["num_blocks"] == 8 * 2**24


# ---- quality -----------------------------------------------------------------------------------------------

TILES = [(8, 1), (16, 1), (24, 3), (64, 1), (128, 2), (192, 3)]


@pytest.mark.parametrize(("tile_tokens", "groups"), TILES)
def test_one_layer_where_rows_are_disjoint(tile_tokens, groups):
    rng = np.random.default_rng(11)
    total = 4096
    short = masks.random_cu_seqlens(rng, total, 200)
    medium = masks.random_cu_seqlens(rng, total, 24)
    for table in (
        masks.varlen(short, CAUSAL),
        masks.varlen(short, FULL),
        masks.varlen(medium, CAUSAL),
        masks.causal(total),
        masks.full(total),
        masks.prefix_causal(total, total // 3),
        masks.sliding_window_causal(total, 256),
        masks.sliding_window(total, 256),
    ):
        assert segments_per_tile(table, total, tile_tokens, groups).max() == 1


@pytest.mark.parametrize(("tile_tokens", "groups"), TILES)
def test_few_layers_elsewhere(tile_tokens, groups):
    total = 4096
    cu = masks.random_cu_seqlens(np.random.default_rng(12), total, 12)
    for block in (37, 100, 256):
        assert segments_per_tile(masks.varlen_block_causal(cu, block), total, tile_tokens, groups).max() <= 2
    families = masks.mask_families(total)
    assert segments_per_tile(families["share_question"], total, tile_tokens, groups).max() <= 2
    assert segments_per_tile(families["global_and_window"], total, tile_tokens, groups).max() <= 2


def test_neighbours_in_k_become_one_interval():
    """FULL pieces of 64 keys and a CAUSAL end, as block-sparse lists give them, in any order of slices."""
    pieces = [(0, 64, 64 * i, 64 * (i + 1), FULL) for i in range(40)] + [(0, 64, 2560, 2624, CAUSAL)]
    slices = np.array(pieces)[np.random.default_rng(5).permutation(41)]
    for tile_tokens, groups in ((16, 1), (64, 1), (64, 3)):
        view = lib.View(plan_and_check(slices, 64, 2624, tile_tokens, groups))
        assert (view.tiles["num_segments"] == 1).all()
        assert (view.pairs(0)[:, 0] == 0).all() and view.pairs(0)[0, 1] == 2561
        assert view.segment(0)["group"][0, 0]["full_hi"] == 2561


def test_a_triangle_joins_on_the_left():
    """The causal triangle comes after the inverse one (same first key), and completes it to full rows."""
    slices = np.array([[0, 16, 100, 200, INVCAUSAL], [1, 16, 100, 115, CAUSAL]])
    view = lib.View(plan_and_check(slices, 16, 200, 16, 1))
    assert view.tiles["num_segments"].tolist() == [1] and (view.pairs(0) == (100, 200)).all()
    assert view.segment(0)["group"][0, 0].tolist() == (100, 200, 100, 200)


@pytest.mark.parametrize(("start", "segments", "blocks"), [(128, 1, 2), (188, 2, 2), (400, 2, 2), (10_000, 2, 2)])
def test_rows_share_a_layer_only_where_their_keys_are_near(start, segments, blocks):
    slices = np.array([[0, 8, 0, 128, FULL], [8, 16, start, start + 128, FULL]])
    tile = lib.View(plan_and_check(slices, 16, 20_000, 16, 1)).tiles[0]
    assert (tile["num_segments"], tile["num_blocks"]) == (segments, blocks)


# ---- through Python ----------------------------------------------------------------------------------------


def test_a_plan_is_read_only_and_refuses_another_mask():
    plan = TilePlan.build(Mask.causal(61).slices, 61, 61, 12, 3)
    assert len(plan.words) == plan.header.words_total == plan_words(61, 12, plan.header.num_segments)
    plan.check(Mask.causal(61).slices)
    with pytest.raises(MagiError):
        plan.check(Mask.full(61).slices)
    with pytest.raises(ValueError, match="read-only"):
        plan.words[0] = 3


@pytest.mark.parametrize("seed", range(20))
def test_a_pair_of_two_slices_is_visited_twice(seed):
    """As ``flex_flash_attn_func`` counts it on every device."""
    print(f"seed {seed}")
    rng = np.random.default_rng(seed)
    for _ in range(10):
        ranges = np.sort(rng.integers(0, 65, (int(rng.integers(1, 6)), 2, 2)), axis=2).reshape(-1, 4)
        slices = np.concatenate([ranges, rng.integers(0, 4, (len(ranges), 1))], axis=1)
        want = sum(to_dense(row[None], 64, 64).astype(int) for row in slices)
        view = lib.View(TilePlan.build(slices, 64, 64, 32, 2).words)
        assert np.array_equal(dense_segments(view, 64, 64), want), slices.tolist()


def test_wrong_sizes_are_sentences():
    with pytest.raises(ContractError, match=r"Slice 0 has k range \[0, 9\) with 8 rows"):
        TilePlan.build(Mask.causal(9).slices, 9, 8, 16, 2)
    with pytest.raises(ContractError, match=r"2\*\*31"):
        TilePlan.build(SliceTable([]), 2**31, 8, 16, 2)
    with pytest.raises(MagiError):
        TilePlan.build(Mask.causal(9).slices, 9, 9, 0, 2)


# ---- the ABI -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("row", "words"),
    [
        ([-1, 4, 0, 4, 0], "Slice 1 has the query range [-1, 4)"),
        ([4, 3, 0, 4, 0], "Slice 1 has the query range [4, 3)"),
        ([0, 11, 0, 4, 0], "total_q = 10"),
        ([0, 4, -2, 4, 0], "Slice 1 has the key range [-2, 4)"),
        ([0, 4, 5, 4, 0], "Slice 1 has the key range [5, 4)"),
        ([0, 4, 0, 13, 0], "total_k = 12"),
        ([0, 4, 0, 4, 4], "mask type 4"),
        ([0, 4, 0, 4, -1], "mask type -1"),
    ],
)
def test_bad_slices_are_refused(row, words):
    rows = lib.as_rows(np.array([[0, 1, 0, 1, 0], row]))
    assert lib.plan_into(rows, 10, 12, 8, 1, None)[0] == lib.INVALID_ARGUMENT
    assert words in lib.last_error() and lib.last_error().endswith(".")
    plan = lib.make_plan(rows[:1], 10, 12, 8, 1)
    status, sentence = lib.check_plan(rows, plan)
    assert status == lib.INVALID_ARGUMENT and sentence.startswith("Slice 1 is q [")


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ((-1, 4, 8, 1), "total_q is -1"),
        ((4, -1, 8, 1), "total_k is -1"),
        ((4, 4, 0, 1), "tile_tokens is 0"),
        ((4, 4, 4096, 1), "tile_tokens is 4096"),
        ((4, 4, 8, 0), "num_groups is 0"),
        ((4, 4, 8, 4), "num_groups is 4"),
    ],
)
def test_bad_shapes_are_refused(arguments, words):
    rows = lib.as_rows(np.zeros((0, 5)))
    assert lib.plan_into(rows, *arguments, None)[0] == lib.INVALID_ARGUMENT
    assert words in lib.last_error() and lib.last_error().endswith(".")


def test_null_pointers_are_refused():
    needed = ctypes.c_int64(0)
    library = lib.library()
    shape, no_plan = (4, 4, 4, 1), (None, 0, ctypes.byref(needed))
    assert library.magi_tile_plan_host(None, 1, *shape, *no_plan) == lib.INVALID_ARGUMENT
    assert "slices is NULL" in lib.last_error()
    assert library.magi_tile_plan_host(None, -1, *shape, *no_plan) == lib.INVALID_ARGUMENT
    assert "num_slices is -1" in lib.last_error()
    assert library.magi_tile_plan_host(None, 0, *shape, None, 0, None) == lib.INVALID_ARGUMENT
    assert "both NULL" in lib.last_error()
    assert library.magi_tile_plan_check(None, 0, None, 100) == lib.INVALID_ARGUMENT
    assert "plan is NULL" in lib.last_error()
    assert library.magi_tile_plan_words(-1, 8, 0) == -1 and "total_q is -1" in lib.last_error()


def test_too_small_buffers():
    """Every size below the one needed is refused, nothing behind the buffer is written."""
    rows = lib.as_rows(masks.varlen([0, 5, 11, 30], CAUSAL))
    needed = lib.plan_into(rows, 30, 30, 8, 1, None)[1]
    for words in range(needed):
        memory = np.full(needed + 8, -7, dtype=np.int32)
        status, again = lib.plan_into(rows, 30, 30, 8, 1, memory[:words])
        assert status == lib.CAPACITY and again == needed
        assert f"needs {needed} words, the buffer has {words}" in lib.last_error()
        assert (memory[words:] == -7).all()
    memory = np.full(needed + 8, -7, dtype=np.int32)
    assert lib.plan_into(rows, 30, 30, 8, 1, memory) == (lib.OK, needed)
    assert (memory[needed:] == -7).all() and lib.check_plan(rows, memory)[0] == lib.OK
    assert lib.check_plan(rows, memory[: needed - 1])[0] == lib.INVALID_ARGUMENT
    assert lib.library().magi_tile_plan_words(30, 8, int(memory[6])) == needed


def test_plans_beyond_the_word_limit_are_refused():
    rows = lib.as_rows(np.zeros((0, 5)))
    assert lib.plan_into(rows, 2**31 - 1, 4, 1, 1, None)[0] == lib.UNSUPPORTED
    assert "Use larger tiles" in lib.last_error()


@pytest.mark.parametrize(
    ("total", "docs", "kind"), [(32_768, 500, CAUSAL), (32_768, 1, CAUSAL), (1_048_576, 10_000, CAUSAL)]
)
def test_long_sequences(total, docs, kind):
    """No pair of tiles twice or not at all, where a dense mask would be too large."""
    table = masks.varlen(masks.random_cu_seqlens(np.random.default_rng(0), total, docs), kind)
    plan_and_check(lib.as_rows(table), total, total, 16, 1)
