# SPDX-License-Identifier: Apache-2.0
"""``ContextParallelTrainer`` as its users use it: evaluation of several batches, padded data, losses and collators of
one's own; beside each document alone in one process. All cases of as many processes share one start."""

from __future__ import annotations

import json

import numpy as np
import pytest
import torch

pytest.importorskip("transformers", reason="needs transformers; ci/integrations installs it")
pytest.importorskip("trl", reason="needs trl; ci/integrations installs it")

import transformers  # noqa: E402
from starting import assert_same_steps, launch  # noqa: E402
from tiny_models import make_model  # noqa: E402
from use_trainer import documents, padded  # noqa: E402

IS_OLD, NAN = transformers.__version__.startswith("4."), "transformers 4 takes the NaN of a batch without labels"
LENGTHS = {"equal": [20] * 8, "unequal": [5, 9, 30, 17, 4, 22, 8], "one token": [1, 1, 13, 2, 1]}
EVALUATED = {
    "equal": {"model": "llama", "lengths": LENGTHS["equal"]},
    "unequal": {"model": "llama", "lengths": LENGTHS["unequal"]},
    "windows": {"model": "gemma3", "lengths": LENGTHS["unequal"]},
    "one token": {"model": "llama", "lengths": LENGTHS["one token"]},
    "groups of two": {"model": "llama", "lengths": LENGTHS["unequal"], "cp_size": 2},
    "groups of one": {"model": "llama", "lengths": LENGTHS["unequal"], "cp_size": 1},
}
PADDED = {x: {"model": "llama", "lengths": LENGTHS["unequal"], "width": 32, "side": x} for x in ("left", "right")}
COMPLETIONS, SFT_LENGTHS = ([1, 1, 1, 1], [12, 0, 0, 3], [0, 0, 6, 0]), [13, 9, 30, 17]
USERS = {
    "plain": {},
    "padded right": {"data": "padded", "width": 32, "side": "right", "has_labels": True},
    "padded left": {"data": "padded", "width": 32, "side": "left", "has_labels": False},
    "default collator": {"data": "padded", "width": 32, "side": "right", "has_labels": True, "collator": "default"},
    "more fields": {"data": "two fields"},
    "collator for language modeling": {"collator": "language modeling"},
    "collator that flattens": {"collator": "flattening"},
    "loss by hand": {"loss": "by_hand"},
    "loss by padding": {"loss": "by_padding", "collator": "language modeling"},
}
# name -> (processes that run it, settings)
CASES = {
    **{f"eval {name}": ((1, 2), {"case": "evaluated", **x}) for name, x in EVALUATED.items()},
    "eval groups of two": ((4,), {"case": "evaluated", **EVALUATED["groups of two"]}),
    **{f"padded {name}": ((2,), {"case": "evaluated", **x}) for name, x in PADDED.items()},
    **{
        f"sft {x}": ((1, 2), {"case": "sft_evaluated", "lengths": SFT_LENGTHS, "completions": x}) for x in COMPLETIONS
    },
    **{f"train {name}": ((1, 2), {"case": "trained", "lengths": LENGTHS["unequal"], **x}) for name, x in USERS.items()},
    "generation": ((1, 2), {"case": "trained", "lengths": LENGTHS["unequal"], "generates": True}),
    "without plans": ((2,), {"case": "without_plans"}),
    "autocast": ((1, 2), {"case": "trained", "lengths": LENGTHS["unequal"], "arguments": {"bf16": True}}),
    "other tokens": (
        (2,), {"case": "trained", "lengths": LENGTHS["unequal"], "other_tokens_on_rank": 1, "fails": True}
    ),
    "forgotten": ((2,), {"case": "forgotten", "fails": True}),
}  # fmt: skip


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """``runs(name, processes, rank)``: what a case gave."""
    made: dict[int, list[dict]] = {}
    folder = tmp_path_factory.mktemp("trainer")
    started: set[int] = set()

    def get(name: str, processes: int, rank: int = 0) -> dict:
        names = [n for n, (counts, _) in CASES.items() if processes in counts]
        if processes not in made:
            assert processes not in started, f"{processes} processes failed before; the first test with them says why"
            started.add(processes)
            launch(folder, [CASES[n][1] for n in names], processes, script="use_trainer.py")
            files = [folder / f"{processes}.json{f'.{r}' if r else ''}" for r in range(processes)]
            made[processes] = [json.loads(file.read_text())["cases"] for file in files]
        return made[processes][rank][names.index(name)]

    return get


def alone(model: str, examples: list[dict]) -> tuple[list[np.ndarray], list[float], list[int]]:
    """Logits, summed loss and number of labels of each document, by the attention of transformers."""
    theirs, logits, losses, labels = make_model(model, "eager").eval(), [], [], []
    for x in examples:
        ids = torch.tensor([x["input_ids"]])
        with torch.no_grad():
            made = theirs(input_ids=ids, use_cache=False).logits[0]
        logits.append(made.numpy())
        losses.append(torch.nn.functional.cross_entropy(made[:-1], ids[0, 1:], reduction="sum").item())
        labels.append(ids.shape[1] - 1)
    return logits, losses, labels


