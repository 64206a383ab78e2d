# SPDX-License-Identifier: Apache-2.0
"""AttnMask against dense boolean masks."""

import numpy as np
import pytest

from magi_attention.common import AttnMask, AttnMaskType, AttnRange, AttnRanges, slices
from magi_attention.compat.values.rows import RowIntervals
from magi_attention.errors import ContractError
from magi_attention.testing import masks


def attn_mask(table, total_q, total_k=None) -> AttnMask:
    s = table.array if hasattr(table, "array") else table
    q, k = AttnRanges.from_array(s[:, :2]), AttnRanges.from_array(s[:, 2:4])
    return AttnMask.from_ranges(q, k, [AttnMaskType.from_int_type(t) for t in s[:, 4]], total_q, total_k or total_q)


@pytest.mark.parametrize("seed", range(40))
def test_attn_mask_against_dense(seed):
    rng = np.random.default_rng(seed)
    tq, tk = (int(x) for x in rng.integers(1, 8, 2))
    s = masks.random_slices(rng, tq, tk)
    dense = slices.to_dense(s, tq, tk)
    mask = attn_mask(s, tq, tk)
    assert mask.mask_flag_array.tolist() == dense.astype(int).tolist() and mask.area == dense.sum()
    assert mask.mask_tensor[..., AttnMask.mask_flag_dim_idx].numpy().tolist() == mask.mask_flag_array.tolist()
    assert (
        mask.mask_tensor.shape == (tq, tk, AttnMask.meta_info_dim_size)
        and mask.mask_tensor.device.type == AttnMask.device
    )
    again = AttnMask.from_mask(dense.astype(int))
    assert (again.mask_flag_array == dense).all() and again.area == mask.area
    assert [(*q, *k, t.to_int_type()) for q, k, t in mask.tuples()] == [tuple(r) for r in s.tolist()]
    q0, q1 = np.sort(rng.integers(0, tq + 1, 2)).tolist()
    k0, k1 = np.sort(rng.integers(0, tk + 1, 2)).tolist()
    window = AttnRange(q0, q1), AttnRange(k0, k1)
    sub = mask.make_sub_mask(*window)
    assert (sub.mask_flag_array == dense[q0:q1, k0:k1]).all()
    assert sub.q_ranges.is_sorted() or not sub.attn_mask_type
    assert mask.calc_sub_area(*window) == sub.area == dense[q0:q1, k0:k1].sum()
    assert mask.is_empty() == (not dense.any()) and mask.is_pure_full() == dense.all()
    causal = np.tril(np.ones((tq, tk), bool), tk - tq)
    assert mask.is_pure_causal() == (dense == causal).all() and mask.is_square() == (tq == tk)
    varlen_full, varlen_causal = by_definition(dense)
    assert mask.is_varlen_full() == varlen_full and mask.is_varlen_causal() == varlen_causal


def cuts(total):
    """All cu_seqlens of ``total`` tokens, by the number of documents."""
    found: dict[int, list[list[int]]] = {}
    for bits in range(1 << max(total - 1, 0)):
        cu = [0, *(n + 1 for n in range(total - 1) if bits >> n & 1), *([total] if total else [])]
        found.setdefault(len(cu), []).append(cu)
    return found


def by_definition(dense):
    """Is ``dense`` varlen full, varlen causal, for any cu_seqlens of q and of k? By trying all of them."""
    tq, tk = dense.shape
    by_q, by_k = cuts(tq), cuts(tk)
    full = causal = False
    for count in by_q.keys() & by_k.keys():
        for cu_q in by_q[count]:
            for cu_k in by_k[count]:
                whole, lower = np.zeros((tq, tk), bool), np.zeros((tq, tk), bool)
                for q0, q1, k0, k1 in zip(cu_q, cu_q[1:], cu_k, cu_k[1:]):
                    whole[q0:q1, k0:k1] = True
                    lower[q0:q1, k0:k1] = np.tril(np.ones((q1 - q0, k1 - k0), bool), (k1 - k0) - (q1 - q0))
                full |= bool((dense == whole).all())
                causal |= bool((dense == lower).all())
    return full, causal


