# SPDX-License-Identifier: Apache-2.0
"""Mask constructors against their definitions, pair by pair."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from magi_attention.common.attn_mask import AttnMask
from magi_attention.common.disjoint import first_overlap
from magi_attention.common.infer import dense_slices, window_slices
from magi_attention.common.mask import Mask
from magi_attention.common.slices import areas, to_dense
from magi_attention.errors import ContractError


def dense(n, rule) -> np.ndarray:
    return np.array([[rule(i, j) for j in range(n)] for i in range(n)], dtype=bool).reshape(n, n)


def same(mask: Mask, expected: np.ndarray) -> None:
    assert np.array_equal(mask.to_dense(), expected)
    assert mask.area == expected.sum()
    assert mask.check() is mask


def doc_of(cu, i) -> int:
    return int(np.searchsorted(cu, i, side="right") - 1)


CU = [0, 3, 3, 10, 17, 24]


def test_full_and_causal() -> None:
    same(Mask.full(7), np.ones((7, 7), bool))
    same(Mask.causal(7), np.tril(np.ones((7, 7), bool)))
    assert Mask.causal(2, 5).to_dense().astype(int).tolist() == [[1, 1, 1, 1, 0], [1, 1, 1, 1, 1]]


@pytest.mark.parametrize("causal", [False, True])
def test_varlen(causal) -> None:
    expected = dense(24, lambda i, j: doc_of(CU, i) == doc_of(CU, j) and (j <= i or not causal))
    same(Mask.varlen(CU, causal=causal), expected)
    same(Mask.varlen(torch.tensor(CU, dtype=torch.int32), causal=causal), expected)


@settings(max_examples=200, deadline=None)
@given(
    sq=st.integers(0, 10), sk=st.integers(0, 10), left=st.integers(-1, 9), right=st.integers(-1, 9), g=st.integers(0, 5)
)
def test_windows(sq, sk, left, right, g) -> None:
    rows = window_slices(np.array([[2, 2 + sq, 3, 3 + sk]]), left, right, g)
    reach_left = sk if left == -1 or left >= sk - 1 else left
    reach_right = sk if right == -1 or right >= sk - 1 else right
    limited = (left, right) != (-1, -1)
    expected = np.zeros((14, 15), bool)
    for i in range(max(0, sq - sk), sq):
        c = i + sk - sq
        for j in range(sk):
            inside = c - reach_left <= j <= c + reach_right
            expected[2 + i, 3 + j] = inside or (limited and j < min(g, c + reach_right + 1))
    assert np.array_equal(to_dense(rows, 14, 15), expected)
    assert first_overlap(rows) is None
    assert g or len(rows) <= 3


def test_windows_of_documents() -> None:
    expected = dense(24, lambda i, j: doc_of(CU, i) == doc_of(CU, j) and 0 <= i - j <= 2)
    same(Mask.varlen(CU, window=(2, 0)), expected)
    expected = dense(20, lambda i, j: j <= i + 1 and (i - j <= 3 or j < 2))
    same(Mask.sliding_window(20, (3, 1), global_prefix=2), expected)


def test_block_causal() -> None:
    def rule(i, j):
        start = CU[doc_of(CU, i)]
        return doc_of(CU, i) == doc_of(CU, j) and (j - start) // 4 <= (i - start) // 4

    same(Mask.block_causal(CU, 4), dense(24, rule))
    same(Mask.block_causal(10, 3), dense(10, lambda i, j: j // 3 <= i // 3))


@settings(max_examples=200, deadline=None, print_blob=True)
@given(
    lengths=st.lists(st.integers(0, 9), min_size=1, max_size=5),
    cuts=st.lists(st.integers(0, 45), max_size=12),
    left=st.integers(-1, 9),
    data=st.data(),
)
def test_causal_with_blocks(lengths, cuts, left, data) -> None:
    cu = np.concatenate([[0], np.cumsum(lengths)]).tolist()
    edges = np.unique([*cu, *(cut for cut in cuts if cut < cu[-1])]).tolist()  # no range between two crosses a document
    blocks = [(a, b) for a, b in zip(edges, edges[1:]) if data.draw(st.booleans())]
    block_of = {i: n for n, (a, b) in enumerate(blocks) for i in range(a, b)}

    def rule(i, j):
        is_later_in_block = j > i and i in block_of and block_of[i] == block_of.get(j)
        is_near = j <= i and (left == -1 or i - j <= left)
        return doc_of(cu, i) == doc_of(cu, j) and (is_near or is_later_in_block)

    mask = Mask.causal_with_blocks(cu, data.draw(st.permutations(blocks)), window=(left, 0))
    same(mask, dense(cu[-1], rule))
    assert mask.cu_seqlens == Mask.varlen(cu).cu_seqlens
    assert len(mask.slices) <= (1 if left == -1 else 3) * len(lengths) + len(blocks)


def test_prefix_lm() -> None:
    same(Mask.prefix_lm(9, 4), dense(9, lambda i, j: j <= i or (i < 4 and j < 4)))
    prefixes = [2, 0, 7, 3, 1]

    def rule(i, j):
        d = doc_of(CU, i)
        inside = i - CU[d] < prefixes[d] and j - CU[d] < prefixes[d]
        return d == doc_of(CU, j) and (j <= i or inside)

    same(Mask.prefix_lm(CU, prefixes), dense(24, rule))


def test_shared_question() -> None:
    cu = [0, 5, 9, 12, 20]

    def rule(i, j):
        di, dj = doc_of(cu, i), doc_of(cu, j)
        return j <= i and (di == dj or dj == 0)

    same(Mask.shared_question(cu), dense(20, rule))
    same(Mask.shared_question([0, 4]), dense(4, lambda i, j: j <= i))


def test_prefix_tree() -> None:
    lengths, parents = [4, 3, 2, 5, 1], [-1, 0, 0, 2, -1]
    bounds = np.concatenate([[0], np.cumsum(lengths)])
    line = {0: [], 1: [0], 2: [0], 3: [2, 0], 4: []}

    def rule(i, j):
        a, b = doc_of(bounds, i), doc_of(bounds, j)
        return (a == b and j <= i) or b in line[a]

    same(Mask.prefix_tree(lengths, parents), dense(15, rule))


def test_batched() -> None:
    parts = [Mask.causal(4), Mask.full(3), Mask.sliding_window(5, (1, 0))]
    expected = np.zeros((12, 12), bool)
    expected[:4, :4], expected[4:7, 4:7] = parts[0].to_dense(), parts[1].to_dense()
    expected[7:, 7:] = parts[2].to_dense()
    same(Mask.batched(parts), expected)


@settings(max_examples=150, deadline=None)
@given(seed=st.integers(0, 10**9), density=st.floats(0, 1))
def test_from_dense_is_exact(seed, density) -> None:
    matrix = np.random.default_rng(seed).random((9, 11)) < density
    rows = dense_slices(matrix)
    assert np.array_equal(to_dense(rows, 9, 11), matrix) and areas(rows).sum() == matrix.sum()


def test_from_dense_finds_diagonals() -> None:
    assert dense_slices(np.tri(6, dtype=bool)).tolist() == [[0, 6, 0, 6, 1]]
    assert len(dense_slices(np.triu(np.tri(40, k=3, dtype=bool), -2))) == 3
    same(Mask.from_dense(torch.ones(5, 5).tril().bool()), np.tril(np.ones((5, 5), bool)))


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: Mask.varlen([1, 4]), "must be 0"),
        (lambda: Mask.varlen([0, 4, 2]), "decreases from 4 to 2"),
        (lambda: Mask.varlen([0, 4, 2]), "Mask.from_lengths takes them"),
        (lambda: Mask.varlen([4, 2, 7]), "must be 0. If these are the lengths .* Mask.from_lengths"),
        (lambda: Mask.varlen(torch.tensor([300, 512])), "Mask.from_lengths"),
        (lambda: Mask.varlen([0, 4, 9, -1, -1]), r"is -1 from entry 3 on, .* give the entries before it"),
        (lambda: Mask.from_lengths([4, -1]), r"lengths\[1\] is -1; lengths count tokens"),
        (lambda: Mask.from_lengths([[4]]), r"lengths has shape \(1, 1\)"),
        (lambda: Mask.from_lengths([4.0]), "lengths holds floats"),
        (lambda: Mask.from_lengths([2**62, 2**62, 2**62]), "fewer than 2"),
        (lambda: Mask.from_lengths([4], [2, 2]), "same number of samples"),
        (lambda: Mask.varlen([[0, 4]]), "1-D"),
        (lambda: Mask.varlen([0.0, 4.0]), "integers"),
        (lambda: Mask.varlen([0, 4], [0, 2, 4]), "same number of samples"),
        (lambda: Mask.varlen([0, 4], causal=True, window=(1, 0)), "causal=False"),
        (lambda: Mask.sliding_window(4, (-2, 0)), "-1 for unlimited"),
        (lambda: Mask.block_causal(8, 0), "block length"),
        (lambda: Mask.causal_with_blocks([0, 4, 9], [[2, 4], [5, 8], [6, 9]]), "\\[5, 8\\) overlaps the next"),
        (lambda: Mask.causal_with_blocks([0, 4, 9], [[3, 5]]), "\\[3, 5\\) reaches into another document"),
        (lambda: Mask.causal_with_blocks([0, 4, 9], [[7, 10]]), "not inside the 9 tokens"),
        (lambda: Mask.causal_with_blocks([0, 4, 9], [[-1, 2]]), "not inside the 9 tokens"),
        (lambda: Mask.causal_with_blocks(9, [[3, 3]]), "is empty"),
        (lambda: Mask.causal_with_blocks(9, [[3, 5]], window=(4, 1)), "give \\(w, 0\\)"),
        (lambda: Mask.prefix_lm([0, 4], 5), "document length"),
        (lambda: Mask.prefix_tree([1, 1], [-1, 1]), "earlier nodes"),
        (lambda: Mask.from_slices([[0, 9]], [[0, 4]], "full", total_q=8, total_k=8), "beyond the 8 q tokens"),
        (lambda: Mask.from_slices([[0, 4]], [[0, 4]], "triangular"), "'inv_causal'"),
        (lambda: Mask.from_dense(np.ones(3, bool)), "two dimensions"),
        (lambda: Mask.full(-1), "must be >= 0"),
        (lambda: Mask.from_slices([[0, 4], [2, 6]], [[0, 4], [3, 8]], "full").check(), "Slices 0 and 1 overlap"),
    ],
)
def test_bad_masks_say_what_to_do(make, words) -> None:
    with pytest.raises(ContractError, match=words):
        make()


@pytest.mark.parametrize("seed", range(30))
def test_block_sparse(seed: int) -> None:
    print(f"seed {seed}")
    rng = np.random.default_rng(seed)
    shape = tuple(rng.integers(1, 12, 2).tolist())
    blocks = rng.random(shape) < rng.choice([0.1, 0.5, 0.9])
    sizes = [rng.integers(1, 9, count) for count in shape]
    mask = Mask.block_sparse(blocks, *sizes).check()
    assert np.array_equal(mask.to_dense(), np.repeat(np.repeat(blocks, sizes[0], axis=0), sizes[1], axis=1))
    size = int(rng.integers(1, 9))
    square = rng.random((7, 7)) < 0.4
    same = Mask.block_sparse(torch.from_numpy(square), size)
    assert same == Mask.block_sparse(square.tolist(), [size] * 7, size)
    assert (same.total_q, same.total_k, same.area) == (7 * size, 7 * size, int(square.sum()) * size**2)


def test_block_sparse_merges_and_refuses() -> None:
    assert len(Mask.block_sparse(np.ones((16, 16), bool), 128).slices) == 1
    assert len(Mask.block_sparse(np.zeros((3, 3), bool), 4).slices) == 0
    for sizes, words in (((0,), "smallest 0, for 2 blocks"), (([1, 2, 3],), "3 sizes"), ((4, [1]), "k_sizes has 1")):
        with pytest.raises(ContractError, match=words):
            Mask.block_sparse(np.ones((2, 2), bool), *sizes)
    with pytest.raises(ContractError, match="one row for each query block"):
        Mask.block_sparse(np.ones(4, bool), 2)


def additive(allowed: np.ndarray) -> np.ndarray:
    """The mask that is added to logits."""
    return np.where(allowed, 0.0, -np.inf)


DOORS = {"from_dense": Mask.from_dense, "from_mask": AttnMask.from_mask, "blocks": lambda x: Mask.block_sparse(x, 2, 3)}


@pytest.mark.parametrize("door", DOORS.values(), ids=DOORS)
def test_a_dense_mask_is_booleans_or_zeros_and_ones(door) -> None:
    """What is added to logits is 0 where a pair is allowed, so its truth values would say the opposite."""
    allowed = np.array([[True, False, True], [False, True, True]])
    want = door(allowed)
    for good in (allowed.astype(int), allowed.astype(np.uint8), allowed.tolist(), allowed.astype(int).tolist()):
        assert door(good) == want
    for dtype in (torch.bool, torch.int64, torch.uint8):
        assert door(torch.from_numpy(allowed).to(dtype)) == want
    for dtype in (np.float16, np.float32, np.float64):
        with pytest.raises(ContractError, match=r"`mask == 0`; of zeros and ones, `mask.astype\(bool\)`"):
            door(additive(allowed).astype(dtype))
        with pytest.raises(ContractError, match="give booleans"):
            door(allowed.astype(dtype))
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        with pytest.raises(ContractError, match=r"`mask == 0`; of zeros and ones, `mask.bool\(\)`"):
            door(torch.from_numpy(additive(allowed)).to(dtype))
    for other in (allowed * 2, -allowed.astype(int), allowed.astype(int) - 5):
        with pytest.raises(ContractError, match="holds the integer .*; give booleans, or 0 and 1"):
            door(other)
    for other in (allowed.astype(str), allowed.astype(complex), [[1, 0], [1]]):
        with pytest.raises(ContractError, match="give booleans|rows of one length"):
            door(other)
    assert door(additive(allowed) == 0) == want


@settings(max_examples=60, deadline=None)
@given(lengths=st.lists(st.integers(0, 9), max_size=8), causal=st.booleans())
def test_from_lengths_is_varlen(lengths, causal) -> None:
    cu = [sum(lengths[:i]) for i in range(len(lengths) + 1)]
    want = Mask.varlen(cu, causal=causal)
    for given_as in (lengths, np.array(lengths, dtype=np.int32), torch.tensor(lengths, dtype=torch.int64)):
        assert Mask.from_lengths(given_as, causal=causal) == want
    keys = [n + 2 for n in lengths]
    cu_k = [sum(keys[:i]) for i in range(len(keys) + 1)]
    assert Mask.from_lengths(lengths, keys, window=(3, 1)) == Mask.varlen(cu, cu_k, window=(3, 1))
    assert Mask.from_lengths(lengths, window=(2, 0), global_prefix=1) == Mask.varlen(cu, window=(2, 0), global_prefix=1)
