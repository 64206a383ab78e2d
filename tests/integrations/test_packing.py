# SPDX-License-Identifier: Apache-2.0
"""The packing collator against a plain loop over documents; it needs neither transformers nor a process group."""

from __future__ import annotations

import pickle

import numpy as np
import pytest
import torch

from magi_attention.api import Mask
from magi_attention.errors import ContractError
from magi_attention.integrations.packing import IGNORE_INDEX, PackingCollator


def draw(seed: int) -> list[dict]:
    rng = np.random.default_rng(seed)
    examples = []
    for _ in range(int(rng.integers(1, 6))):
        lengths = rng.integers(1, 30, int(rng.integers(1, 4)))
        example = {"input_ids": rng.integers(0, 100, lengths.sum()).tolist()}
        if rng.random() < 0.5 or len(lengths) > 1:
            example["seq_lengths"] = lengths.tolist()
        if rng.random() < 0.5:
            kept = rng.random(lengths.sum()) < 0.7
            example["labels"] = np.where(kept, example["input_ids"], IGNORE_INDEX).tolist()
        elif rng.random() < 0.5:
            example["completion_mask"] = (rng.random(lengths.sum()) < 0.7).astype(int).tolist()
        examples.append(example)
    return examples


def rows_by_hand(examples: list[dict]) -> list[tuple[int, int, int]]:
    """(token, position, label of the next token) of every token, document by document."""
    rows = []
    for x in examples:
        tokens, at = x["input_ids"], 0
        mask = x.get("completion_mask", [1] * len(tokens))
        labels = x.get("labels") or [t if m else IGNORE_INDEX for t, m in zip(tokens, mask)]
        for length in x.get("seq_lengths", [len(tokens)]):
            for i in range(length):
                rows.append((tokens[at + i], i, labels[at + i + 1] if i + 1 < length else IGNORE_INDEX))
            at += length
    return rows


@pytest.mark.parametrize("seed", range(100))
def test_ranks_have_all_rows_once(seed):
    examples, cp_size = draw(seed), 1 + seed % 4
    print(f"seed {seed}: {examples}")
    want, got = rows_by_hand(examples), {}
    for rank in range(cp_size):
        batch = PackingCollator(cp_size, rank, windows=[7])(examples)
        plan = batch["magi_plans"].full
        assert batch["labels"] is batch["shift_labels"] and batch["input_ids"].shape == (1, plan.shard_sizes[rank])
        columns = (batch[name][0].tolist() for name in ("input_ids", "position_ids", "labels"))
        for place, row in zip(plan.position_array(rank).tolist(), zip(*columns)):
            if place < len(want):
                assert place not in got
                got[place] = row
            else:
                assert row[2] == IGNORE_INDEX  # a pad row
    assert [got[place] for place in range(len(want))] == want


@pytest.mark.parametrize("seed", range(30))
def test_parts_of_documents_are_told_apart(seed):
    """Two rows are of one part if they follow one another in a document; on one rank parts are the documents."""
    examples, cp_size = draw(seed), 1 + seed % 3
    print(f"seed {seed}: {examples}")
    documents = [n for x in examples for n in x.get("seq_lengths", [len(x["input_ids"])])]
    document_of = np.repeat(np.arange(len(documents)), documents)
    for rank in range(cp_size):
        batch = PackingCollator(cp_size, rank, has_segments=True)(examples)
        rows = batch["magi_plans"].full.position_array(rank)
        document = np.where(rows < len(document_of), document_of[np.minimum(rows, len(document_of) - 1)], -1)
        follows = (np.diff(rows) == 1) & (np.diff(document) == 0)
        lengths = np.diff(batch["cu_seq_lens_q"].numpy())
        assert batch["seq_idx"].dtype == batch["cu_seq_lens_k"].dtype == torch.int32
        assert np.array_equal(np.diff(batch["seq_idx"][0].numpy()) == 0, follows)
        assert lengths.sum() == len(rows) and np.array_equal(np.flatnonzero(~follows) + 1, np.cumsum(lengths)[:-1])
        assert batch["max_length_q"] == batch["max_length_k"] == lengths.max()
        if cp_size == 1:
            assert lengths.tolist() == documents


def test_plans_of_windows_have_the_tokens_of_the_full_one():
    examples = [{"input_ids": list(range(50))}, {"input_ids": list(range(30))}]
    plans = PackingCollator(2, 1, windows=[8, 8, 3])(examples)["magi_plans"]
    assert set(plans.windows) == {3, 8} and plans.of(None) is plans.full
    for window, plan in plans.windows.items():
        assert np.array_equal(plan.position_array(1), plans.full.position_array(1))
        dense = Mask.varlen([0, 50, 80], causal=True).to_dense() & ~np.tri(80, 80, -window, dtype=bool)
        assert plan.areas.sum() == dense.sum()
    with pytest.raises(ContractError, match=r"window of 5, and the batch was planned for \[3, 8\]"):
        plans.of(5)
    again = pickle.loads(pickle.dumps(plans))
    assert again.full == plans.full and again.windows[8] == plans.windows[8]


