# SPDX-License-Identifier: Apache-2.0
"""Whether two slices share a pair: exact, found once for each mask, and asked before a plan is made."""

from __future__ import annotations

import numpy as np
import pytest

from magi_attention.api import Mask, make_plan
from magi_attention.common import disjoint
from magi_attention.common.disjoint import check_disjoint, first_overlap
from magi_attention.common.slices import BICAUSAL, CAUSAL, FULL, INVCAUSAL, SliceTable, to_dense
from magi_attention.errors import ContractError
from magi_attention.testing.masks import random_slices


def is_shared(slices: np.ndarray, total: int) -> bool:
    """Whether a pair is allowed twice, by counting."""
    return bool((sum((to_dense(row[None], total, total).astype(int) for row in slices), np.zeros(1)) > 1).any())


def some_slices(rng: np.random.Generator, total: int) -> np.ndarray:
    """Disjoint slices, those with one more, or slices anywhere."""
    kind = rng.integers(3)
    count = (0, 1, int(rng.integers(9)))[kind]
    ranges = np.sort(rng.integers(0, total + 1, (count, 2, 2)), axis=2).reshape(count, 4)
    anywhere = np.concatenate([ranges, rng.integers(0, 4, (count, 1))], axis=1)
    return anywhere if kind == 2 else rng.permutation(np.concatenate([random_slices(rng, total, total), anywhere]))


@pytest.mark.parametrize("few", [1, 4])
@pytest.mark.parametrize("seed", range(20))
def test_overlaps_are_found_exactly(seed, few, monkeypatch) -> None:
    print(f"seed {seed}")
    monkeypatch.setattr(disjoint, "_FEW", few)  # few slices take the way of many, too
    monkeypatch.setattr(disjoint, "_SMALL", 24 * (few > 1))
    rng, found = np.random.default_rng(seed), 0
    for _ in range(100):
        total = int(rng.integers(4, 26))
        slices = some_slices(rng, total)
        hit = first_overlap(slices)
        assert (hit is not None) == is_shared(slices, total), slices.tolist()
        if hit is not None:
            found += 1
            assert hit[0] < hit[1] and is_shared(slices[list(hit)], total), (slices.tolist(), hit)
    assert 10 < found < 90


def test_rectangles_may_meet_where_pairs_do_not() -> None:
    """Both sides of one diagonal, and a band of it."""
    below, on, above = [0, 8, 0, 8, CAUSAL], [0, 8, 0, 8, BICAUSAL], [0, 8, 0, 8, INVCAUSAL]
    beyond = [0, 7, 1, 8, INVCAUSAL]
    assert first_overlap(np.array([below, beyond])) is None
    assert first_overlap(np.array([on, beyond, [1, 8, 0, 7, CAUSAL]])) is None
    assert first_overlap(np.array([below, above])) == first_overlap(np.array([below, on])) == (0, 1)


def diagonals(count: int, width: int) -> np.ndarray:
    """Bands side by side, whose rectangles all meet."""
    start = np.arange(count) * width
    rows = np.zeros_like(start), np.full_like(start, count)
    return np.stack([*rows, start, start + count + width - 1, np.full_like(start, BICAUSAL)], axis=1)


def blocks_in_a_triangle(count: int) -> np.ndarray:
    begin = np.arange(count) * 10
    later = np.stack([begin, begin + 8, begin + 1, begin + 9, np.full_like(begin, INVCAUSAL)], axis=1)
    return np.concatenate([[[0, 10 * count, 0, 10 * count, CAUSAL]], later])


def same_queries(count: int) -> np.ndarray:
    begin, rows = np.arange(count) * 3, np.full(count, 0)
    return np.stack([rows, rows + 5, begin, begin + 3, rows], axis=1)


MANY = {"diagonals": diagonals(700, 3), "blocks": blocks_in_a_triangle(700), "same queries": same_queries(700)}


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize("slices", MANY.values(), ids=MANY)
def test_one_pair_among_many(slices, seed) -> None:
    """One key more of one slice is found, wherever the slice stands."""
    print(f"seed {seed}")
    rng = np.random.default_rng(seed)
    slices = rng.permutation(slices)
    assert first_overlap(slices) is None
    spoiled = slices.copy()
    at = int(rng.choice(np.flatnonzero(slices[:, 2] > 0)))  # not the first keys of all
    spoiled[at, 2] -= 1
    if spoiled[at, 4] == INVCAUSAL:
        spoiled[at, 1] += 1  # the diagonal moves, the last key stays
    hit = first_overlap(spoiled)
    assert hit is not None and at in hit


