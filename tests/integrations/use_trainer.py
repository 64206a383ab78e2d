# SPDX-License-Identifier: Apache-2.0
"""Cases of ``ContextParallelTrainer`` that a loop of one's own does not have; to be started by torchrun as
``train_tiny.py``. Settings: a list of {"case": name of a function here, ...}, which run one after another."""

from __future__ import annotations

import json
import os
import sys
import tempfile
from pathlib import Path

import torch
from accelerate.state import AcceleratorState
from tiny_models import make_model
from train_tiny import leave
from train_trl import PackedSFTTrainer, make_tokenizer
from transformers import (
    DataCollatorForLanguageModeling,
    DataCollatorWithFlattening,
    TrainingArguments,
    default_data_collator,
    set_seed,
)
from trl import SFTConfig

from magi_attention.errors import ContractError
from magi_attention.integrations.transformers import ContextParallelTrainer, full_sequences, register

RANK = int(os.environ.get("RANK", 0))
PAD = 2  # of make_tokenizer


def documents(lengths: list[int], seed: int = 3) -> list[dict]:
    generator = torch.Generator().manual_seed(seed)
    return [{"input_ids": torch.randint(3, 64, (n,), generator=generator).tolist()} for n in lengths]


def padded(examples: list[dict], width: int, side: str, has_labels: bool) -> list[dict]:
    """As a tokenizer pads them; labels are those of the padded tokens, or None."""
    made = []
    for x in examples:
        ids, pads = x["input_ids"], [PAD] * (width - len(x["input_ids"]))
        ones, zeros = [1] * len(ids), [0] * len(pads)
        left = side == "left"
        mask = zeros + ones if left else ones + zeros
        row = {"input_ids": pads + ids if left else ids + pads, "attention_mask": mask}
        made.append({**row, "labels": list(row["input_ids"])} if has_labels else row)
    return made


def arguments(settings: dict, kind: type = TrainingArguments, **more) -> TrainingArguments:
    options = {"per_device_train_batch_size": 2, "per_device_eval_batch_size": 2, "logging_steps": 1, "report_to": []}
    options |= {"save_strategy": "no", "disable_tqdm": True, "learning_rate": 3e-3, "use_cpu": True}
    return kind(tempfile.mkdtemp(), **{**options, **more, **settings.get("arguments", {})})


def evaluated(settings: dict) -> dict:
    """``evaluate`` and ``predict`` of several batches."""
    examples = documents(settings["lengths"])

    def metrics(made) -> dict:
        return {"rows": len(made.label_ids), "labels": int((made.label_ids != -100).sum())}

    if settings.get("width"):
        examples = padded(examples, settings["width"], settings["side"], True)
    trainer = ContextParallelTrainer(
        make_model(settings["model"], "magi"), arguments(settings), train_dataset=documents([3]),
        compute_metrics=metrics, cp_size=settings.get("cp_size"),
    )  # fmt: skip
    measured = trainer.evaluate(examples)
    made = trainer.predict(examples)
    result = {name: measured[f"eval_{name}"] for name in ("loss", "rows", "labels")}
    result |= {"test_loss": made.metrics["test_loss"], "label_ids": made.label_ids.tolist()}
    return {**result, "predictions": made.predictions.tolist()}


def sft_evaluated(settings: dict) -> dict:
    """TRL's evaluation, where a rank may have no label at all."""
    examples = [
        {**x, "completion_mask": [0] * (len(x["input_ids"]) - n) + [1] * n}
        for x, n in zip(documents(settings["lengths"]), settings["completions"])
    ]
    from datasets import Dataset

    trainer = PackedSFTTrainer(
        make_model("llama", "magi"), arguments(settings, SFTConfig, bf16=False, max_length=None),
        train_dataset=Dataset.from_list(examples), eval_dataset=Dataset.from_list(examples),
        processing_class=make_tokenizer(),
    )  # fmt: skip
    return {name: x for name, x in trainer.evaluate().items() if name in ("eval_loss", "eval_mean_token_accuracy")}


def by_hand(outputs, labels, num_items_in_batch):
    """``compute_loss_func`` as the documentation of transformers has it: it shifts by itself."""
    logits = outputs["logits"][:, :-1].flatten(0, 1)
    return torch.nn.functional.cross_entropy(logits, labels[:, 1:].flatten(), reduction="sum") / num_items_in_batch


