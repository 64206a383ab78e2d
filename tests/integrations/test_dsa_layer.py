# SPDX-License-Identifier: Apache-2.0
"""A layer of DSA beside MLA written out over all pairs, in both stages; what learns from what; what is refused."""

from __future__ import annotations

import copy
from dataclasses import replace

import pytest
import torch
from torch.utils.checkpoint import checkpoint

from magi_attention.api import DispatchConfig, DistAttnConfig, Mask, make_plan
from magi_attention.comm.transport.fake import FakeWorld
from magi_attention.errors import ContractError
from magi_attention.integrations.dsa import DsaAttention, DsaConfig, DsaOutput

CONFIG = DsaConfig(
    hidden_size=20, num_attention_heads=3, q_lora_rank=12, kv_lora_rank=10, qk_nope_head_dim=6, qk_rope_head_dim=4,
    v_head_dim=5, index_n_heads=5, index_head_dim=8, index_topk=6, is_index_rope_interleaved=True,
)  # fmt: skip


def rotary_of(at, dtype=torch.float64):
    angles = (at[:, None].to(dtype) * torch.tensor([1.0, 0.1], dtype=dtype)).repeat(1, 2)
    return angles.cos(), angles.sin()


def turn(x, at, is_interleaved=True):
    """x (T, heads, 4) by complex numbers."""
    pairs = x.unflatten(-1, (2, 2))
    pairs = pairs if is_interleaved else pairs.transpose(-1, -2)
    angles = at[:, None].double() * torch.tensor([1.0, 0.1], dtype=torch.float64)
    turned = torch.view_as_complex(pairs.contiguous()) * torch.polar(torch.ones_like(angles), angles)[:, None]
    return torch.cat((turned.real, turned.imag), -1)


def written_out(layer, x, at, document, stage):
    """Out and divergence of one process, with keys and values of each head and a matrix of all pairs."""
    c, n = layer.config, torch.arange(len(x))
    is_visible = (n <= n[:, None]) & (document == document[:, None])
    q_resid = layer.q_a_layernorm(layer.q_a_proj(x))
    q_nope, q_rot = layer.q_b_proj(q_resid).view(len(x), c.num_attention_heads, -1).split((6, 4), -1)
    k_pass, k_rot = layer.kv_a_proj_with_mqa(x).split((10, 4), -1)
    k_nope, v = layer.kv_b_proj(layer.kv_a_layernorm(k_pass)).view(len(x), c.num_attention_heads, -1).split((6, 5), -1)
    logits = torch.einsum("thd,shd->hts", q_nope, k_nope)
    logits = (logits + torch.einsum("thd,sd->hts", turn(q_rot, at), turn(k_rot[:, None], at)[:, 0])) * c.scale

    of, x, q_resid = layer.indexer, x.detach(), q_resid.detach()
    q_index = of.wq_b(q_resid).view(len(x), c.index_n_heads, -1)
    k_index = of.k_norm(of.wk(x))[:, None]
    rotated = [
        torch.cat((turn(t[..., :4], at, c.is_index_rope_interleaved), t[..., 4:]), -1) for t in (q_index, k_index)
    ]
    dots = torch.einsum("thd,sd->ths", rotated[0], rotated[1][:, 0]) * c.index_head_dim**-0.5
    scores = torch.einsum("ths,th->ts", dots.relu(), of.weights_proj(x) * c.index_n_heads**-0.5)
    if stage == "sparse":
        order = scores.masked_fill(~is_visible, -torch.inf).sort(dim=1, descending=True, stable=True).indices
        is_visible = is_visible & torch.zeros_like(is_visible).scatter(1, order[:, : c.index_topk], True)
    probabilities = logits.masked_fill(~is_visible, -torch.inf).softmax(2)
    target = probabilities.detach().sum(0)
    target = target / target.sum(1, keepdim=True)
    log = scores.masked_fill(~is_visible, -torch.inf).log_softmax(1).masked_fill(~is_visible, 0)
    divergence = (target.xlogy(target) - target * log).sum(1)
    return layer.o_proj(torch.einsum("hts,shd->thd", probabilities, v).flatten(1)), divergence


@pytest.mark.parametrize("stage", ["dense", "sparse"])
@pytest.mark.parametrize("is_interleaved", [True, False])
@pytest.mark.parametrize("seed", range(3))
def test_a_layer_is_mla_written_out(seed, is_interleaved, stage):
    print("seed", seed)
    gen = torch.Generator().manual_seed(seed)
    total, world = int(torch.randint(3, 40, (), generator=gen)), 1 + seed
    cuts = torch.randint(1, total, (2,), generator=gen).sort().values.tolist()
    cu_seqlens = sorted({0, *cuts, total})
    document = torch.bucketize(torch.arange(total), torch.tensor(cu_seqlens[1:]), right=True)
    at = torch.arange(total) - torch.tensor(cu_seqlens)[document]
    torch.manual_seed(seed)
    layer = DsaAttention(replace(CONFIG, is_index_rope_interleaved=is_interleaved)).double()
    x, dout = (torch.randn(total, 20, generator=gen, dtype=torch.float64) for _ in range(2))
    leaf = x.clone().requires_grad_()
    want, divergence = written_out(layer, leaf, at, document, stage)
    wanted = torch.autograd.grad((want * dout).sum() + divergence.sum(), [leaf, *layer.parameters()])
    plan = make_plan(Mask.varlen(cu_seqlens, causal=True), world, DistAttnConfig(DispatchConfig(4, True)))

    def rank(transport):
        mine = copy.deepcopy(layer)
        local = plan.shard(x, transport).requires_grad_()
        rotary = rotary_of(plan.positions(transport, per_document=True))
        got = mine(local, rotary, plan, transport, stage=stage)
        loss = (got.out * plan.shard(dout, transport)).sum() + got.divergence.sum()
        grads = torch.autograd.grad(loss, [local, *mine.parameters()])
        shown = [plan.gather(t.detach(), transport) for t in (got.out, got.divergence, grads[0])]
        return shown, grads[1:]

    results = FakeWorld(world).run(rank)
    for shown, _ in results:
        for a, b in zip(shown, (want, divergence, wanted[0])):
            torch.testing.assert_close(a, b.detach(), atol=1e-10, rtol=1e-9)
    names = [name for name, _ in layer.named_parameters()]
    for name, *parts, b in zip(names, *(grads for _, grads in results), wanted[1:]):
        torch.testing.assert_close(sum(parts), b, atol=1e-9, rtol=1e-9, msg=name)


