# SPDX-License-Identifier: Apache-2.0
"""The row kernels refuse bad parameters, and lists of terms hold what they are made from."""

from __future__ import annotations

import gc

import numpy as np
import pytest
import torch

from magi_attention.comm.collectives.layout import A2AVLayout
from magi_attention.errors import ContractError, UnsupportedError
from magi_attention.native import abi, loader, rows
from magi_attention.native.rows import RangeTerms, list_terms

SEEDS = range(30)


def test_the_library_built_ahead_has_the_functions_and_refuses_bad_parameters():
    if (reason := loader.why_absent("ffa_sm90")) is not None:
        pytest.skip(reason)
    library = loader.load("ffa_sm90")
    rows.bind(library)
    head = abi.ROW_COPY.pack(abi.ABI_VERSION + 1, 1, 0)
    none = abi.ROW_LIST.pack(abi.ROWS_ALL, 0, 0)
    part = abi.ROW_PART.pack(abi.RAW, abi.RAW, 1, 1, 1, 0, 0)
    with pytest.raises(ContractError, match="ABI version"):
        loader.check(library, library.magi_row_copy(head + 2 * none + bytes(8) + part), "Moving rows")
    head = abi.ROW_COPY.pack(abi.ABI_VERSION, 5, 0)
    with pytest.raises(ContractError, match="5 parts"):
        loader.check(library, library.magi_row_copy(head + 2 * none + bytes(8) + 5 * part), "Moving rows")
    half = abi.ROW_PART.pack(abi.BF16, abi.FP32, 1, 1, 1, 0, 0)
    head = abi.ROW_COPY.pack(abi.ABI_VERSION, 1, 1)
    with pytest.raises(UnsupportedError, match="float32 to 16 bits"):
        loader.check(library, library.magi_row_copy(head + 2 * none + bytes(8) + half), "Moving rows")


@pytest.mark.parametrize(
    ("x", "stride"),
    [
        (torch.zeros(5, 3, 4), 12),
        (torch.zeros(5, 6, 4)[:, :3], 24),
        (torch.zeros(5, 3, 4)[:, :, :2], None),
        (torch.zeros(3, 5, 4).transpose(0, 1), None),
        (torch.zeros(5, 1, 4)[:, :, :3], 4),
        (torch.zeros(9, 4)[::2], 8),
        (torch.zeros(9)[::3], 3),
        (torch.zeros(1, 4).expand(7, 4), 0),
    ],
)
def test_row_stride(x, stride):
    assert rows.row_stride(x) == stride


@pytest.mark.parametrize("seed", SEEDS)
def test_terms_of_ranges(seed):
    rng = np.random.default_rng(seed)
    count = int(rng.integers(0, 12))
    sizes = rng.integers(0, 6, count)
    sources, targets = (np.stack([s, s + sizes], 1) for s in rng.integers(0, 20, (2, count)))
    wanted: dict[int, list[int]] = {}
    for (a, b), (c, _) in zip(sources, targets):
        for i in range(b - a):
            wanted.setdefault(int(c) + i, []).append(int(a) + i)
    touched, begin, listed = list_terms(sources, targets)
    assert touched.tolist() == sorted(wanted)
    got = {int(row): listed[begin[i] : begin[i + 1]].tolist() for i, row in enumerate(touched)}
    assert got == wanted
    if count and sizes[0]:
        with pytest.raises(ContractError, match="differ in size"):
            list_terms(sources, targets + np.array([0, 1]))


@pytest.mark.parametrize("seed", SEEDS)
def test_terms_of_a_layout_are_its_segments(seed):
    rng = np.random.default_rng(seed)
    world, count = int(rng.integers(2, 5)), int(rng.integers(1, 20))
    rank = int(rng.integers(world))
    sends = [np.flatnonzero(rng.random(count) < 0.5) if r != rank else np.zeros(0, np.int64) for r in range(world)]
    none = [np.zeros(0, np.int64)] * world
    layout = A2AVLayout(rank, world, count, 0, sends, none)
    wire = [(r, i) for r in range(world) for i in sends[r].tolist()]
    wanted = {row: [at for at, (_, i) in enumerate(wire) if i == row] for row in range(count)}
    for of_all_rows in (True, False):
        terms = layout.terms(torch.device("cpu"), of_all_rows)
        touched, begin, listed = (None if x is None else x.tolist() for x in terms.tensors)
        assert (touched is None) == of_all_rows
        names = range(count) if touched is None else touched
        got = {row: listed[begin[i] : begin[i + 1]] for i, row in enumerate(names)}
        assert got == {row: terms for row, terms in wanted.items() if of_all_rows or terms}
        assert terms.count == len(got) and layout.terms(torch.device("cpu"), of_all_rows) is terms


def test_terms_of_range_tensors_follow_them():
    kept = RangeTerms("cpu")
    sources, targets = torch.tensor([[0, 3], [4, 6]]), torch.tensor([[1, 4], [0, 2]])
    first = kept.get(sources, targets)
    assert kept.get(sources, targets) is first and len(kept) == 1
    assert kept.nbytes == sum(x.nbytes for x in first.tensors) == 4 * (4 + 5 + 5)
    targets += 1
    edited = kept.get(sources, targets)
    assert edited is not first and edited.tensors[0].tolist() == [1, 2, 3, 4] and len(kept) == 1
    assert kept.get(sources, targets.clone()) is not edited
    with torch.inference_mode():
        unseen = sources.clone()
    assert kept.get(unseen, targets) is not kept.get(unseen, targets)
    del targets
    gc.collect()
    assert (len(kept), kept.nbytes) == (0, 0)
