# SPDX-License-Identifier: Apache-2.0
"""A layer of DSA with the weights of transformers' layers gives what these give: packed documents on several ranks
beside each document alone there, outputs, gradients and the divergence by its definition."""

from __future__ import annotations

import copy

import pytest
import torch

pytest.importorskip("transformers.models.deepseek_v32", reason="needs transformers; ci/integrations installs it")

from transformers import DeepseekV32Config, GlmMoeDsaConfig  # noqa: E402
from transformers.models.deepseek_v32 import modeling_deepseek_v32 as deepseek  # noqa: E402
from transformers.models.glm_moe_dsa import modeling_glm_moe_dsa as glm  # noqa: E402

from magi_attention.api import Mask, make_plan  # noqa: E402
from magi_attention.comm.transport.fake import FakeWorld  # noqa: E402
from magi_attention.errors import ContractError  # noqa: E402
from magi_attention.integrations.dsa import DEEPSEEK_V32, GLM_5, DsaAttention, DsaConfig  # noqa: E402

# of few index heads all may say 0 to several keys, and torch.topk breaks such ties in any way
SIZES = dict(
    hidden_size=48, num_attention_heads=4, num_key_value_heads=4, q_lora_rank=24, kv_lora_rank=16, qk_rope_head_dim=8,
    qk_nope_head_dim=12, v_head_dim=10, index_n_heads=16, index_head_dim=16, index_topk=7, num_hidden_layers=2,
)  # fmt: skip
YARN = {"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0, "mscale_all_dim": 1.0, "mscale": 1.0}
KINDS = {
    "deepseek_v32": (DeepseekV32Config, deepseek.DeepseekV32Attention, deepseek.DeepseekV32RotaryEmbedding),
    "glm_moe_dsa": (GlmMoeDsaConfig, glm.GlmMoeDsaAttention, glm.GlmMoeDsaRotaryEmbedding),
}
CU_SEQLENS = [0, 5, 34, 52]  # the first has fewer tokens than are chosen


def make(kind: str, sizes=SIZES, **more):
    """Their layer, ours of the same weights, and their rotary embedding."""
    config_class, layer_class, rotary_class = KINDS[kind]
    config = config_class(**sizes, **more)
    config._attn_implementation = "eager"
    torch.manual_seed(0)
    theirs, rotary = layer_class(config, 0), rotary_class(config)
    ours = DsaAttention(DsaConfig.from_transformers(config, softmax_scale=theirs.scaling))
    ours.load_state_dict(theirs.state_dict())
    return theirs, ours, rotary


def whole(theirs, rotary, x):
    """Out of each document alone, and the divergence of its indexer by the definition."""
    outs, divergences = [], []
    for start, stop in zip(CU_SEQLENS, CU_SEQLENS[1:]):
        part, number = x[None, start:stop], torch.arange(stop - start)[None]
        embeddings = rotary(part, number)
        mask = torch.full((stop - start,) * 2, float("-inf")).triu(1)[None, None]
        chosen = []
        handle = theirs.indexer.register_forward_hook(lambda _, __, out, chosen=chosen: chosen.append(out))
        out, weights = theirs(part, embeddings, mask)[:2]
        handle.remove()
        outs.append(out[0])
        is_chosen = torch.zeros(weights.shape[2:], dtype=torch.bool).scatter(1, chosen[0][0].long(), True)
        is_chosen &= number[0] <= number[0][:, None]
        target = weights[0].detach().double().sum(0)
        target = target / target.sum(1, keepdim=True)
        scores = all_scores(theirs.indexer, theirs, part[0].detach(), embeddings)
        log = scores.masked_fill(~is_chosen, float("-inf")).log_softmax(1)
        terms = torch.where(is_chosen, target.xlogy(target) - target * log.masked_fill(~is_chosen, 0), 0)
        divergences.append(terms.sum(1))
    return torch.cat(outs), torch.cat(divergences)


def all_scores(indexer, layer, x, embeddings):
    """Their indexer's scores of all pairs, which its forward does not return, with gradients."""
    q = indexer.wq_b(layer.q_a_layernorm(layer.q_a_proj(x)).detach()).unflatten(1, (indexer.n_heads, -1))
    k = indexer.k_norm(indexer.wk(x))[:, None]
    turn = deepseek.apply_rotary_pos_emb
    if isinstance(indexer, glm.GlmMoeDsaIndexer):
        turn = glm.apply_rotary_pos_emb_interleave
    size = indexer.qk_rope_head_dim
    q_rot, k_rot = turn(q[None, ..., :size], k[None, ..., :size], *embeddings, unsqueeze_dim=2)
    q, k = torch.cat((q_rot[0], q[..., size:]), -1), torch.cat((k_rot[0], k[..., size:]), -1)
    weights = indexer.weights_proj(x) * indexer.n_heads**-0.5 * indexer.head_dim**-0.5
    return torch.einsum("thd,sd->ths", q.double(), k[:, 0].double()).relu().mul(weights[..., None]).sum(1)


@pytest.mark.parametrize("more", [{}, {"rope_parameters": YARN}], ids=["rope", "yarn"])
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("world", [1, 3])
def test_packed_documents_are_as_if_alone(world, kind, more):
    theirs, ours, rotary = make(kind, **more)
    gen = torch.Generator().manual_seed(3)
    print("seed 3")
    x = torch.randn(CU_SEQLENS[-1], SIZES["hidden_size"], generator=gen)
    want, divergence = whole(theirs, rotary, x)
    (want.square().sum() + divergence.sum()).backward()
    plan = make_plan(Mask.varlen(CU_SEQLENS, causal=True), world)

    def rank(transport):
        layer = copy.deepcopy(ours)
        local, at = plan.shard(x, transport), plan.positions(transport, per_document=True)
        cos, sin = rotary(local[None], at[None])
        got = layer(local, (cos[0], sin[0]), plan, transport)
        is_real = torch.from_numpy(plan.position_array(transport.rank)) < CU_SEQLENS[-1]
        (got.out[is_real].square().sum() + got.divergence.sum()).backward()
        return plan.gather(got.out, transport), plan.gather(got.divergence, transport), layer

    results = FakeWorld(world).run(rank)
    for out, got, _ in results:
        torch.testing.assert_close(out, want, atol=2e-6, rtol=1e-5)
        torch.testing.assert_close(got.double(), divergence, atol=2e-5, rtol=1e-4)
    for name, parameter in theirs.named_parameters():
        total = sum(layer.get_parameter(name).grad for _, _, layer in results)
        within = 1e-5 * max(1.0, float(parameter.grad.abs().max()))
        torch.testing.assert_close(total, parameter.grad, atol=within, rtol=1e-4, msg=name)


@pytest.mark.parametrize("kind", KINDS)
def test_published_heads(kind):
    """64 and 128 heads with latents of 576; only what goes in and out of the layer is narrow."""
    theirs, ours, rotary = make(kind, dict(hidden_size=64, q_lora_rank=32, index_topk=16))
    assert ours.config.num_attention_heads == {"deepseek_v32": 128, "glm_moe_dsa": 64}[kind]
    gen = torch.Generator().manual_seed(4)
    print("seed 4")
    x = torch.randn(CU_SEQLENS[-1], 64, generator=gen)
    with torch.no_grad():
        want, divergence = whole(theirs, rotary, x)
        plan = make_plan(Mask.varlen(CU_SEQLENS, causal=True), 1)
        cos, sin = rotary(x[None], plan.positions(per_document=True)[None])
        got = ours(x, (cos[0], sin[0]), plan)
    torch.testing.assert_close(got.out, want, atol=2e-6, rtol=1e-5)
    torch.testing.assert_close(got.divergence.double(), divergence, atol=2e-5, rtol=1e-4)


def test_sizes_are_those_of_the_published_models():
    assert DsaConfig.from_transformers(DeepseekV32Config()) == DEEPSEEK_V32
    assert DsaConfig.from_transformers(GlmMoeDsaConfig()) == GLM_5
    for config, (config_class, layer_class, _) in zip((DEEPSEEK_V32, GLM_5), KINDS.values()):
        with torch.device("meta"):
            ours, theirs = DsaAttention(config), layer_class(config_class(), 0)
        shapes = [{name: x.shape for name, x in layer.state_dict().items()} for layer in (ours, theirs)]
        assert shapes[0] == shapes[1]
    with pytest.raises(ContractError, match="model_type is 'llama'"):
        DsaConfig.from_transformers(type("Config", (), {"model_type": "llama"}))
