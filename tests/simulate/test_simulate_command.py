# SPDX-License-Identifier: Apache-2.0
"""`magi simulate`."""

from __future__ import annotations

import json

import numpy as np
import pytest

from magi_attention.cli import main, parser
from magi_attention.cli.plans.simulate import mask_maker
from magi_attention.config.rates import KernelRate, MachineRates, keep_rates

WORDS = ["simulate", "--gpus", "8,16", "--tokens-per-gpu", "1K"]


def test_tables_and_what_would_have_to_change(tmp_path, capsys):
    words = [*WORDS, "--ways", "one_launch,ring,all-gather", "--docs", "3000,500,17", "--out", str(tmp_path)]
    assert main([*words, "--tokens-per-gpu", "192K"]) == 0
    first, *lines = capsys.readouterr().out.splitlines()
    assert first.startswith("Measured: ") and "Modelled: " in first and "assumed" in first
    assert sum("one launch" in line for line in lines) == 3  # two tables, and the last line
    assert lines[-1].startswith("An estimate of one launch on 16 GPUs: efficiency ") and "GB/s of network" in lines[-1]
    assert (tmp_path / "simulate.png").read_bytes()[:4] == b"\x89PNG"


def test_what_no_record_supports_is_called_an_estimate(tmp_path, capsys):
    words = ["simulate", "--gpus", "2,8", "--ways", "one_launch,ring", "--docs", "3000,500,17", "--no-pictures"]
    assert main(words) == 0
    few, many = capsys.readouterr().out.split("8 GPUs, ")

    def row(text: str, way: str) -> list[str]:
        return next(line for line in text.splitlines() if line.strip().startswith(way)).split()[-5:]

    assert [cell[0] == "~" for cell in row(few, "ring")] == [False, True, True, True, True]
    assert [cell[0] == "~" for cell in row(many, "one launch")] == [True] * 5
    assert few.count("~ is an estimate") == many.count("~ is an estimate") == 1
    assert main([*words[:1], "--gpus", "2", *words[3:5], "--no-pictures"]) == 0
    full = capsys.readouterr().out
    assert "~" not in full and "one launch" in full


def test_numbers_as_json(capsys):
    assert main([*WORDS, "--json", "--mask", "sliding-window", "--window", "100", "--levels", "flat"]) == 0
    data = json.loads(capsys.readouterr().out)
    assert data["cluster"]["levels"] == "flat" and len(data["estimates"]) == 2 * 9
    assert [one["ranks"] for one in data["answers"]] == [16]
    for one in data["estimates"]:
        assert (one["reason"] is None) == (one["efficiency"] is not None)


def test_documents_are_repeated_to_any_number_of_tokens(capsys):
    """1,000 tokens of each GPU are documents of 300, 50, 300, ...: as many pairs as those have."""
    assert main([*WORDS, "--tokens-per-gpu", "1000", "--json", "--docs", "300,50", "--ways", "one_launch"]) == 0
    one = json.loads(capsys.readouterr().out)["estimates"][0]
    repeats, rest = divmod(8000, 350)
    lengths = [300, 50] * repeats + [rest]
    assert rest <= 300
    pairs = sum(n * (n + 1) // 2 for n in lengths)
    seconds = (one["forward_ms"] + one["backward_ms"]) / 1e3
    assert one["tflops"] == pytest.approx(14 * pairs * 64 * 128 / 8 / seconds / 1e12)


@pytest.mark.parametrize("tokens, wanted", [(14, [5, 9]), (20, [5, 9, 5, 1]), (21, [5, 9, 5, 2]), (3, [3])])
def test_documents_are_no_shorter_than_the_prefix(tokens, wanted):
    for prefix in (0, 2, 3):
        words = ["--docs", "5,9", "--mask", "prefix-lm", "--prefix", str(prefix)]
        found = np.diff(mask_maker(parser().parse_args(["simulate", *words]))(tokens).cu_seqlens).tolist()
        assert found == (wanted if wanted[-1] >= prefix else [*wanted[:-2], sum(wanted[-2:])])


def test_rates_of_a_file(tmp_path, capsys):
    """Kernels of a tenth of the pace take ten times as long; the first words name the machine."""
    path = tmp_path / "rates.json"
    call = KernelRate(64, 8, 128, 4096, 65e12, 57.2e12)
    keep_rates(path, MachineRates("a slow GPU", ranks=8, kernels=(call,), is_measured=True))
    found = []
    for words in ([], ["--rates", str(path)]):
        assert main([*WORDS, "--json", "--ways", "one_launch", *words]) == 0
        found.append(json.loads(capsys.readouterr().out))
    assert "a slow GPU" in found[1]["origins"] and "a slow GPU" not in found[0]["origins"]
    assert found[1]["estimates"][0]["tflops"] < 0.2 * found[0]["estimates"][0]["tflops"]
    assert found[1]["estimates"][0]["efficiency"] > found[0]["estimates"][0]["efficiency"]


@pytest.mark.parametrize(
    "words, text",
    [
        (["--goal", "1"], "between 0 and 1"),
        (["--window", "5"], "--window is for --mask sliding-window"),
        (["--rates", "none.json"], "magi tune"),
        (["--heads-kv", "7"], "do not divide"),
        (["--no-pictures", "--out", "x"], "--out"),
    ],
)
def test_wrong_requests(words, text, capsys):
    assert main([*WORDS, *words]) == 2
    assert text in capsys.readouterr().err


@pytest.mark.parametrize("words", [["--gpus", "8192"], ["--ways", "magic"], ["--tokens-per-gpu", "many"]])
def test_wrong_words(words, capsys):
    with pytest.raises(SystemExit):
        main([*WORDS, *words])
    assert "4096" in (err := capsys.readouterr().err) or "one_launch" in err or "8K" in err
