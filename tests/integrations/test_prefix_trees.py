# SPDX-License-Identifier: Apache-2.0
"""Prompts with several responses: the collator against a loop over responses, and models against themselves with a
prompt of its own for each response. Only the Llama needs transformers."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import nn

from magi_attention.api import DispatchConfig, DistAttnConfig, attend, sum_gradients
from magi_attention.errors import ContractError
from magi_attention.integrations.packing import PackingCollator
from magi_attention.integrations.prefix_trees import PrefixTreeBatch, PrefixTreeCollator
from magi_attention.testing.spawn import run_processes

VOCABULARY = 64
CONFIG = DistAttnConfig(DispatchConfig(chunk_size=8))


def draw(seed: int) -> list[dict]:
    rng = np.random.default_rng(seed)

    def ids() -> list[int]:
        return rng.integers(0, VOCABULARY, rng.integers(1, 30)).tolist()

    groups = [int(n) for n in rng.integers(1, 5, 1 + seed % 3)]
    return [{"prompt_ids": ids(), "response_ids": [ids() for _ in range(n)]} for n in groups]


def sequences(examples: list[dict]) -> list[tuple[list[int], list[int]]]:
    """The prompt and the response of each response, in order."""
    return [(x["prompt_ids"], response) for x in examples for response in x["response_ids"]]


@pytest.mark.parametrize("seed", range(60))
def test_ranks_have_each_response_token_once(seed):
    examples, cp_size = draw(seed), 1 + seed % 4
    print(f"seed {seed}: {examples}")
    wanted = {(r, s): token for r, (_, ids) in enumerate(sequences(examples)) for s, token in enumerate(ids)}
    tokens = [t for x in examples for part in (x["prompt_ids"], *x["response_ids"]) for t in part]
    places = [
        i + offset
        for x in examples
        for part, offset in [(x["prompt_ids"], 0), *((y, len(x["prompt_ids"])) for y in x["response_ids"])]
        for i in range(len(part))
    ]
    got = {}
    for rank in range(cp_size):
        batch = PrefixTreeCollator(cp_size, rank, CONFIG)(examples)
        plan = batch.inputs["magi_plans"].full
        held = np.minimum(plan.position_array(rank), len(tokens) - 1)
        ids, positions = batch.inputs["input_ids"][0], batch.inputs["position_ids"][0]
        assert ids.tolist() == [tokens[i] for i in held] and positions.tolist() == [places[i] for i in held]
        columns = (batch.rows, batch.targets, batch.responses, batch.steps)
        for row, target, response, step in zip(*(x.tolist() for x in columns)):
            assert (response, step) not in got
            got[response, step] = target
            prompt, answer = sequences(examples)[response]
            before = [*prompt, *answer][len(prompt) + step - 1]
            assert ids[row] == before and positions[row] == len(prompt) + step - 1
    assert got == wanted and batch.lengths == tuple(len(ids) for _, ids in sequences(examples))


def loss_of(log_probs, batch: PrefixTreeBatch) -> torch.Tensor:
    """A clipped policy gradient: each response with an advantage, each token with an old log-probability."""
    old = torch.linspace(-5, -3, 200, dtype=torch.float64).view(-1, 1)[batch.steps % 200, 0]
    advantage = torch.linspace(-1, 1, len(batch.lengths), dtype=torch.float64)[batch.responses]
    ratio = (log_probs - old).exp()
    return -torch.minimum(ratio * advantage, ratio.clamp(0.8, 1.2) * advantage).sum() / sum(batch.lengths)


class Plain(nn.Module):
    """Two layers of attention, in float64 throughout; called as a Llama is."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.tokens, self.places = nn.Embedding(VOCABULARY, 16), nn.Embedding(64, 16)
        self.layers = nn.ModuleList(nn.Linear(16, 8 * 4) for _ in range(2))
        self.head = nn.Linear(16, VOCABULARY)
        self.double()

    def forward(self, input_ids, position_ids, magi_plans):
        x = self.tokens(input_ids[0]) + self.places(position_ids[0])
        for layer in self.layers:
            q, k, v = layer(x).view(-1, 8, 4).split([4, 2, 2], 1)
            x = x + attend(q, k, v, magi_plans.full)[0].flatten(1)
        return SimpleNamespace(logits=self.head(x)[None])


