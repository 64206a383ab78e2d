# SPDX-License-Identifier: Apache-2.0
"""Predicted bytes of a training step beside those of a small decoder of plain PyTorch that takes one."""

from __future__ import annotations

import sys
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.distributed._tools.mem_tracker import MemTracker
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts, noop_context_fn

from magi_attention.api import Experts, Mask, ModelShape, TrainingSetup, longest_context, make_plan
from magi_attention.errors import ContractError, UnsupportedError
from magi_attention.meta.predict.model_memory import longest
from magi_attention.testing.spawn import run_processes

sys.path.insert(0, str(Path(__file__).parents[1] / "functional"))
from live_bytes import LiveBytes  # noqa: E402

SHAPE = ModelShape(64, 3, 4, 2, 16, 160, 300)
SPARSE = ModelShape(64, 4, 4, 2, 16, 160, 300, experts=Experts(8, 2, 96, 64, 1))
TOKENS = 2048
SETUP = TrainingSetup(element_bytes=4, optimizer_bytes=0, activations="kept")


def linear(a: int, b: int) -> nn.Linear:
    return nn.Linear(a, b, bias=False)


class Mlp(nn.Module):
    def __init__(self, width: int, hidden: int) -> None:
        super().__init__()
        self.gate, self.up, self.down = linear(width, hidden), linear(width, hidden), linear(hidden, width)

    def forward(self, x):
        return self.down(F.silu(self.gate(x)) * self.up(x))


class SparseMlp(nn.Module):
    """Experts of grouped products. Each gets as many tokens, whatever the router says."""

    def __init__(self, width: int, experts: Experts) -> None:
        super().__init__()
        count, hidden, self.per_token = experts.count, experts.hidden, experts.per_token
        self.router = linear(width, count)
        shapes = (count, width, hidden), (count, width, hidden), (count, hidden, width)
        self.gate, self.up, self.down = (nn.Parameter(torch.randn(shape) * 0.1) for shape in shapes)
        self.shared = Mlp(width, experts.shared_hidden) if experts.shared_hidden else None

    def forward(self, x):
        tokens, k, count = len(x), self.per_token, self.router.out_features
        weights = self.router(x).softmax(-1, dtype=torch.float32)
        chosen = torch.arange(tokens * k) % count
        order = chosen.argsort(stable=True)
        rows, weights = order // k, weights.reshape(-1)[order // k * count + chosen[order]]
        routed = x[rows].unflatten(0, (count, -1))
        found = ((F.silu(routed @ self.gate) * (routed @ self.up)) @ self.down).flatten(0, 1)
        del routed
        found = torch.zeros_like(x).index_add(0, rows, found * weights[:, None].to(x.dtype))
        return found if self.shared is None else found + self.shared(x)


class Layer(nn.Module):
    def __init__(self, shape: ModelShape, mlp_chunk: int | None, is_sparse: bool) -> None:
        super().__init__()
        c, self.shape, self.mlp_chunk = shape, shape, mlp_chunk

        # why no RMSNorm: on a CPU it is made up of several operations, each of which keeps something
        self.norms = nn.ModuleList(nn.LayerNorm(c.width, bias=False) for _ in range(2))
        self.q, self.o = linear(c.width, c.num_heads_q * c.head_dim), linear(c.num_heads_q * c.head_dim, c.width)
        self.k, self.v = (linear(c.width, c.num_heads_kv * c.head_dim) for _ in range(2))
        self.mlp = SparseMlp(c.width, c.experts) if is_sparse else Mlp(c.width, c.hidden)

    def forward(self, x):
        y = self.norms[0](x)
        heads = (p(y).unflatten(-1, (-1, self.shape.head_dim)) for p in (self.q, self.k, self.v))
        q, k, v = (z.transpose(0, 1)[None] for z in heads)
        out = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        del y, q, k, v
        x = x + self.o(out[0].transpose(0, 1).flatten(1))
        del out
        y = self.norms[1](x)
        if self.mlp_chunk is None:
            return x + self.mlp(y)
        return x + torch.cat([checkpoint(self.mlp, part, use_reentrant=False) for part in y.split(self.mlp_chunk)])


