# SPDX-License-Identifier: Apache-2.0
"""`magi tune` and `magi explain --budget`."""

from __future__ import annotations

import json
from dataclasses import replace

import numpy as np
import pytest
import torch

from magi_attention.benchmarking import tune
from magi_attention.cli import main
from magi_attention.config.rates import KernelRate, MachineRates, find_rates, keep_rates, read_rates

WORDS = ["explain", "--docs", "300,500,224", "--cp", "2", "--no-pictures", "--budget"]


@pytest.fixture(autouse=True)
def own_file(tmp_path, monkeypatch):
    path = tmp_path / "rates.json"
    monkeypatch.setenv("MAGI_ATTENTION_RATES_FILE", str(path))
    return path


@pytest.mark.parametrize("seed", range(5))
def test_a_link_is_fitted(seed):
    print(f"seed {seed}")
    rng = np.random.default_rng(seed)
    latency, rate = 10 ** rng.uniform(-6, -3), 10 ** rng.uniform(8, 12)
    sizes = 4.0 ** np.arange(8, 15)
    exact = tune.fit_link([(int(n), latency + n / rate) for n in sizes])
    assert exact == pytest.approx((latency, rate), rel=1e-6)
    noisy = [(int(n), (latency + n / rate) * rng.uniform(0.9, 1.1)) for n in sizes]
    found = tune.fit_link(noisy)
    assert found[0] >= 0 and found[1] > 0
    errors = [abs((found[0] + n / found[1]) / t - 1) for n, t in noisy]
    assert max(errors) < 0.3


def test_a_link_that_makes_no_sense_still_has_rates():
    assert tune.fit_link([(1000, 2.0), (4000, 1.0)]) == (1.0, 4000.0)
    assert tune.fit_link([(1000, 0.1), (4000, 1.0)]) == (0.0, 4000.0)


@pytest.mark.nightly
def test_measuring_on_two_ranks(own_file, capfd, monkeypatch):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    assert main(["tune"]) == 0
    printed = capfd.readouterr().out
    assert "There are no two GPUs here" in printed
    assert f"2 ranks on CPU, float32; results go to {own_file}" in printed
    assert all(f"\n{name}" in printed for name in ("4 on 1, dim 64", "causal", "documents", "full"))
    (rates,) = read_rates(own_file)
    assert rates.is_measured and rates.ranks == 2 and rates.element_bytes == 4
    assert find_rates([rates], "CPU", 2) == rates
    assert len(rates.kernels) == len(tune.ON_CPU.shapes) * len(tune.ON_CPU.tokens)
    assert main(["tune", "--show"]) == 0 and "2 ranks on CPU, float32" in capfd.readouterr().out
    assert main(["tune", "--show", "--json"]) == 0
    assert MachineRates.from_dict(json.loads(capfd.readouterr().out)[0]) == rates


def test_what_would_be_run(own_file, capsys):
    assert main(["tune", "--ranks", "3", "--device", "cpu", "--dry-run"]) == 0
    words = capsys.readouterr().out.split()
    assert words[words.index("--nproc-per-node") + 1] == "3" and words[-1] == str(own_file)


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (["tune", "--ranks", "1"], "--ranks is 1, and links are between several"),
        (["tune", "--json"], "--json goes with --show"),
        (["tune", "--show"], "holds no rates; run `magi tune`"),
        ([*WORDS[:-1], "--layers", "3"], "--layers goes with --budget"),
        ([*WORDS, "--layers", "0"], "--layers is 0"),
        ([*WORDS, "--rates", "nowhere.json"], "nowhere.json is no file"),
    ],
)
def test_requests_that_mean_nothing(words, sentence, capsys):
    assert main(words) == 2
    assert sentence in capsys.readouterr().err


def budget(capsys, *words: str) -> dict:
    assert main([*WORDS, "--json", *words]) == 0
    return json.loads(capsys.readouterr().out)["budget"]


def test_a_budget_adds_up(capsys):
    found = budget(capsys, "--layers", "4")
    planning, modelled = found["measured"]["planning_s"], found["modelled"]
    assert sum(planning.values()) == pytest.approx(found["measured"]["planning_total_s"]) and min(planning.values()) > 0
    assert "assumed" in modelled["rates"] and not modelled["is_measured"]
    layer = modelled["forward"]["seconds"] + modelled["backward"]["seconds"]
    assert modelled["attention_s"] == pytest.approx(4 * layer)
    total = found["measured"]["planning_total_s"]
    assert found["share_on_the_training_thread"] == pytest.approx(total / (total + 4 * layer))
    assert 0 <= found["share_if_planned_ahead"] < found["share_on_the_training_thread"]


def test_a_budget_by_measured_rates(own_file, capsys):
    assumed = budget(capsys)
    slow = replace(MachineRates(), kernels=(KernelRate(64, 8, 128, 1024, 1e9, 1e9),), is_measured=True)
    keep_rates(own_file, replace(slow, device="CPU"))
    measured = budget(capsys)
    assert measured["modelled"]["is_measured"] and measured["share_if_planned_ahead"] == 0
    assert measured["modelled"]["attention_s"] > 1000 * assumed["modelled"]["attention_s"]
    assert main(WORDS) == 0
    printed = capsys.readouterr().out
    assert "planning, measured here" in printed and "measured by `magi tune` over 8 ranks" in printed


def test_a_plan_by_rates_of_another_machine(tmp_path, capsys):
    path, slow = str(tmp_path / "there.json"), replace(MachineRates(), link_bytes_per_s=1e9, is_measured=True)
    keep_rates(tmp_path / "there.json", slow)
    words = ["explain", "--tokens", "32768", "--cp", "4", "--degree", "dynamic", "--json"]
    degrees = []
    for more in ([], ["--rates", path]):
        assert main([*words, *more]) == 0
        degrees.append(json.loads(capsys.readouterr().out)["degree"])
    assert degrees[0] == 1 < degrees[1]
    keep_rates(tmp_path / "there.json", replace(slow, device="another"))
    assert main([*words, "--rates", path]) == 2
    assert "has rates of NVIDIA H100, another; keep those of one device" in capsys.readouterr().err
