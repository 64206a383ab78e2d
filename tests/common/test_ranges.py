# SPDX-License-Identifier: Apache-2.0
"""AttnRange and AttnRanges against sets of integers."""

import pickle
from functools import partial

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from magi_attention.api.keys.helpers import infer_attn_mask_from_sliding_window
from magi_attention.common import AttnMask, AttnRange, AttnRanges, AttnRectangle, AttnRectangles, protocols
from magi_attention.common.mask import Mask
from magi_attention.common.ranges import check_valid_cu_seqlens, is_valid_cu_seqlens
from magi_attention.common.slices import SliceTable
from magi_attention.compat.metas.builders import slice_table
from magi_attention.errors import ContractError, RangeError
from magi_attention.magi_attn_ext import GroupCastRanges, expand_attn_ranges
from magi_attention.meta.solver.affinity import IOUAffinity

PAIRS = st.tuples(st.integers(0, 24), st.integers(0, 8)).map(lambda p: (p[0], p[0] + p[1]))
RANGES = st.lists(PAIRS, max_size=7)
FAST = settings(deadline=None, max_examples=150, print_blob=True)


def points(ranges) -> set[int]:
    return {x for start, end in ranges for x in range(start, end)}


def merged(values: set[int]) -> list[tuple[int, int]]:
    """The least list of half-open ranges over ``values``, by walking the integers."""
    out: list[tuple[int, int]] = []
    for x in sorted(values):
        if out and out[-1][1] == x:
            out[-1] = (out[-1][0], x + 1)
        else:
            out.append((x, x + 1))
    return out


def make(pairs) -> AttnRanges:
    return AttnRanges.from_ranges(pairs)


# ---- one range --------------------------------------------------------------------------------------


@FAST
@given(PAIRS, PAIRS)
def test_range_algebra(x, y):
    a, b = AttnRange(*x), AttnRange(*y)
    pa, pb = points([x]), points([y])
    assert points([a.intersect(b)]) == pa & pb and a.intersect_size(b) == len(pa & pb)
    union = [r.to_naive_range() for r in a.union(b)]
    assert points(union) == pa | pb and union == (merged(pa | pb) if pa & pb else [x, y])
    assert a.union_size(b) == len(pa | pb)
    assert [r.to_naive_range() for r in a.diff_by(b)] == merged(pb - pa)
    assert a.is_overlap_with(b) == bool(pa & pb)
    assert (not pa or a.is_subrange_of(b) == (pa <= pb)) and a.is_subrange_of(a)
    assert a.is_empty() == (not pa) and len(a) == a.seqlen == len(pa)
    assert points([a.truncate(*y)]) == pa & pb
    assert points([a.truncate(end=y[0])]) == {p for p in pa if p < y[0]}
    assert points([a.truncate(start=y[0])]) == {p for p in pa if p >= y[0]}
    assert points([a.offset(3)]) == {p + 3 for p in pa}
    assert (a == b) == (x == y) and (a != b or hash(a) == hash(b))
    assert (a.to_naive_range(), b.to_naive_range()) == (x, y)  # nothing was changed


def test_range_basics():
    r = AttnRange(2, 5)
    assert repr(r) == "[2, 5)" and tuple(r) == (2, 5) and r.clone() == r and r.clone() is not r
    assert AttnRange.from_range([2, 5]) == AttnRange.from_range(r, check=True) == r
    assert AttnRange.from_range(r) is not r and pickle.loads(pickle.dumps(r)) == r
    r.end = 9
    r.start = 9
    assert r.is_empty() and r.is_valid_close() and not r.is_valid_open() and r
    assert r.is_valid_close(3, 3) and not r.is_valid_close(4, 3) and r.is_valid_open(3, 4)
    assert AttnRange(0, 1) != (0, 1) and isinstance(r, protocols.AttnRangeProtocol)


@FAST
@given(PAIRS, PAIRS, st.booleans())
def test_a_range_moves_in_place_in_either_order(x, y, start_first):
    r = AttnRange(*x)
    for name, value in zip(("start", "end") if start_first else ("end", "start"), y if start_first else y[::-1]):
        setattr(r, name, value)
        assert getattr(r, name) == value and r.is_valid_close() == (r.start <= r.end)
    assert r == AttnRange(*y) and len(r) == y[1] - y[0]
    for value in (1.5, True, "1", None):
        for use in (
            lambda v: AttnRange(v, 9),
            lambda v: AttnRange(0, v),
            *(partial(setattr, r, n) for n in ("start", "end")),
        ):
            with pytest.raises(ContractError, match="give an integer"):
                use(value)
    for use in (lambda rows: SliceTable.from_ranges(rows, [(0, 1)]), IOUAffinity):
        with pytest.raises(ContractError, match="floats, such as 1.5"):
            use([(0, 1.5)])
    r.end = np.int32(99)
    assert type(r.end) is int and r == AttnRange(r.start, torch.tensor(99))


