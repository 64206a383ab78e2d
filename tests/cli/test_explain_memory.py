# SPDX-License-Identifier: Apache-2.0
"""`magi explain --memory`: its numbers are those of ``Plan.memory``, and requests that cannot be meant are refused."""

from __future__ import annotations

import json

import pytest

from magi_attention.api import Mask, ModelShape, TrainingSetup, longest_context, make_plan
from magi_attention.cli import main

CONFIG = {
    "hidden_size": 256, "num_hidden_layers": 4, "num_attention_heads": 8, "num_key_value_heads": 2,
    "intermediate_size": 512, "vocab_size": 1000, "model_type": "llama",
}  # fmt: skip
COMMAND = ("explain", "--tokens", "64K", "--cp", "2", "--no-pictures")


@pytest.fixture
def config(tmp_path):
    path = tmp_path / "config.json"
    path.write_text(json.dumps(CONFIG))
    return str(path)


def test_numbers_are_those_of_the_plan(config, capsys):
    more = ("--activations", "offloaded", "--logits-chunk", "2K", "--gigabytes", "0.5", "--longest-context")
    assert main([*COMMAND, "--json", "--memory", config, *more]) == 0
    found = json.loads(capsys.readouterr().out)["memory"]
    shape = ModelShape.of_config(CONFIG)
    setup = TrainingSetup(activations="offloaded", logits_chunk=2048, is_one_launch=True)
    heads = {"num_heads_q": 8, "num_heads_kv": 2, "head_dim": 32}
    wanted = make_plan(Mask.causal(1 << 16), 2, **heads).memory(shape, setup)
    assert (found["peak_bytes"], found["host_bytes"]) == (wanted.peak_bytes, wanted.host_bytes)
    assert found["held"] == wanted.held and found["moments"] == wanted.moments and found["host"] == wanted.host
    assert found["longest_context"] == longest_context(shape, 2, 0.5, setup) > 0


def test_tables_and_remedies(config, capsys):
    assert main([*COMMAND, "--memory", config, "--gigabytes", "0.01"]) == 0
    printed = capsys.readouterr().out
    for word in ("Memory of a training step", "optimizer", "gathered parameters", "the largest", "one launch"):
        assert word in printed
    assert "more than a GPU of 0.01 GB has" in printed and "--logits-chunk" in printed
    assert main([*COMMAND, "--memory", config, "--node-size", "1"]) == 0
    printed = capsys.readouterr().out
    assert "stage by stage" in printed and "more than a GPU" not in printed


def test_experts(tmp_path, capsys):
    config = {**CONFIG, "num_experts": 16, "num_experts_per_tok": 2, "moe_intermediate_size": 64}
    path = tmp_path / "config.json"
    path.write_text(json.dumps(config))
    more = ("--expert-parallel", "2", "--loss", "torch", "--logits-chunk", "1K")
    assert main([*COMMAND, "--json", "--memory", str(path), *more]) == 0
    found = json.loads(capsys.readouterr().out)["memory"]
    setup = TrainingSetup(expert_parallel=2, loss="torch", logits_chunk=1024, is_one_launch=True)
    heads = {"num_heads_q": 8, "num_heads_kv": 2, "head_dim": 32}
    wanted = make_plan(Mask.causal(1 << 16), 2, **heads).memory(ModelShape.of_config(config), setup)
    assert found["peak_bytes"] == wanted.peak_bytes and found["moments"] == wanted.moments
    assert main([*COMMAND, "--memory", str(path)]) == 0
    assert "decoder with experts" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (("--longest-context",), "--longest-context goes with --memory CONFIG"),
        (("--memory", "absent.json"), "absent.json is no config.json"),
        (("--memory", "{config}", "--heads-q", "16"), "--heads-q is 16, and"),
        (("--memory", "{config}", "--head-chunks", "3"), "no divisor of the 2 kv heads"),
        (("--memory", "{config}", "--expert-parallel", "2"), "1 for a dense model"),
        (("--memory", "{config}", "--query-moves", "always"), "query_moves"),
    ],
)
def test_requests_that_are_refused(arguments, sentence, config, capsys):
    command = [*COMMAND, *(x.replace("{config}", config) for x in arguments)]
    assert main(command) != 0
    error = capsys.readouterr().err.strip()
    assert sentence in error and "Traceback" not in error and "\n" not in error


@pytest.mark.parametrize("text", ["[]", "no JSON", '{"hidden_size": 4}', '{"num_experts": 8}'])
def test_configs_that_are_refused(text, tmp_path, capsys):
    (tmp_path / "config.json").write_text(text)
    assert main([*COMMAND, "--memory", str(tmp_path / "config.json")]) != 0
    error = capsys.readouterr().err.strip()
    assert error and "Traceback" not in error and "\n" not in error
