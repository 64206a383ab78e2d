# SPDX-License-Identifier: Apache-2.0
"""When a backward takes m-blocks of 80 queries, halves of the heads, one document after the other, and when the first
writer of dq stores."""

from __future__ import annotations

import numpy as np
import pytest

from magi_attention.common.mask import Mask
from magi_attention.common.slices import SliceTable, to_dense
from magi_attention.kernels import AttnOptions
from magi_attention.kernels.ffa.arrival import Pace
from magi_attention.kernels.ffa.peer_kv import TILE, RemoteKeys, RemoteMask
from magi_attention.kernels.ffa.schedule import select_schedule as schedule_module
from magi_attention.kernels.ffa.schedule import simulate
from magi_attention.kernels.ffa.schedule.select_schedule import BwdSchedule, select_schedule
from magi_attention.kernels.ffa.schedule.tile_splits import Split
from magi_attention.native.tile_plan import TilePlan
from magi_attention.testing.libraries import planner_or_skip

NUM_SMS = 132
WIDE, WIDEST, NARROW, HALVES = BwdSchedule(80, 0), BwdSchedule(128, 0), BwdSchedule(64, 0), BwdSchedule(64, 2)


@pytest.fixture(scope="module", autouse=True)
def planner():
    planner_or_skip()


def choose(
    mask: Mask, total: int, is_deterministic=False, dim: int = 128, num_sms=NUM_SMS, heads=(64, 8), **options
) -> BwdSchedule:
    shapes = (total, heads[0], dim), (total, heads[1], dim)
    return select_schedule(*shapes, mask.slices, AttnOptions(0.3, deterministic=is_deterministic, **options), num_sms)


def first_writer(schedule: BwdSchedule) -> BwdSchedule:
    return schedule._replace(first_writer=True)


def direct(schedule: BwdSchedule) -> BwdSchedule:
    return schedule._replace(direct_dq_store=True)


def split(begin: int, end: int, parts: int) -> BwdSchedule:
    return WIDE._replace(split=Split(begin, end, parts))


def by_document(schedule: BwdSchedule) -> BwdSchedule:
    return schedule._replace(by_document=True)


def documents(length: int, total: int) -> Mask:
    return Mask.varlen(list(range(0, total + 1, length)))


def block_mask(seen: np.ndarray) -> Mask:
    return Mask.block_sparse(seen, 128)


def test_parts_of_the_heads_in_no_order():
    """Where tiles have many segments, and where few are so long that those of the last kv heads would end alone."""
    blocks, place = 128, np.arange(128)
    scattered = np.random.default_rng(0).random((blocks, blocks)) < 0.2
    window = abs(place[:, None] - place) <= 8
    assert choose(block_mask(scattered), 128 * blocks) == HALVES
    assert choose(block_mask(scattered), 128 * blocks, heads=(16, 8)).num_head_splits == 0
    assert choose(block_mask(window), 128 * blocks).num_head_splits == 0
    assert choose(block_mask(window | (place == 0)), 128 * blocks) == BwdSchedule(64, 4)
    for mask in (Mask.full(16_384), Mask.causal(16_384), documents(1000, 16_384)):
        assert choose(mask, 16_384).num_head_splits == 0


def test_long_documents_go_one_after_the_other_in_no_order():
    """Those that are not causal, of many query heads, where it gains; a single one has no order."""
    long = Mask.varlen([0, 3000, 5000, 8100, 11_000, 14_000, 16_384])
    assert choose(long, 16_384) == by_document(WIDE)
    assert choose(long, 16_384, heads=(16, 8)) != by_document(WIDE), "two query heads to a kv head"
    assert choose(Mask.full(16_384), 16_384) == WIDE
    short = Mask.varlen(list(range(0, 16_384 + 1, 1024)))
    assert choose(short, 16_384) == by_document(first_writer(WIDE))
    causal = Mask.varlen([0, 6000, 10_000, 16_384], causal=True)
    assert choose(causal, 16_384).first_writer


