# SPDX-License-Identifier: Apache-2.0
"""Rectangles against dense boolean masks."""

import numpy as np
import pytest

from magi_attention.common import (
    AttnMaskType,
    AttnRange,
    AttnRanges,
    AttnRectangle,
    AttnRectangles,
    disjoint,
    protocols,
    rectangle,
    slices,
)
from magi_attention.errors import ContractError, RangeError
from magi_attention.testing import masks

Q, K = np.arange(16)[:, None], np.arange(16)[None]


def pairs(rect) -> np.ndarray:
    """The dense mask straight from the definition."""
    if rect is None:
        return np.zeros((16, 16), dtype=bool)
    inside = (Q >= rect.q_range.start) & (Q < rect.q_range.end)
    inside = inside & (K >= rect.k_range.start) & (K < rect.k_range.end)
    return inside & (K - Q >= rect.d_range.start) & (K - Q <= rect.d_range.end)


def random_rect(rng) -> AttnRectangle | None:
    q, k = np.sort(rng.integers(0, 13, 2)), np.sort(rng.integers(0, 13, 2))
    d = np.sort(rng.integers(-13, 14, 2))
    band = AttnRange(*d) if rng.random() < 0.6 else None
    try:
        return AttnRectangle(AttnRange(*q), AttnRange(*k), band, AttnMaskType.from_int_type(rng.integers(4)))
    except RangeError:
        return None


def test_mask_types_are_bands():
    for sq in range(1, 7):
        for sk in range(1, 10):
            for kind in range(4):
                ranges = AttnRange(2, 2 + sq), AttnRange(1, 1 + sk)
                row = np.array([[2, 2 + sq, 1, 1 + sk, kind]])
                dense = slices.to_dense(row, 16, 16)
                if not dense.any():
                    with pytest.raises(RangeError, match="holds no pair"):
                        AttnRectangle(*ranges, mask_type=kind)
                    continue
                rect = AttnRectangle(*ranges, mask_type=kind)
                assert (pairs(rect) == dense).all() and rect == AttnRectangle(*ranges, mask_type=AttnMaskType.of(kind))
                tests = (rect.is_full(), rect.is_causal(), rect.is_inv_causal(), rect.is_bi_causal())
                assert tests[kind]
                if sq > 1 and sk > sq:  # otherwise a shape may have two names
                    assert sum(tests) == 1
                    assert rect.to_slices().tolist() == row.tolist()


@pytest.mark.parametrize("seed", range(4))
def test_everything_against_dense(seed):
    rng = np.random.default_rng(seed)
    checked = 0
    while checked < 400:
        rect = random_rect(rng)
        if rect is None:
            continue
        checked += 1
        assert rect == rect.get_valid_or_none(), "the constructor leaves the tightest form"
        if rng.random() < 0.5:  # a setter takes any valid range
            rect.k_range = AttnRange(k := int(rng.integers(0, 12)), int(rng.integers(k + 1, 14)))
        dense = pairs(rect)
        before = rect.clone()
        s = rect.to_slices()
        assert len(s) <= 3 and disjoint.first_overlap(s) is None
        assert (slices.to_dense(s, 16, 16) == dense).all()
        assert rect.area() == dense.sum()
        assert rect.is_valid() == dense.any()
        tight = rect.get_valid_or_none()
        if not dense.any():
            assert tight is None
            with pytest.raises(ValueError):
                rect.check_valid()
        else:
            rows, keys = np.nonzero(dense)
            assert (pairs(tight) == dense).all()
            assert tight.q_range == AttnRange(rows.min(), rows.max() + 1)
            assert tight.k_range == AttnRange(keys.min(), keys.max() + 1)
            assert tight.d_range == AttnRange((keys - rows).min(), (keys - rows).max())
            left = tight.intersection_q_id_on_left_boundary()
            right = tight.intersection_q_id_on_right_boundary()
            for q in range(*tight.q_range):
                assert (np.flatnonzero(dense[q])[0] == tight.k_range.start) == (q <= left)
                assert (np.flatnonzero(dense[q])[-1] == tight.k_range.end - 1) == (q >= right)
        cut = int(rng.integers(0, 14))
        for axis, parts in ((Q, rect.cut_q(cut)), (K, rect.cut_k(cut))):
            assert (pairs(parts[0]) == (dense & (axis < cut))).all()
            assert (pairs(parts[1]) == (dense & (axis >= cut))).all()
            assert all(p is None or pairs(p).any() for p in parts)
        a, b = int(rng.integers(0, 14)), int(rng.integers(0, 14))
        assert (pairs(rect.get_rect_within_q_segment(a, b)) == (dense & (Q >= a) & (Q < b))).all()
        assert (pairs(rect.get_rect_within_k_segment(a, b)) == (dense & (K >= a) & (K < b))).all()
        assert rect == before and hash(rect) == hash(before), "these methods must not change the rectangle"