def make(kind: str) -> nn.Module:
    if kind == "plain":
        return Plain()
    from tiny_models import make_model

    from magi_attention.integrations.transformers import register

    register()
    return make_model("llama", "magi", torch.float64)


def tree(kind: str, examples: list[dict], rank: int, world: int) -> list[torch.Tensor]:
    """Log-probabilities (R, longest), the loss of all ranks and all gradients."""
    model, batch = make(kind), PrefixTreeCollator(world, rank, CONFIG)(examples)
    log_probs = batch.log_probs(model(**batch.inputs).logits[0])
    loss = loss_of(log_probs, batch)
    loss.backward()
    total = loss.detach().clone()
    if world > 1:
        sum_gradients(model)
        dist.all_reduce(total)
    return [batch.gather(log_probs), total, *(p.grad for p in model.parameters())]


def repeated(kind: str, examples: list[dict]) -> list[torch.Tensor]:
    """The same from documents, each of a prompt of its own and a response; of a Llama by transformers' attention."""
    model, batch = make(kind), PrefixTreeCollator()(examples)
    if kind == "llama":
        model.set_attn_implementation("eager")
    rows = []
    for prompt, response in sequences(examples):
        packed = PackingCollator()([{"input_ids": prompt + response}])
        given = {name: packed[name] for name in ("input_ids", "position_ids", "magi_plans")[: 2 + (kind == "plain")]}
        logits = model(**given).logits[0, len(prompt) - 1 : -1]
        rows.append(logits.log_softmax(1)[torch.arange(len(response)), torch.tensor(response)])
    log_probs = torch.stack([rows[r][s] for r, s in zip(batch.responses.tolist(), batch.steps.tolist())])
    loss = loss_of(log_probs, batch)
    loss.backward()
    return [batch.gather(log_probs), loss.detach(), *(p.grad for p in model.parameters())]


def on_ranks(rank: int, world: int, kind: str, seeds: list[int]) -> list[list[torch.Tensor]]:
    return [tree(kind, draw(seed), rank, world) for seed in seeds]


@pytest.mark.parametrize(("kind", "tolerance"), [("plain", 1e-11), ("llama", 1e-7)])  # a Llama has norms in float32
def test_models_are_as_with_repeated_prompts(kind, tolerance):
    if kind == "llama":
        pytest.importorskip("transformers", reason="needs transformers; ci/integrations installs it")
    seeds = [2, 3, 7]
    want = [repeated(kind, draw(seed)) for seed in seeds]
    for found in ([tree(kind, draw(seed), 0, 1) for seed in seeds], *run_processes(2, on_ranks, kind, seeds)):
        for seed, got, wanted in zip(seeds, found, want):
            for a, b in zip(got, wanted):
                torch.testing.assert_close(a, b, atol=tolerance, rtol=tolerance, msg=f"seed {seed}")


def test_wrong_examples_are_sentences():
    make = PrefixTreeCollator()
    for words, examples in {
        "has input_ids; it needs": [{"input_ids": [1]}],
        "no response": [{"prompt_ids": [1], "response_ids": []}],
        "prompt_ids has shape": [{"prompt_ids": [], "response_ids": [[1]]}],
        "A response has shape": [{"prompt_ids": [1], "response_ids": [[]]}],
    }.items():
        with pytest.raises(ContractError, match=words):
            make(examples)
    with pytest.raises(ContractError, match="no response"):
        make([])
    with pytest.raises(ContractError, match="ranks count from 0"):
        PrefixTreeCollator(2, 2)
    batch = make([{"prompt_ids": [1, 2], "response_ids": [[3]]}])
    with pytest.raises(ContractError, match="give \\(3, vocabulary\\)"):
        batch.log_probs(torch.zeros(1, 3, 5))