@pytest.mark.parametrize(
    "mask, total, schedule, is_deterministic",
    [
        (Mask.full(4096), 4096, WIDE, WIDE),
        (Mask.causal(4096), 4096, NARROW, WIDE),  # few work tiles; 1.045 times as many queries in whole blocks of 80
        (documents(1024, 4096), 4096, first_writer(WIDE), WIDE),
        (documents(512, 4096), 4096, by_document(first_writer(NARROW)), by_document(NARROW)),  # 1.13 times
        (Mask.varlen([0, 1000, 2000, 3000, 4096]), 4096, first_writer(WIDE), split(1, 2, 8)),  # 1.008 times
        (Mask.varlen([0, 1300, 2600, 4096]), 4096, NARROW, split(2, 3, 4)),  # 1.023 times
        (Mask.varlen([0, 1500, 4096]), 4096, WIDE, WIDE),  # 1.025 times, where keys see 2,194
        (Mask.varlen([0, 2900, 3000, 3300, 3500, 3900, 4096]), 4096, WIDE, split(16, 27, 2)),
        (Mask.full(5120), 5120, WIDE, split(0, 7, 2)),
        (documents(1280, 5120), 5120, WIDE, split(0, 7, 2)),  # few work tiles, whole blocks of either size
        (Mask.full(2560), 2560, WIDE, WIDE),  # the same, heads are split
        (Mask.full(1280), 1280, NARROW, NARROW),  # and keys see few queries
        (documents(2048, 8192), 8192, by_document(first_writer(WIDE)), WIDE),  # many work tiles
        (documents(2560, 7680), 7680, by_document(WIDE), WIDE),
        (Mask.causal(8192), 8192, WIDE, WIDE),
        (Mask.sliding_window(8192, (1023, 0)), 8192, first_writer(WIDE), WIDE),  # 1.06 times
        (documents(512, 8192), 8192, by_document(first_writer(NARROW)), NARROW),
        (documents(640, 8320), 8320, by_document(first_writer(WIDE)), WIDE),  # whole blocks of either size
        (Mask.full(1024), 1024, NARROW, NARROW),  # heads are split
    ],
    ids=(
        "full, causal, four documents, eight, four of 1 000, three, two, uneven, 5K, aligned 5K, 2.5K, 1.25K, 8K, "
        "three in 7.5K, causal 8K, window 8K, short 8K, aligned, 1K"
    ).split(", "),
)
def test_by_rounding_and_the_number_of_work_tiles(mask, total, schedule, is_deterministic):
    assert choose(mask, total) == schedule
    assert choose(mask, total, is_deterministic=True) == is_deterministic


def test_only_where_there_is_a_kernel():
    mask = Mask.full(8192)
    for dim, schedule in ((64, WIDEST), (72, WIDE), (128, WIDE), (256, NARROW)):
        assert choose(mask, 8192, dim=dim) == schedule
    assert choose(mask, 8192, softcap=1.0) == NARROW


def test_the_choice_is_kept_with_the_mask(monkeypatch):
    mask, made, select = Mask.full(7680), [], schedule_module.select_block_m
    monkeypatch.setattr(schedule_module, "select_block_m", lambda *a: made.append(a) or select(*a))
    for _ in range(3):
        assert choose(mask, 7680) == WIDE and choose(mask, 7680, softcap=1.0) == NARROW
    assert len(made) == 1
    choose(mask, 7680, is_deterministic=True)
    choose(mask, 7680, num_sms=264)  # machines may have GPUs of two kinds
    assert len(made) == 3


@pytest.mark.parametrize("total", (4096, 8192))
def test_the_first_writer_stores_where_queries_see_few_keys(total):
    """Up to some width of the window and not beyond."""
    found = [choose(Mask.sliding_window(total, (window, 0)), total).first_writer for window in range(256, total, 256)]
    assert found[0] and not found[-1] and found == sorted(found, reverse=True)


def test_otherwise_dq_accum_is_cleared():
    short = Mask.sliding_window(8192, (500, 0))
    assert choose(short, 8192) == first_writer(NARROW)
    assert choose(short, 8192, heads=(32, 8)).first_writer
    for options in (
        *({"dim": 64}, {"dim": 256}, {"softcap": 1.0}, {"is_deterministic": True}),
        *({"heads": (24, 8)}, {"heads": (32, 32)}),
    ):
        assert not choose(short, 8192, **options).first_writer, options


