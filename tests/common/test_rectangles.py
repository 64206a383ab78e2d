# SPDX-License-Identifier: Apache-2.0
"""Rectangles and AttnMask against dense boolean masks."""

import numpy as np
import pytest

from magi_attention.common import (
    AttnMask,
    AttnMaskType,
    AttnRange,
    AttnRanges,
    AttnRectangle,
    AttnRectangles,
    protocols,
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
                assert (pairs(rect) == dense).all()
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
        dense = pairs(rect)
        before = rect.clone()
        s = rect.to_slices()
        assert len(s) <= 3 and slices.first_overlap(s) is None
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
    rects.clear()
    assert rects.is_empty() and rects.is_valid()
    tall = AttnRectangles.from_ranges([(0, 5), (0, 0)], [(0, 3), (0, 3)], ["bi_causal", "full"])
    assert tall.is_empty(), "slices without pairs are dropped"
    with pytest.raises(ContractError, match="Slices 0 and 1"):
        AttnRectangles.from_ranges([(0, 5), (4, 6)], [(0, 3), (2, 3)], "full", check=True)


# ---- AttnMask ---------------------------------------------------------------------------------------


def attn_mask(table, total_q, total_k=None) -> AttnMask:
    s = table.array if hasattr(table, "array") else table
    q, k = AttnRanges.from_array(s[:, :2]), AttnRanges.from_array(s[:, 2:4])
    return AttnMask.from_ranges(
        q, k, [AttnMaskType.from_int_type(t) for t in s[:, 4]], total_q, total_k or total_q
    )


@pytest.mark.parametrize("seed", range(40))
def test_attn_mask_against_dense(seed):
    rng = np.random.default_rng(seed)
    tq, tk = (int(x) for x in rng.integers(1, 17, 2))
    s = masks.random_slices(rng, tq, tk)
    dense = slices.to_dense(s, tq, tk)
    mask = attn_mask(s, tq, tk)
    assert mask.mask_tensor.bool().numpy().tolist() == dense.tolist() and mask.area == dense.sum()
    again = AttnMask.from_mask(dense.astype(int))
    assert (again.mask_tensor.numpy() == dense).all() and again.area == mask.area
    assert [(*q, *k, t.to_int_type()) for q, k, t in mask.tuples()] == [tuple(r) for r in s.tolist()]
    q0, q1 = np.sort(rng.integers(0, tq + 1, 2)).tolist()
    k0, k1 = np.sort(rng.integers(0, tk + 1, 2)).tolist()
    window = AttnRange(q0, q1), AttnRange(k0, k1)
    sub = mask.make_sub_mask(*window)
    assert (sub.mask_tensor.numpy() == dense[q0:q1, k0:k1]).all()
    assert mask.calc_sub_area(*window) == sub.area == dense[q0:q1, k0:k1].sum()
    assert mask.is_empty() == (not dense.any()) and mask.is_pure_full() == dense.all()
    causal = np.tril(np.ones((tq, tk), bool), tk - tq)
    assert mask.is_pure_causal() == (dense == causal).all() and mask.is_square() == (tq == tk)
    varlen_full, varlen_causal = by_definition(dense)
    assert mask.is_varlen_full() == varlen_full and mask.is_varlen_causal() == varlen_causal


def by_definition(dense):
    """Is ``dense`` varlen full, varlen causal, for any cu_seqlens? By trying all of them."""
    tq, tk = dense.shape
    if tq != tk:
        return False, False
    i, j = np.arange(tq)[:, None], np.arange(tq)[None]
    full = causal = False
    for bits in range(1 << max(tq - 1, 0)) if tq <= 9 else ():
        doc = np.cumsum([0] + [bits >> n & 1 for n in range(tq - 1)])
        same = doc[:, None] == doc[None]
        full |= bool((dense == same).all())
        causal |= bool((dense == (same & (j <= i))).all())
    if tq > 9:
        doc = np.cumsum([0] + [int(not dense[n + 1, n]) for n in range(tq - 1)])
        same = doc[:, None] == doc[None]
        full, causal = bool((dense == same).all()), bool((dense == (same & (j <= i))).all())
    return full, causal


@pytest.mark.parametrize("seed", range(40))
def test_varlen_predicates_on_cut_up_masks(seed):
    """The answer depends on the pairs, not on how they are cut into slices."""
    rng = np.random.default_rng(seed)
    total = int(rng.integers(2, 16))
    cu = masks.random_cu_seqlens(rng, total, 4)
    kind = int(rng.integers(2))
    s = masks.varlen(cu, kind).array
    s = np.concatenate([slices.cut_q(s, 0, total // 2)[0], slices.cut_q(s, total // 2, total)[0]])
    s = np.concatenate([slices.cut_k(s, 0, total // 3)[0], slices.cut_k(s, total // 3, total)[0]])
    mask = attn_mask(s, total)
    full, causal = by_definition(slices.to_dense(s, total, total))
    assert (full, causal)[kind] and mask.is_varlen_full() == full and mask.is_varlen_causal() == causal
    if len(s) > 1:
        less = attn_mask(s[1:], total)
        assert (less.is_varlen_full(), less.is_varlen_causal()) == by_definition(less.mask_tensor.numpy() > 0)


def test_families_and_causal_matrix():
    families = masks.mask_families(24)
    named = {name: attn_mask(table, 24) for name, table in families.items()}
    assert named["full"].is_pure_full() and named["causal"].is_pure_causal()
    assert named["varlen_full"].is_varlen_full() and named["varlen_causal"].is_varlen_causal()
    assert named["diagonal"].is_varlen_full() and named["empty"].is_empty()
    assert not named["sliding_window"].is_varlen_causal() and not named["causal"].is_pure_full()
    make = AttnMask.make_causal_mask
    assert make(2, 3).tolist() == [[1, 1, 0], [1, 1, 1]]
    assert make(2, 3, "top-left").tolist() == [[1, 0, 0], [1, 1, 0]]
    assert make(3, 2).tolist() == [[0, 0], [1, 0], [1, 1]] and str(make(1, 1).dtype) == "torch.int32"
    with pytest.raises(ContractError, match="middle"):
        make(2, 2, "middle")


def test_attn_mask_rules():
    q, k = AttnRanges.from_ranges([(0, 4), (2, 6)]), AttnRanges.from_ranges([(0, 4), (0, 4)])
    with pytest.raises(ContractError, match="Slices 0 and 1"):
        AttnMask.from_ranges(q, k, [AttnMaskType.FULL] * 2)
    with pytest.raises(AssertionError, match="mask types"):
        AttnMask.from_ranges(q, k, [AttnMaskType.FULL])
    with pytest.raises(AssertionError, match="beyond"):
        AttnMask.from_ranges(q[:1], k[:1], "causal", total_seqlen_q=3)
    mask = AttnMask.from_ranges(q[:1], k[:1], "causal")
    same = AttnMask.from_ranges(q[:1], k[:1], [AttnMaskType.CAUSAL], 4, 4)
    assert mask == same and hash(mask) == hash(same) and mask.q_ranges == q[:1] and mask.k_ranges == k[:1]
    assert mask.attn_mask_type == [AttnMaskType.CAUSAL] and "area 10" in repr(mask)