def invalid() -> AttnRange:
    r = AttnRange(0, 10)
    r.start = 20
    return r


OTHER = AttnRange(3, 30)
RANGE_USES = {
    "seqlen": lambda r: r.seqlen,
    "len": len,
    "is_empty": lambda r: r.is_empty(),
    "naive": lambda r: r.to_naive_range(),
    "unpack": list,
    "clone": lambda r: r.clone(),
    "from_range": AttnRange.from_range,
    "offset": lambda r: r.offset(1),
    "truncate": lambda r: r.truncate(0, 40),
    "intersect": lambda r: r.intersect(OTHER),
    "intersect_by": lambda r: OTHER.intersect(r),
    "union": lambda r: r.union(OTHER),
    "union_by": lambda r: OTHER.union(r),
    "union_size": lambda r: r.union_size(OTHER),
    "diff_by": lambda r: r.diff_by(OTHER),
    "diff_of": lambda r: OTHER.diff_by(r),
    "subrange": lambda r: r.is_subrange_of(OTHER),
    "subrange_of": lambda r: OTHER.is_subrange_of(r),
    "overlap": lambda r: r.is_overlap_with(OTHER),
    "check_valid": lambda r: r.check_valid(),
    "append": lambda r: AttnRanges().append(r, check=True),
    "insert": lambda r: AttnRanges().insert(0, r, check=True),
    "extend": lambda r: AttnRanges().extend([r], check=True),
    "from_ranges": lambda r: AttnRanges.from_ranges([r]),
    "rectangle": lambda r: AttnRectangle(r, OTHER),
    "rectangle_k": lambda r: AttnRectangle(OTHER, r),
    "rectangle_d": lambda r: AttnRectangle(OTHER, OTHER, r),
    "rectangles": lambda r: AttnRectangles.from_ranges([r], [OTHER], "full"),
    "slices": lambda r: SliceTable.from_ranges([OTHER], [r]),
    "mask": lambda r: Mask.from_slices([r], [OTHER]),
    "window": lambda r: infer_attn_mask_from_sliding_window(r, OTHER, (2, 0)),
    "sub_mask": lambda r: AttnMask.from_mask(np.tri(40, dtype=bool)).make_sub_mask(r, OTHER),
    "sub_area": lambda r: AttnMask.from_mask(np.tri(40, dtype=bool)).calc_sub_area(OTHER, r),
    "pickle": lambda r: pickle.loads(pickle.dumps(r)),
}
LIST_USES = {
    **{
        name: lambda rs, name=name: getattr(rs, name)()
        for name in (
            *("clone", "check_valid", "clear_empty", "sort", "merge", "merge_with_split_alignment", "to_array"),
            *("truncate", "is_sorted", "is_merged", "is_non_overlap", "intersect_size", "union_size", "to_tensor"),
            "to_naive_ranges",
        )
    },
    **{
        name: lambda rs, name=name: getattr(rs, name)
        for name in ("total_seqlen", "max_seqlen", "start", "end", "points")
    },
    "chunk": lambda rs: rs.chunk(4),
    "chunk_unchecked": lambda rs: rs.chunk(4, check=False),
    "is_cu_seqlens": lambda rs: rs.is_cu_seqlens(10),
    "to_cu_seqlens": lambda rs: rs.to_cu_seqlens(10),
    "make_range_local": lambda rs: rs.make_range_local(OTHER),
    "make_ranges_local": lambda rs: rs.make_ranges_local(make([(3, 4)])),
    "made_local": lambda rs: make([(0, 40)]).make_ranges_local(rs),
    "holes": lambda rs: rs.find_hole_ranges(make([(3, 4)])),
    "holes_of": lambda rs: make([(3, 4)]).find_hole_ranges(rs),
    "overlap": lambda rs: rs.find_overlap_ranges(make([(3, 4)])),
    "overlap_of": lambda rs: make([(3, 4)]).intersect_size_with(rs),
    "union_of": lambda rs: make([(3, 4)]).union_size_with(rs),
    "key": lambda rs: slice_table(rs, make([(0, 4)]), "full"),
    "group_cast": lambda rs: GroupCastRanges(1, [rs]),
    "expand": lambda rs: expand_attn_ranges(rs, 4, 2),
    "affinity": IOUAffinity.from_ranges,
}


@pytest.mark.parametrize("use", RANGE_USES.values(), ids=RANGE_USES)
def test_an_invalid_range_is_refused_where_it_is_used(use):
    r = invalid()
    assert not r.is_valid_close() and not r.is_valid_open() and repr(r) == "[20, 10)" and r == invalid()
    with pytest.raises(RangeError, match=r"\[20, 10\)|start <= end"):
        use(r)