def test_tensors_are_taken_too():
    batch = PackingCollator()([{"input_ids": torch.arange(5), "labels": torch.arange(5)}])
    assert batch["labels"].tolist() == [[1, 2, 3, 4, IGNORE_INDEX]]


@pytest.mark.parametrize("dtype", [None, torch.bfloat16, torch.float32, torch.float64])
@pytest.mark.parametrize("cp_size", [1, 2, 3])
def test_weights_of_tokens_keep_their_fractions(cp_size, dtype):
    """A column of floating-point numbers beside the tokens, as advantages or weights of a loss; pads weigh nothing."""
    generator = torch.Generator().manual_seed(cp_size)
    examples, weights = [], {}
    for tokens in (torch.arange(1, 8), torch.arange(8, 10)):
        given = torch.rand(len(tokens), generator=generator, dtype=dtype)
        weights |= dict(zip(tokens.tolist(), given.tolist()))
        examples.append({"input_ids": tokens.tolist(), "weights": given.tolist() if dtype is None else given})
    batches = [PackingCollator(cp_size, rank, per_token=["weights"])(examples) for rank in range(cp_size)]
    assert {batch["weights"].dtype for batch in batches} == {torch.float64 if dtype == torch.float64 else torch.float32}
    total = sum(batch["weights"].double().sum().item() for batch in batches)
    assert total == pytest.approx(sum(weights.values()), rel=1e-6)
    for batch in batches:
        for token, weight in zip(batch["input_ids"][0].tolist(), batch["weights"][0].tolist()):
            assert weight == 0 or weight == pytest.approx(weights[token], rel=1e-6)


@pytest.mark.parametrize("kind", (list, torch.tensor, np.array))
def test_whole_weights_of_one_example_do_not_change_the_dtype(kind):
    """Weights that happen to be integers, as rewards of 0 and 1, beside others of float32."""
    examples = [{"input_ids": [1, 2], "w": kind([0, 1])}, {"input_ids": [3], "w": torch.tensor([0.25])}]
    for order in (examples, examples[::-1]):
        got = PackingCollator(per_token=["w"])(order)
        assert got["w"].dtype == torch.float32
        pairs = dict(zip(got["input_ids"][0].tolist(), got["w"][0].tolist()))
        assert (pairs[1], pairs[2], pairs[3]) == (0, 1, 0.25)


def test_a_column_that_the_first_example_lacks_is_missed():
    with pytest.raises(ContractError, match="Some examples of a batch have 'weights' and others do not"):
        PackingCollator(per_token=["weights"])([{"input_ids": [1]}, {"input_ids": [2], "weights": [0.5]}])


def test_masks_of_other_dtypes():
    for kept in (torch.tensor([1.0, 0.0]), torch.tensor([True, False]), np.array([1, 0], dtype=np.int8)):
        batch = PackingCollator()([{"input_ids": torch.tensor([5, 6], dtype=torch.int16), "attention_mask": kept}])
        assert batch["input_ids"].tolist() == [[5]] and batch["input_ids"].dtype == torch.int64


@pytest.mark.parametrize(
    "examples, word",
    (
        ([], "no examples"),
        ([{"text": "a"}], "needs 'input_ids'"),
        ([{"input_ids": []}], "at least one token"),
        ([{"input_ids": [[1, 2]]}], "one dimension"),
        ([{"input_ids": [1, 2.5]}], "holds 2.5; give integers"),
        ([{"input_ids": "abc"}], "tokenize it first"),
        ([[1, 2, 3]], "An example is a list; give a dict"),
        ([{"input_ids": [1, 2], "labels": [1]}], "2 input_ids and 1 labels"),
        ([{"input_ids": [1, 2], "seq_lengths": [1]}], "must add up"),
        ([{"input_ids": [1, 2], "seq_lengths": [2, 0]}], "must add up"),
    ),
)
def test_bad_examples_get_a_sentence(examples, word):
    with pytest.raises(ContractError, match=word):
        PackingCollator()(examples)


@pytest.mark.parametrize("bad", ({"cp_size": 0}, {"cp_size": 2, "cp_rank": 2}, {"windows": [0]}))
def test_bad_settings_get_a_sentence(bad):
    with pytest.raises(ContractError):
        PackingCollator(**bad)