@pytest.mark.parametrize("heads", ((24, 8), (32, 32)), ids=str)
def test_few_heads_for_each_kv_head_want_shorter_masks(heads):
    """400 keys for a query, 520 where one document comes after the other."""
    for window, stores in ((380, True), (480, False)):
        assert choose(Mask.sliding_window(8192, (window, 0)), 8192, heads=heads).first_writer == stores
    for length, stores in ((512, True), (1024, False)):
        found = choose(documents(length, 8192), 8192, heads=heads)
        assert found.first_writer == found.by_document == stores


def test_other_head_dims():
    """64 where a third of the blocks has a single contribution, else m-blocks of 128 that round to little more; 256 by
    document where a query sees up to 520 keys."""
    for mask, of_64, of_256 in (
        (documents(64, 8192), direct(first_writer(NARROW)), direct(first_writer(NARROW))),
        # half of the blocks
        (causal_documents(256, 8192), direct(first_writer(NARROW)), direct(by_document(first_writer(NARROW)))),
        (causal_documents(512, 8192), WIDEST, direct(by_document(first_writer(NARROW)))),  # a quarter
        (causal_documents(1024, 8192), WIDEST, direct(by_document(first_writer(NARROW)))),  # an eighth
        (causal_documents(2048, 8192), WIDEST, NARROW),
        (Mask.sliding_window(8192, (100, 0)), WIDEST, first_writer(NARROW)),
        (Mask.sliding_window(8192, (200, 0)), WIDEST, NARROW),
        (documents(80, 8160), NARROW, direct(first_writer(NARROW))),  # 1.44 times the queries in whole blocks of 128
    ):
        assert choose(mask, 8192, dim=64) == of_64
        assert choose(mask, 8192, dim=256) == of_256


def choose_few(queries: int, keys: int, heads: tuple[int, int] = (64, 8), dim: int = 128, rows=None) -> BwdSchedule:
    slices = SliceTable(np.array([[0, queries, 0, keys, 0]] if rows is None else rows))
    return select_schedule((queries, heads[0], dim), (keys, heads[1], dim), slices, AttnOptions(0.3), NUM_SMS)


def test_few_keys():
    """Where heads are split: queries that see few keys and are many enough that dq_accum does not stay in L2."""
    assert choose_few(16384, 77) == direct(first_writer(WIDE))
    for keys in (256, 512, 1024):
        assert choose_few(16384, keys) == first_writer(WIDE)
        assert choose_few(2048, keys).first_writer == (keys <= 512)  # of 1,024 they are not four times as many
        for dim in (64, 256):
            assert not choose_few(16384, keys, dim=dim).first_writer
    assert not choose_few(16384, 1152).first_writer
    assert not choose_few(1023, 128).first_writer and choose_few(1024, 128).first_writer
    assert not choose_few(2000, 128, heads=(16, 16)).first_writer
    short = [[a, a + 256, a, a + 256, 0] for a in range(0, 2048, 256)]
    assert choose_few(2048, 2048, rows=short) == first_writer(NARROW)
    assert not choose_few(2048, 2048, rows=[[0, 2048, 0, 2048, 1]]).first_writer


def test_many_keys():
    """It is the keys that a query sees that count, 3,600 at most, and not the queries that a key sees, 2,048 here."""
    assert choose_few(2048, 16384, heads=(64, 16)) == WIDE
    assert choose_few(2048, 3500, heads=(64, 16)) == first_writer(WIDE)


def causal_documents(length: int, total: int) -> Mask:
    return Mask.varlen(list(range(0, total + 1, length)), causal=True)