@pytest.mark.parametrize("use", LIST_USES.values(), ids=LIST_USES)
def test_a_list_with_an_invalid_range_is_refused_where_it_is_used(use):
    rs = AttnRanges()
    rs.append(invalid())
    assert not rs.is_valid() and len(rs) == 1
    with pytest.raises(RangeError, match="start <= end"):
        use(rs)


@pytest.mark.parametrize(
    "make_bad",
    [
        lambda: AttnRange(3, 2),
        lambda: AttnRange.from_range((3, 2)),
        lambda: AttnRange(0, 9).truncate(4, 3),
        lambda: AttnRange(0, 9).check_valid(4, 3),
    ],
)
def test_malformed_ranges(make_bad):
    with pytest.raises(RangeError, match="start <= end"):
        make_bad()


# ---- many ranges ------------------------------------------------------------------------------------


@FAST
@given(RANGES, RANGES)
def test_set_algebra(x, y):
    a, b = make(x), make(y)
    pa, pb = points(x), points(y)
    assert a.merge().to_naive_ranges() == merged(pa) and a.merge().is_merged()
    assert a.find_hole_ranges(b).to_naive_ranges() == merged(pa - pb)
    assert a.find_overlap_ranges(b).to_naive_ranges() == merged(pa & pb)
    assert a.merge().find_hole_ranges(b.merge(), True, True).to_naive_ranges() == merged(pa - pb)
    assert a.union_size() == len(pa) and a.union_size_with(b) == len(pa | pb)
    assert a.intersect_size_with(b) == len(pa & pb)
    assert a.intersect_size() == sum(e - s for s, e in x) - len(pa)
    assert a.is_non_overlap() == (a.total_seqlen == len(pa))
    assert a.to_naive_ranges() == x and b.to_naive_ranges() == y  # nothing was changed


