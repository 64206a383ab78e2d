# SPDX-License-Identifier: Apache-2.0
"""Which tile a forward takes, by the rows that the busiest SM works on."""

from __future__ import annotations

import random

from magi_attention.native.ffa import FfaTile, ForwardTiles


def busiest(tile: FfaTile, queries: int, heads: int, num_sms: int) -> int:
    """Rows of the SM that has most, where work tiles are dealt out one by one."""
    rows = [0] * num_sms
    for number in range(-(-queries // tile.tokens) * heads // tile.pack):
        rows[number % num_sms] += tile.tokens * tile.pack
    return max(rows)


def test_the_smaller_tile_where_it_takes_enough_less():
    chosen = set()
    for seed in range(300):
        rng = random.Random(seed)
        pack = rng.choice((1, 2, 8, 16))
        tiles = ForwardTiles(*(FfaTile(64 * groups // pack, groups, pack) for groups in (3, 2)))
        heads, num_sms = pack * rng.randint(1, 12), rng.choice((78, 114, 132))
        queries = rng.randint(1, 9000)
        many, few = (busiest(tile, queries, heads, num_sms) for tile in tiles)
        if few == 128 and -(-queries // tiles.few.tokens) * heads // pack < num_sms:
            continue  # parts of tiles, see below
        for is_even, enough in ((False, 0.85), (True, 0.94)):
            is_few = few <= enough * many
            chosen.add((is_even, is_few))
            assert tiles.of(queries, heads, num_sms, is_even) == (tiles.few if is_few else tiles.many), f"{seed=}"
    assert len(chosen) == 4


def test_few_tiles_are_split_and_one_tile_has_no_choice():
    tiles = ForwardTiles(FfaTile(192, 3, 1), FfaTile(128, 2, 1))
    assert tiles.of(8192, 1, 132) == tiles.many  # 43 tiles in three parts, or 64 in two
    assert tiles.of(8192, 2, 132) == tiles.few  # 86 whole ones, or 128
    assert tiles.of(2048, 64, 132) == tiles.many  # 6 rounds, or 8
    assert tiles.of(2048, 64, 132, is_even=True) == tiles.few
    assert ForwardTiles(tiles.many).of(8192, 2, 132) == tiles.many
