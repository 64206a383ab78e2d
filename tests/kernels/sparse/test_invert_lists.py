# SPDX-License-Identifier: Apache-2.0
"""The inverted lists of index attention, against who sees a key by the definition of lists."""

from __future__ import annotations

import copy
import gc
import pickle
import weakref

import pytest
import torch

from magi_attention.errors import UnsupportedError
from magi_attention.kernels.index_attn import invert, with_kept_readers
from magi_attention.kernels.index_attn.invert import check_readers, key_counts, with_readers
from magi_attention.kernels.index_attn.prepare import lists_of_blocks, prepare_indices
from magi_attention.kernels.index_attn.types import PreparedIndices


def readers_of(lists: PreparedIndices, key: int, head: int) -> list[tuple[int, int]]:
    """``(first key of the block, list)`` of all that read a key, in the order of the inverted lists."""
    block, (_, heads, width) = lists.k_block_size, lists.rows.shape
    counts, begins = key_counts(lists).flatten(), lists.reader_begins.tolist()
    firsts = [key // block] if lists.k_start is None else range(max(key - block + 1, 0), key + 1)
    found = []
    for number in firsts:
        first = number * block if lists.k_start is None else number
        group = number * heads + head
        for place in lists.readers[begins[group] : begins[group + 1]].tolist():
            assert place // width % heads == head
            if place % width * block + key - first < counts[place // width]:
                found.append((first, place // width // heads))
    return found


def seen_by(indices: torch.Tensor, lists: PreparedIndices, key: int, head: int) -> list[tuple[int, int]]:
    """The same by the definition, ascending."""
    block, found = lists.k_block_size, set()
    for number, entries in enumerate(indices[:, head].tolist()):
        start = 0 if lists.k_start is None else int(lists.k_start[number])
        end = lists.total_k if lists.k_end is None else int(lists.k_end[number])
        for entry in entries:
            first = start + entry * block
            if entry >= 0 and first <= key < min(first + block, end, lists.total_k):
                found.add((first, number))
    return sorted(found)


@pytest.mark.parametrize("seed", range(24))
def test_who_reads_a_key(seed, monkeypatch):
    """With keys that are there twice, -1 anywhere and lists of unequal length; a few lists are sorted at a time."""
    print(f"seed {seed}")
    gen = torch.Generator().manual_seed(seed)

    def pick(*of: int) -> int:
        return of[int(torch.randint(len(of), (1,), generator=gen))]

    num_lists, heads, width = pick(0, 1, 9), pick(1, 3), pick(0, 1, 7)
    total_k, block = pick(1, 8, 40), pick(1, 1, 3, 16)
    if seed % 2:
        monkeypatch.setattr(invert, "CHUNK", pick(1, 20))
    bounds = {}
    if seed % 3 == 1:
        bounds["k_start"] = torch.randint(0, total_k, (num_lists,), generator=gen)
    if seed % 4 > 1:
        bounds["k_end"] = torch.randint(0, total_k + 1, (num_lists,), generator=gen)
    most = -(-total_k // block)
    indices = torch.randint(-most, most, (num_lists, heads, width), generator=gen)
    if "k_start" in bounds:
        indices[indices * block + bounds["k_start"][:, None, None] >= total_k] = -1
    lists = prepare_indices(indices, total_k, k_block_size=block, **bounds, deterministic=True)
    assert with_readers(lists) is lists
    assert sorted(lists.readers.tolist()) == list(range(num_lists * heads * width)), "each place once"
    for key in range(total_k):
        for head in range(heads):
            assert readers_of(lists, key, head) == seen_by(indices, lists, key, head), (key, head)


@pytest.mark.parametrize("total_k", [2**16 - 2, 2**16 - 1, 2**16, 80_000])
@pytest.mark.parametrize("chunk", [1 << 24, 1000])
def test_groups_of_more_and_of_fewer_than_16_bits(total_k, chunk, monkeypatch):
    print(f"seed {total_k}")
    monkeypatch.setattr(invert, "CHUNK", chunk)
    gen = torch.Generator().manual_seed(total_k)
    indices = torch.randint(-total_k // 9, total_k, (90, 1, 50), generator=gen)
    indices[:, 0, 0], indices[::2, 0, 1] = total_k - 1, 0
    lists = prepare_indices(indices, total_k, deterministic=True)
    begins, places = lists.reader_begins.tolist(), lists.readers.tolist()
    found = [(key, place // 50) for key in range(total_k) for place in places[begins[key] : begins[key + 1]]]
    wanted = {(key, number) for number, keys in enumerate(indices[:, 0].tolist()) for key in keys if key >= 0}
    assert found == sorted(wanted)


def test_lists_of_a_block_mask():
    gen = torch.Generator().manual_seed(0)
    blocks = torch.rand((2, 5, 6), generator=gen) < 0.5
    lists = with_readers(lists_of_blocks(blocks, 4, 3, 17))
    for key in range(17):
        for head in range(2):
            want = blocks[head, :, key // 3].nonzero().flatten().tolist()
            assert [number for _, number in readers_of(lists, key, head)] == want


@pytest.mark.parametrize("edited", ["rows", "counts", "k_start", "k_end"])
def test_lists_are_inverted_once_until_they_are_edited(edited):
    bounds = {"k_start": torch.tensor([0, 3, 1]), "k_end": torch.tensor([9, 12, 12])}
    lists = prepare_indices(torch.tensor([[[0, 1, 2]], [[2, 0, -1]], [[1, -1, -1]]]), 12, k_block_size=3, **bounds)
    first = with_kept_readers(lists)
    assert with_kept_readers(lists).readers is first.readers is with_kept_readers(first).readers
    assert lists.kept.made == 1 and lists.readers is None
    change = {"rows": [1, 2, -1], "counts": 1, "k_start": 0, "k_end": 5}[edited]
    getattr(lists, edited)[1] = torch.tensor(change, dtype=getattr(lists, edited).dtype)
    again, want = with_kept_readers(lists), with_readers(lists)
    assert lists.kept.made == 2
    assert all(torch.equal(getattr(again, name), getattr(want, name)) for name in ("readers", "reader_begins"))
    other = lists._replace(rows=lists.rows.clone())
    with_kept_readers(other)
    assert lists.kept.made == 3, "other tensors are other lists"


def test_what_is_kept_goes_with_the_lists():
    lists = prepare_indices(torch.tensor([[[0, 1]], [[1, -1]]]), 4)
    readers = weakref.ref(with_kept_readers(lists).readers)
    gc.collect()
    assert readers() is not None
    del lists
    assert readers() is None, "without the garbage collector"


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda x: pickle.loads(pickle.dumps(x))], ids=["copy", "pickle"])
def test_copied_lists_keep_their_own(copied):
    lists = prepare_indices(torch.tensor([[[0, 1]], [[1, -1]]]), 4)
    want, other = with_kept_readers(lists), copied(lists)
    assert torch.equal(with_kept_readers(other).readers, want.readers)
    assert (lists.kept.made, other.kept.made) == (1, 1)


def test_lists_that_count_no_edits_are_not_kept():
    with torch.inference_mode():
        lists = prepare_indices(torch.tensor([[[0, 1]]]), 4)
    assert with_kept_readers(lists).readers.tolist() == [0, 1] and lists.kept.made == 0


def test_too_many_entries_get_a_sentence():
    rows = torch.empty((2**20, 1, 2**11), dtype=torch.int32, device="meta")
    lists = PreparedIndices(rows, rows[..., 0], 9)
    with pytest.raises(UnsupportedError, match="split the queries, or set deterministic=False"):
        with_readers(lists)
    check_readers(lists._replace(rows=rows[1:]))


def test_compiled_it_is_one_more_op():
    indices = torch.randint(-3, 20, (6, 2, 5), generator=torch.Generator().manual_seed(1))
    graphs = []

    def backend(graph, _):
        graphs.append(graph)
        return graph.forward

    def prepare(x):
        return prepare_indices(x, 20, k_block_size=1, deterministic=True)[7:9]

    got = torch.compile(prepare, fullgraph=True, backend=backend)(indices)
    assert all(torch.equal(*pair) for pair in zip(got, prepare(indices)))
    names = [str(node.target) for node in graphs[0].graph.nodes if "magi_attention" in str(node.target)]
    assert names == ["magi_attention.index_prepare.default", "magi_attention.index_readers.default"]


@pytest.mark.parametrize("has_start", (False, True))
def test_the_op_is_registered_soundly(has_start):
    lists = prepare_indices(torch.tensor([[[0, 2]], [[1, 1]]]), 9, k_block_size=3)
    start = torch.tensor([0, 2]) if has_start else None
    arguments = lists.rows, key_counts(lists), 9, 3, start
    torch.library.opcheck(invert.readers_op, arguments, test_utils=("test_schema", "test_faketensor"))