@pytest.mark.parametrize("seed", range(60))
def test_varlen_predicates_on_cut_up_masks(seed):
    """The answer depends on the pairs, not on how they are cut into slices."""
    rng = np.random.default_rng(seed)
    tq, tk = (int(x) for x in rng.integers(2, 8, 2))
    count = int(rng.integers(1, min(tq, tk) + 1))
    cu_q, cu_k = ([0, *np.sort(rng.choice(np.arange(1, t), count - 1, replace=False)).tolist(), t] for t in (tq, tk))
    kind = int(rng.integers(2))
    s = np.array([[*q, *k, kind] for q, k in zip(zip(cu_q, cu_q[1:]), zip(cu_k, cu_k[1:]))])
    s = slices.trim(s)
    s = np.concatenate([slices.cut_q(s, 0, tq // 2)[0], slices.cut_q(s, tq // 2, tq)[0]])
    s = np.concatenate([slices.cut_k(s, 0, tk // 3)[0], slices.cut_k(s, tk // 3, tk)[0]])
    mask = attn_mask(s, tq, tk)
    full, causal = by_definition(slices.to_dense(s, tq, tk))
    assert (full, causal)[kind] and mask.is_varlen_full() == full and mask.is_varlen_causal() == causal
    if len(s) > 1:
        less = attn_mask(s[1:], tq, tk)
        assert (less.is_varlen_full(), less.is_varlen_causal()) == by_definition(less.mask_flag_array > 0)


def random_stack(rng, total_k):
    """Slices FULL and CAUSAL one below the other, some of whose rows see nothing: ``(slices, total_q)``."""
    rows, q = [], 0
    for _ in range(int(rng.integers(1, 6))):
        length, k0 = int(rng.integers(1, 5)), int(rng.integers(0, total_k))
        rows.append([q, q + length, k0, int(rng.integers(k0, total_k + 1)), int(rng.integers(2))])
        q += length
    return np.array(rows), q


@pytest.mark.parametrize("seed", range(60))
def test_reading_of_a_mask_whose_rows_are_intervals(seed):
    """Every row is in one slice, rows ascend, types are FULL and CAUSAL, and no two neighbours are one slice."""
    rng = np.random.default_rng(seed)
    s, total_q = random_stack(rng, 6)
    dense = slices.to_dense(s, total_q, 6)
    mask = AttnMask.from_mask(dense.astype(int))
    found = mask.slices.array
    assert (slices.to_dense(found, total_q, 6) == dense).all() and mask == AttnMask.from_mask(dense)
    assert found[:, 0].tolist() == [0, *found[:-1, 1].tolist()] and found[-1, 1] == total_q
    assert set(found[:, 4].tolist()) <= {slices.FULL, slices.CAUSAL}
    for a, b in zip(found[:-1], found[1:]):
        both = dense[a[0] : b[1]]
        for kind in (slices.FULL, slices.CAUSAL):
            for k0, k1 in {(a[2], a[3]), (b[2], b[3]), (a[2], b[3])}:
                if k0 < k1:
                    joined = slices.to_dense(np.array([[0, len(both), k0, k1, kind]]), len(both), 6)
                    assert not (joined == both).all(), (a, b)
    # From slices and from the matrix the same, whatever the slices.
    pieces = np.concatenate([slices.cut_k(slices.trim(s), 0, 3)[0], slices.cut_k(slices.trim(s), 3, 6)[0]])
    assert (RowIntervals.of_slices(pieces, total_q, 6).to_slices() == found).all()
    whole = attn_mask(s, total_q, 6).make_sub_mask(AttnRange(0, total_q), AttnRange(0, 6))
    assert whole == mask, "a window is read as the matrix of the window is"


def test_reading_by_hand():
    rows = ["000", "100", "110", "110", "111", "000", "001", "001", "011"]
    mask = AttnMask.from_mask([[int(c) for c in row] for row in rows])
    F, C = AttnMaskType.FULL, AttnMaskType.CAUSAL
    assert mask.q_ranges.to_naive_ranges() == [(0, 3), (3, 5), (5, 7), (7, 8), (8, 9)]
    assert mask.k_ranges.to_naive_ranges() == [(0, 2), (0, 3), (2, 3), (2, 3), (1, 3)]
    assert mask.attn_mask_type == [C, C, C, F, F]
    nothing = AttnMask.from_mask([[1], [0], [0]])
    assert nothing.k_ranges.to_naive_ranges() == [(0, 1), (1, 1)] and nothing.attn_mask_type == [F, C]
    assert AttnMask.from_mask(np.zeros((0, 3))).is_empty() and AttnMask.from_mask(np.zeros((2, 0))).is_empty()
    split = AttnMask.from_mask([[1, 0, 1], [0, 1, 0]])  # keys of a row need not be one interval
    assert split.mask_flag_array.tolist() == [[1, 0, 1], [0, 1, 0]] and split.area == 3


def test_causal_matrix():
    make = AttnMask.make_causal_mask
    assert make(2, 3).tolist() == [[1, 1, 0], [1, 1, 1]]
    assert make(2, 3, "top-left").tolist() == [[1, 0, 0], [1, 1, 0]]
    assert make(3, 2).tolist() == [[0, 0], [1, 0], [1, 1]] and str(make(1, 1).dtype) == "torch.int32"
    with pytest.raises(ContractError, match="Invalid alignment 'middle'"):
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
    for window in ((AttnRange(0, 5), AttnRange(0, 4)), (AttnRange(0, 4), AttnRange(-1, 4))):
        with pytest.raises(AssertionError, match="leaves the mask"):
            mask.make_sub_mask(*window)
    with pytest.raises(RuntimeError, match="from_ranges"):
        AttnMask(mask_tensor=mask.mask_tensor, q_ranges=q, k_ranges=k)
