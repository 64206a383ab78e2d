# SPDX-License-Identifier: Apache-2.0
"""transformers with the real package: attention against its own, and training over ranks against one process.

In processes started by torchrun and accelerate. ci/integrations installs the packages and runs these tests.
"""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pytest
import torch

pytest.importorskip("transformers", reason="needs transformers; ci/integrations installs it")

import transformers  # noqa: E402
from starting import ACCELERATE, assert_same_steps, launch  # noqa: E402
from tiny_models import CONFIGS, make_documents, make_model  # noqa: E402
from transformers import Qwen2_5_VLConfig, Qwen2_5_VLForConditionalGeneration, TrainingArguments  # noqa: E402

from magi_attention.errors import ContractError, UnsupportedError  # noqa: E402
from magi_attention.integrations.packing import PackingCollator  # noqa: E402
from magi_attention.integrations.transformers import (
    ContextParallelMixin,
    ContextParallelTrainer,
    register,
    windows_of,
)  # noqa: E402

register()


@pytest.mark.parametrize("name", CONFIGS)
def test_packed_documents_are_as_if_alone(name):
    ours, theirs = (make_model(name, attention) for attention in ("magi", "eager"))
    theirs.load_state_dict(ours.state_dict())
    documents = [x for x in make_documents(12) if len(x["input_ids"]) > 1]
    got = ours(**PackingCollator(windows=windows_of(ours.config))(documents), use_cache=False)
    logits, losses, labels = [], [], 0
    for x in documents:
        ids = torch.tensor([x["input_ids"]])
        alone = theirs(input_ids=ids, labels=ids, use_cache=False)
        logits.append(alone.logits[0])
        losses.append(alone.loss * (ids.shape[1] - 1))
        labels += ids.shape[1] - 1
    want = torch.cat(logits)
    assert torch.allclose(got.logits[0, : len(want)], want, rtol=1e-4, atol=1e-5)
    loss = sum(losses) / labels
    assert torch.allclose(got.loss, loss, rtol=1e-6)
    got.loss.backward()
    loss.backward()
    for (parameter, a), (_, b) in zip(ours.named_parameters(), theirs.named_parameters()):
        assert (a.grad is None) == (b.grad is None), parameter
        assert a.grad is None or torch.allclose(a.grad, b.grad, rtol=1e-3, atol=1e-5), parameter


# ---- training over ranks: all cases of as many processes share one start ----------------------------------------

MANY = {"max_steps": 6, "gradient_accumulation_steps": 3, "gradient_checkpointing": True, "dataloader_num_workers": 1}
GROUPS = {"max_steps": 8, "gradient_accumulation_steps": 2}
COMPILED = {"max_steps": 3, "torch_compile": True, "torch_compile_backend": "aot_eager"}
SAVED = {"max_steps": 6, "save_strategy": "steps", "save_steps": 3}
# name -> (processes that run it, settings); a folder is below that of the start
TRAINED = {
    **{name: ((1, 2), {"model": name, "arguments": {"max_steps": 50}}) for name in CONFIGS},
    "many": ((1, 2), {"model": "gemma3", "arguments": MANY, "evaluate": True}),
    "groups of one": ((2,), {"model": "llama", "arguments": GROUPS, "cp_size": 1}),
    "groups of two": ((4,), {"model": "llama", "arguments": GROUPS, "cp_size": 2}),
    "saved": ((2,), {"model": "llama", "arguments": SAVED, "folder": "run"}),
    "resumed": ((2,), {"model": "llama", "arguments": SAVED, "folder": "run", "resume": "run/checkpoint-3"}),
    "compiled": ((2,), {"model": "llama", "arguments": COMPILED}),
    "seldom": ((1, 2), {"model": "llama", "arguments": {"max_steps": 5, "logging_steps": 100}}),
    "three steps": ((2,), {"model": "llama", "arguments": {"max_steps": 3}}),
}


if IS_OLD := transformers.__version__.startswith("4."):  # it cannot load a checkpoint on CPUs with a torch of today
    del TRAINED["resumed"]


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """``trained(name, processes)``: what a case gave."""
    made: dict[int, dict[str, dict]] = {}
    folder = tmp_path_factory.mktemp("trained")

    def settings(name: str) -> dict:
        given = TRAINED[name][1]
        return {**given, **{key: str(folder / given[key]) for key in ("folder", "resume") if key in given}}

    def get(name: str, processes: int) -> dict:
        if processes not in made:
            names = [n for n, (counts, _) in TRAINED.items() if processes in counts]
            made[processes] = {}
            found = launch(folder, [settings(n) for n in names], processes)["cases"]
            made[processes] = dict(zip(names, found))
        return made[processes][name]

    return get


@pytest.mark.parametrize("name", CONFIGS)
def test_two_ranks_train_as_one(name, trained):
    one, two = trained(name, 1), trained(name, 2)
    assert_same_steps(one, two, 50)
    losses = [x["loss"] for x in one["log"] if "grad_norm" in x]
    assert losses[-1] < 0.8 * losses[0], "it learns nothing, so equal losses say little"


