# SPDX-License-Identifier: Apache-2.0
"""The command line without starting processes: explain, env, version and wrong requests."""

from __future__ import annotations

import argparse
import json
import re
from dataclasses import replace

import numpy as np
import pytest

from magi_attention.cli import main
from magi_attention.cli.common import token_count
from magi_attention.cli.plans.masks import read_mask
from magi_attention.common.slices import to_dense
from magi_attention.config.rates import MachineRates, keep_rates
from magi_attention.testing.libraries import planner_or_skip
from magi_attention.testing.masks import random_slices
from magi_attention.tools.report.describe import readable_bytes


def test_explain_writes_tables_and_a_page(tmp_path, capsys):
    out = tmp_path / "out"
    assert main(["explain", "--docs", "300,1000,748", "--cp", "4", "--out", str(out)]) == 0
    printed = capsys.readouterr().out
    for word in ("area", "imbalance", "rows out", "rows in", "ring P2P, 3 steps", "all-gather", "stage 0"):
        assert word in printed
    page = (out / "report.html").read_text()
    assert '<script type="application/json" id="plan">' in page and "2,048" in page


def test_explain_with_few_ranges_of_tokens(capsys):
    arguments = ["explain", "--docs", "300,1000,748", "--cp", "4", "--no-pictures"]
    assert main([*arguments, "--max-fragments", "2"]) == 0
    assert re.search(r"ranges of tokens of a rank, at most +2\b", capsys.readouterr().out)
    assert main([*arguments, "--max-fragments", "0"]) != 0 and "max_fragments" in capsys.readouterr().err


def test_explain_of_a_recurrent_layer(capsys):
    """The table has the numbers of the plan, and says the way that it has."""
    arguments = ["explain", "--docs", "300,1000,748", "--cp", "4", "--no-pictures", "--recurrent"]
    for layer, heads in (("gated_delta", 4), ("mamba2", 6)):
        assert main([*arguments, f"{layer}:{heads}x64x32", "--json"]) == 0
        found = json.loads(capsys.readouterr().out)["recurrent"]
        assert main([*arguments, f"{layer}:{heads}x64x32"]) == 0
        printed = capsys.readouterr().out
        assert f'run_recurrent takes "{found["way"]}". {found["why"]}' in printed
        assert all(f"With {n} ranks: " in printed for n in (2, 8)) and "With 4 ranks" not in printed
        assert (found["heads"] is None) is (heads == 6) is ("Heads do not divide" in printed)
        assert readable_bytes(found["contiguous"]["busiest_bytes"]) in printed
    for wrong in ("gated_delta", "gated_delta:4x64", "lstm:4x64x64", "kda:0x64x64"):
        assert main([*arguments, wrong]) != 0 and "give" in capsys.readouterr().err


def test_explain_for_256_ranks(tmp_path, capsys):
    arguments = ["--mask", "sliding-window", "--window", "2048", "--tokens", "262144", "--cp", "256"]
    assert main(["explain", *arguments, "--degree", "2", "--out", str(tmp_path)]) == 0
    printed = capsys.readouterr().out
    assert "largest" in printed and "stage 1" in printed and (tmp_path / "report.html").exists()


def test_explain_says_where_another_dispatch_moves_less(capsys):
    """And there the other one is as it was said to be."""
    arguments = ["explain", "--mask", "sliding-window", "--window", "2048", "--tokens", "65536", "--cp", "8"]
    arguments.append("--no-pictures")
    assert main([*arguments, "--dispatch", "min-heap"]) == 0
    said = re.search(r"--dispatch locality .* would receive (.*) in place of (.*), at", capsys.readouterr().out)
    assert said is not None and main([*arguments, "--dispatch", "locality"]) == 0
    printed = capsys.readouterr().out
    assert said[1] in printed and said[2] not in printed and "--dispatch" not in printed
    assert main(["explain", "--tokens", "65536", "--cp", "8", "--no-pictures", "--mask", "full"]) == 0
    assert "--dispatch" not in capsys.readouterr().out  # everybody reads everything
    assert main(["explain", "--docs", "4096,4096", "--cp", "2", "--no-pictures", "--dispatch", "sequential"]) == 0
    printed = capsys.readouterr().out
    assert "--dispatch" not in printed and re.search(r"this plan, all stages +0 B", printed)  # a document each


