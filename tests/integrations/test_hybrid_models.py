# SPDX-License-Identifier: Apache-2.0
"""Hybrid models of transformers, with torch's own recurrences: packed documents on one to three ranks beside each
document alone; and what is said of layers that know no plans."""

from __future__ import annotations

import copy
from contextlib import nullcontext

import numpy as np
import pytest
import torch
from torch import nn

pytest.importorskip("transformers", reason="needs transformers; ci/integrations installs it")

import transformers  # noqa: E402
from architectures import HYBRID, HYBRID_SINCE, make_config  # noqa: E402
from starting import assert_same_steps, launch_both  # noqa: E402
from tiny_models import models  # noqa: E402
from transformers import AutoModelForCausalLM, TrainingArguments  # noqa: E402

from magi_attention.api import AttentionCheck  # noqa: E402
from magi_attention.comm.transport.fake import FakeWorld  # noqa: E402
from magi_attention.errors import ContractError, UnsupportedError  # noqa: E402
from magi_attention.integrations.packing import PackingCollator  # noqa: E402
from magi_attention.integrations.shared.recurrent_layers import is_marked, mixing_layers  # noqa: E402
from magi_attention.integrations.transformers import (  # noqa: E402
    ContextParallelTrainer,
    register,
    use_recurrent_layers,
)
from magi_attention.integrations.validate import validate  # noqa: E402

register()
RELEASE = float(".".join(transformers.__version__.split(".")[:2]))
is_known = pytest.mark.skipif(RELEASE < HYBRID_SINCE, reason=f"needs transformers {HYBRID_SINCE}")
DOCUMENTS = [torch.randint(3, 64, (n,), generator=torch.Generator().manual_seed(n)).tolist() for n in (5, 30, 17, 2)]
LABELS = sum(len(x) - 1 for x in DOCUMENTS)


def of_rank(transport, ours: nn.Module) -> tuple[torch.Tensor, list[torch.Tensor | None]]:
    """This rank's share of the loss, and of all gradients."""
    model = copy.deepcopy(ours)
    batch = PackingCollator(transport.size, transport.rank, has_segments=True)([{"input_ids": x} for x in DOCUMENTS])
    plans, labels = batch["magi_plans"].in_group(transport), batch.pop("labels")
    del batch["shift_labels"]
    # the check counts the calls of a process, which ranks of threads share
    with AttentionCheck(model)(*plans.all()) if transport.size == 1 else nullcontext():
        logits = model(**{**batch, "magi_plans": plans}, use_cache=False).logits[0]
    loss = nn.functional.cross_entropy(logits, labels[0], reduction="sum") / LABELS
    loss.backward()
    return loss.detach(), [parameter.grad for parameter in model.parameters()]


@is_known
@pytest.mark.parametrize("name", HYBRID)
def test_loss_and_gradients_are_those_of_documents_alone(name: str) -> None:
    ours, theirs = models(name)
    use_recurrent_layers(ours)
    assert [finding for finding in validate(ours) if finding.level == "error"] == []
    loss = 0.0
    for x in DOCUMENTS:
        ids = torch.tensor([x])
        made = theirs(input_ids=ids, use_cache=False).logits[0]
        loss = loss + nn.functional.cross_entropy(made[:-1], ids[0, 1:], reduction="sum") / LABELS
    loss.backward()
    for world in (1, 2, 3):
        results = FakeWorld(world).run(of_rank, ours)
        assert abs(sum(share for share, _ in results) - loss) <= 1e-6 * loss
        for i, (parameter, b) in enumerate(theirs.named_parameters()):
            got = sum(grads[i] for _, grads in results if grads[i] is not None)
            if b.grad is None or b.grad.abs().max() < 1e-6:
                assert isinstance(got, int) or got.abs().max() < 1e-6, (world, parameter)
            else:
                assert (got - b.grad).abs().max() <= 1e-5 * b.grad.abs().max(), (world, parameter)


