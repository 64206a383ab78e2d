# SPDX-License-Identifier: Apache-2.0
"""Masks at the edge of what int64 counts: right below it, refused by a sentence above it."""

from __future__ import annotations

import random

import numpy as np
import pytest

from magi_attention.api import Mask, make_plan
from magi_attention.common.slices import (
    BICAUSAL,
    CAUSAL,
    FULL,
    INVCAUSAL,
    MOST_PAIRS,
    SliceTable,
    areas,
    check_countable,
)
from magi_attention.errors import ContractError
from magi_attention.meta.explain import explain
from magi_attention.meta.planner import build_plan


def exact_area(sq: int, sk: int, kind: int) -> int:
    """Allowed pairs in Python's integers: a rectangle, a parallelogram or an arithmetic series of rows."""
    if kind == FULL:
        return sq * sk
    if kind == BICAUSAL:
        return sq * (sk - sq + 1) if sk >= sq else 0
    first, rows = max(sk - sq, 0) + 1, min(sq, sk)
    return rows * (first + sk) // 2


def side(kind: int) -> int:
    """The longest square slice of a type whose pairs are fewer than can be counted."""
    low, high = 1, 1 << 61
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if exact_area(middle, middle, kind) < MOST_PAIRS else (low, middle)
    return low


@pytest.mark.parametrize("kind", [FULL, CAUSAL, INVCAUSAL])
def test_the_bound(kind):
    longest = side(kind)
    assert longest == (2**31 - 1 if kind == FULL else 3_037_000_499)
    table = SliceTable(np.array([[0, longest, 0, longest, kind]]))
    assert Mask(table, longest, longest).area == exact_area(longest, longest, kind)
    table = SliceTable(np.array([[0, longest + 1, 0, longest + 1, kind]]))
    with pytest.raises(ContractError, match="can be counted; shorten"):
        Mask(table, longest + 1, longest + 1)
    with pytest.raises(ContractError, match="can be counted; shorten"):
        build_plan(table, longest + 1, 8)


@pytest.mark.parametrize("seed", range(20))
def test_random_slices_are_counted_exactly_or_refused(seed):
    print(f"seed {seed}")
    rng = random.Random(seed)
    kind = rng.choice([FULL, CAUSAL, INVCAUSAL, BICAUSAL])
    sq, sk = (rng.randrange(1, 1 << rng.randrange(20, 60)) for _ in "qk")
    array, exact = np.array([[0, sq, 0, sk, kind]]), exact_area(sq, sk, kind)
    if exact < MOST_PAIRS * 0.999:
        check_countable(array, sq, sk)
        assert int(areas(array).sum()) == exact
    elif exact > MOST_PAIRS * 1.001:
        with pytest.raises(ContractError, match="can be counted"):
            check_countable(array, sq, sk)
    assert float(areas(array, np.float64)[0]) == pytest.approx(exact, rel=1e-9)


def test_masks_and_plans_of_too_many_pairs():
    for make in (lambda: Mask.causal(2**32), lambda: Mask.full(2**32), lambda: Mask.varlen([0, 2**32], causal=True)):
        with pytest.raises(ContractError, match="can be counted"):
            make()
    with pytest.raises(ContractError, match="beyond 64 bits"):
        Mask.full(2**64)
    with pytest.raises(ContractError, match="fewer than 2\\*\\*60"):
        Mask.from_slices([[0, 5]], [[0, 5]], total_q=2**70, total_k=5)


def test_a_long_window_is_planned():
    """Few pairs in a long sequence: planned right, and refused only where kernels would read positions."""
    total, window = 2**33, 4095
    mask = Mask.sliding_window(total, (window, 0))
    assert mask.area == total * (window + 1) - window * (window + 1) // 2
    assert explain(make_plan(mask, 8))["area"] == mask.area
    with pytest.raises(ContractError, match="kernels take positions up to 2,147,483,647"):
        mask.slices.tensors()
