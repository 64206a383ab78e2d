# SPDX-License-Identifier: Apache-2.0
"""torchtitan's Trainer with our attention: over ranks, against a dense mask in one process; and what is refused."""

from __future__ import annotations

import dataclasses
from types import SimpleNamespace

import numpy as np
import pytest
import torch

pytest.importorskip("torchtitan", reason="needs torchtitan; ci/integrations installs it")

from starting import assert_same_steps, launch  # noqa: E402
from titan_parts import DenseAttention  # noqa: E402
from torchtitan.components.validate import Validator  # noqa: E402
from torchtitan.config import ParallelismConfig  # noqa: E402
from torchtitan.distributed import ParallelDims  # noqa: E402
from torchtitan.models.common import CosSinRoPE  # noqa: E402
from torchtitan.models.common.attention import VarlenAttention  # noqa: E402
from torchtitan.models.gpt_oss import _make_gptoss_attn_config  # noqa: E402
from torchtitan.models.gpt_oss import model_registry as gpt_oss  # noqa: E402
from torchtitan.models.llama3.config_registry import llama3_debugmodel  # noqa: E402
from torchtitan.trainer import Trainer  # noqa: E402

from magi_attention.errors import ContractError, UnsupportedError  # noqa: E402
from magi_attention.integrations.packing import layer_plans  # noqa: E402
from magi_attention.integrations.torchtitan import MagiAttention, _local_batch, use_magi  # noqa: E402
from magi_attention.integrations.validate import validate  # noqa: E402
from magi_attention.testing.spawn import run_processes  # noqa: E402

SCRIPT, STEPS = "use_torchtitan.py", 4
IS_NEW = hasattr(torch.distributed, "set_timeout")
needs_new_torch = pytest.mark.skipif(not IS_NEW, reason="torchtitan 0.3.0 does so with torch 2.14 or newer")


@pytest.fixture(scope="module")
def dense(tmp_path_factory) -> dict:
    return launch(tmp_path_factory.mktemp("dense"), {"dense": True}, 1, SCRIPT)


@pytest.mark.parametrize(
    "settings",
    [
        {"cp": 2, "checkpointing": "selective"},
        pytest.param({"cp": 2, "checkpointing": "full", "compile": True}, marks=pytest.mark.nightly),
        pytest.param({"cp": 2, "tp": 2, "checkpointing": "selective"}, marks=pytest.mark.nightly),
        pytest.param({"cp": 2, "dp": 2}, marks=pytest.mark.nightly),
        pytest.param({"cp": 2, "typechecking": True}, marks=needs_new_torch),
    ],
    ids=str,
)
def test_ranks_are_as_a_dense_mask(dense, tmp_path, settings):
    ranks = settings["cp"] * settings.get("dp", 1) * settings.get("tp", 1)
    got = launch(tmp_path, settings, ranks, SCRIPT)
    assert got["ours"] and not dense["ours"]
    assert_same_steps(dense, got, STEPS)


@pytest.fixture(scope="module")
def hybrid(tmp_path_factory) -> dict:
    """Qwen 3.5 in one process by torchtitan's own gated delta nets."""
    return launch(tmp_path_factory.mktemp("hybrid"), {"model": "qwen3_5", "dense": True}, 1, SCRIPT)


@pytest.mark.parametrize(
    "settings",
    [
        {"cp": 1},
        {"cp": 2, "checkpointing": "selective", "evaluate": True},
        pytest.param({"cp": 3}, marks=pytest.mark.nightly),
        pytest.param({"cp": 2, "dp": 2, "checkpointing": "full"}, marks=pytest.mark.nightly),
    ],
    ids=str,
)
def test_gated_delta_nets_of_qwen(hybrid, tmp_path, settings):
    """Each document alone, by torchtitan's layer in one process and by ours; heads do not divide by three ranks."""
    got = launch(tmp_path, {"model": "qwen3_5", **settings}, settings["cp"] * settings.get("dp", 1), SCRIPT)
    assert got["ours"] and not hybrid["ours"] and got["cp"] == settings["cp"]
    assert_same_steps(hybrid, got, STEPS)


