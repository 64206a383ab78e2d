# SPDX-License-Identifier: Apache-2.0
"""The training examples with weights that transformers saved: transformers' loss, and each row read by one rank."""

from __future__ import annotations

import json
import random
import sys
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from magi_attention.testing.spawn import run_processes

pytest.importorskip("transformers", reason="needs transformers; ci/integrations installs it")
pytest.importorskip("safetensors", reason="needs safetensors; ci/integrations installs it")
from transformers import LlamaConfig, LlamaForCausalLM, Qwen3Config, Qwen3ForCausalLM  # noqa: E402

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"
sys.path[:0] = [str(EXAMPLES), str(EXAMPLES / "llama")]
import fsdp2_llama  # noqa: E402
import long_context  # noqa: E402
import weights  # noqa: E402
from data import Batch, packed_batches  # noqa: E402

SIZES = {
    "vocab_size": 256, "hidden_size": 64, "intermediate_size": 90, "num_hidden_layers": 3, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 18, "rms_norm_eps": 3e-3, "tie_word_embeddings": False,
}  # fmt: skip
MODELS = {"llama": (LlamaConfig, LlamaForCausalLM), "qwen3": (Qwen3Config, Qwen3ForCausalLM)}
TOKENS = 301


def save(kind: str, folder: Path, seed: int) -> torch.nn.Module:
    torch.manual_seed(seed)
    config, model = MODELS[kind]
    made = model(config(**SIZES, rope_parameters={"rope_type": "default", "rope_theta": 700.0}))
    with torch.no_grad():
        for p in made.parameters():  # norms are ones, and the rest so small that the loss is that of no model at all
            p.copy_(torch.randn(p.shape) * 0.2 + 1 if p.ndim == 1 else torch.randn(p.shape) * 0.15)
    made.save_pretrained(folder, max_shard_size="60KB")
    return made.eval()


def first_loss(rank: int, world: int, folder: Path, tokens: torch.Tensor, is_long: bool) -> tuple[float, int, bool]:
    """The loss of one step, how many bytes of the weights this rank read, and whether it made all of them first."""
    program = long_context if is_long else fsdp2_llama
    parser = (program.make_long_parser if is_long else program.make_parser)(None)
    args = parser.parse_args(["--out", "none", "--dtype", "fp32", "--weights", str(folder), "--seq-len", str(TOKENS)])
    args.cp, args.device, args.attention, args.recompute = world, "cpu", "magi", is_long
    read, was_whole = [], []

    def load(model, path):
        was_whole.append(any(len(p.to_local()) == len(p) > 1 for p in model.parameters()) and dist.get_world_size() > 1)
        read.append(weights.load_weights(model, path))

    fsdp2_llama.load_weights = load
    trainer = (program.LongTrainer if is_long else program.Trainer)(args, fsdp2_llama.Place.make("cpu", world))
    batch = Batch(tokens, (0, TOKENS))
    trainer.batches = iter([(batch, trainer.plan(batch))])
    return trainer.step().item(), read[0], was_whole[0]


@pytest.mark.parametrize("kind", MODELS)
@pytest.mark.parametrize(("world", "is_long"), [(1, False), (2, False), (3, True)])
def test_losses_are_those_of_transformers(tmp_path, kind, world, is_long):
    seed = random.randrange(10**6)
    print(f"seed {seed}")
    model = save(kind, tmp_path, seed)
    files = list(tmp_path.glob("*.safetensors"))
    assert len(files) > 2
    tokens = torch.randint(0, 256, (TOKENS,))
    with torch.no_grad():
        wanted = model(tokens[None], labels=tokens[None]).loss.item()
    found = run_processes(world, first_loss, tmp_path, tokens, is_long)
    assert [loss for loss, _, _ in found] == pytest.approx([wanted] * world, rel=1e-5)
    assert sum(read for _, read, _ in found) == sum(p.nbytes for p in model.parameters()), "each row by one rank"
    assert not any(was_whole for _, _, was_whole in found)


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"model_type": "gemma3"}, "model_type is 'gemma3'"),
        ({"rope_parameters": {"rope_type": "llama3", "rope_theta": 5e5}}, "positions are scaled"),
        ({"rope_scaling": {"type": "yarn"}, "rope_parameters": None}, "positions are scaled"),
        ({"attention_bias": True}, "have biases"),
        ({"tie_word_embeddings": True}, "head is its embedding"),
        ({"use_sliding_window": True}, "have windows"),
    ],
)
def test_other_models_are_refused(tmp_path, changes, sentence):
    save("qwen3", tmp_path, 0)
    path = tmp_path / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))
    with pytest.raises(SystemExit, match=sentence):
        weights.read_config(tmp_path)


def test_folders_without_weights_are_refused(tmp_path):
    with pytest.raises(SystemExit, match=r"no config\.json"):
        weights.read_config(tmp_path)
    save("llama", tmp_path, 0)
    model = weights.Llama(weights.read_config(tmp_path), None)
    path = tmp_path / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"intermediate_size": 91}))
    with pytest.raises(SystemExit, match=r"gate_up.weight has the shape \(182, 64\) by config.json, and \(180, 64\)"):
        weights.load_weights(weights.Llama(weights.read_config(tmp_path), None), tmp_path)
    files = sorted(tmp_path.glob("*.safetensors"))
    files[0].unlink()
    with pytest.raises(SystemExit, match="are all of its files there"):
        weights.load_weights(model, tmp_path)
    for path in files[1:]:
        path.unlink()
    with pytest.raises(SystemExit, match=r"holds no \*\.safetensors"):
        weights.load_weights(model, tmp_path)


def test_text_by_a_tokenizer(tmp_path):
    tokenizers = pytest.importorskip("tokenizers", reason="needs tokenizers; ci/integrations installs it")
    made = tokenizers.Tokenizer(tokenizers.models.WordLevel({"<unk>": 0, "one": 1, "two": 2}, unk_token="<unk>"))
    made.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    made.save(str(tmp_path / "tokenizer.json"))
    (tmp_path / "text.txt").write_text("one two\n\n" * 40)
    batch = next(packed_batches(str(tmp_path / "text.txt"), 30, 0, 9, str(tmp_path / "tokenizer.json")))
    assert batch.tokens.tolist() == [1, 2] * 15 and batch.cu_seqlens == tuple(range(0, 31, 2))