def test_explain_says_whether_queries_move(tmp_path, capsys):
    planner_or_skip()
    slow = replace(MachineRates(), device="CPU", link_bytes_per_s=1e9, is_measured=True)
    keep_rates(tmp_path / "rates.json", slow)
    few = ["explain", "--docs", "3000,3000,3000,7384", "--cp", "8", "--no-pictures", "--heads-q", "8"]
    few += ["--rates", str(tmp_path / "rates.json")]
    assert main(few) == 0
    assert "With --query-moves auto" in capsys.readouterr().out
    assert main([*few, "--query-moves", "auto"]) == 0
    assert "Queries move" in capsys.readouterr().out
    dear = ["explain", "--tokens", "16384", "--cp", "8", "--no-pictures"]
    for moves, sentence in (("never", ""), ("auto", "Keys and values alone move")):
        assert main([*dear, "--query-moves", moves]) == 0
        out = capsys.readouterr().out
        assert sentence in out and "--query-moves auto" not in out
    assert re.search(r"with queries \d+% of the bytes of a training step would travel", out)


def test_explain_as_json(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    assert main(["explain", "--docs", "300,1000,748", "--cp", "4", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["tokens"] == 2048 and len(found["areas"]) == 4 and found["seconds"] >= 0
    assert not list(tmp_path.iterdir())


def test_explain_says_which_backend_runs_and_why(monkeypatch, capsys):
    """Each backend has a line, and a backend that was asked for and cannot run is no error here."""
    monkeypatch.delenv("MAGI_ATTENTION_KERNEL_BACKEND", raising=False)
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    arguments = ["explain", "--docs", "512", "--cp", "2", "--no-pictures"]
    assert main(arguments) == 0
    printed = capsys.readouterr().out
    assert "Kernels on the CPU" in printed and "Backend 'sdpa_ol' runs in place of 'ffa'" in printed
    assert re.search(r"fa4 .*runs on NVIDIA GPUs", printed) and re.search(r"sdpa_ol +can run", printed)
    monkeypatch.setenv("MAGI_ATTENTION_KERNEL_BACKEND", "fa4")
    assert main(arguments) == 0
    assert "'fa4' was asked for and cannot run" in capsys.readouterr().out


def test_explain_a_mask_file(tmp_path, capsys):
    mask = {"total": 512, "q_ranges": [[0, 256], [256, 512]], "k_ranges": [[0, 256], [0, 512]]}
    file = tmp_path / "mask.json"
    file.write_text(json.dumps({**mask, "types": ["causal", "full"]}))
    assert main(["explain", "--mask-file", str(file), "--cp", "2", "--no-pictures"]) == 0
    assert f"{256 * 257 // 2 + 256 * 512:,}" in capsys.readouterr().out


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize("form", ["npy bool", "npy int64", "png"])
def test_explain_a_dense_mask(form, seed, tmp_path):
    """White and True are pairs of a query, downwards, and a key that it sees."""
    total = 40
    dense = to_dense(random_slices(np.random.default_rng(seed), total, total), total, total)
    file = tmp_path / f"mask.{form[:3]}"
    if form == "png":
        image = pytest.importorskip("PIL.Image", reason="pictures are read by pillow")
        image.fromarray(dense).save(file)
    else:
        np.save(file, dense.astype(form[4:]))
    mask = read_mask(file)
    assert (mask.to_dense() == dense).all()
    assert main(["explain", "--mask-file", str(file), "--cp", "2", "--no-pictures"]) == 0


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (np.zeros((3, 4), bool), "(3 x 4, bool); it must be square"),
        (np.zeros(9, bool), "(9, bool)"),
        (np.full((3, 3), 2), "holds the integer 2; give booleans, or 0 and 1"),
        (np.ones((3, 3)), "dtype float64; give booleans"),
        (np.zeros((3, 3)), "of a mask that is added to logits (0 and -inf), allowed pairs are `mask == 0`"),
        (np.triu(np.full((3, 3), -np.inf), 1), "`mask == 0`"),
        (np.zeros((0, 0), bool), "it must be square"),
        (np.array([[None]]), "cannot be read: Object arrays"),
        (None, "Write it with numpy.save"),
    ],
)
def test_bad_dense_masks(content, words, tmp_path, capsys):
    file = tmp_path / "mask.npy"
    if content is not None:
        np.save(file, content, allow_pickle=True)
    assert main(["explain", "--mask-file", str(file), "--cp", "2"]) == 2
    error = capsys.readouterr().err.strip()
    assert words in error and str(file) in error and "\n" not in error


def test_bad_pictures(tmp_path, capsys):
    image = pytest.importorskip("PIL.Image", reason="pictures are read by pillow")
    grey, text = tmp_path / "grey.png", tmp_path / "text.PNG"
    image.fromarray(np.full((4, 4), 99, np.uint8)).save(grey)
    text.write_text("no picture")
    for file, words in ((grey, "white where a query sees a key"), (text, "Give a PNG picture")):
        assert main(["explain", "--mask-file", str(file), "--cp", "2"]) == 2
        error = capsys.readouterr().err.strip()
        assert words in error and str(file) in error and "\n" not in error


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["explain"], "how long the sequence is"),
        (["explain", "--docs", "1,x"], "whole numbers"),
        (["explain", "--docs", "5,-3"], "at least one token"),
        (["explain", "--docs", "5,6", "--tokens", "3"], "the documents have 11"),
        (["explain", "--doc-file", "/no/such/file"], "cannot be read"),
        (["explain", "--mask-file", "/no/such/file"], "cannot be read"),
        (["explain", "--mask", "sliding-window", "--tokens", "64"], "needs --window"),
        (["explain", "--tokens", "64", "--cp", "0"], "cp_size is 0"),
        (["explain", "--tokens", "64", "--heads-q", "3", "--heads-kv", "2"], "multiple"),
        (["run", "--data", "/no/such/folder"], "does not exist"),
        (["run", "--steps", "0"], "--steps is 0"),
        (["run", "--ranks", "0"], "--ranks is 0"),
    ],
)
def test_wrong_requests_are_one_sentence(arguments, words, capsys):
    assert main(arguments) == 2
    error = capsys.readouterr().err.strip()
    assert words in error and "\n" not in error, error


