# SPDX-License-Identifier: Apache-2.0
"""Which CTA of ``csrc/ffa/sm90/bwd_prepare_listed.cuh`` prepares which block of queries, and when ``bwd_needed.cuh``
takes a block to be needed.

The models follow the CUDA code and do not show that it keeps to them; that is for
``tests/gpu/test_ffa_backward_split.py``.
"""

from __future__ import annotations

from collections import Counter

import numpy as np
import pytest

from magi_attention.testing.libraries import csrc_or_skip

GROUPS = (3, 2)  # of a CTA; for blocks of 64 queries, of 80


def test_the_constants_are_those_of_the_kernel():
    folder = csrc_or_skip() / "ffa" / "sm90"
    text = "".join((folder / name).read_text() for name in ("bwd_config.h", "bwd_prepare_listed.cuh"))
    narrow, wide = GROUPS
    assert f"int prepare_groups(int queries) {{ return queries == kQueryBlock ? {narrow} : {wide}; }}" in text
    assert "late_processors(int processors) { return processors < 8 ? 1 : processors / 8; }" in text


def late_processors(processors: int) -> int:
    return 1 if processors < 8 else processors // 8


def items_of_group(cta: int, group: int, groups: int, ctas: int, at_once: int, items: int) -> list[int]:
    """``RowGroup``: shares of what is needed at once, then in the first CTAs of the rest."""
    late = late_processors(ctas)

    def first_of_others() -> int:
        return at_once + cta * groups + group if cta < late else items

    def after(item: int) -> int:
        if item >= at_once:
            return item + late * groups
        step = ctas * groups
        return item + step if item + step < at_once else first_of_others()

    item, mine = cta * groups + group, []
    if item >= at_once:
        item = first_of_others()
    while item < items:
        mine.append(item)
        item = after(item)
    return mine


@pytest.mark.parametrize("groups", GROUPS)
def test_every_block_of_every_head_is_prepared_once(groups):
    for seed in range(200):
        print("seed", seed)
        rng = np.random.default_rng(seed)
        ctas, heads, blocks = int(rng.integers(1, 140)), int(rng.integers(1, 65)), int(rng.integers(1, 80))
        items = heads * blocks
        for at_once in {0, heads * int(rng.integers(0, blocks + 1)), items}:
            shares = [
                items_of_group(cta, g, groups, ctas, at_once, items) for cta in range(ctas) for g in range(groups)
            ]
            assert Counter(item for share in shares for item in share) == Counter(range(items))
            # What is needed at once comes first, and leaves the CTAs behind the first few.
            assert all(share == sorted(share) for share in shares)
            early = shares[late_processors(ctas) * groups :]
            assert all(item < at_once for share in early for item in share)


def walk(first: int, end: int, backwards: int) -> list[int]:
    """``BlockOrder``: so many from the end, backwards, and the rest forwards."""
    return [*range(end - 1, end - 1 - backwards, -1), *range(first, end - backwards)]


def test_a_block_is_needed_when_the_walk_comes_to_it():
    for first in range(6):
        for end in range(first + 1, first + 9):
            for backwards in {0, min(first, end - first), end - first}:
                order = walk(first, end, backwards)
                assert sorted(order) == list(range(first, end))
                for block in range(first, end):  # as find_needed counts
                    before = end - 1 - block if block >= end - backwards else backwards + block - first
                    assert order[before] == block