def test_direct_dq_store():
    """From a tenth of the blocks on, of the size that m-blocks have, where contributions are counted."""
    for length, share in ((1152, 1 / 9), (1408, 1 / 11)):  # the first two blocks of 64 of each document
        mask, total = causal_documents(length, 8 * length), 8 * length
        assert simulate.tile_steps(mask.slices, total, total).single[64] == pytest.approx(share)
        narrow = choose(mask, total, is_deterministic=True, dim=64)
        assert narrow.block_m == 64 and narrow.direct_dq_store == (share > 0.1)
    short = causal_documents(128, 8192)
    assert choose(short, 8192).direct_dq_store and choose(short, 8192, is_deterministic=True).direct_dq_store
    assert not choose(short, 8192, is_deterministic=True, softcap=1.0).direct_dq_store  # there is no kernel
    cleared = choose(causal_documents(512, 8192), 8192, dim=64)
    assert not cleared.first_writer and not cleared.direct_dq_store
    assert not choose(documents(256, 8192), 8192).direct_dq_store  # two tiles at each block
    uneven = Mask.varlen([0, 1000, 2000, 3000, 4096])
    assert not choose(uneven, 4096, is_deterministic=True).direct_dq_store  # tiles are split


@pytest.mark.parametrize("queries", (64, 80))
@pytest.mark.parametrize("total", (1337, 2048))
def test_the_share_of_single_contributions(queries, total):
    """Pair by pair: of all tiles of 128 keys, one has a key that some query of the block sees."""
    windows = [Mask.sliding_window(total, window) for window in ((59, 0), (9, 70))]
    packed = [Mask.varlen([*range(0, total, n), total], causal=c) for n in (64, 100, 300) for c in (False, True)]
    for mask in (*packed, *windows, Mask.causal(total), Mask.full(total)):
        seen = to_dense(mask.slices.array, total, total).astype(bool)
        by_tile = np.logical_or.reduceat(seen, np.arange(0, total, 128), axis=1)
        contributions = np.logical_or.reduceat(by_tile, np.arange(0, total, queries), axis=0).sum(axis=1)
        found = simulate.tile_steps(mask.slices, total, total).single[queries]
        assert found == pytest.approx((contributions == 1).mean()), (mask.name, mask.slices.array[:3])


def test_one_document_after_the_other():
    """Where that gains by the estimate; with the first writer where keys see up to 10,000 queries; alone with few query
    heads of a kv head; in deterministic order with any head dim; not with remote keys, nor where heads are split."""
    many = causal_documents(4096, 65536)
    assert choose(many, 65536) == by_document(first_writer(WIDE))
    assert choose(many, 65536, is_deterministic=True) == by_document(WIDE)
    for dim, schedule in ((64, WIDEST), (256, NARROW)):
        assert choose(many, 65536, dim=dim) == schedule
        assert choose(many, 65536, dim=dim, is_deterministic=True) == by_document(NARROW)
    assert choose(many, 65536, softcap=1.0) == NARROW
    longer = causal_documents(16384, 4 * 65536)
    assert choose(longer, 4 * 65536) == by_document(first_writer(WIDE)) and longer.slices.area < 10_000 * 4 * 65536
    longest = causal_documents(32768, 8 * 65536)
    assert not choose(longest, 8 * 65536).first_writer
    assert choose(causal_documents(4096, 8192), 8192) == first_writer(WIDE)  # ends later
    assert choose(causal_documents(512, 65536), 65536, heads=(24, 8)) == direct(by_document(first_writer(NARROW)))
    assert choose(causal_documents(1280, 65280), 65280, heads=(24, 8)) == by_document(WIDE)
    assert not choose(causal_documents(512, 2048), 2048, heads=(64, 8)).by_document


def test_deterministic_documents_of_few_heads():
    """With one or two query heads in a work tile, L2 groups are larger, so less of them stays in L2; and causal
    documents wait for each other less one after the other: if work tiles are few, with two query heads, or with head
    dim 256."""
    short, long = causal_documents(512, 8192), causal_documents(2048, 8192)

    def is_by_document(mask: Mask, heads: tuple[int, int], dim: int = 128) -> bool:
        return choose(mask, mask.total_q, is_deterministic=True, heads=heads, dim=dim).by_document

    for heads in ((16, 16), (32, 16), (8, 8)):
        assert is_by_document(short, heads), heads
    for heads, expected in (((32, 16), True), ((8, 8), True), ((16, 16), False), ((64, 8), False)):
        assert is_by_document(long, heads) == expected, heads
        assert not is_by_document(documents(2048, 8192), heads), heads
    assert is_by_document(short, (16, 16), 256) and is_by_document(long, (16, 16), 256)
    assert not is_by_document(short, (16, 16), 64)
    longer = causal_documents(4096, 65536)  # keys that a query sees: 2,048
    assert not is_by_document(longer, (16, 16)) and not is_by_document(longer, (32, 16))
    assert not is_by_document(Mask.causal(8192), (16, 16), 256)