def test_the_mean_loss_of_a_training_that_logs_seldom(trained):
    """transformers sums up what is not logged yet from one rank."""
    one, two = (trained("seldom", n)["log"][-1]["train_loss"] for n in (1, 2))
    assert one == pytest.approx(two, rel=1e-6) and one > 0


@pytest.mark.nightly
def test_replicas_of_groups(trained):
    """Two groups of two ranks, beside two groups of one."""
    assert_same_steps(trained("groups of one", 2), trained("groups of two", 4), 8)


def test_accumulation_checkpointing_workers_and_evaluation(trained):
    one, two = trained("many", 1), trained("many", 2)
    assert_same_steps(one, two, 6)
    assert abs(one["eval"]["eval_loss"] - two["eval"]["eval_loss"]) < 1e-5
    a, b = (np.array(result["predicted"]) for result in (one, two))
    assert a.shape == b.shape and np.allclose(a, b, atol=1e-4)


@pytest.mark.skipif(IS_OLD, reason="transformers 4 cannot load a checkpoint on CPUs with a torch of today")
def test_resume_gives_the_same_bits(trained):
    tails = [[(x["loss"], x["grad_norm"]) for x in r["log"] if x.get("step", 0) > 3 and "loss" in x]
             for r in (trained("saved", 2), trained("resumed", 2))]  # fmt: skip
    assert len(tails[0]) == 3 and tails[0] == tails[1]


def test_compiled(trained):
    assert_same_steps(trained("three steps", 2), trained("compiled", 2), 3)


@pytest.mark.nightly
def test_started_by_accelerate(trained, tmp_path):
    (got,) = launch(tmp_path, [TRAINED["three steps"][1]], 2, by=ACCELERATE)["cases"]
    assert got["log"][:3] == trained("three steps", 2)["log"][:3]


# ---- what is refused ------------------------------------------------------------------------------------------


def make_trainer(tmp_path, attention="magi", model=None, **arguments) -> ContextParallelTrainer:
    model = make_model("llama", attention) if model is None else model
    options = TrainingArguments(str(tmp_path), use_cpu=True, report_to=[], **arguments)
    return ContextParallelTrainer(model, options, train_dataset=make_documents(4))


def test_the_trainer_refuses_what_ranks_cannot_share(tmp_path):
    for settings, error, word in (
        ({"attention": "sdpa"}, ContractError, "attn_implementation='magi'"),
        ({"average_tokens_across_devices": False}, ContractError, "average_tokens_across_devices"),
        ({"label_smoothing_factor": 0.1}, UnsupportedError, "label_smoothing_factor"),
    ):
        with pytest.raises(error, match=word):
            make_trainer(tmp_path, **settings)
    with pytest.raises(ContractError, match="a divisor of the 1 processes"):
        ContextParallelTrainer(make_model("llama", "magi"), TrainingArguments(str(tmp_path), use_cpu=True), cp_size=2)
    trainer = make_trainer(tmp_path)
    with pytest.raises(ContractError, match="no eval_dataset"):
        trainer.evaluate()
    mixing = make_model("llama", "magi")
    mixing.mixer = torch.nn.Conv1d(4, 4, 3)
    with pytest.raises(UnsupportedError, match="Conv1d mixes neighbouring tokens, and documents that are packed leak"):
        make_trainer(tmp_path, model=mixing)


@pytest.mark.parametrize("name", ("DPOTrainer", "GRPOTrainer", "KTOTrainer", "RewardTrainer", "RLOOTrainer"))
def test_trainers_of_trl_with_losses_of_their_own_are_refused_by_name(name):
    kind = getattr(pytest.importorskip("trl"), name)
    with pytest.raises(UnsupportedError, match=f"{name} of TRL makes batches and losses of its own"):
        type("OverRanks", (ContextParallelMixin, kind), {})()


def test_a_loss_of_a_subclass_has_to_say_that_it_is_by_shard(tmp_path):
    class Shifting(ContextParallelTrainer):
        def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
            return super().compute_loss(model, inputs, return_outputs, num_items_in_batch)

    options = {"args": TrainingArguments(str(tmp_path), use_cpu=True, report_to=[]), "train_dataset": make_documents(4)}
    with pytest.raises(UnsupportedError, match="Shifting has a compute_loss of its own"):
        Shifting(make_model("llama", "magi"), **options)
    Shifting.computes_loss_by_shard = True
    Shifting(make_model("llama", "magi"), **options)