@pytest.mark.parametrize(
    ("content", "words"),
    [
        ("not json", "is no mask"),
        ("{}", "is no mask"),
        ("[]", "is no mask"),
        ('{"total": 8, "q_ranges": [[0, 4], [0, 4]], "k_ranges": [[0, 4], [2, 6]]}', "overlap"),
        ('{"total": 8, "q_ranges": [[0, 9]], "k_ranges": [[0, 4]]}', "beyond"),
        ('{"total": 8, "q_ranges": [[4, 0]], "k_ranges": [[0, 4]]}', "start <= end"),
        ('{"total": 8, "q_ranges": [[0, 4]], "k_ranges": [[0, 4]], "types": ["diagonal"]}', "Unknown AttnMaskType"),
        ('{"total": 8, "q_ranges": [[0, 4]], "k_ranges": []}', "1 q ranges, 0 k ranges"),
    ],
)
def test_bad_mask_files(tmp_path, content, words, capsys):
    file = tmp_path / "mask.json"
    file.write_text(content)
    assert main(["explain", "--mask-file", str(file), "--cp", "2"]) == 2
    assert words in capsys.readouterr().err


def test_data_folder_without_text(tmp_path, capsys):
    (tmp_path / "picture.png").write_bytes(b"x")
    assert main(["run", "--data", str(tmp_path)]) == 2
    assert "holds no text file" in capsys.readouterr().err
    (tmp_path / "empty.txt").write_bytes(b"")
    assert main(["run", "--data", str(tmp_path)]) == 2
    assert "all empty" in capsys.readouterr().err


def test_unknown_arguments_and_commands(capsys):
    for arguments in (["fly"], ["explain", "--colour", "red"], ["explain", "--degree", "much"]):
        with pytest.raises(SystemExit) as stop:
            main(arguments)
        assert stop.value.code == 2