def by_padding(outputs, labels, num_items_in_batch):
    """The other usual form, in which the last row has a label that is ignored."""
    labels = torch.nn.functional.pad(labels, (0, 1), value=-100)[..., 1:].flatten()
    logits = outputs.logits.float().flatten(0, 1)
    return torch.nn.functional.cross_entropy(logits, labels, reduction="sum") / num_items_in_batch


LOSSES = {None: None, "by_hand": by_hand, "by_padding": by_padding}
COLLATORS = {
    None: lambda: None,
    "language modeling": lambda: DataCollatorForLanguageModeling(make_tokenizer(), mlm=False),
    "flattening": lambda: DataCollatorWithFlattening(),
    "default": lambda: default_data_collator,
}


def trained(settings: dict) -> dict:
    """A few steps; ``loss``, ``collator`` and ``data`` say in which form a user gives them."""
    examples = documents(settings["lengths"])
    if settings.get("data") == "padded":
        examples = padded(examples, settings["width"], settings["side"], settings["has_labels"])
    elif settings.get("data") == "two fields":
        examples = [{**x, "token_type_ids": [0] * len(x["input_ids"]), "text": "word", "note": None} for x in examples]
    if settings.get("other_tokens_on_rank") == RANK:
        examples = documents(settings["lengths"], seed=4)
    trainer = ContextParallelTrainer(
        make_model(settings.get("model", "llama"), "magi"), arguments(settings, max_steps=settings.get("steps", 3)),
        train_dataset=examples, compute_loss_func=LOSSES[settings.get("loss")],
        data_collator=COLLATORS[settings.get("collator")](), cp_size=settings.get("cp_size"),
    )  # fmt: skip
    trainer.train()
    if settings.get("generates"):
        with torch.no_grad():
            prompt, options = torch.tensor([[5, 9, 11]]), {"do_sample": False, "pad_token_id": PAD}
            made = trainer.model.generate(prompt, max_new_tokens=5, **options)
        trainer.train()
    return {"log": trainer.state.log_history, **({"generated": made.tolist()} if settings.get("generates") else {})}


def forgotten(settings: dict) -> dict:
    """``set_attn_implementation`` for a generation, and not taken back."""
    trainer = ContextParallelTrainer(
        make_model("llama", "magi"), arguments(settings, max_steps=2), train_dataset=documents([9, 12, 20, 7]),
    )  # fmt: skip
    trainer.model.set_attn_implementation("sdpa")
    trainer.train()
    return {}


def without_plans(settings: dict) -> dict:
    """A forward of whole sequences, several in a batch, on each rank: where it is refused and where it runs."""
    model, ids = make_model("llama", "magi"), torch.tensor([[5, 6, 7], [9, 8, 7]])
    theirs, result = make_model("llama", "eager"), {}
    try:
        model(ids)
    except ContractError as error:
        result["training"] = str(error)
    with full_sequences():
        result["inside full_sequences"] = torch.allclose(model(ids).logits, theirs(ids).logits, atol=1e-5)
    with torch.no_grad():
        result["evaluation"] = torch.allclose(model.eval()(ids).logits, theirs(ids).logits, atol=1e-5)
    model.train().gradient_checkpointing_enable({"use_reentrant": True})
    model.enable_input_require_grads()
    try:
        model(ids, use_cache=False)
    except ContractError:
        result["recomputed"] = "refused"
    return result


def run(settings: dict) -> dict:
    set_seed(0)
    AcceleratorState._reset_state()  # it keeps the precision of the first Trainer
    try:
        return globals()[settings["case"]](settings)
    except Exception as error:
        if not settings.get("fails"):
            raise
        return {"error": type(error).__name__, "text": str(error)}


def main(out: str, cases: list[dict]) -> None:
    register()
    torch.set_num_threads(1)
    result = {"cases": [run(settings) for settings in cases], "processes": int(os.environ.get("WORLD_SIZE", 1))}
    Path(out if RANK == 0 else f"{out}.{RANK}").write_text(json.dumps(result))


if __name__ == "__main__":
    main(sys.argv[1], json.loads(sys.argv[2]))
    leave()