def random_constructions(rng: np.random.Generator) -> dict[str, Mask]:
    lengths = rng.integers(0, 9, int(rng.integers(1, 7))).tolist()
    cu, total = np.concatenate([[0], np.cumsum(lengths)]), sum(lengths)
    window = tuple(rng.integers(-1, 6, 2).tolist())
    blocks = [[a, a + 2] for a, b in zip(cu[:-1].tolist(), cu[1:].tolist()) if b - a > 2]
    pattern = rng.random((4, 5)) < 0.5
    masks = {
        "full": Mask.full(total, total + 3),
        "causal": Mask.causal(total, total + 2),
        "varlen": Mask.varlen(cu, causal=bool(rng.integers(2))),
        "window": Mask.varlen(cu, window=window, global_prefix=int(rng.integers(0, 4))),
        "block causal": Mask.block_causal(cu, int(rng.integers(1, 5))),
        "with blocks": Mask.causal_with_blocks(cu, blocks, window=(int(rng.integers(-1, 5)), 0)),
        "prefix lm": Mask.prefix_lm(cu, [int(rng.integers(0, n + 1)) for n in lengths]),
        "shared question": Mask.shared_question(cu),
        "prefix tree": Mask.prefix_tree(lengths, [int(rng.integers(-1, i)) for i in range(len(lengths))]),
        "block sparse": Mask.block_sparse(pattern, rng.integers(1, 4, 4), rng.integers(1, 4, 5)),
        "dense": Mask.from_dense(rng.random((7, 9)) < rng.random()),
    }
    return {**masks, "batched": Mask.batched(list(masks.values()))}


@pytest.mark.parametrize("seed", range(60))
def test_constructors_make_disjoint_slices(seed, monkeypatch) -> None:
    """So nobody looks again when they are planned."""
    print(f"seed {seed}")
    for name, mask in random_constructions(np.random.default_rng(seed)).items():
        assert first_overlap(mask.slices.array) is None, name
        monkeypatch.setattr(disjoint, "first_overlap", lambda _: pytest.fail("looked again"))
        assert mask.check() is mask
        monkeypatch.undo()


def test_a_mask_is_looked_at_once(monkeypatch) -> None:
    looked = []
    monkeypatch.setattr(disjoint, "first_overlap", lambda array: looked.append(1) or first_overlap(array))
    mask = Mask.from_slices([[0, 4], [4, 8]], [[0, 4], [0, 8]], ["causal", "full"])
    plan = make_plan(mask, 2)
    make_plan(mask, 1)
    plan.with_mask(mask)
    assert len(looked) == 1
    make_plan(Mask.from_slices([[0, 8]], [[0, 8]]), 1, check=False)
    assert len(looked) == 1


TWICE = [[0, 4], [2, 6]], [[0, 4], [3, 8]]


def test_plans_refuse_overlapping_slices() -> None:
    words = r"Slices 0 and 1 overlap: q \[0, 4\) x k \[0, 4\) type 0 and q \[2, 6\) .* cut one of the two"
    mask = Mask.from_slices(*TWICE, total_q=8, total_k=8)
    for _ in range(2):
        with pytest.raises(ContractError, match=words):
            make_plan(mask, 2)
        with pytest.raises(ContractError, match=words):
            make_plan(Mask.causal(8), 2).with_mask(mask)
    with pytest.raises(ContractError, match="Slices 1 and 2 overlap"):
        make_plan(Mask.batched([Mask.full(1), mask]), 1)
    assert make_plan(mask, 2, check=False).cp_size == 2


def test_slices_without_pairs_do_not_count() -> None:
    table = SliceTable(np.array([[0, 4, 0, 0, FULL], [0, 4, 0, 4, FULL], [3, 5, 3, 5, CAUSAL]]))
    with pytest.raises(ContractError, match="Slices 1 and 2 overlap"):
        check_disjoint(table)
    check_disjoint(SliceTable(np.array([[0, 4, 0, 4, FULL], [4, 5, 0, 4, FULL]])))
    check_disjoint(SliceTable(np.array([[0, 4, 0, 2, BICAUSAL], [0, 4, 0, 2, FULL]])))  # more queries than keys