def qwen_without_training(rank: int, world: int) -> list[str]:
    """What is refused for it, and what ``validate`` says of torchtitan's layers and of ours."""
    import titan_qwen

    titan_qwen.install_stand_ins()  # which other tests of this process must not see
    from torchtitan.models import qwen3_5

    said, config = [], llama3_debugmodel()
    config.model_spec = qwen3_5.model_registry("debugmodel", attn_backend="varlen")
    titan_qwen.make_small(config.model_spec.model, 64)
    for option, value in (
        ("spmd_backend", "spmd_types"), ("tensor_parallel_degree", 2), ("pipeline_parallel_degree", 2),
        ("components", ["model"]),
    ):  # fmt: skip
        made = use_magi(config)
        made.parallelism = dataclasses.replace(made.parallelism, spmd_backend="partial_dtensor")
        if option == "components":
            made.compile = dataclasses.replace(made.compile, enable=True, components=value)
        else:
            made.parallelism = dataclasses.replace(made.parallelism, **{option: value})
        with pytest.raises(UnsupportedError) as error:
            made.build()
        said.append(str(error.value))
    for spec in (config.model_spec, use_magi(config).model_spec):
        with torch.device("meta"):
            model = spec.model.build()
        said.append("; ".join(str(finding) for finding in validate(model, None, SimpleNamespace())))
    tokens, ids = torch.zeros(2, 8, dtype=torch.int64), torch.arange(48).view(2, 8, 3)
    special = {"image_id": 3, "video_id": 4}
    given = {"input": tokens, "positions": torch.arange(8).expand(2, -1), "mrope_positions": ids, "pixel_values": None}
    dims = ParallelDims(dp_replicate=1, dp_shard=1, cp=1, tp=1, pp=1, ep=1, world_size=1)
    of_ours = use_magi(config).model_spec.model
    _, _, found = _local_batch(dims, ParallelismConfig(), of_ours, {**given, "special_tokens": special}, tokens)
    assert torch.equal(found["mrope_positions"], ids.view(1, 16, 3)) and found["special_tokens"] == special
    assert {plans.full.cu_seqlens for plans in found["attention_masks"].values()} == {(0, 8, 16)}
    layer = config.model_spec.model.layers[0]
    layer.delta_net = dataclasses.replace(layer.delta_net, kernel=dataclasses.replace(layer.delta_net.kernel))
    layer.delta_net.kernel.backend = "fla_fused_recurrent"
    with pytest.raises(UnsupportedError) as error:
        use_magi(config)
    return [*said, str(error.value)]


def test_what_qwen_is_refused_with():
    ((*options, of_theirs, of_ours, of_kernel),) = run_processes(1, qwen_without_training)
    wanted = ("spmd_types", "tensor_parallel", "pipeline_parallel", "compile.components")
    for said, words in zip(options, wanted, strict=True):
        assert words in said
    assert "GatedDeltaNet mixes neighbouring tokens" in of_theirs and "integrations.torchtitan returns" in of_theirs
    assert not of_ours and "fla_chunked" in of_kernel


@needs_new_torch
@pytest.mark.parametrize("model", ["qwen3", "muse_glimmer"])
def test_other_models(tmp_path, model):
    dense = launch(tmp_path / "dense", {"model": model, "dense": True}, 1, SCRIPT)
    assert_same_steps(dense, launch(tmp_path, {"model": model, "cp": 2}, 2, SCRIPT), STEPS)


@needs_new_torch
def test_validation_and_token_counts(tmp_path):
    one, two = (launch(tmp_path / str(n), {"cp": n, "evaluate": True}, n, SCRIPT) for n in (1, 2))
    assert one["tokens"] == 2 * two["tokens"] == STEPS * 2 * 96
    assert len(one["eval"]) == 2 and np.allclose(one["eval"], two["eval"], rtol=1e-5)


@pytest.mark.parametrize("window", [None, 6])
def test_sinks_of_gpt_oss(window):
    rope = CosSinRoPE.Config(dim=8, max_seq_len=64, theta=10000.0)
    made = _make_gptoss_attn_config(
        dim=32, layer_id=0, n_heads=4, n_kv_heads=2, head_dim=8, sliding_window_size=window, rope=rope
    )
    module = dataclasses.replace(made, inner_attention=DenseAttention.Config()).build()
    module.init_states()
    torch.manual_seed(0)
    bounds, length = [0, 7, 30, 48], 48
    positions = torch.cat([torch.arange(b - a) for a, b in zip(bounds, bounds[1:])])[None]
    x, weights = torch.randn(1, length, 32), torch.randn(1, length, 32)
    torch.nn.init.normal_(module.sinks)
    results = []
    size = made.inner_attention.window_size
    ours, theirs = MagiAttention.Config(window_size=size), DenseAttention.Config(window_size=size)
    for inner, masks in ((theirs, positions), (ours, layer_plans(bounds, 1, [6]))):
        module.inner_attention = inner.build()
        leaf = x.clone().requires_grad_()
        module.zero_grad()
        out = module(leaf, masks, positions)
        (out * weights).sum().backward()
        results.append([out, leaf.grad, *(p.grad.clone() for p in module.parameters())])
    for want, got in zip(*results):
        torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-4 * float(want.detach().abs().max()))