class Decoder(nn.Module):
    def __init__(self, shape: ModelShape, setup: TrainingSetup) -> None:
        super().__init__()
        self.setup = setup
        self.embedding = nn.Embedding(shape.vocabulary, shape.width)
        dense = shape.num_layers if shape.experts is None else shape.experts.dense_layers
        self.layers = nn.ModuleList(Layer(shape, setup.mlp_chunk, i >= dense) for i in range(shape.num_layers))
        self.norm = nn.LayerNorm(shape.width, bias=False)
        self.head = nn.Linear(shape.width, shape.vocabulary, bias=False)

    def loss_of(self, x, labels):
        return F.cross_entropy(self.head(x), labels, reduction="sum")

    def forward(self, tokens, labels):
        x = self.embedding(tokens)
        kept = [torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default]
        keeps = partial(create_selective_checkpoint_contexts, kept) if self.setup.keeps_attention else noop_context_fn
        for layer in self.layers:
            if self.setup.activations == "kept":
                x = layer(x)
            else:
                x = checkpoint(layer, x, use_reentrant=False, context_fn=keeps)
        x = self.norm(x)
        size = self.setup.logits_chunk
        if size is None:
            return self.loss_of(x, labels)
        if self.setup.loss == "torch":
            options = nn.LinearCrossEntropyOptions(batch_chunk_size=size)
            return F.linear_cross_entropy(x, self.head.weight, labels, reduction="none", options=options).sum()
        parts = zip(x.split(size), labels.split(size))
        return sum(checkpoint(self.loss_of, *part, use_reentrant=False) for part in parts)


def measured(shape: ModelShape, setup: TrainingSetup, tokens: int) -> int:
    """The most bytes at a time: parameters, and what a step makes."""
    model = Decoder(shape, setup)
    parameters = sum(p.nbytes for p in model.parameters())
    assert sum(p.numel() for p in model.parameters()) == shape.num_parameters
    ids = torch.randint(0, shape.vocabulary, (tokens,))
    with LiveBytes() as live:
        model(ids, ids).backward()
    return parameters + live.peak


@pytest.mark.parametrize(
    ("shape", "changes"),
    [
        (SHAPE, {}),
        (SHAPE, {"activations": "checkpointed"}),
        (SHAPE, {"activations": "checkpointed", "logits_chunk": 64}),
        (SHAPE, {"activations": "checkpointed", "logits_chunk": 64, "mlp_chunk": 64}),
        (SHAPE, {"logits_chunk": 64, "mlp_chunk": 128}),
        (replace(SHAPE, vocabulary=2000), {"activations": "checkpointed"}),
        (replace(SHAPE, vocabulary=2000), {"activations": "checkpointed", "logits_chunk": 512}),
        (replace(SHAPE, vocabulary=2000), {"activations": "checkpointed", "logits_chunk": 512, "loss": "torch"}),
        (SHAPE, {"activations": "checkpointed", "logits_chunk": 64, "loss": "torch"}),
        (replace(SHAPE, hidden=512, num_layers=2), {"activations": "checkpointed", "logits_chunk": 32}),
        (replace(SHAPE, num_layers=8), {"logits_chunk": 32}),
        (SPARSE, {"logits_chunk": 32}),
        (SPARSE, {"logits_chunk": 32, "activations": "checkpointed"}),
        (SPARSE, {"logits_chunk": 32, "activations": "checkpointed", "mlp_chunk": 128}),
        (SPARSE, {"logits_chunk": 32, "mlp_chunk": 256}),
        (replace(SPARSE, experts=Experts(16, 4, 32, 0, 0)), {"logits_chunk": 32, "activations": "checkpointed"}),
        (replace(SPARSE, experts=Experts(4, 1, 256, 0, 2)), {"logits_chunk": 32, "activations": "checkpointed"}),
        (replace(SPARSE, experts=Experts(8, 2, 32, 64, 3), num_layers=12), {"logits_chunk": 32}),
        (replace(SHAPE, num_layers=24), {"activations": "checkpointed", "logits_chunk": 32}),
        (replace(SHAPE, num_layers=24), {"activations": "checkpointed", "logits_chunk": 32, "keeps_attention": True}),
        (SHAPE, {"activations": "checkpointed", "logits_chunk": 32, "mlp_chunk": 64, "keeps_attention": True}),
    ],
)
def test_predicted_bytes_of_a_step_are_within_a_tenth(shape, changes):
    setup = replace(SETUP, **changes)
    plan = make_plan(Mask.causal(TOKENS), 1)
    found, predicted = measured(shape, setup, TOKENS), plan.memory(shape, setup).peak_bytes
    print(found, round(predicted / found, 3), shape, changes)
    assert abs(predicted - found) <= 0.1 * found