def test_the_gain_is_estimated_once(monkeypatch):
    asked, estimate = [], schedule_module.gain_by_document
    monkeypatch.setattr(schedule_module, "gain_by_document", lambda *a: asked.append(a) or estimate(*a))
    mask = causal_documents(4096, 65536)
    for is_deterministic in (False, True, False):
        choose(mask, 65536, is_deterministic=is_deterministic)
    choose(mask, 65536, softcap=1.0)
    assert len(asked) == 1
    choose(mask, 65536, heads=(32, 4))
    assert len(asked) == 2


def test_nothing_to_do():
    for is_deterministic in (False, True):
        options = AttnOptions(0.3, deterministic=is_deterministic)
        for queries, keys in ((0, 8192), (8192, 0), (8192, 8192)):
            assert select_schedule((queries, 64, 128), (keys, 8, 128), SliceTable([]), options, NUM_SMS) == NARROW


def test_steps_are_counted_once(monkeypatch):
    """By halves of the heads and by m-blocks of 80."""
    made, build = [], TilePlan.build
    monkeypatch.setattr(simulate.TilePlan, "build", lambda *a: made.append(a) or build(*a))
    mask = documents(2000, 4000)
    for is_deterministic in (False, True, True):
        choose(mask, 4000, is_deterministic=is_deterministic)
    assert len(made) == 1


def beside_remote(local: int, rows: list[list[int]], remote: int, heads=(64, 8)) -> list[BwdSchedule]:
    """Schedules of a rank with so many keys of others behind its own, by default and in deterministic order."""
    mask = RemoteMask(
        SliceTable(np.array(rows)), local, local, np.zeros(remote // TILE, dtype=np.int32), Pace(np.array([1e-3])), 0
    )
    shapes = (local, heads[0], 128), (local, heads[1], 128)
    options = [AttnOptions(0.3, deterministic=is_deterministic) for is_deterministic in (False, True)]
    return [select_schedule(*shapes, RemoteKeys(mask, b""), o, NUM_SMS) for o in options]


def test_keys_of_other_ranks_count():
    """A quarter of the keys is local: alone they would be few work tiles. Heads are never split there, nor are
    tiles, and no kernel lists work tiles."""
    long = [[0, 4096, 0, 4096, 1], [0, 4096, 4096, 16384, 0]]
    assert beside_remote(4096, long, 3 * 4096) == [WIDE, WIDE]
    uneven = [[a, a + 64, 1024 + 3 * a, 1024 + 3 * (a + 64), 0] for a in range(0, 1024, 64)]
    atomic, deterministic = beside_remote(1024, [[0, 1024, 0, 1024, 1], *uneven], 3 * 1024)
    assert atomic._replace(by_document=False) == first_writer(NARROW)
    assert deterministic._replace(by_document=False) == NARROW
    assert beside_remote(1024, [[0, 1024, 0, 1024, 1], *uneven], 1024, heads=(64, 4)) == [NARROW] * 2  # heads would be


def test_documents_beside_keys_of_other_ranks():
    """Halves of causal documents of 2,048: their first half is another rank's. As if all keys were local."""
    documents = [
        [[q, q + 1024, 8192 + q, 8192 + q + 1024, 0], [q, q + 1024, q, q + 1024, 1]] for q in range(0, 8192, 1024)
    ]
    rows = [row for pair in documents for row in pair]
    found = beside_remote(8192, rows, 8192)
    options = [AttnOptions(0.3, deterministic=is_deterministic) for is_deterministic in (False, True)]
    shapes = (8192, 64, 128), (16384, 8, 128)
    assert found == [select_schedule(*shapes, SliceTable(np.array(rows)), o, NUM_SMS) for o in options]
    assert found[0].first_writer and not found[0].direct_dq_store
