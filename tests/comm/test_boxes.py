# SPDX-License-Identifier: Apache-2.0
"""How large the memory is that ranks share: what is needed at first, and a quarter more where it has to grow."""

from __future__ import annotations

import random
from types import SimpleNamespace

from magi_attention.comm.boxes import _GRAIN, BoxGroup


def sizes_made(wanted: list[int]) -> list[int]:
    """Of the boxes that a group makes for uses of so many bytes, one after the other."""
    group, made = object.__new__(BoxGroup), []
    group._boxes = {}
    group._make = lambda name, data_bytes: made.append(data_bytes) or SimpleNamespace(data_bytes=data_bytes)
    for needed in wanted:
        assert group.box("keys", needed).data_bytes >= needed
    return made


def test_one_size_is_made_as_it_is() -> None:
    assert sizes_made([5 * _GRAIN] * 9) == [5 * _GRAIN]
    assert sizes_made([5 * _GRAIN - 3, 4 * _GRAIN, 1]) == [5 * _GRAIN]


def test_growth_is_by_a_quarter_at_least() -> None:
    assert sizes_made([100 * _GRAIN, 101 * _GRAIN, 125 * _GRAIN, 126 * _GRAIN]) == [
        100 * _GRAIN, 125 * _GRAIN, (125 + 31) * _GRAIN + _GRAIN
    ]  # fmt: skip
    assert sizes_made([100 * _GRAIN, 300 * _GRAIN]) == [100 * _GRAIN, 300 * _GRAIN]


def test_masks_of_all_sizes_make_few_boxes() -> None:
    """All ranks wait for each, and keys that used the old ones hold them."""
    for seed in range(50):
        draw = random.Random(seed)
        made = sizes_made([int(draw.lognormvariate(4, 0.5) * _GRAIN) for _ in range(1000)])
        assert len(made) <= 9 and all(b >= a + a // 4 for a, b in zip(made, made[1:])), (seed, made)
