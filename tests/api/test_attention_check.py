# SPDX-License-Identifier: Apache-2.0
"""``AttentionCheck`` on a small model: what it must find, and what must give no false alarm."""

from __future__ import annotations

import copy
import pickle

import pytest
import torch
import torch._dynamo.testing
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

from magi_attention.api import AttentionCheck, Mask, attend, make_plan
from magi_attention.errors import ContractError

PLANS = [make_plan(Mask.varlen([0, end, 24], causal=True), 1) for end in (7, 9, 11, 14)]
X = torch.randn(24, 8, generator=torch.Generator().manual_seed(0))


class SelfAttention(nn.Module):
    def __init__(self, is_ours: bool = True) -> None:
        super().__init__()
        self.qkv, self.is_ours = nn.Linear(8, 24), is_ours

    def forward(self, x, plan):
        q, k, v = self.qkv(x).view(-1, 3, 2, 4).unbind(1)
        if self.is_ours:
            return attend(q, k, v, plan)[0].flatten(1)
        return F.scaled_dot_product_attention(*(y.transpose(0, 1) for y in (q, k, v))).transpose(0, 1).flatten(1)


class AttentionNorm(nn.LayerNorm):
    """Has the word in its name and calls nothing."""


class OuterAttention(nn.Module):
    """Calls attention itself and holds a module whose name has the word, before and behind the call."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.inner = AttentionNorm(8), SelfAttention()

    def forward(self, x, plan):
        q, k, v = self.inner.qkv(self.norm(x)).view(-1, 3, 2, 4).unbind(1)
        return self.norm(attend(q, k, v, plan)[0].flatten(1))


class Layer(nn.Module):
    def __init__(self, attention: nn.Module, how: str) -> None:
        super().__init__()
        self.attention, self.mlp, self.how = attention, nn.Linear(8, 8), how

    def forward(self, x, plan):
        if self.how == "plain":
            return x + self.mlp(self.attention(x, plan))
        inner = lambda x: x + self.mlp(self.attention(x, plan))  # noqa: E731
        return checkpoint(inner, x, use_reentrant=self.how == "reentrant")


class Model(nn.Module):
    def __init__(self, *attentions: nn.Module, how: str = "plain") -> None:
        super().__init__()
        self.layers = nn.ModuleList(Layer(x, how) for x in attentions)

    def forward(self, x, plan, skip=()):
        for index, layer in enumerate(self.layers):
            if index not in skip:
                x = layer(x, plan)
        return x.square().mean()


def make_model(*kinds: bool, **options) -> Model:
    torch.manual_seed(0)
    return Model(*(SelfAttention(kind) for kind in kinds), **options)


def test_a_module_with_attention_of_its_own_is_named():
    model = make_model(True, False, True, False)
    check = AttentionCheck(model)
    with pytest.raises(ContractError, match=r"layers\.1\.attention, layers\.3\.attention \(SelfAtt"):
        with check(PLANS[0]):
            model(X, PLANS[0])
    with check(PLANS[0]):
        model(X, PLANS[0], skip=(1, 3))


def test_the_plan_of_another_batch_is_found():
    model = make_model(True)
    check = AttentionCheck(model)
    with pytest.raises(ContractError, match="not of this batch"), check(PLANS[1]):
        model(X, PLANS[0])
    with check(PLANS[1], PLANS[0]):
        model(X, PLANS[0])
    with check():  # where the caller does not know the plan
        model(X, PLANS[0])
    with check() as plans:
        plans.append(PLANS[0])
        model(X, PLANS[0])
    with pytest.raises(ContractError, match="not of this batch"), check() as plans:
        plans.append(PLANS[1])
        model(X, PLANS[0])


def test_nothing_ran():
    with pytest.raises(ContractError, match="No attention module ran"), AttentionCheck(make_model(True))(PLANS[0]):
        pass


def test_an_error_of_the_model_comes_through():
    with pytest.raises(ZeroDivisionError), AttentionCheck(make_model(True))(PLANS[0]):
        raise ZeroDivisionError


def test_models_without_attention_by_name():
    class Mixer(SelfAttention):
        pass

    model = nn.ModuleList([Mixer(), Mixer(False)])
    with pytest.raises(ContractError, match="modules="):
        AttentionCheck(model)
    check = AttentionCheck(model, modules=model)
    with pytest.raises(ContractError, match=r"^1 \(Mixer\)"), check(PLANS[0]):
        model[0](X, PLANS[0]), model[1](X, PLANS[0])


def test_parts_that_are_not_meant():
    model = nn.ModuleDict({"visual": make_model(False), "text": make_model(True)})
    check = AttentionCheck(model, exclude=["visual"])
    with check(PLANS[0]):
        model["visual"](X, PLANS[0]), model["text"](X, PLANS[0])
    with pytest.raises(ContractError, match="No attention module ran"), check(PLANS[0]):
        model["visual"](X, PLANS[0])


def test_calls_of_the_module_around_count():
    model = Model(OuterAttention(), OuterAttention())
    with AttentionCheck(model)(PLANS[0]):
        model(X, PLANS[0])


@pytest.mark.parametrize("how", ("plain", "reentrant", "not reentrant"))
def test_recomputation_accumulation_shared_and_skipped_layers(how):
    shared = SelfAttention()
    model = Model(shared, SelfAttention(), shared, SelfAttention(), how=how)
    check, x = AttentionCheck(model), X.clone().requires_grad_()
    for plan in PLANS:  # micro-batches: the backward of one computes its layers anew before the next
        with check(plan):
            loss = model(x, plan, skip=(1,))
        loss.backward()
    with check(*PLANS):  # several in one block, backwards between them, as a pipeline has them
        for plan in PLANS:
            model(x, plan).backward()


def test_stages_of_a_pipeline_check_what_they_hold():
    model = make_model(True, False)
    stages = [nn.Sequential(layer) for layer in model.layers]
    with AttentionCheck(stages[0])(PLANS[0]):
        stages[0][0](X, PLANS[0])
    with pytest.raises(ContractError, match=r"0\.attention"), AttentionCheck(stages[1])(PLANS[0]):
        stages[1][0](X, PLANS[0])


@pytest.mark.parametrize("kinds", ((True, True), (True, False)))
@pytest.mark.parametrize("part", ("model", "layers"))
def test_compiled_without_a_graph_break_or_a_recompilation(kinds, part):
    model = make_model(*kinds)
    check = AttentionCheck(model)
    torch._dynamo.reset()
    counter = torch._dynamo.testing.CompileCounterWithBackend("aot_eager")
    run = model
    if part == "model":
        run = torch.compile(model, backend=counter, fullgraph=True)
    else:
        for layer in model.layers:
            layer.compile(backend=counter, fullgraph=True)
    for index, plan in enumerate(PLANS):
        if all(kinds):
            with check(plan):
                run(X, plan).backward()
        else:
            with pytest.raises(ContractError, match=r"layers\.1\.attention"), check(plan):
                run(X, plan)
        if index == 1:  # a plan's numbers are made dynamic at their first change
            frames = counter.frame_count
    assert counter.frame_count == frames


def test_a_change_between_steps_is_found_in_a_model_and_in_copies_and_pickles_of_it():
    """As of ``set_attn_implementation`` for a generation that was not taken back."""
    model = make_model(True, True)
    AttentionCheck(model)
    for other in (copy.deepcopy(model), pickle.loads(pickle.dumps(model)), model):
        check = AttentionCheck(other)
        with check(PLANS[0]):
            other(X, PLANS[0])
        other.layers[1].attention.is_ours = False
        with pytest.raises(ContractError, match=r"layers\.1\.attention"), check(PLANS[1]):
            other(X, PLANS[1])