@pytest.mark.parametrize("seed", range(4))
def test_only_needed_rows_travel_and_work_is_even(seed):
    print("seed", seed)
    rng = np.random.default_rng(seed)
    lengths = rng.integers(1, 1500, 12)
    bounds, cp_size = np.concatenate([[0], np.cumsum(lengths)]), int(rng.integers(2, 9))
    plan = layer_plans(bounds.tolist(), cp_size, [100]).full
    told = plan.explain()
    document, at = np.repeat(np.arange(len(lengths)), lengths), np.arange(bounds[-1])
    for rank in range(cp_size):
        own = plan.position_array(rank)
        own = own[own < bounds[-1]]
        last = np.full(len(lengths), -1)
        np.maximum.at(last, document[own], own)  # of each document the last query here; it sees all before it
        needed = (at <= last[document]) & ~np.isin(at, own)
        assert told["rows_received"][rank] == needed.sum()
    assert max(told["areas"]) <= 1.1 * np.mean(told["areas"])


class OtherTrainer(Trainer):
    @dataclasses.dataclass(kw_only=True, slots=True)
    class Config(Trainer.Config):
        pass


class OtherValidator(Validator):
    @dataclasses.dataclass(kw_only=True, slots=True)
    class Config(Validator.Config):
        pass


def config(**changes) -> Trainer.Config:
    made = llama3_debugmodel()
    for name, value in changes.items():
        setattr(made, name, value)
    return made


def test_refused_configs():
    both_ways, hybrid = config(), config()
    hybrid.model_spec.model.layers[1].attention = None
    both_ways.model_spec.model.layers[1].attention.inner_attention = VarlenAttention.Config(window_size=(-1, -1))
    for given, word in (
        (OtherTrainer.Config(model_spec=config().model_spec), "OtherTrainer"),
        (config(validator=OtherValidator.Config()), "OtherValidator"),
        (config(model_spec=None), "only decoders"),
        (hybrid, "Layer 1 has no attention"),
        (config(model_spec=gpt_oss("debugmodel", attn_backend="flex")), "attn_backend='varlen'"),
        (both_ways, r"Layer 1 has window_size \(-1, -1\)"),
    ):
        with pytest.raises(UnsupportedError, match=word):
            use_magi(given)
    with pytest.raises(UnsupportedError, match="MagiAttention"):
        again = config()
        again.model_spec = use_magi(again).model_spec
        use_magi(again)


def test_use_magi_leaves_its_argument():
    before = config()
    names = [type(layer.attention.inner_attention) for layer in before.model_spec.model.layers]
    use_magi(before)
    assert [type(layer.attention.inner_attention) for layer in before.model_spec.model.layers] == names
    assert type(before) is Trainer.Config and not before.training.disable_cuda_graphs


def test_refused_when_the_trainer_is_made():
    made = use_magi(config())
    made.parallelism.spmd_backend = "partial_dtensor"
    with pytest.raises(UnsupportedError, match="partial_dtensor"):
        made.build()
    made = use_magi(config())
    made.training.disable_cuda_graphs = False
    with pytest.raises(UnsupportedError, match="CUDA graph"):
        made.build()


def test_refused_batches():
    model = use_magi(config()).model_spec.model
    tokens = torch.zeros(2, 8, dtype=torch.int64)
    whole = {"input": tokens, "positions": torch.arange(8).expand(2, -1)}

    def batch(given: dict, tp: int = 1) -> tuple:
        dims = ParallelDims(dp_replicate=1, dp_shard=1, cp=1, tp=tp, pp=1, ep=1, world_size=tp)
        return _local_batch(dims, ParallelismConfig(), model, given, tokens)

    inputs, _, kwargs = batch(whole)
    assert inputs.shape == (1, 16) and kwargs["attention_masks"].full.cu_seqlens == (0, 8, 16)
    with pytest.raises(UnsupportedError, match="has pixel_values"):
        batch({**whole, "pixel_values": tokens})
    with pytest.raises(ContractError, match="no positions"):
        batch({"input": tokens})
    with pytest.raises(ContractError, match="16 tokens, which 5 tensor-parallel"):
        batch(whole, tp=5)


def test_refused_calls():
    attention, q = MagiAttention.Config().build(), torch.randn(1, 8, 2, 4)
    with pytest.raises(ContractError, match="no plan of the batch"):
        attention(q, q, q, attention_masks=None)
    with pytest.raises(UnsupportedError, match="out_transform"):
        attention(q, q, q, attention_masks=layer_plans([0, 8], 1), out_transform=lambda out, lse: out)