def draw(total=24):
    torch.manual_seed(5)
    print("seed 5")
    layer, x = DsaAttention(CONFIG), torch.randn(total, 20)
    return layer, x, rotary_of(torch.arange(total), torch.float32), make_plan(Mask.causal(total), 1)


@pytest.mark.parametrize("stage", ["dense", "sparse"])
def test_the_indexer_alone_learns_from_the_divergence_and_from_nothing_else(stage):
    layer, x, rotary, plan = draw()
    x.requires_grad_()
    got = layer(x, rotary, plan, stage=stage)
    parameters = dict(layer.named_parameters())
    of_divergence = torch.autograd.grad(got.divergence.sum(), parameters.values(), allow_unused=True, retain_graph=True)
    learning = {name for name, grad in zip(parameters, of_divergence) if grad is not None and grad.any()}
    assert learning == {name for name in parameters if name.startswith("indexer.")}
    assert torch.autograd.grad(got.divergence.sum(), x, allow_unused=True, retain_graph=True) == (None,)
    of_out = torch.autograd.grad(got.out.square().sum(), parameters.values(), allow_unused=True)
    learning = {name for name, grad in zip(parameters, of_out) if grad is not None and grad.any()}
    assert learning == {name for name in parameters if not name.startswith("indexer.")}
    layer.requires_grad_(False).indexer.requires_grad_(True)  # the warm-up
    layer(x.detach(), rotary, plan, stage=stage).divergence.sum().backward()
    assert all(parameter.grad is not None for parameter in layer.indexer.parameters())


def test_a_layer_without_an_indexer_sees_what_an_earlier_one_chose():
    layer, x, rotary, plan = draw()
    first = layer(x, rotary, plan)
    later = DsaAttention(CONFIG, has_indexer=False)
    later.load_state_dict({k: v for k, v in layer.state_dict().items() if not k.startswith("indexer.")})
    got = later(x, rotary, plan, shared=first)
    assert torch.equal(got.out, first.out) and got.divergence is None and got.indices is first.indices
    assert later(x, rotary, plan, shared=got).exchange is first.exchange  # and so on
    assert later(x, rotary, plan, stage="dense").divergence is None
    assert layer(x, rotary, plan, needs_divergence=False).divergence is None


@pytest.mark.parametrize("kind", ["bfloat16", "autocast"])
def test_low_precision(kind):
    layer, x, rotary, plan = draw()
    want = layer(x, rotary, plan, stage="dense")
    if kind == "bfloat16":
        layer, x = layer.bfloat16(), x.bfloat16()
    for stage in ("dense", "sparse"):
        with torch.autocast("cpu", torch.bfloat16, enabled=kind == "autocast"):
            got = layer(x, rotary, plan, stage=stage)
        assert got.out.dtype == torch.bfloat16 and got.divergence.dtype == torch.float32
        (got.out.float().square().sum() + got.divergence.sum()).backward()
        assert all(p.grad is not None and p.grad.isfinite().all() for p in layer.parameters())
        if stage == "dense":
            torch.testing.assert_close(got.out.float(), want.out, atol=2e-2, rtol=2e-2)
            torch.testing.assert_close(got.divergence, want.divergence, atol=2e-2, rtol=2e-2)


def test_compiled_or_computed_twice_it_is_the_same():
    layer, x, rotary, plan = draw()

    def train(forward):
        layer.zero_grad()
        got = DsaOutput(*forward(x, rotary, plan))
        (got.out.square().sum() + got.divergence.sum()).backward()
        return [got.out.detach(), *(parameter.grad for parameter in layer.parameters())]

    want = train(layer)
    compiled = train(torch.compile(layer, backend="aot_eager"))
    again = train(lambda *inputs: checkpoint(layer, *inputs, use_reentrant=False))
    for other in (compiled, again):
        for a, b in zip(other, want):
            torch.testing.assert_close(a, b)


def test_what_is_refused():
    layer, x, rotary, plan = draw()
    later = DsaAttention(CONFIG, has_indexer=False)
    for call, words in (
        (lambda: layer(x, rotary, plan, stage="warm"), "stage is 'warm'; give one of dense, sparse"),
        (lambda: later(x, rotary, plan), "This layer has no indexer; give shared="),
        (lambda: later(x, rotary, plan, shared=layer(x, rotary, plan, stage="dense")), "in this stage"),
        (lambda: layer(x, rotary, make_plan(Mask.full(24), 1)), "the mask of this plan is not"),
        (lambda: layer(x, rotary, make_plan(Mask.varlen([0, 24], window=(3, 0)), 1)), "the mask of this plan is not"),
    ):
        with pytest.raises(ContractError, match=words):
            call()