def measured_with_fsdp(rank: int, world: int, cases: list[tuple[int, int, int, dict]]) -> list[tuple[int, int]]:
    """(measured by torch's tracker, predicted) of the backward in bf16; states of the optimizer are there."""
    found = []
    for layers, vocabulary, tokens, changes in cases:
        shape = ModelShape(256, layers, 4, 2, 64, 1024, vocabulary)
        setup = TrainingSetup(activations="checkpointed", logits_chunk=32, **changes)
        model, ids = Decoder(shape, setup), torch.randint(0, vocabulary, (tokens,))
        policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
        for part in (*model.layers, model):
            fully_shard(part, mesh=init_device_mesh("cpu", (world,)), mp_policy=policy)
        optimizer = torch.optim.AdamW(model.parameters(), foreach=False)
        model(ids, ids).backward()
        optimizer.step()
        optimizer.zero_grad()
        tracker = MemTracker()
        tracker.track_external(model, optimizer)
        with tracker:
            for is_last in (False, True) if setup.accumulates_gradients else (True,):
                model.set_requires_gradient_sync(is_last or not setup.defers_reduction)
                tracker.reset_mod_stats()
                model(ids, ids).backward()
        (peak,) = tracker.get_tracker_snapshot("peak").values()
        plan = make_plan(Mask.causal(tokens * world), world)
        found.append((peak["Total"], plan.memory(shape, setup).peak_bytes))
    return found


@pytest.mark.nightly
def test_predicted_bytes_under_fsdp2_are_within_a_tenth():
    """Where parameters are the most, where embedding and head are, and where activations are; gradients of two batches
    that are reduced each time, or once."""
    sizes = (6, 200, 32), (6, 4000, 32), (6, 4000, 4096), (12, 200, 2048)
    mostly_root = (4, 9000, 32), (4, 9000, 2048)
    twice = {"accumulates_gradients": True}
    once_for_two = {**twice, "defers_reduction": True}
    cases = [*((*size, {}) for size in sizes), (*sizes[1], twice), (*sizes[1], once_for_two), (*sizes[3], once_for_two)]
    cases += [(*size, {}) for size in mostly_root]
    for found in run_processes(2, measured_with_fsdp, cases):
        for case, (bytes_found, predicted) in zip(cases, found):
            print(case, bytes_found, round(predicted / bytes_found, 3))
            assert abs(predicted - bytes_found) <= 0.1 * bytes_found, (case, bytes_found, predicted)


def test_gradients_that_accumulate_are_there_from_the_beginning():
    shape = replace(SHAPE, num_layers=24)
    plan = make_plan(Mask.causal(TOKENS), 1)
    setup = replace(SETUP, activations="checkpointed", logits_chunk=32)
    once, again = plan.memory(shape, setup), plan.memory(shape, replace(setup, accumulates_gradients=True))
    assert 0 < again.peak_bytes - once.peak_bytes <= again.gradients == shape.num_parameters * 4


def test_gradients_that_are_reduced_once_are_whole():
    plan = make_plan(Mask.causal(TOKENS), 4)
    for shape, parallel in ((SHAPE, 1), (SPARSE, 1), (SPARSE, 4)):
        each = TrainingSetup(accumulates_gradients=True, expert_parallel=parallel)
        use = plan.memory(shape, replace(each, defers_reduction=True))
        of_other_ranks = 0 if parallel == 1 else 3 * 3 * 64 * 96 * 6  # layers, matrices, their sizes, experts
        assert use.gradients == 4 * (shape.num_parameters - of_other_ranks)
        more = use.moments["forward"] - plan.memory(shape, each).moments["forward"]
        assert more == use.gradients - shape.num_parameters


