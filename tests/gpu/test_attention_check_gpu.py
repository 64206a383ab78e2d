# SPDX-License-Identifier: Apache-2.0
"""``AttentionCheck`` and CUDA graphs: those of a step that is captured, and those of torch.compile."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from magi_attention.api import AttentionCheck, Mask, attend, make_plan
from magi_attention.errors import ContractError

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")]

PLANS = [make_plan(Mask.varlen([0, end, 512], causal=True), 1) for end in (100, 200, 300)]


class SelfAttention(nn.Module):
    is_ours = True

    def __init__(self) -> None:
        super().__init__()
        self.qkv = nn.Linear(256, 768)

    def forward(self, x, plan):
        q, k, v = self.qkv(x).view(-1, 3, 4, 64).unbind(1)
        return x + (attend(q, k, v, plan)[0] if self.is_ours else v).flatten(1)


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(SelfAttention() for _ in range(2))

    def forward(self, x, plan):
        for layer in self.layers:
            x = layer(x, plan)
        return x


def make() -> tuple[Model, torch.Tensor]:
    torch.manual_seed(0)
    return Model().cuda().bfloat16(), torch.randn(512, 256, device="cuda", dtype=torch.bfloat16)


def test_a_captured_forward_replays_without_an_alarm():
    model, x = make()
    check, graph = AttentionCheck(model), torch.cuda.CUDAGraph()
    with torch.no_grad():
        for _ in range(2):
            with check(PLANS[0]):
                want = model(x, PLANS[0])
        with check(PLANS[0]), torch.cuda.graph(graph):
            out = model(x, PLANS[0])
    for _ in range(3):
        graph.replay()
        assert torch.equal(out, want)


def test_graphs_of_torch_compile_are_checked_in_each_step():
    """A replay of such a graph runs no Python of the layers, and the check still knows what they are."""
    model, x = make()
    check = AttentionCheck(model)
    compiled = torch.compile(model, mode="reduce-overhead")
    with torch.no_grad():
        for plan in PLANS:  # tables of a plan are made at its first use, which no graph may capture
            model(x, plan)
    for plan in PLANS * 3:
        with check(plan), torch.no_grad():
            out = compiled(x, plan).clone()
        assert torch.allclose(out, model(x, plan), rtol=2e-2, atol=2e-2)
    model.layers[1].is_ours = False
    with pytest.raises(ContractError, match=r"layers\.1"), check(PLANS[0]), torch.no_grad():
        compiled(x, PLANS[0])
