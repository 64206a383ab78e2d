# SPDX-License-Identifier: Apache-2.0
"""Tile plans made on the GPU: walked against the mask, and equal in content to those of the host."""

from __future__ import annotations

import functools

import numpy as np
import pytest
import torch

from magi_attention.common.slices import SliceTable
from magi_attention.native import abi
from magi_attention.native.ffa import FfaLibrary, FfaTile
from magi_attention.native.planner.tile_plan import TilePlan, plan_words, transposed
from magi_attention.testing import masks

IS_HOPPER = torch.cuda.is_available() and torch.cuda.get_device_capability() == (9, 0)
pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not IS_HOPPER, reason="needs a GPU of compute capability 9.0 (H100, H200)"),
]

DEVICE = "cuda"
TILES = (16, 64, 128)
ALL = masks.ALL_TYPES
GARBAGE = -7  # what buffers hold before
GUARD = 64  # words after the buffer that nobody may touch
HAS_UNSEEN = 4  # word of a segment


@functools.lru_cache(maxsize=1)
def library() -> FfaLibrary:
    return FfaLibrary.ahead()


def stream() -> int:
    return torch.cuda.current_stream().cuda_stream


def rows_of(slices) -> np.ndarray:
    return np.ascontiguousarray(getattr(slices, "array", slices), dtype=np.int32).reshape(-1, 5)


def on_device(rows: np.ndarray, with_types: bool = True) -> tuple[torch.Tensor, ...]:
    parts = (rows[:, :2], rows[:, 2:4], rows[:, 4])
    q, k, types = (torch.from_numpy(np.ascontiguousarray(x)).to(DEVICE) for x in parts)
    return q, k, types if with_types else None