def test_env_and_version_for_programs(capsys, monkeypatch):
    """The same rows and numbers as in the text."""
    monkeypatch.setenv("MAGI_ATTENTION_SANITY_CHECK", "1")
    assert main(["env", "--json"]) == 0
    rows = json.loads(capsys.readouterr().out)
    assert {row["name"]: row for row in rows}["MAGI_ATTENTION_SANITY_CHECK"]["value"] == "1"
    assert main(["env"]) == 0
    printed = capsys.readouterr().out
    assert all(row["name"] in printed for row in rows) and len(rows) == printed.count("\n      ")
    assert main(["env", "--set", "--json"]) == 0
    assert all(row["value"] for row in json.loads(capsys.readouterr().out))
    assert main(["env", "--set"]) == 0 and "SANITY_CHECK" in capsys.readouterr().out
    assert main(["version", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert main(["version"]) == 0
    printed = capsys.readouterr().out
    assert printed.startswith("magi_attention 1.1.1")
    assert all(f"{name} {found[name]}" in printed for name in ("magi_attention", "torch", "numpy", "python"))


def test_sources_beside_another_place(tmp_path, monkeypatch):
    """An installed package finds examples and tests where MAGI_SOURCES says, and says so if they are not there."""
    from magi_attention.cli.common import ROOT, UsageError, source_file

    monkeypatch.setenv("MAGI_SOURCES", str(tmp_path))
    with pytest.raises(UsageError, match=r"MAGI_SOURCES is .* there is no examples/one.py in it"):
        source_file("examples", "one.py")
    (tmp_path / "examples").mkdir()
    (tmp_path / "examples" / "one.py").touch()
    assert source_file("examples", "one.py") == tmp_path / "examples" / "one.py"
    monkeypatch.delenv("MAGI_SOURCES")
    if (ROOT / "examples").is_dir():
        assert source_file("examples", "llama", "train.py").exists()
    else:
        with pytest.raises(UsageError, match="needs the repository"):
            source_file("examples", "llama", "train.py")


@pytest.mark.parametrize(
    ("text", "tokens"), [("8192", 8192), ("8K", 8192), ("8k", 8192), ("1M", 1_048_576), (" 3m", 3 * 2**20), ("-1", -1)]
)
def test_numbers_of_tokens_take_suffixes(text, tokens):
    assert token_count(text) == tokens


@pytest.mark.parametrize("text", ["", "K", "1G", "1.5K", "1e6", "1 K", "1KK", "4_096", "0x10"])
def test_what_is_no_number_of_tokens_is_told(text):
    with pytest.raises(argparse.ArgumentTypeError, match="no number of tokens"):
        token_count(text)


def test_suffixes_in_every_option_of_tokens(capsys):
    found = []
    for line in (
        "--docs 2K,1024,1k --chunk-size 1K --mask sliding-window --window 1K",
        "--docs 2048,1024,1024 --chunk-size 1024 --mask sliding-window --window 1024",
    ):
        assert main(["explain", *line.split(), "--cp", "4", "--json"]) == 0
        found.append({**json.loads(capsys.readouterr().out), "seconds": 0})
    assert found[0] == found[1]


def test_explain_says_what_rows_are_and_which_heads_it_assumes(tmp_path, capsys):
    """The two figures of rows are those of the plan, and heads that were given are not called assumed."""
    words = ["explain", "--docs", "300,1000,748", "--cp", "4"]
    assert main([*words, "--json"]) == 0
    numbers = json.loads(capsys.readouterr().out)
    assert main([*words, "--heads-q", "32", "--out", str(tmp_path)]) == 0
    printed = " ".join(capsys.readouterr().out.split())
    assert f"does not hold: {sum(numbers['rows_received']):,} in one forward" in printed
    assert (
        f"No plan fetches fewer than {numbers['least_rows']:,} " in printed
        and "A row is K and V of one token" in printed
    )
    assert "Heads: 32 for queries, 8 for K and V, head dim 128. Assumed: give those" in printed
    assert "by --heads-kv, --head-dim," in printed
    assert "A row is K and V of one token" in (tmp_path / "report.html").read_text()
    assert main([*words, "--heads-q", "4", "--heads-kv", "2", "--head-dim", "64", "--no-pictures"]) == 0
    assert "Assumed" not in capsys.readouterr().out
