# SPDX-License-Identifier: Apache-2.0
"""Slices by chunk and by rank against sets of pairs."""

import numpy as np
import pytest

from magi_attention.common import AttnMaskType, AttnRange, AttnRanges, slices
from magi_attention.compat.metas.buckets import AttnBucket, AttnChunk, AttnSlice, MultiKAttnSlice
from magi_attention.errors import ContractError
from magi_attention.meta import make_global_bucket_from_qk_ranges
from magi_attention.testing import masks

FULL = AttnMaskType.FULL


def full(q, k, slice_id=None) -> AttnSlice:
    return AttnSlice(slice_id, FULL, AttnRange(*q), AttnRange(*k))


@pytest.mark.parametrize("seed", range(20))
@pytest.mark.parametrize("chunk_size", [1, 3, 4])
def test_chunks_hold_the_rows_of_their_own(seed, chunk_size):
    rng = np.random.default_rng(seed)
    total = 12
    s = masks.random_slices(rng, total, total)
    s = s[np.lexsort((s[:, 2], s[:, 1], s[:, 0]))]
    q, k = AttnRanges.from_array(s[:, :2]), AttnRanges.from_array(s[:, 2:4])
    bucket = make_global_bucket_from_qk_ranges(
        q, k, [AttnMaskType.of(kind) for kind in s[:, 4]], total // chunk_size, chunk_size
    )
    dense = slices.to_dense(s, total, total)
    assert len(bucket.q_chunks) == total // chunk_size and bucket.cp_rank is None
    for i, chunk in enumerate(bucket.q_chunks):
        low, high = i * chunk_size, (i + 1) * chunk_size
        rows = np.array([x.to_row() for x in chunk.attn_slices], dtype=np.int64).reshape(-1, 5)
        inside = dense.copy()
        inside[:low] = inside[high:] = False
        assert (slices.to_dense(rows, total, total) == inside).all() and chunk.area == inside.sum()
        assert (rows[:, 0] >= low).all() and (rows[:, 1] <= high).all()
        assert chunk.chunk_id == i and [x.slice_id for x in chunk.attn_slices] == list(range(len(rows)))
        for x, sample in zip(chunk.attn_slices, chunk.sample_ids, strict=True):
            whole = slices.to_dense(s[sample : sample + 1], total, total)
            part = slices.to_dense(np.array([x.to_row()]), total, total)
            assert (part == (whole & inside)).all() and x.mask_type == AttnMaskType.of(s[sample, 4])
    assert bucket.area == dense.sum() and bucket.areas == [chunk.area for chunk in bucket.q_chunks]


@pytest.mark.parametrize("kind", list(AttnMaskType))
@pytest.mark.parametrize(("rows", "keys"), [(3, 5), (5, 3), (4, 4), (1, 1), (0, 3)])
def test_area_of_a_slice(kind, rows, keys):
    dense = slices.to_dense(np.array([[2, 2 + rows, 1, 1 + keys, kind.to_int_type()]]), 12, 12)
    ranges = {"q_range": AttnRange(2, 2 + rows), "k_range": AttnRange(1, 1 + keys)}
    x = AttnSlice(slice_id=4, mask_type=kind, **ranges)
    assert x.area == dense.sum() and x == AttnSlice(4, kind, *ranges.values(), 99) != AttnSlice(
        5, kind, *ranges.values()
    )
    x.area = 7
    assert x.area == 7 and x != "a slice"
    several = MultiKAttnSlice(AttnRange(2, 2 + rows), AttnRanges.from_ranges([(1, 1 + keys)] * 2), [kind, "full"])
    assert several.area == dense.sum() + rows * keys
    several.area = 3
    assert several.area == 3


def test_slices_that_are_none():
    for bad in (
        AttnSlice(0, "round", AttnRange(0, 1), AttnRange(0, 1)),
        AttnSlice(0, None, AttnRange(0, 1), AttnRange(0, 1)),
    ):
        with pytest.raises(ValueError, match="Only supported mask types"):
            bad.area  # noqa: B018
    with pytest.raises(ValueError, match="Only supported mask types"):
        MultiKAttnSlice(AttnRange(0, 1), AttnRanges.from_ranges([(0, 1)]), ["round"]).area  # noqa: B018
    with pytest.raises(ContractError, match="lacks a range"):
        AttnSlice(mask_type=FULL).area  # noqa: B018
    with pytest.raises(ContractError, match="no keys"):
        AttnSlice().iou_with(AttnSlice())
    with pytest.raises(AssertionError, match="2 mask types for 1 k ranges"):
        MultiKAttnSlice(AttnRange(0, 1), AttnRanges.from_ranges([(0, 1)]), [FULL, FULL])


@pytest.mark.parametrize("seed", range(20))
def test_shared_keys(seed):
    rng = np.random.default_rng(seed)

    def chunk() -> AttnChunk:
        bounds = np.sort(rng.integers(0, 20, (int(rng.integers(0, 4)), 2))).tolist()
        return AttnChunk(0, [full((0, 2), k) for k in bounds])

    chunks = [chunk() for _ in range(4)]
    buckets = AttnBucket(0, chunks[:2]), AttnBucket(1, chunks[2:])
    for a, b in [(chunks[0], chunks[1]), buckets]:
        lists = [[x for s in side.attn_slices for x in range(*s.k_range)] for side in (a, b)]
        mine, theirs = map(set, lists)
        assert a.iou_with(b) == (len(mine & theirs) / len(mine | theirs) if mine | theirs else 0)
        assert a.iou == (1 - len(mine) / len(lists[0]) if lists[0] else 0) or a.iou == pytest.approx(
            1 - len(mine) / len(lists[0])
        )
        assert a.k_ranges.to_naive_ranges() == [(*s.k_range,) for s in a.attn_slices]
    assert full((0, 2), (0, 10)).iou_with(full((4, 9), (5, 15))) == 5 / 15
    assert full((0, 2), (3, 3)).iou_with(full((0, 2), (3, 3))) == 0
    assert AttnChunk(1, [], [3]) == AttnChunk(1, [], []) != AttnChunk(2) and AttnBucket(0) != AttnBucket(1)