def test_batches_that_cannot_be_packed(tmp_path):
    for example, error, word in (
        ({"attention_mask": [1, 2, 0]}, ContractError, "give 0 and 1"),
        ({"attention_mask": [0, 0, 0]}, ContractError, "leaves out all tokens"),
        ({"attention_mask": [1, 1]}, ContractError, "3 input_ids and 2 attention_mask"),
        ({"pixel_values": [[0.5, 0.5]]}, UnsupportedError, "'pixel_values' of shape"),
        ({"labels": [1, 2]}, ContractError, "3 input_ids and 2 labels"),
        ({"position_ids": [0, 1]}, ContractError, "3 input_ids and 2 position_ids"),
    ):
        with pytest.raises(error, match=word):
            PackingCollator()([{"input_ids": [5, 6, 7], **example}])
    for collator, error, word in (
        (lambda examples: {"tokens": 1}, ContractError, "made 'tokens'"),
        (lambda examples: {"input_ids": torch.zeros(1, 3), "images": torch.zeros(2, 9)}, UnsupportedError, "'images'"),
    ):
        with pytest.raises(error, match=word):
            PackingCollator(inner=collator)([{}])
    trainer = make_trainer(tmp_path)
    trainer.data_collator = lambda examples: {"input_ids": torch.tensor([[1, 2, 3]])}
    with pytest.raises(ContractError, match="A batch has input_ids, and no magi_plans"):
        trainer.evaluate([{"input_ids": [1, 2, 3]}])


@pytest.mark.parametrize("name", ("llama", "gemma3", "gpt_oss"))
def test_generation_and_padded_evaluation_are_as_without_us(name):
    """Left-padded prompts, with a cache; torch's attention, or the model's own for sinks."""
    ours, theirs = (make_model(name, attention) for attention in ("magi", "eager"))
    theirs.load_state_dict(ours.state_dict())
    ids = torch.randint(3, 64, (2, 40), generator=torch.Generator().manual_seed(0))
    mask = torch.ones_like(ids)
    mask[0, :17] = 0
    options = {"attention_mask": mask, "max_new_tokens": 6, "do_sample": False, "pad_token_id": 0}
    for is_training in (True, False):
        a, b = (model.train(is_training).generate(ids, **options) for model in (ours, theirs))
        assert torch.equal(a, b)
    with torch.no_grad():
        a, b = (model.eval()(ids, attention_mask=mask).logits for model in (ours, theirs))
    assert torch.allclose(a[mask == 1], b[mask == 1], rtol=1e-4, atol=1e-5)


def test_models_of_images_are_refused(tmp_path):
    vision = {"depth": 1, "hidden_size": 16, "num_heads": 2, "intermediate_size": 16, "out_hidden_size": 32}
    rope = {"rope_type": "default", "mrope_section": [1, 1, 2], "rope_theta": 1e4}
    text = {**CONFIGS["llama"]().to_dict(), "model_type": "qwen2_5_vl_text", "layer_types": None}
    text["rope_parameters"] = rope
    model = Qwen2_5_VLForConditionalGeneration._from_config(
        Qwen2_5_VLConfig(text_config=text, vision_config=vision), attn_implementation="magi"
    )
    with pytest.raises(UnsupportedError, match="Qwen2_5_VLForConditionalGeneration has a part for images"):
        make_trainer(tmp_path, model=model)


def test_processes_of_which_the_trainer_does_not_know(tmp_path, monkeypatch):
    """As torchrun on CPUs without use_cpu=True: each would train alone."""
    arguments = TrainingArguments(str(tmp_path), use_cpu=True, report_to=[])
    assert arguments.world_size == 1
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(ContractError, match="2 processes were started, and the Trainer knows of 1"):
        ContextParallelTrainer(make_model("llama", "magi"), arguments, train_dataset=make_documents(4))


@pytest.mark.parametrize(
    "asked, configured, want", ((None, None, 8), (4, None, 4), (None, 2, 2), (2, 2, 2), (4, 2, None))
)
def test_cp_size_from_the_config_of_accelerate(asked, configured, want):
    parallel = SimpleNamespace(cp_enabled=configured is not None, cp_size=configured or 1)
    trainer = SimpleNamespace(accelerator=SimpleNamespace(parallelism_config=parallel))
    if want is None:
        with pytest.raises(ContractError, match="cp_size is 4, and ParallelismConfig says 2"):
            ContextParallelMixin._cp_size(trainer, asked, 8)
    else:
        assert ContextParallelMixin._cp_size(trainer, asked, 8) == want


def test_attention_refuses_other_batches():
    model = make_model("llama", "magi")
    batch = PackingCollator()(make_documents(3))
    plans = batch.pop("magi_plans")
    twice = {name: x.expand(2, -1) for name, x in batch.items()}
    with pytest.raises(ContractError, match="2 rows"):
        model(**twice, magi_plans=plans)
    padded = torch.ones_like(batch["input_ids"])
    padded[0, 0] = 0
    with pytest.raises(ContractError, match="leaves tokens out"):
        model(**batch, attention_mask=padded, magi_plans=plans)
    with pytest.raises(UnsupportedError, match="attention_dropout"):
        make_model_with_dropout().train()(**batch, magi_plans=plans)


def make_model_with_dropout():
    model = make_model("llama", "magi")
    for layer in model.model.layers:
        layer.self_attn.attention_dropout = 0.1
    return model