@FAST
@given(RANGES, st.integers(1, 7), st.integers(0, 30), st.integers(0, 12))
def test_normal_forms(x, size, low, span):
    a = make(x)
    assert a.sort().to_naive_ranges() == sorted(x) and a.sort().is_sorted()
    assert a.is_sorted() == (x == sorted(x))
    assert a.is_merged() == (x == merged(points(x)))
    assert a.clear_empty().to_naive_ranges() == [r for r in x if r[0] < r[1]]
    aligned = {p for s, e in x if s < e for p in range(s // size * size, -(-e // size) * size)}
    assert a.merge_with_split_alignment(size).to_naive_ranges() == merged(aligned)
    window = set(range(low, low + span))
    cut = a.truncate(low, low + span)
    assert points(cut) == points(x) & window and not any(r.is_empty() for r in cut)
    lengths = [e - s for s, e in x]
    assert a.total_seqlen == sum(lengths) and a.max_seqlen == max(lengths, default=0)
    assert a.points == sorted({b for r in x for b in r}) and a.size == len(a) == len(x)
    order = [p for s, e in x for p in range(s, e)]
    chunks = a.chunk(size, check=False)
    assert [[p for r in c for p in range(*r)] for c in chunks] == [
        order[i : i + size] for i in range(0, len(order), size)
    ]
    assert a.to_naive_ranges() == x


@FAST
@given(RANGES)
def test_local_coordinates(x):
    a = make(x)
    packed = [p for s, e in merged(points(x)) for p in range(s, e)]
    whole = a.merge()
    for start, end in [(s, e) for s, e in x if s < e]:
        local, cover = a.make_range_local(AttnRange(start, end))
        assert packed[local.start : local.end] == list(range(start, end))
        assert cover in list(whole) and start >= cover.start and end <= cover.end
        assert whole.make_range_local(AttnRange(start, end), is_self_merged=True) == (local, cover)
    inside = make([r for r in x if r[0] < r[1]])
    many = a.make_ranges_local(inside)
    assert list(many) == [a.make_range_local(r)[0] for r in inside]


def test_local_coordinates_of_foreign_ranges():
    a = make([(0, 4), (8, 10)])
    for bad in [(3, 5), (4, 8), (10, 11), (2, 9)]:
        with pytest.raises(ValueError, match="not inside"):
            a.make_range_local(AttnRange(*bad))
    assert a.make_range_local(AttnRange(8, 9), True, prefix_offset=[0, 100])[0] == AttnRange(100, 101)
    assert a.make_range_local(other_attn_range=AttnRange(8, 9))[0] == AttnRange(4, 5)


def test_published_vectors():
    holes = make([(0, 10), (15, 20), (20, 30)]).find_hole_ranges(make([(5, 10), (25, 30)]))
    assert holes.to_naive_ranges() == [(0, 5), (15, 25)]
    overlap = make([(0, 10), (15, 20), (25, 30)]).find_overlap_ranges(make([(5, 10), (18, 30)]))
    assert overlap.to_naive_ranges() == [(5, 10), (18, 20), (25, 30)]


def test_chunk_checks():
    with pytest.raises(AssertionError, match="overlap"):
        make([(0, 4), (2, 6)]).chunk(2)
    with pytest.raises(ContractError, match="at least 1"):
        make([(0, 4)]).chunk(0)
    with pytest.raises(ContractError, match="at least 1"):
        make([(0, 4)]).merge_with_split_alignment(0)
    chunks = make([(4, 7), (0, 2)]).chunk(2)
    assert [c.to_naive_ranges() for c in chunks] == [[(4, 6)], [(6, 7), (0, 1)], [(1, 2)]]


def test_cu_seqlens():
    a = AttnRanges.from_cu_seqlens([0, 3, 5], 5)
    assert a.to_naive_ranges() == [(0, 3), (3, 5)] and a.to_cu_seqlens(5) == [0, 3, 5]
    assert a.is_cu_seqlens(5) and not a.is_cu_seqlens(6) and not make([(1, 5)]).is_cu_seqlens(5)
    assert not make([(0, 3), (4, 5)]).is_cu_seqlens(5) and AttnRanges().is_cu_seqlens(0)
    assert is_valid_cu_seqlens([0, 2], 2) and not is_valid_cu_seqlens([0, 2, 2], 2)
    assert not is_valid_cu_seqlens([1, 2], 2) and not is_valid_cu_seqlens([0, 2], 3)
    assert is_valid_cu_seqlens([], 0) and is_valid_cu_seqlens([], 1)
    assert AttnRanges.from_cu_seqlens([], 7).is_empty() and AttnRanges.from_cu_seqlens([0], 0).is_empty()
    check_valid_cu_seqlens([0, 2], 2)
    for bad in (lambda: check_valid_cu_seqlens([0, 2], 3), lambda: a.to_cu_seqlens(9)):
        with pytest.raises(ValueError):
            bad()


def test_container():
    a = AttnRanges()
    assert repr(a) == "[[,)]" and a.is_empty() and a.is_valid()
    for what in ("start", "end"):
        with pytest.raises(ValueError, match=what):
            getattr(a, what)
    a.append(AttnRange(4, 6), check=True)
    a.insert(0, (0, 2))
    a.extend(make([(9, 9), (7, 8)]), check=True)
    assert repr(a) == "[[0, 2), [4, 6), [9, 9), [7, 8)]" and (a.start, a.end) == (0, 9)
    assert a[1] == AttnRange(4, 6) and a[-2:].to_naive_ranges() == [(9, 9), (7, 8)]
    assert isinstance(a[1:], AttnRanges) and list(a)[0].end == 2
    assert a.pop() == AttnRange(7, 8) and a.pop(0) == AttnRange(0, 2) and a.size == 2
    a[0] = (1, 2)
    a[1:] = [(3, 4), AttnRange(5, 6)]
    assert a.to_naive_ranges() == [(1, 2), (3, 4), (5, 6)]
    again = pickle.loads(pickle.dumps(a))
    assert again == a and hash(again) == hash(a) == hash(a.clone()) and a != a[:1]
    copy = AttnRanges.from_ranges(a)
    copy[0].end = 3
    assert a[0].end == 2, "from_ranges must not share its ranges"
    assert isinstance(a, protocols.AttnRangesProtocol)
    a.check_valid()


@FAST
@given(RANGES, st.integers(-8, 8), st.integers(-8, 8) | st.none(), RANGES)
def test_a_slice_with_an_end_takes_as_many_as_it_names(x, start, stop, y):
    a, wanted = make(x), list(x)
    named = range(*(b if b >= 0 else max(0, len(x) + b) for b in (start, 0 if stop is None else stop)))
    if stop is not None and len(named) != len(y):
        with pytest.raises(ContractError, match=f"names {len(named)} items and is assigned {len(y)}"):
            a[start:stop] = make(y)
    else:
        a[start:stop] = make(y)
        wanted[start:stop] = y
    assert a.to_naive_ranges() == wanted


def test_conversions():
    a = make([(3, 5), (0, 2)])
    tensor = a.to_tensor()
    assert str(tensor.dtype) == "torch.int32" and tensor.tolist() == [[3, 5], [0, 2]]
    assert tuple(AttnRanges().to_tensor().shape) == (0, 2)
    assert a.to_array().dtype == np.int64 and AttnRanges.from_array(a.to_array()) == a
    assert make([[1, 2]]) == make([AttnRange(1, 2)])