TRAINED = [
    {"model": "Qwen3Next", "arguments": {"max_steps": 8}, "evaluate": True},
    {"model": "FalconH1", "arguments": {"max_steps": 4, "gradient_checkpointing": True}},
]


@is_known
@pytest.mark.slow
def test_two_processes_train_as_one(tmp_path) -> None:
    one, two = (launched["cases"] for launched in launch_both(tmp_path, TRAINED))
    for a, b, settings in zip(one, two, TRAINED):
        assert_same_steps(a, b, settings["arguments"]["max_steps"])
    assert one[0]["eval"]["eval_loss"] == pytest.approx(two[0]["eval"]["eval_loss"], rel=1e-5)
    np.testing.assert_allclose(one[0]["predicted"], two[0]["predicted"], atol=1e-4)


@is_known
def test_ranks_hold_few_fragments(tmp_path) -> None:
    arguments, data = TrainingArguments(str(tmp_path), use_cpu=True), [{"input_ids": [1, 2, 3]}]
    hybrid = ContextParallelTrainer(models("Lfm2")[0], arguments, train_dataset=data)
    assert hybrid.data_collator.config.dispatch_config.max_fragments == 8
    attention = AutoModelForCausalLM.from_config(make_config("Llama"), attn_implementation="magi")
    assert ContextParallelTrainer(attention, arguments, train_dataset=data).data_collator.config is None


@is_known
def test_without_plans_layers_do_what_they_did() -> None:
    ours, theirs = models("Qwen3Next")
    use_recurrent_layers(ours)
    use_recurrent_layers(ours)  # does nothing more
    ids = torch.tensor([DOCUMENTS[1]])
    with torch.no_grad():
        torch.testing.assert_close(ours(input_ids=ids).logits, theirs(input_ids=ids).logits)
        tokens = [model.generate(ids[:, :4], max_new_tokens=6, do_sample=False) for model in (ours, theirs)]
    assert torch.equal(*tokens)


@is_known
def test_caches_and_rows_are_refused_beside_plans() -> None:
    (ours, _), batch = models("Qwen3Next"), PackingCollator()([{"input_ids": x} for x in DOCUMENTS])
    use_recurrent_layers(ours)
    with pytest.raises(ContractError, match="use_cache=False"):
        ours(**batch, use_cache=True)
    with pytest.raises(ContractError, match="has 2 rows"):
        twice = {name: torch.cat([batch[name]] * 2) for name in ("input_ids", "position_ids")}
        ours(**twice, magi_plans=batch["magi_plans"], use_cache=False)


class OtherGatedDeltaNet(nn.Module):
    """As layers of other libraries: it calls no function that could know plans."""

    def forward(self, x):
        return x.cumsum(1)


@is_known
def test_layers_that_know_no_plans_are_named_on_any_number_of_ranks(tmp_path) -> None:
    ours, _ = models("Qwen3Next")
    scope = __import__(type(ours).__module__, fromlist=["x"])
    kept = {name: getattr(scope, name) for name in ("causal_conv1d_fn", "torch_chunk_gated_delta_rule")}
    try:
        for name, function in kept.items():  # as they are before anyone called use_recurrent_layers
            setattr(scope, name, function.__wrapped__ if is_marked(function) else function)
        found = [str(finding) for finding in validate(ours) if finding.level == "error"]
        assert any("Qwen3NextGatedDeltaNet mixes neighbouring tokens" in text for text in found)
        assert all("use_recurrent_layers(model)" in text for text in found)
        use_recurrent_layers(ours)
        assert list(mixing_layers(ours)) == []
        ours.model.layers[0].other = OtherGatedDeltaNet()
        (finding,) = [x for x in validate(ours) if "OtherGatedDeltaNet" in x.text]
        assert "documents that are packed leak" in finding.text and "without packing" in finding.remedy
        with pytest.raises(UnsupportedError, match="OtherGatedDeltaNet mixes"):
            ContextParallelTrainer(ours, TrainingArguments(str(tmp_path), use_cpu=True), train_dataset=[])
    finally:
        for name, function in kept.items():
            setattr(scope, name, function)