def touches(rows: np.ndarray, tile: int) -> int:
    """How many (slice, tile) pairs there are: room for these always suffices."""
    live = rows[rows[:, 0] < rows[:, 1]].astype(np.int64)
    return int((-(-live[:, 1] // tile) - live[:, 0] // tile).sum())


def launch(ranges, total_q: int, total_k: int, tile: int, plan: torch.Tensor, words: int, groups: int = 2) -> None:
    q, k, types = ranges
    library().plan_on_device(
        q.data_ptr(), k.data_ptr(), None if types is None else types.data_ptr(), len(q), total_q, total_k,
        FfaTile(tile, groups, 1), plan.data_ptr(), words, stream(),
    )  # fmt: skip


def device_words(
    rows: np.ndarray, total_q: int, total_k: int, tile: int, room: int | None = None, with_types=True, groups=2
) -> np.ndarray:
    """Words of the plan in a buffer with ``room`` records, by default as many as it can ever need."""
    words = plan_words(total_q, tile, touches(rows, tile) if room is None else room)
    buffer = torch.full((words + GUARD,), GARBAGE, dtype=torch.int32, device=DEVICE)
    launch(on_device(rows, with_types), total_q, total_k, tile, buffer, words, groups)
    got = buffer.cpu().numpy()
    assert (got[words:] == GARBAGE).all(), "written beyond the buffer"
    return got[:words]


def content(plan: TilePlan) -> tuple[np.ndarray, ...]:
    """Header without places, tiles without places, order with its padding, records tile by tile."""
    header = plan.header
    fixed = [getattr(header, name) for name, _ in header._fields_ if name not in ("words_total", "reserved")]
    everything = plan.words[header.words_records : header.words_total].reshape(-1, header.segment_words)
    places = [np.arange(first, first + count) for first, count in plan.tiles[:, 2:4]]
    records = everything[np.concatenate([np.zeros(0, dtype=np.int64), *places])]
    order = plan.words[header.words_order : header.words_records]
    return np.hstack(fixed), np.delete(plan.tiles, 2, axis=1), order, records


def check(slices, total_q: int, total_k: int, tile: int, groups: int = 2, **options) -> TilePlan:
    """The device's plan passes the walker and holds what the host's does."""
    rows = rows_of(slices)
    plan = TilePlan(device_words(rows, total_q, total_k, tile, groups=groups, **options))
    plan.check(rows)
    host = TilePlan.build(rows, total_q, total_k, tile, groups)
    for name, got, want in zip(("header", "tiles", "order", "records"), content(plan), content(host)):
        assert np.array_equal(got, want), f"{name} differs from the host's plan"
    return plan


@pytest.mark.parametrize("tile", TILES)
def test_random_masks(tile):
    for seed in range(60):
        rng = np.random.default_rng(1000 * tile + seed)
        total_q, total_k = (int(x) for x in rng.integers(1, 1500, size=2))
        slices = masks.random_slices(rng, total_q, total_k, max_slices=int(rng.integers(1, 60)))
        check(slices, total_q, total_k, tile)


def test_odd_tiles_and_groups():
    for seed, (tile, groups) in enumerate([(1, 1), (2, 2), (5, 3), (24, 1), (192, 3), (1000, 2), (1024, 3)]):
        rng = np.random.default_rng(seed)
        check(masks.random_slices(rng, 700, 900, max_slices=200), 700, 900, tile, groups)


@pytest.mark.parametrize("tile", TILES)
def test_families(tile):
    for total in (16, 129, 1000, 4096):
        for slices in masks.mask_families(total).values():
            check(slices, total, total, tile)


@pytest.mark.parametrize("tile", TILES)
@pytest.mark.parametrize("total_q, total_k", [(0, 0), (0, 50), (50, 0), (1, 1), (333, 77)])
def test_no_slices(tile, total_q, total_k):
    plan = check(np.zeros((0, 5)), total_q, total_k, tile)
    assert plan.header.num_segments == 0 and plan.header.has_unseen == (total_k > 0)


@pytest.mark.parametrize("tile", TILES)
def test_slices_that_allow_nothing(tile):
    rows = [[5, 5, 0, 9, 0], [3, 9, 4, 4, 1], [0, 9, 3, 5, 3], [9, 9, 9, 9, 2], [2, 60, 10, 20, 1], [0, 2, 0, 1, 2]]
    check(np.array(rows), 90, 40, tile)


def test_types_default_to_full():
    rows = masks.random_slices(np.random.default_rng(3), 400, 500, max_slices=30, types=(0,))
    check(rows, 400, 500, 64, with_types=False)


@pytest.mark.parametrize("tile", TILES)
def test_a_million_tokens(tile):
    """10,000 documents in random order; with tiles of 16 more tiles than are ordered in shared memory."""
    rng = np.random.default_rng(tile)
    total = 1_000_000
    rows = rows_of(masks.varlen(masks.random_cu_seqlens(rng, total, 10_000), 1))
    check(rows[rng.permutation(len(rows))], total, total, tile)


@pytest.mark.parametrize("tile", TILES)
def test_more_slices_per_tile_than_are_sorted_at_a_time(tile):
    rng = np.random.default_rng(tile)
    for total_q, total_k, count in ((300, 20_000, 3000), (5000, 5000, 10_000)):
        slices = masks.random_slices(rng, total_q, total_k, max_slices=count)
        assert len(slices) > 500
        check(slices, total_q, total_k, tile)


def test_many_layers_in_a_tile():
    """Separate columns cannot join, so a tile has hundreds of segments, most of them built in the plan itself."""
    rows = np.array([[0, 300, 1000 * i, 1000 * i + 1 + i % 300, 0] for i in range(400)])
    plan = check(rows[np.random.default_rng(0).permutation(400)], 300, 400_000, 128)
    assert (plan.tiles[:, 3] == 400).all()


def test_more_key_ranges_than_are_merged_at_a_time():
    rng = np.random.default_rng(0)
    cu = masks.random_cu_seqlens(rng, 200_000, 40_000)
    rows = rows_of(masks.varlen(cu, 0))
    rows = rows[rng.permutation(len(rows))]
    check(rows, 200_000, 200_000, 64)
    check(rows[1:], 200_000, 200_000, 64)


def test_too_many_separate_key_ranges_are_all_taken_for_unseen():
    """The one case in which the device says less than the host: has_unseen may be 1 where it need not."""
    count = 40_000
    i = np.arange(count)
    rows = np.stack([i, i + 1, 200 + 3 * i, 202 + 3 * i, 0 * i], axis=1)
    rows[0, 2:4] = 0, 2000  # what the first tile visits is all seen
    total_k = 200 + 3 * count
    rows = rows[np.random.default_rng(0).permutation(count)]
    got = content(TilePlan(device_words(rows_of(rows), count, total_k, 16)))
    want = content(TilePlan.build(rows, count, total_k, 16, 2))
    assert all(np.array_equal(got[n], want[n]) for n in range(3))
    assert (got[3][:, HAS_UNSEEN] == 1).all() and set(want[3][:, HAS_UNSEEN]) == {0, 1}
    assert np.array_equal(np.delete(got[3], HAS_UNSEEN, 1), np.delete(want[3], HAS_UNSEEN, 1))


def test_content_is_the_same_in_every_run():
    rng = np.random.default_rng(7)
    rows = rows_of(masks.random_slices(rng, 20_000, 20_000, max_slices=2000))
    first = content(TilePlan(device_words(rows, 20_000, 20_000, 16)))
    for _ in range(5):
        again = content(TilePlan(device_words(rows, 20_000, 20_000, 16)))
        assert all(np.array_equal(a, b) for a, b in zip(first, again))


@pytest.mark.parametrize("tile", TILES)
def test_too_small_buffers_say_so(tile):
    rows = rows_of(masks.causal(3000))
    segments = TilePlan.build(rows, 3000, 3000, tile, 2).header.num_segments
    assert TilePlan(device_words(rows, 3000, 3000, tile, room=segments)).header.status == abi.OK
    for room in (0, 1, segments // 2, segments - 1):
        plan = TilePlan(device_words(rows, 3000, 3000, tile, room=room))
        header = plan.header
        assert header.status == abi.CAPACITY and header.num_segments == 0, room
        assert header.num_tiles == len(plan.tiles) and not plan.tiles[:, 3].any()
        assert sorted(plan.order.tolist()) == list(range(header.num_tiles))
        assert plan.tiles[:, :2].tolist() == [[t, min(tile, 3000 - t)] for t in range(0, 3000, tile)]


def test_malformed_slices_are_left_out():
    good = rows_of(masks.random_slices(np.random.default_rng(0), 200, 250, max_slices=20))
    bad = np.array(
        [
            *([0, 201, 0, 5, 0], [-1, 4, 0, 5, 0], [9, 3, 0, 5, 0], [0, 5, 0, 251, 1], [0, 5, 4, 2, 0]),
            *([0, 5, -3, 2, 0], [0, 5, 0, 5, 4], [0, 5, 0, 5, -1], [2**31 - 1, -(2**31), 0, 5, 0]),
        ],
        dtype=np.int32,
    )
    mixed = np.concatenate([bad[:4], good, bad[4:]])
    want = content(TilePlan.build(good, 200, 250, 64, 2))
    got = content(TilePlan(device_words(mixed, 200, 250, 64, room=200)))
    assert all(np.array_equal(a, b) for a, b in zip(got, want))


def test_transposition_equals_that_of_the_host():
    """Slice by slice; malformed slices and those that allow nothing become three empty ones."""
    bad = [[0, 999, 0, 5, 0], [-1, 4, 0, 5, 0], [9, 3, 0, 5, 0], [0, 5, 0, 5, 4], [3, 3, 0, 5, 1], [0, 9, 3, 5, 3]]
    for seed in range(40):
        rng = np.random.default_rng(seed)
        total_q, total_k = (int(x) for x in rng.integers(1, 900, size=2))
        good = rows_of(masks.random_slices(rng, total_q, total_k, max_slices=400, types=ALL if seed % 4 else (0,)))
        with_types = bool(seed % 4)
        rows = rows_of(np.concatenate([bad[:3], good, bad[3:]])) if with_types else good
        count = len(rows)
        if not count:
            continue
        q, k, types = on_device(rows, with_types)
        got = torch.full((3 * count * 5 + GUARD,), GARBAGE, dtype=torch.int32, device=DEVICE)
        at = [got.data_ptr() + 4 * words * count for words in (0, 6, 12)]
        types_at = None if types is None else types.data_ptr()
        library().transpose_on_device(q.data_ptr(), k.data_ptr(), types_at, count, total_q, total_k, *at, stream())
        flat = got.cpu().numpy()
        assert (flat[15 * count :] == GARBAGE).all(), "written beyond the buffers"
        pairs = flat[: 12 * count].reshape(2, -1, 2)
        made = np.column_stack([pairs[0], pairs[1], flat[12 * count : 15 * count]])
        assert np.array_equal(made[made[:, 0] < made[:, 1]], transposed(good, total_q, total_k)), seed
        assert not made[made[:, 0] >= made[:, 1]].any(), "an empty slice is not all zeros"


def test_follows_the_ranges_in_a_cuda_graph():
    cases = [rows_of(masks.varlen(cu, 1)) for cu in ([0, 100, 350, 500], [0, 1, 499, 500], [0, 200, 201, 500])]
    ranges = on_device(cases[0])
    words = plan_words(500, 64, 3 * 8)
    buffer = torch.full((words,), GARBAGE, dtype=torch.int32, device=DEVICE)
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        launch(ranges, 500, 500, 64, buffer, words)
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        launch(ranges, 500, 500, 64, buffer, words)
    for rows in cases:
        for tensor, new in zip(ranges, on_device(rows)):
            tensor.copy_(new)
        buffer.fill_(GARBAGE)
        graph.replay()
        TilePlan(buffer.cpu().numpy()).check(SliceTable(rows))
