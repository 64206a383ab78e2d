# SPDX-License-Identifier: Apache-2.0
"""Architectures of transformers: packed documents by plans beside each document alone, or refused by a sentence."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("transformers", reason="needs transformers; ci/integrations installs it")

import transformers  # noqa: E402
from architectures import REFUSED, RIGHT, SINCE, make_config  # noqa: E402
from tiny_models import models  # noqa: E402
from transformers import AutoModelForCausalLM, TrainingArguments  # noqa: E402

from magi_attention.api import AttentionCheck  # noqa: E402
from magi_attention.errors import UnsupportedError  # noqa: E402
from magi_attention.integrations.packing import PackingCollator  # noqa: E402
from magi_attention.integrations.transformers import (  # noqa: E402
    ContextParallelTrainer,
    chunks_of,
    register,
    windows_of,
)
from magi_attention.integrations.validate import validate  # noqa: E402

register()
RELEASE = float(".".join(transformers.__version__.split(".")[:2]))
RUNS_ON_META = RELEASE >= 5  # rotary embeddings of 4.57 do not
DOCUMENTS = [torch.randint(3, 64, (n,), generator=torch.Generator().manual_seed(n)).tolist() for n in (5, 30, 17, 2)]


@pytest.fixture(autouse=True)
def release(request):
    name = request.node.callspec.params["name"]
    if SINCE.get(name, 0) > RELEASE:
        pytest.skip(f"{name} does not go through the attention interface before transformers {SINCE[name]}")


@pytest.mark.parametrize("name", RIGHT)
def test_packed_documents_are_as_if_alone(name):
    ours, theirs = models(name)
    found = validate(ours)
    assert found == [] or (RUNS_ON_META is False and [x.level for x in found] == ["warning"])
    batch = PackingCollator(windows=windows_of(ours.config), chunks=chunks_of(ours.config))(
        [{"input_ids": x} for x in DOCUMENTS]
    )
    with AttentionCheck(ours)(*batch["magi_plans"].all()):
        got = ours(**batch, use_cache=False)
    got.loss.backward()
    logits, losses = [], []
    for x in DOCUMENTS:
        ids = torch.tensor([x])
        made = theirs(input_ids=ids, use_cache=False).logits[0]
        losses.append(torch.nn.functional.cross_entropy(made[:-1], ids[0, 1:], reduction="sum"))
        logits.append(made)
    loss = sum(losses) / sum(len(x) - 1 for x in DOCUMENTS)
    loss.backward()
    want = torch.cat(logits)
    assert (got.logits[0, : len(want)] - want).abs().max() <= 1e-6 * want.abs().max()
    assert abs(got.loss - loss) <= 1e-6 * loss
    for (parameter, a), b in zip(ours.named_parameters(), theirs.parameters()):
        if b.grad is None or b.grad.abs().max() < 1e-6:  # biases of keys have none, but for rounding
            assert a.grad is None or a.grad.abs().max() < 1e-6, parameter
        else:
            tolerance = 1e-5 if a.dtype == torch.float32 else 5e-2  # Apertus keeps some in bfloat16
            assert (a.grad - b.grad).abs().max() <= tolerance * b.grad.abs().max(), parameter


@pytest.mark.parametrize("name", REFUSED)
def test_others_are_refused_before_training(name, tmp_path):
    if name in ("StableLm", "Nemotron") and not RUNS_ON_META:
        pytest.skip("transformers 4 does not run on the meta device; AttentionCheck ends the first step")
    with pytest.raises(UnsupportedError, match=REFUSED[name][1]):
        model = AutoModelForCausalLM.from_config(make_config(name), attn_implementation="magi")
        ContextParallelTrainer(
            model, TrainingArguments(str(tmp_path), use_cpu=True), train_dataset=[{"input_ids": [1, 2, 3]}]
        )