@pytest.mark.parametrize("seed", range(4))
def test_the_constructor_trims_to_what_holds_pairs(seed):
    rng = np.random.default_rng(seed)
    empty = 0
    for _ in range(400):
        q, k = (np.sort(rng.integers(0, 14, 2)) for _ in "qk")
        d = np.sort(rng.integers(-14, 15, 2))
        given = AttnRange(*q), AttnRange(*k), AttnRange(*d)
        inside = (Q >= q[0]) & (Q < q[1]) & (K >= k[0]) & (K < k[1]) & (K - Q >= d[0]) & (K - Q <= d[1])
        assert AttnRectangle.count_areas(*q.tolist(), *k.tolist(), *d.tolist()) == inside.sum()
        if not inside.any():
            empty += 1
            with pytest.raises(RangeError, match="holds no pair"):
                AttnRectangle(*given)
            continue
        rows, keys = np.nonzero(inside)
        rect = AttnRectangle(*given)
        assert rect.q_range == AttnRange(rows.min(), rows.max() + 1)
        assert rect.k_range == AttnRange(keys.min(), keys.max() + 1)
        assert rect.d_range == AttnRange((keys - rows).min(), (keys - rows).max())
        assert given == (AttnRange(*q), AttnRange(*k), AttnRange(*d)), "the ranges given are copied, not changed"
        assert len(rect) == 1 and rect.area() == inside.sum()
    assert 0 < empty < 400


def test_bounds_of_other_sizes_than_a_sequence_has():
    assert AttnRectangle.count_areas(4, 2, 0, 9, -9, 9) == AttnRectangle.count_areas(0, 2, 3, 3, -9, 9) == 0
    assert AttnRectangle.count_areas(0, 2, 0, 9, 3, 2) == 0
    n = 1 << 40
    assert AttnRectangle.count_areas(0, n, 0, n, -n, 0) == n * (n + 1) // 2
    wide = AttnRectangle(AttnRange(0, 4), AttnRange(0, 6), AttnRange(rectangle.INT_MIN, rectangle.INT_MAX))
    assert wide == AttnRectangle(AttnRange(0, 4), AttnRange(0, 6)) and wide.d_range == AttnRange(-3, 5)


def test_invalid_ranges_of_a_rectangle():
    rect = AttnRectangle(AttnRange(0, 10), AttnRange(0, 20), AttnRange(-5, 5))
    fine = rect.clone()
    bad = AttnRange(0, 1)
    bad.start, bad.end = 9, 3
    for name in ("q_range", "k_range", "d_range"):
        with pytest.raises(RangeError, match=name):
            setattr(rect, name, bad)
        assert not rect.is_valid(**{name: bad})
        with pytest.raises(RangeError, match="holds no pair"):
            rect.check_valid(**{name: bad})
        if name != "d_range":
            with pytest.raises(RangeError, match="start < end"):
                setattr(rect, name, AttnRange(4, 4))
    assert rect == fine and rect.is_valid(k_range=AttnRange(14, 30)) and not rect.is_valid(k_range=AttnRange(15, 30))
    given = AttnRange(2, 4)
    rect.q_range = given
    given.end = 3
    assert rect.q_range == AttnRange(2, 4)

    rect.q_range.start, rect.q_range.end = 10, 0
    assert not rect.is_valid() and rect.get_valid_or_none() is None
    rects = AttnRectangles()
    rects.append(rect)
    assert not rects.is_valid()
    uses = [
        *(rect.check_valid, rect.area, rect.to_slices, rect.shrink_q_range, rect.shrink_k_range, rect.shrink_d_range),
        *(lambda: rect.cut_q(3), lambda: rect.cut_k(3), lambda: rect.get_rect_within_q_segment(0, 4), rect.clone),
        *(lambda: rects.append(rect, check=True), lambda: rects.extend([rect], check=True), rects.check_valid),
        *(rects.area, rects.get_qo_ranges_union, rects.total_seqlen_qo, rects.to_slices, rect.to_qk_range_mask_type),
        *(rect.is_full, rect.is_causal, rect.is_inv_causal, rect.is_bi_causal),
        *(rect.intersection_q_id_on_left_boundary, rect.intersection_q_id_on_right_boundary),
    ]
    for use in uses:
        with pytest.raises(RangeError):
            use()