@pytest.mark.parametrize("name, processes", [(n, p) for n in EVALUATED for p in CASES[f"eval {n}"][0]])
def test_each_example_is_evaluated_once(name, processes, runs):
    if IS_OLD and name == "one token":
        pytest.skip(NAN)
    got = runs(f"eval {name}", processes)
    examples = documents(EVALUATED[name]["lengths"])
    logits, losses, labels = alone(EVALUATED[name]["model"], examples)
    assert got["rows"] == len(examples) and got["labels"] == sum(labels)
    for row, want in zip(got["predictions"], logits):
        assert np.allclose(np.array(row)[: len(want)], want, rtol=1e-4, atol=1e-5)
        assert (np.array(row)[len(want) :] == -100).all()
    for row, x in zip(got["label_ids"], examples):
        assert row[: len(x["input_ids"]) - 1] == x["input_ids"][1:]
        assert all(y == -100 for y in row[len(x["input_ids"]) - 1 :])
    batches = [(losses[i : i + 2], labels[i : i + 2]) for i in range(0, len(losses), 2)]
    by_batch = [(sum(a) / sum(b), len(a)) for a, b in batches if sum(b)]
    want = sum(loss * n for loss, n in by_batch) / sum(n for _, n in by_batch)
    assert got["loss"] == pytest.approx(want, rel=1e-5) and got["test_loss"] == pytest.approx(want, rel=1e-5)


@pytest.mark.parametrize("side", PADDED)
def test_predictions_of_padded_examples_have_their_shape(side, runs):
    got = runs(f"padded {side}", 2)
    examples = documents(LENGTHS["unequal"])
    logits, _, labels = alone("llama", examples)
    predicted = np.array(got["predictions"])
    assert predicted.shape[:2] == (len(examples), 32) and got["labels"] == sum(labels)
    for row, x, want in zip(predicted, padded(examples, 32, side, False), logits):
        mask = np.array(x["attention_mask"]) == 1
        assert np.allclose(row[mask], want, rtol=1e-4, atol=1e-5) and (row[~mask] == -100).all()


@pytest.mark.parametrize("completions", COMPLETIONS, ids=str)
def test_trl_evaluates_where_a_rank_has_no_labels(completions, runs):
    if IS_OLD and not sum(completions[:2]):
        pytest.skip(NAN)
    one, two = (runs(f"sft {completions}", processes) for processes in (1, 2))
    theirs, sums = make_model("llama", "eager"), []
    for x, n in zip(documents(SFT_LENGTHS), completions):
        ids = torch.tensor([x["input_ids"]])
        with torch.no_grad():
            logits = theirs(input_ids=ids, use_cache=False).logits[0]
        targets = ids[0, 1:].clone()
        targets[: len(targets) - n] = -100
        sums.append((torch.nn.functional.cross_entropy(logits[:-1], targets, reduction="sum").item(), n))
    means = [(a + b) / max(m + n, 1) for (a, m), (b, n) in (sums[:2], sums[2:])]
    for got in (one, two):
        assert got["eval_loss"] == pytest.approx(sum(means) / len(means), rel=1e-5)
    assert one["eval_mean_token_accuracy"] == pytest.approx(two["eval_mean_token_accuracy"], abs=1e-6)


@pytest.mark.parametrize("name", USERS)
@pytest.mark.parametrize("processes", (1, 2))
def test_data_collators_and_losses_of_users_train_as_whole_documents(name, processes, runs):
    """``test_transformers`` holds plain training against the attention of transformers."""
    assert_same_steps(runs("train plain", 1), runs(f"train {name}", processes), 3)


def test_generation_between_steps(runs):
    """It runs torch's attention, and training goes on by plans."""
    one, two = (runs("generation", processes) for processes in (1, 2))
    assert one["generated"] == two["generated"] and len(one["generated"][0]) == 8
    assert_same_steps(one, two, 3)


def test_half_precision_by_autocast(runs):
    """TRL's default: bf16=True on float32 weights."""
    for processes in (1, 2):
        assert_same_steps(runs("train plain", 1), runs("autocast", processes), 3, tolerance=2e-2)


def test_forwards_without_plans_run_where_they_cannot_be_a_forgotten_collator(runs):
    got = runs("without plans", 2)
    assert "training step of 2 processes" in got["training"] and "full_sequences" in got["training"]
    assert got["inside full_sequences"] is True and got["evaluation"] is True and got["recomputed"] == "refused"


@pytest.mark.parametrize("rank", (0, 1))
def test_ranks_with_equal_plans_and_other_tokens(rank, runs):
    got = runs("other tokens", 2, rank)
    assert got["error"] == "PlanMismatchError" and "Ranks 1 hold other tokens" in got["text"]


@pytest.mark.parametrize("rank", (0, 1))
def test_attention_that_was_switched_and_not_back(rank, runs):
    got = runs("forgotten", 2, rank)
    assert got["error"] == "ContractError" and "model.layers.0.self_attn" in got["text"]
