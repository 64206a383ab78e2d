# SPDX-License-Identifier: Apache-2.0
"""The tile walk of the online backend: every allowed pair in exactly one tile, full tiles without mask."""

from __future__ import annotations

import weakref
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from magi_attention.common.slices import CAUSAL, FULL, SliceTable, empty_slices, to_dense, trim
from magi_attention.errors import RangeError
from magi_attention.kernels.reference.block_iter import TileMask, block_walk
from magi_attention.kernels.reference.sdpa import count_pairs
from magi_attention.kernels.tables import (
    SliceTables,
    table_from_attn_arg,
    table_from_host_ranges,
    table_from_tensors,
)
from magi_attention.testing.masks import random_slices


@settings(max_examples=60, deadline=None, print_blob=True)
@given(
    seed=st.integers(0, 2**32 - 1),
    size=st.tuples(st.integers(1, 90), st.integers(1, 90)),
    blocks=st.sampled_from([(1, 1), (7, 13), (32, 16), (128, 128)]),
    transposed=st.booleans(),
)
def test_tiles_tell_the_dense_mask(seed, size, blocks, transposed):
    rng = np.random.default_rng(seed)
    slices = random_slices(rng, *size, max_slices=40)
    dense = to_dense(slices, *size)
    assert np.array_equal(count_pairs(trim(slices), *size), dense)
    got = np.zeros(size, dtype=int)
    mask = TileMask(*blocks, torch.float32, torch.device("cpu"), transposed)
    for block in block_walk(SliceTable(slices), *blocks):
        assert 0 <= block.q0 < block.q1 and block.q0 // blocks[0] == (block.q1 - 1) // blocks[0]
        rows = slice(block.q0, block.q1)
        for tile in block.tiles:
            shape = (block.q1 - block.q0, tile.k1 - tile.k0)
            allowed = torch.ones(shape, dtype=torch.bool)
            if tile.pieces is not None:
                ceiling = mask.ceiling(tile.pieces, *shape)
                ceiling = ceiling.T if transposed else ceiling
                assert torch.isinf(ceiling).all()
                allowed = ceiling > 0
                assert allowed.any(), "a tile without pairs was not skipped"
            got[rows, tile.k0 : tile.k1] += allowed.numpy()
    assert np.array_equal(got, dense.astype(int))


def test_causal_walk_skips_and_masks_only_the_diagonal():
    walk = block_walk(SliceTable(np.array([[0, 64, 0, 64, CAUSAL]])), 16, 16)
    assert [[t.pieces is None for t in b.tiles] for b in walk] == [[True] * i + [False] for i in range(4)]


def test_walk_is_kept_with_the_table_and_not_shared():
    table, twin = (SliceTable(np.array([[0, 9, 0, 9, FULL]])) for _ in range(2))
    assert block_walk(table, 4, 4) is block_walk(table, 4, 4)
    assert block_walk(table, 4, 4) is not block_walk(twin, 4, 4)
    assert block_walk(SliceTable(empty_slices()), 4, 4) == ()


def test_equal_range_tensors_share_a_table():
    tables = SliceTables()
    q, k = torch.tensor([[0, 4]], dtype=torch.int32), torch.tensor([[0, 6]])
    first = table_from_tensors(q, k, None, tables)
    assert table_from_tensors(q.clone(), k.int(), torch.tensor([0]), tables) is first
    assert table_from_host_ranges(q, k, None, 4, 6, tables) is first
    argument = SimpleNamespace(q_ranges=q, k_ranges=[(0, 6)], attn_type_map=["full"])
    assert table_from_attn_arg(argument, tables) is first and len(tables) == 1
    assert table_from_tensors(q, k) is not first and SliceTables().get(first.array) is not first
    q[0, 1] = 3  # by value: the caller may write to its tensors afterwards
    assert first.array.tolist() == [[0, 4, 0, 6, 0]]
    assert table_from_tensors(q, k, None, tables).array.tolist() == [[0, 3, 0, 6, 0]]


def test_tables_that_were_not_asked_for_lately_go():
    tables, rows = SliceTables(), [np.array([[0, n, 0, n, 1]]) for n in range(40)]
    first = tables.get(rows[0])
    for array in rows[1:]:
        tables.get(array).tensors()
        assert tables.get(rows[0]) is first
    assert len(tables) == 32 and tables.nbytes == 32 * first.array.nbytes + 31 * 20
    died = weakref.ref(tables.get(rows[20]))
    tables.get(np.zeros((0, 5), dtype=np.int64))
    with pytest.raises(RangeError):
        tables.get(np.array([[5, 4, 0, 1, 0]]))
    assert died() is not None and len(tables) == 32
    tables.clear()
    assert died() is None and (len(tables), tables.nbytes) == (0, 0) and len(first) == 1