def test_shrinking_reports_emptiness():
    rect = AttnRectangle(AttnRange(0, 4), AttnRange(0, 4))
    rect.d_range = AttnRange(3, 3)
    assert rect.shrink_q_range() and rect.q_range == AttnRange(0, 1)
    assert rect.shrink_k_range() and rect.k_range == AttnRange(3, 4)
    rect.d_range = AttnRange(5, 9)
    before = rect.clone()
    assert not rect.shrink_q_range() and not rect.shrink_k_range() and not rect.shrink_d_range()
    assert rect == before
    assert "k - q in [5, 9]" in repr(rect) and isinstance(rect, protocols.AttnRectangleProtocol)


@pytest.mark.parametrize("seed", range(30))
def test_rectangles_from_slices(seed):
    rng = np.random.default_rng(seed)
    s = masks.random_slices(rng, 14, 15)
    dense = slices.to_dense(s, 16, 16)
    rects = AttnRectangles.from_ranges(s[:, :2].tolist(), s[:, 2:4].tolist(), s[:, 4].tolist(), check=True)
    assert rects.area() == dense.sum() and rects.size == len(rects) == (slices.areas(s) > 0).sum()
    assert (slices.to_dense(rects.to_slices(), 16, 16) == dense).all()
    cut = int(rng.integers(0, 16))
    for axis, (first, second) in ((Q, rects.cut_q(cut)), (K, rects.cut_k(cut))):
        assert (slices.to_dense(first.to_slices(), 16, 16) == (dense & (axis < cut))).all()
        assert (slices.to_dense(second.to_slices(), 16, 16) == (dense & (axis >= cut))).all()
    part = rects.get_rects_within_q_segment(2, 9).get_rects_within_k_segment(3, 12)
    assert part.area() == dense[2:9, 3:12].sum()
    live = slices.trim(s)
    assert rects.total_seqlen_qo() >= dense.any(1).sum()
    assert rects.get_kv_ranges_union() == AttnRanges.from_ranges(r.k_range for r in rects).merge()
    assert rects.total_seqlen_kv() <= 15 and len(live) == rects.size


def test_rectangles_container():
    rect = AttnRectangle(AttnRange(0, 3), AttnRange(0, 5))
    rects = AttnRectangles()
    rects.append(rect, check=True)
    rects.extend([rect.clone()])
    assert rects[0] is rect and rects[:1].size == 1 and rects == rects.clone() and not rects.is_empty()
    assert hash(rects) == hash(rects.clone()) and isinstance(rects, protocols.AttnRectanglesProtocol)
    rects.check_valid()
    other = AttnRectangle(AttnRange(4, 6), AttnRange(0, 5), mask_type="causal")
    rects[1] = other
    assert rects[1] is other and rects[0] is rect
    rects[0:2] = AttnRectangles._of([other, rect])
    assert list(rects) == [other, rect]
    with pytest.raises(ContractError, match="names 2 items"):
        rects[0:2] = AttnRectangles._of([rect])
    with pytest.raises(ContractError, match="no rectangle"):
        rects[0] = AttnRange(0, 1)
    assert rects.get_rects_within_q_segment(q_start=4, q_end=6).area() == other.area() == 9
    assert rects.get_rects_within_k_segment(k_start=4, k_end=9).area() == 4
    assert rect.get_rect_within_q_segment(q_start=1, q_end=2).area() == 5
    assert rect.get_rect_within_k_segment(k_start=1, k_end=2).area() == 3
    rects.clear()
    assert rects.is_empty() and rects.is_valid() and repr(rects) == "[-1, -1) x [-1, -1): None"
    tall = AttnRectangles.from_ranges([(0, 5), (0, 0)], [(0, 3), (0, 3)], ["bi_causal", "full"])
    assert tall.is_empty(), "slices without pairs are dropped"
    with pytest.raises(ContractError, match="Slices 0 and 1"):
        AttnRectangles.from_ranges([(0, 5), (4, 6)], [(0, 3), (2, 3)], "full", check=True)