def test_host_memory_takes_what_is_offloaded():
    plan, base = make_plan(Mask.causal(1 << 14), 2), TrainingSetup(activations="checkpointed")
    kept, moved = plan.memory(SHAPE, base), plan.memory(SHAPE, replace(base, activations="offloaded"))
    assert kept.host_bytes == 0 and moved.host["activations"] == kept.activations == 3 * (1 << 13) * 64 * 2
    assert moved.activations == 2 * (1 << 13) * 64 * 2, "those of two blocks are on the GPU"
    with_attention = plan.memory(SHAPE, replace(base, activations="offloaded", keeps_attention=True))
    assert with_attention.host["activations"] - moved.host["activations"] == 3 * (1 << 13) * (4 * 16 * 2 + 4 * 4)
    states = plan.memory(SHAPE, replace(base, offloads_parameters=True)).host
    assert states == {name: SHAPE.num_parameters // 2 * size for name, size in zip(states, (4, 8, 4))}


CONFIG = {
    "hidden_size": 4096, "num_hidden_layers": 36, "num_attention_heads": 32, "num_key_value_heads": 8,
    "head_dim": 128, "intermediate_size": 12288, "vocab_size": 151936, "model_type": "qwen3",
}  # fmt: skip


def test_shape_of_a_config():
    assert ModelShape.of_config(CONFIG).num_parameters == 8_190_735_360  # as Qwen3-8B's card counts
    llama = {**CONFIG, "num_hidden_layers": 32, "intermediate_size": 14336, "vocab_size": 128256, "model_type": "llama"}
    assert ModelShape.of_config(llama).num_parameters == 8_030_261_248  # Llama-3-8B
    tied = ModelShape.of_config({**llama, "tie_word_embeddings": True})
    assert tied.num_parameters == 8_030_261_248 - 128256 * 4096
    with pytest.raises(UnsupportedError, match="kv_lora_rank"):
        ModelShape.of_config({**CONFIG, "kv_lora_rank": 512})
    with pytest.raises(ContractError, match="num_experts_per_tok"):
        ModelShape.of_config({**CONFIG, "num_experts": 128})
    with pytest.raises(ContractError, match="hidden_size.*ModelShape"):
        ModelShape.of_config({})


QWEN3_30B_A3B = {
    "hidden_size": 2048, "num_hidden_layers": 48, "num_attention_heads": 32, "num_key_value_heads": 4, "head_dim": 128,
    "intermediate_size": 6144, "moe_intermediate_size": 768, "num_experts": 128, "num_experts_per_tok": 8,
    "decoder_sparse_step": 1, "mlp_only_layers": [], "vocab_size": 151936, "model_type": "qwen3_moe",
}  # fmt: skip
GLM_45_AIR = {
    "hidden_size": 4096, "num_hidden_layers": 46, "num_attention_heads": 96, "num_key_value_heads": 8, "head_dim": 128,
    "intermediate_size": 10944, "moe_intermediate_size": 1408, "n_routed_experts": 128, "n_shared_experts": 1,
    "num_experts_per_tok": 8, "first_k_dense_replace": 1, "vocab_size": 151552, "model_type": "glm4_moe",
}  # fmt: skip


def test_shape_of_a_config_with_experts():
    qwen, glm = ModelShape.of_config(QWEN3_30B_A3B), ModelShape.of_config(GLM_45_AIR)
    assert qwen.num_parameters == 30_532_122_624 and qwen.experts == Experts(128, 8, 768)  # the card: 30.5B
    assert glm.experts == Experts(128, 8, 1408, 1408, 1)
    assert round(glm.num_parameters / 1e8) == 1069  # 106.85B, and 0.6M biases, which are left out
    every_other = ModelShape.of_config({**QWEN3_30B_A3B, "decoder_sparse_step": 2, "mlp_only_layers": [1]})
    assert every_other.experts is not None and every_other.experts.dense_layers == 25
    mixtral = {**CONFIG, "num_local_experts": 8, "num_experts_per_tok": 2}
    assert ModelShape.of_config(mixtral).experts == Experts(8, 2, CONFIG["intermediate_size"])


@pytest.mark.parametrize("config", [CONFIG, QWEN3_30B_A3B, GLM_45_AIR])
def test_no_part_of_a_step_is_below_zero(config):
    """With few and many GPUs: when the embedding's gradient comes, blocks are no longer gathered."""
    shape, plan = ModelShape.of_config(config), make_plan(Mask.causal(1 << 15), 8)
    for shards in (8, 256, 1024):
        for setup in (TrainingSetup(shards), TrainingSetup(shards, offloads_parameters=True)):
            use = plan.memory(shape, setup)
            assert min((*use.held.values(), *use.moments.values(), *use.host.values(), use.activations)) >= 0


def test_experts_over_ranks_share_what_is_gathered():
    """Their parameters are sharded over as many GPUs anyway; only those of a rank are gathered, and tokens travel."""
    shape, plan = ModelShape.of_config(QWEN3_30B_A3B), make_plan(Mask.causal(1 << 17), 8)
    alone, spread = (plan.memory(shape, TrainingSetup(logits_chunk=2048, expert_parallel=n)) for n in (1, 8))
    assert alone.held["parameters"] == spread.held["parameters"]
    of_experts = 3 * 3 * 2048 * 768 * 128 * 2  # of three blocks, in bf16
    assert alone.held["gathered parameters"] - spread.held["gathered parameters"] == of_experts * 7 // 8
    assert spread.activations == alone.activations
    for setup, sentence in ((TrainingSetup(expert_parallel=3), "divisor"), (TrainingSetup(expert_parallel=16), "16")):
        with pytest.raises(ContractError, match=sentence):
            plan.memory(shape, setup)
    with pytest.raises(ContractError, match="1 for a dense model"):
        plan.memory(SHAPE, TrainingSetup(expert_parallel=2))
    with pytest.raises(ContractError, match="there are 4 experts"):
        Experts(4, 5, 16)
    with pytest.raises(ContractError, match="dense_layers is 3"):
        replace(SHAPE, experts=Experts(4, 2, 16, 0, 3))


def test_longest_context_with_experts():
    setup = TrainingSetup(activations="offloaded", mlp_chunk=8192, logits_chunk=2048, expert_parallel=8)
    shape = ModelShape(256, 4, 8, 2, 32, 512, 1000, experts=Experts(8, 2, 128))
    found = longest_context(shape, 8, 0.5, setup)
    assert found and make_plan(Mask.causal(found), 8).memory(shape, replace(setup, shards=8)).peak_bytes <= 0.47e9
    assert longest_context(replace(shape, experts=Experts(8, 8, 512)), 8, 0.5, setup) < found


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"loss": "guessed"}, "one of checkpointed, torch"),
        ({"activations": "thrown away"}, "one of kept, checkpointed, offloaded"),
        ({"activations": "kept", "keeps_attention": True}, "is for checkpoints"),
        ({"defers_reduction": True}, "give accumulates_gradients"),
        ({"mlp_chunk": 0}, "mlp_chunk"),
        ({"head_chunks": 0}, "head_chunks"),
    ],
)
def test_settings_that_cannot_be(changes, sentence):
    with pytest.raises(ContractError, match=sentence):
        TrainingSetup(**changes)


def test_shards_are_whole_groups():
    with pytest.raises(ContractError, match="no multiple of the 2 ranks"):
        make_plan(Mask.causal(64), 2).memory(SHAPE, TrainingSetup(shards=3))


@pytest.mark.parametrize("limit", [0, 1, 2, 7, 8, 9, 63, 64, 100])
def test_the_longest_that_fits(limit):
    asked = []

    def fits(n: int) -> bool:
        asked.append(n)
        return n <= 3 * limit

    assert longest(fits, 3, 3 * 64) == 3 * min(limit, 64) and max(asked) <= 3 * 64 and len(asked) <= 14


def test_the_longest_context_fits_and_the_next_one_does_not():
    shape = ModelShape(512, 2, 8, 2, 64, 1024, 1000)
    setup = TrainingSetup(logits_chunk=1024, shards=2)
    found = longest_context(shape, 2, 1.0, setup)

    def peak(tokens: int) -> int:
        return make_plan(Mask.causal(tokens), 2).memory(shape, setup).peak_bytes

    assert found and peak(found) <= 0.94e9 < peak(found + (1 << 14))
    assert longest_context(shape, 2, 0.001, setup) == 0
