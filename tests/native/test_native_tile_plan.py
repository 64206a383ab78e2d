# SPDX-License-Identifier: Apache-2.0
"""Plans through Python: views, checks, errors, and the memo that lives with the mask."""

from __future__ import annotations

import numpy as np
import pytest

from magi_attention.common.mask import Mask
from magi_attention.common.slices import SliceTable, to_dense
from magi_attention.errors import ContractError, MagiError
from magi_attention.native.planner.tile_plan import TilePlan, plan_words

pytestmark = pytest.mark.usefixtures("planner")


def pairs(plan: TilePlan) -> np.ndarray:
    """How often the plan visits each pair."""
    header = plan.header
    seen = np.zeros((header.total_q, header.total_k), dtype=np.int64)
    for token0, count, begin, segments, *_ in plan.tiles.tolist():
        for record in plan.intervals[begin : begin + segments]:
            for i in range(count):
                seen[token0 + i, record[i, 0] : record[i, 1]] += 1
    return seen


@pytest.mark.parametrize("tile, groups", [(8, 2), (16, 2), (12, 3), (128, 2)])
def test_intervals_are_the_mask(tile, groups):
    q_ranges, k_ranges = [[0, 30], [5, 20], [30, 61]], [[0, 20], [30, 50], [10, 44]]
    mask = Mask.from_slices(q_ranges, k_ranges, ["causal", "full", "bi_causal"])
    plan = TilePlan.build(mask.slices, 61, 70, tile, groups)
    header = plan.header
    assert (header.total_q, header.total_k, header.num_tiles) == (61, 70, -(-61 // tile))
    assert len(plan.words) == header.words_total == plan_words(61, tile, header.num_segments)
    assert sorted(plan.order.tolist()) == list(range(header.num_tiles))
    assert np.array_equal(pairs(plan), to_dense(mask.slices.array, 61, 70))
    plan.check(mask.slices)
    with pytest.raises(MagiError):
        plan.check(Mask.full(61, 70).slices)
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
        assert np.array_equal(pairs(TilePlan.build(slices, 64, 64, 32, 2)), want), slices.tolist()


def test_wrong_sizes_are_sentences():
    with pytest.raises(ContractError, match=r"Slice 0 has k range \[0, 9\) with 8 rows"):
        TilePlan.build(Mask.causal(9).slices, 9, 8, 16, 2)
    with pytest.raises(ContractError, match=r"2\*\*31"):
        TilePlan.build(SliceTable([]), 2**31, 8, 16, 2)
    with pytest.raises(MagiError):
        TilePlan.build(Mask.causal(9).slices, 9, 9, 0, 2)
